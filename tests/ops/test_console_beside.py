"""`turnkeep serve --console`: the console shows its worker's log, and can switch the worker's model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from commands.serve import again
from commands.shelf import Shelf
from tests.commands.command_runs import turnkeep
from tests.parts import WorkerProcess, free_port
from turnkeep_client.errors import NoAnswerError, TurnkeepError
from worker.models.model_files import ModelError
from worker.process.datadir import DataDir, DataDirInUseError
from worker.process.settings import Settings

pytestmark = pytest.mark.process


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


async def test_the_console_switches_its_worker_to_another_model_and_sessions_continue(
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


async def test_the_console_keeps_the_draft_model_only_if_the_new_model_has_its_vocabulary(
    worker_process: Callable[..., WorkerProcess], tiny_model: Path
) -> None:
    worker = worker_process("--console", str(free_port()), "--draft-model", str(tiny_model))
    worker.forks = False
    folders = [shutil.copytree(tiny_model, worker.data_dir / "models" / name) for name in ("kin", "foreign")]
    path = folders[1] / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    names = tokenizer["model"]["vocab"]
    names["A"], names["B"] = names["B"], names["A"]
    path.write_text(json.dumps(tokenizer))
    worker.start()
    async with console_of(worker) as http:
        for name in ("foreign", "kin"):
            answer = await http.post("/api/models/serve", json={"name": name})
            without = ", without the draft model" if name == "foreign" else ""
            assert answer.json()["said"].startswith(f"the worker restarts with {name}{without};")
            lines = await get(http, "log", lambda lines, name=name: name in served(lines))
            told = next(told for told in map(json.loads, lines) if told["event"] == "loaded the model")
            assert told.get("draft_model") == (None if without else str(tiny_model))
    assert worker.stop() == 0


def test_a_console_started_without_a_worker_refuses_to_serve_another_model(tmp_path: Path) -> None:
    shelf = Shelf(Settings(data_dir=tmp_path))
    assert not shelf.listed()["can_serve"]
    with pytest.raises(ModelError, match="only a console of turnkeep serve --console can do this"):
        shelf.serve("other")


async def test_a_request_sent_while_the_model_is_unloaded_is_answered_after_the_next_load(
    worker_process: Callable[..., WorkerProcess],
) -> None:
    worker = worker_process("--console", str(free_port()), "--health", str(health := free_port()))
    worker.forks = False
    worker.start()
    async with await worker.client(timeout_s=60) as client, console_of(worker) as http:
        await client.session("s").generate(text="a", max_tokens=2, timeout_s=60)
        served = (await get(http, "models", bool))["served"]
        assert served == [{"name": "tiny", "is_loaded": True}]
        assert (await get(http, "workers", bool))["unloaded"] is None
        refused = await http.post("/api/models/unload", json={"name": "other"})
        assert refused.json()["error"] == "other is not loaded: the worker serves tiny"
        pid = worker.pid

        said = await http.post("/api/models/unload", json={"name": "tiny"})
        assert (said.status_code, said.json()["said"][:20]) == (200, "tiny is unloaded; re")
        told = await get(http, "workers", lambda told: told["unloaded"] == "tiny")
        assert (told["connected"], told["is_served"]) == (True, False)
        if sys.platform == "linux":  # elsewhere psutil does not list them
            libraries = {one.path for one in psutil.Process(pid).memory_maps() if "mlx" in one.path}
            assert not libraries, "the process is another one, with the same id"
        assert (await get(http, "models", bool))["served"] == [{"name": "tiny", "is_loaded": False}]
        assert [row["session"] for row in (await get(http, "sessions", bool))["rows"]] == ["s"]
        assert (await get(http, "sessions/s", bool))["turns"]
        assert await get(http, "log", lambda lines: "no model is loaded" in lines[-1])
        async with httpx2.AsyncClient() as probe:
            for path, status in (("livez", 200), ("readyz", 503)):
                answer = await probe.get(f"http://127.0.0.1:{health}/{path}")
                assert (path, answer.status_code) == (path, status)
        refused = await http.post("/api/models/unload", json={"name": "tiny"})
        assert refused.json()["error"] == "no model is loaded"
        with pytest.raises(NoAnswerError):
            await client.worker_metrics()
        with pytest.raises(DataDirInUseError, match="whose model was unloaded: Serve in its console loads"):
            DataDir.open(worker.data_dir)
        run = partial(turnkeep, "run", "", "Hello", "--data-dir", worker.data_dir)
        assert (
            "the worker's model was unloaded: Serve in its console" in (await asyncio.to_thread(run)).stderr
        )
        words = ("-m", "commands", "ask", "--data-dir", str(worker.data_dir), "Hello")
        asking = await asyncio.create_subprocess_exec(sys.executable, *words, stderr=subprocess.PIPE)
        said = (await asyncio.wait_for(asking.stderr.readline(), 60)).decode()
        assert said == "turnkeep: the worker's model was unloaded: Serve in its console loads one\n"
        asking.send_signal(signal.SIGINT)
        await asking.communicate()
        asked = await http.post("/api/sessions/s/ask", json={"id": "asked", "text": "b", "max_tokens": 2})
        assert asked.status_code == 200

        assert (await http.post("/api/models/serve", json={"name": "tiny"})).status_code == 200
        found = await get(http, "sessions/s", lambda found: found["turns"][-1]["state"] != "waiting")
        assert [(turn["id"], turn["state"]) for turn in found["turns"][1:]] == [("asked", "done")]
        await get(http, "workers", lambda told: told["unloaded"] is None and told["is_served"])
        assert (worker.pid, worker.running) == (pid, True)
    assert worker.stop() == 0


async def test_a_signal_during_a_restart_of_the_worker_ends_all_its_processes(
    worker_process: Callable[..., WorkerProcess],
) -> None:
    worker = worker_process("--console", str(free_port()))
    worker.forks = False
    worker.start()
    for pause_s in (0.0, 1.0):  # while its console ends, and while it imports
        if not worker.running:
            worker.log_path.unlink()
            worker.start()
        async with console_of(worker) as http:
            await http.post("/api/models/unload", json={"name": "tiny"})
        await asyncio.sleep(pause_s)
        assert worker.stop() == 0
        assert not [one for one in psutil.process_iter() if str(worker.data_dir) in words_of(one)]


def words_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@pytest.mark.parametrize(
    ("wishes", "then"),
    [
        (["serve b"], "--model b"),
        (["serve b", "serve c"], "--model c"),
        (["unload a"], "--unloaded a"),
        (["unload a", "serve"], ""),
        (["unload a", "serve c"], "--model c"),
        (["serve b", "unload b"], "--model b --unloaded b"),
        (["serve b", "unload b", "serve"], "--model b"),
        (["serve-undrafted b"], "--model b --undrafted"),
        (["serve-undrafted b", "unload b", "serve"], "--model b --undrafted"),
        (["serve-undrafted b", "serve c"], "--model c"),
    ],
)
def test_the_buttons_serve_and_unload_set_the_command_line_of_the_next_worker(
    wishes: list[str], then: str
) -> None:
    words = ["serve", "--model", "a", "--console", "9423"]
    for wish in wishes:
        words = again(words, wish)
    assert words == ["serve", "--model", "a", "--console", "9423", *then.split()]


async def test_one_of_several_models_can_be_unloaded_and_its_next_request_loads_it_again(
    tmp_path: Path, tiny_model: Path
) -> None:
    own = shutil.copytree(tiny_model, tmp_path / "tiny")  # others serve that one
    config = tmp_path / "several.toml"
    config.write_text(f"[models.tiny]\nmodel = '{own}'\ndevice_memory = '20MiB'\n")
    options = ("--config", str(config), "--console", str(free_port()))
    worker = WorkerProcess(tmp_path / "data", None, free_port(), *options)
    worker.start()
    try:
        client = await worker.client(timeout_s=60, prefix="turnkeep-tiny")
        async with client, console_of(worker) as http:
            assert (await get(http, "models", bool))["served"] == [{"name": "tiny", "is_loaded": False}]
            await client.session("s").generate(text="a", max_tokens=2, timeout_s=60)
            await get(http, "models", lambda found: found["served"][0]["is_loaded"])
            refused = await http.post("/api/models/unload", json={"name": "other"})
            assert refused.json()["error"] == "other is none of the models of turnkeep.toml: tiny"
            said = await http.post("/api/models/unload", json={"name": "tiny"})
            assert said.json()["said"] == "tiny is unloaded; its next request loads it again"
            await get(http, "models", lambda found: not found["served"][0]["is_loaded"])
            assert (await client.worker_metrics()).device == "unloaded"
            result = await client.session("s").generate(text="b", max_tokens=2, timeout_s=60)
            assert result.position > 4
            refused = await http.post("/api/models/serve", json={"name": "tiny"})
            assert "turnkeep.toml" in refused.json()["error"]
    finally:
        worker.stop()
