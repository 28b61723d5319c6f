"""`turnkeep serve --console`: the console shows its worker's log, and has it serve another model."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from commands.shelf import Shelf
from tests.parts import free_port
from turnkeep_client.errors import TurnkeepError
from worker.models.model_files import ModelError
from worker.process.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.parts import WorkerProcess

pytestmark = pytest.mark.process


async def get(http: httpx2.AsyncClient, path: str, until: Callable[[Any], bool]) -> Any:
    """Ask until the answer is as wanted; the console may be away meanwhile."""
    async with asyncio.timeout(60):
        while True:
            try:
                answer = await http.get(f"/api/{path}")
            except httpx2.TransportError:
                answer = None
            if answer is not None and answer.status_code == 200 and until(answer.json()):
                return answer.json()
            await asyncio.sleep(0.1)


def served(lines: list[str]) -> list[str]:
    return [told["model"] for told in map(json.loads, lines) if told["event"] == "loaded the model"]


async def test_the_console_has_its_worker_serve_another_model_with_the_same_sessions(
    worker_process: Callable[..., WorkerProcess], tiny_model: Path
) -> None:
    port = free_port()
    worker = worker_process("--console", str(port))
    worker.forks = False
    for name in ("other", "broken"):
        shutil.copytree(tiny_model, worker.data_dir / "models" / name)
    broken = worker.data_dir / "models" / "broken" / "config.json"
    broken.write_text(json.dumps(json.loads(broken.read_text()) | {"hidden_size": 60}))
    worker.start()
    origin = f"http://127.0.0.1:{port}"
    async with await worker.client(timeout_s=60) as client:
        await client.session("s").generate(text="a", max_tokens=2, timeout_s=60)
    while not (printed := re.search(r"the console is at (\S+)", worker.log)):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    async with httpx2.AsyncClient(base_url=origin, headers={"Origin": origin}, timeout=60) as http:
        await http.get(printed[1])
        lines = await get(http, "log", bool)
        assert served(lines) == [tiny_model.name]
        assert (await get(http, "models", bool))["can_serve"]

        refused = await http.post("/api/models/serve", json={"name": "broken"})
        assert refused.status_code == 409
        assert refused.json()["error"].startswith("broken cannot be served: ")
        refused = await http.post("/api/models/serve", json={"name": "nosuch"})
        assert "there is no model nosuch" in refused.json()["error"]
        assert worker.running

        pid = worker.pid
        said = await http.post("/api/models/serve", json={"name": "other"})
        assert (said.status_code, said.json()["said"][:30]) == (200, "the worker restarts with other")
        await get(http, "log", lambda lines: "other" in served(lines))
        client = await worker.client(timeout_s=60)
        async with client:
            assert (await client.worker_metrics()).model == "other"
            result = await client.session("s").generate(text="b", max_tokens=2, timeout_s=60)
        assert result.position > 4, "the session goes on"
    assert (worker.pid, worker.running) == (pid, True)
    assert worker.stop() == 0
    with pytest.raises(TurnkeepError):
        await worker.client(timeout_s=0)


def test_a_console_that_no_worker_runs_leaves_models_alone(tmp_path: Path) -> None:
    shelf = Shelf(Settings(data_dir=tmp_path))
    assert not shelf.listed()["can_serve"]
    with pytest.raises(ModelError, match="only a console of turnkeep serve --console can do this"):
        shelf.serve("other")
