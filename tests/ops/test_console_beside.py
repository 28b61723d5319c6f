"""`turnkeep serve --console`: the console shows the worker's log, and can switch or unload its model."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.parts import LocalWorker, WorkerProcess, free_port
from turnkeep_client.errors import TurnkeepError

pytestmark = [pytest.mark.process, pytest.mark.packaging]


async def get(http: httpx2.AsyncClient, path: str, until: Callable[[Any], bool]) -> Any:
    """Send a GET until the response fulfils `until`; meanwhile the console may be down."""
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


@asynccontextmanager
async def console_of(worker: WorkerProcess) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield an HTTP client for the console of a worker, with the console's token as a cookie."""
    while not (printed := re.search(r"the console is at (\S+?)/(\?token=\S+)", worker.log)):
        assert worker.running, worker.log
        await asyncio.sleep(0.05)
    headers = {"Origin": printed[1]}
    async with httpx2.AsyncClient(base_url=printed[1], headers=headers, timeout=60) as http:
        await http.get(f"/{printed[2]}")
        yield http


async def test_a_session_gets_its_next_answer_from_another_model_after_a_switch_in_the_console(
    worker_process: Callable[..., WorkerProcess], tiny_model: Path
) -> None:
    worker = worker_process("--console", str(free_port()))
    worker.forks = False
    for name in ("other", "broken"):
        shutil.copytree(tiny_model, worker.data_dir / "models" / name)
    config = worker.data_dir / "models" / "other" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 500_000.0}))
    broken = worker.data_dir / "models" / "broken" / "config.json"
    broken.write_text(json.dumps(json.loads(broken.read_text()) | {"hidden_size": 60}))
    worker.start()
    async with await worker.client(timeout_s=60) as client:
        await client.session("s").generate(text="a", max_tokens=2, timeout_s=60)
    async with console_of(worker) as http:
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
        turns = (await get(http, "sessions/s", lambda found: len(found["turns"]) == 2))["turns"]
        notes = [turn["note"].partition(", by ")[2] for turn in turns]
        assert notes == ["", "other, after tiny"]
    assert (worker.pid, worker.running) == (pid, True)
    assert worker.stop() == 0
    with pytest.raises(TurnkeepError):
        await worker.client(timeout_s=0)


async def test_a_model_unloaded_in_the_console_keeps_its_sessions_and_is_loaded_by_the_next_request(
    worker_process: Callable[..., WorkerProcess],
) -> None:
    worker = worker_process("--console", str(free_port()), "--health", str(health := free_port()))
    worker.forks = False
    worker.start()
    async with await worker.client(timeout_s=60) as client, console_of(worker) as http:
        await client.session("s").generate(text="a", max_tokens=2, timeout_s=60)
        served = (await get(http, "models", bool))["served"]
        assert served == [{"name": "tiny", "is_loaded": True}]
        refused = await http.post("/api/models/unload", json={"name": "other"})
        assert refused.json()["error"] == "other is not served here; tiny is"
        process = psutil.Process(worker.worker_pid)

        said = await http.post("/api/models/unload", json={"name": "tiny"})
        assert said.json()["said"] == "tiny is unloaded; its next request loads it again"
        await get(http, "models", lambda found: found["served"] == [{"name": "tiny", "is_loaded": False}])
        assert (await client.worker_metrics()).device == "unloaded"
        assert [row["session"] for row in (await get(http, "sessions", bool))["rows"]] == ["s"]
        assert (await get(http, "sessions/s", bool))["turns"]
        await asyncio.to_thread(process.wait, 60)
        async with httpx2.AsyncClient() as probe:
            for path in ("livez", "readyz"):
                assert (await probe.get(f"http://127.0.0.1:{health}/{path}")).status_code == 200, path

        asked = await http.post("/api/sessions/s/ask", json={"id": "asked", "text": "b", "max_tokens": 2})
        assert asked.status_code == 200
        found = await get(http, "sessions/s", lambda found: found["turns"][-1]["state"] != "waiting")
        assert [(turn["id"], turn["state"]) for turn in found["turns"][1:]] == [("asked", "done")]
        await http.post("/api/models/unload", json={"name": "tiny"})
        assert (await http.post("/api/models/serve", json={"name": "tiny"})).status_code == 200
        await get(http, "models", lambda found: found["served"][0]["is_loaded"])
        family = psutil.Process(worker.pid).children(recursive=True)
        await http.post("/api/models/unload", json={"name": "tiny"})
    assert worker.stop() == 0
    assert not [one for one in family if one.is_running()]


async def test_the_console_refuses_to_change_a_workers_model_while_another_worker_serves_the_same_model(
    worker_process: Callable[..., WorkerProcess],
    local_worker: Callable[..., Awaitable[LocalWorker]],
    tmp_path: Path,
) -> None:
    worker = worker_process("--console", str(free_port()))
    worker.forks = False
    worker.start()
    async with await worker.client(timeout_s=60) as client, console_of(worker) as http:
        await client.session("s").append(text="a", timeout_s=60)
        other = await local_worker(
            nats=worker.url, prefix="turnkeep", worker="other", data_dir=tmp_path / "b"
        )
        tiny = {"name": "tiny"}
        async with asyncio.timeout(60):  # until its supervisor knows of the other one
            while (served := await http.post("/api/models/serve", json=tiny)).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        for refused in (served, await http.post("/api/models/unload", json=tiny)):
            assert "other workers serve the prefix with this model" in refused.text
        await other.stop()
    assert worker.stop() == 0
