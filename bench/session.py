"""`turnkeep bench session`: one session, many turns; what each turn costs as the session grows."""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from rich.console import Console
from rich.progress import track
from rich.table import Table

from protocol.client import connect

from .local import LocalWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.client import Client
    from protocol.messages import Generated

SCHEMA: Final = "turnkeep.bench.session/1"
SMOKE_TURNS: Final = 6
QUESTION: Final = "Tell me something about the number {turn}, in one or two sentences."


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn cost; `wall_s` is measured by the client, the rest is the worker's own account."""

    turn: int
    wall_s: float
    first_chunk_s: float
    first_token_s: float
    position: int
    prefilled_tokens: int
    cached_tokens: int
    completion_tokens: int
    kv_live_bytes: int


async def run(url: str | None, *, turns: int, max_tokens: int, smoke: bool, out: Path | None) -> None:
    """Measure a session of `turns` turns, against the worker at `url` or one made for it, and report.

    `out` is a folder for the JSON report. Raises `TurnkeepError` where there is no worker.
    """
    num_turns = SMOKE_TURNS if smoke else turns
    if url is not None:
        async with await connect(url) as client:
            measured = await _measure(client, num_turns, max_tokens)
    else:
        with tempfile.TemporaryDirectory(prefix="turnkeep-bench-") as folder:
            worker = LocalWorker(Path(folder))
            worker.start()
            try:
                async with await worker.ready("bench") as client:
                    measured = await _measure(client, num_turns, max_tokens)
            finally:
                worker.stop()
    _show(measured)
    if out is not None:
        _write(out, measured, max_tokens)


async def _measure(client: Client, num_turns: int, max_tokens: int) -> list[Turn]:
    session = client.session(f"bench-{uuid4().hex[:12]}")
    measured = []
    for turn in track(range(1, num_turns + 1), "turns", console=Console(stderr=True), transient=True):
        started_s = time.monotonic()
        first_chunk_s = 0.0
        messages = [{"role": "user", "content": QUESTION.format(turn=turn)}]
        generation = session.generate(messages=messages, max_tokens=max_tokens)
        async for _ in generation:
            first_chunk_s = first_chunk_s or time.monotonic() - started_s
        measured.append(_turn(turn, time.monotonic() - started_s, first_chunk_s, generation.result))
    await session.close()
    return measured


def _turn(turn: int, wall_s: float, first_chunk_s: float, result: Generated) -> Turn:
    return Turn(
        turn=turn,
        wall_s=wall_s,
        first_chunk_s=first_chunk_s,
        first_token_s=result.seconds.first_token,
        position=result.position,
        prefilled_tokens=result.usage.prefilled_tokens,
        cached_tokens=result.usage.cached_tokens,
        completion_tokens=result.usage.completion_tokens,
        kv_live_bytes=result.kv_live_bytes,
    )


def _show(measured: Sequence[Turn]) -> None:
    table = Table(box=None, header_style="bold")
    for name in ("turn", "position", "cached", "prefilled", "new", "1st chunk", "whole turn", "KV"):
        table.add_column(name, justify="right")
    for turn in measured:
        table.add_row(
            str(turn.turn),
            str(turn.position),
            str(turn.cached_tokens),
            str(turn.prefilled_tokens),
            str(turn.completion_tokens),
            f"{turn.first_chunk_s * 1000:.0f} ms",
            f"{turn.wall_s:.2f} s",
            f"{turn.kv_live_bytes / 2**20:.1f} MiB",
        )
    first = statistics.median(turn.first_chunk_s for turn in measured)
    console = Console()
    console.print(table)
    console.print(f"median time to the first chunk: {first * 1000:.0f} ms over {len(measured)} turns")


def _write(out: Path, measured: Sequence[Turn], max_tokens: int) -> None:
    """Write the report whole or not at all."""
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": {"platform": platform.platform(), "python": platform.python_version()},
        "settings": {"turns": len(measured), "max_tokens": max_tokens},
        "turns": [asdict(turn) for turn in measured],
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / "session.json"
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(report, indent=2), "utf-8")
    draft.replace(path)
    Console().print(f"report: {path}")
