"""A worker never logs the text of a session, whether requests are answered or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raw_wire import Start, append, generate
from structlog.testing import capture_logs

SECRET = "xylophone-7431"


async def test_a_workers_log_lines_contain_no_text_of_answered_or_refused_requests(
    wire: Start, strict_model: Path
) -> None:
    said = {"role": "user", "content": SECRET}
    requests: list[dict[str, Any] | bytes] = [
        append("a1", SECRET),
        generate("g1", messages=[said], stop=[SECRET], temperature=1.0),
        generate("g2", messages=[said | {"role": "stranger"}]),
        append("a2", SECRET, unknown=SECRET),
        append("a3", SECRET * 1000),
        append("a1", SECRET + " and more"),
        {"type": SECRET, "id": "x1"},
        SECRET.encode(),
        json.dumps(append("a4", SECRET)).encode()[:-3],
    ]
    with capture_logs() as lines:
        one = await wire(model=str(strict_model))
        results = [await one.send("s1", request) for request in requests]
        await one.worker.stop()
    assert [result["type"] for result in results] == ["appended", "generated", *["failed"] * 7]
    assert [line["event"] for line in lines].count("answered") >= 2
    assert [line for line in lines if SECRET in repr(line)] == []
