"""`turnkeep serve` with several models: a request loads its model, within one budget of memory."""

import asyncio
import dataclasses
import errno
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx2
import nats
import psutil
import pytest
import structlog
from nats.aio.msg import Msg
from parts import WorkerProcess, free_port, make_tiny_model, until

from turnkeep_client.messages import (
    Embedded,
    EmbedRequest,
    Failed,
    InfoRequest,
    LoadRequest,
    UnloadRequest,
    decode_control_reply,
    decode_serving,
    encode,
)
from turnkeep_client.subjects import SessionKey, Subjects
from worker import main, model_memory, standby, supervisor
from worker.model_memory import IdleModel, choose_to_unload
from worker.model_process import UNKNOWN
from worker.process.datadir import DataDir
from worker.process.limits import with_running_limits
from worker.process.settings import Settings
from worker.reports import Refusal
from worker.reports import encode as report_line
from worker.standby import Standby
from worker.supervisor import Supervisor
from worker.wire.activator import Activator
from worker.wire.discovery import QUEUE

LONG = "hello " * 30


class House:
    """A supervisor with a gateway and the models `tiny` and `wide:1b`; only one fits into memory."""

    def __init__(self, process: WorkerProcess, port: int) -> None:
        self.process = process
        self.http = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120)

    def workers(self) -> dict[str, psutil.Process]:
        """Return the worker processes of the loaded models, by model."""
        told = [json.loads(line) for line in self.process.log.splitlines() if line.startswith("{")]
        pids = {one["model"]: one["pid"] for one in told if one["event"] == "ready" and "pid" in one}
        here = {one.pid: one for one in psutil.Process(self.process.pid).children()}
        return {model: here[pid] for model, pid in pids.items() if pid in here}

    async def chat(self, model: str, *said: str) -> Any:
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
        body = {"model": model, "messages": messages, "max_tokens": 4, "seed": 1}
        return await self.http.post("/v1/chat/completions", json=body)


async def never(_request: object) -> str:
    raise AssertionError


@pytest.fixture
async def house(tmp_path: Path, tiny_model: Path) -> AsyncIterator[Callable[..., Awaitable[House]]]:
    made: list[House] = []
    wide = make_tiny_model(tmp_path / "wide", hidden_size=96)

    async def start(
        of_wide: str = "device_memory = '30MiB'", tiny: Path = tiny_model, **common: str
    ) -> House:
        lines = [f"{name} = {value}" for name, value in ({"memory": "'40MiB'"} | common).items()]
        lines += ["[models.tiny]", f"model = '{tiny}'", "device_memory = '20MiB'"]
        lines += ["[models.'wide:1b']", f"model = '{wide}'", of_wide]
        (tmp_path / "house.toml").write_text("\n".join(lines))
        port, config = free_port(), str(tmp_path / "house.toml")
        options = ("--config", config, "--gateway", str(port))
        process = WorkerProcess(tmp_path / "data", None, free_port(), *options)
        process.start()
        made.append(House(process, port))
        await until(lambda: not process.running or "the gateway is at" in process.log)
        return made[-1]

    yield start
    for one in made:
        await one.http.aclose()
        if one.process.running:
            one.process.stop()


@pytest.mark.process
async def test_a_request_loads_its_model_and_unloads_another_model_if_memory_is_short(house: Any) -> None:
    at = await house()
    listed = (await at.http.get("/v1/models")).json()["data"]
    assert [(one["id"], one["context_window"]) for one in listed] == [("tiny", 2048), ("wide:1b", 2048)]
    assert (await at.http.get("/health")).json() == {"status": "ok", "models": ["tiny", "wide:1b"]}
    assert at.workers() == {}, "looks load nothing"
    for name, status, why in (("nobody", 404, "'tiny', 'wide:1b'"), ("", 400, "model must be one of")):
        refused = await at.chat(name, "Hi.")
        assert (refused.status_code, why in refused.text) == (status, True)

    assert (await at.chat("tiny", LONG)).json()["model"] == "tiny"
    assert [*at.workers()] == ["tiny"]
    counted = {"model": "wide:1b", "messages": [{"role": "user", "content": LONG}], "max_tokens": 1}
    answer = await at.http.post("/v1/messages/count_tokens", json=counted)
    assert answer.json()["input_tokens"] > len(LONG), "held until the model is loaded"
    assert [*at.workers()] == ["wide:1b"], "there is memory for one"

    for reason, asked in (("unload", {"keep_alive": 0}), ("load", {})):
        told = (await at.http.post("/api/generate", json={"model": "wide:1b", **asked})).json()
        assert told["done_reason"] == reason
        await until(lambda reason=reason: len(at.workers()) == (reason == "load"))  # type: ignore[misc]
    at.workers()["wide:1b"].kill()
    await until(lambda: "a worker has ended" in at.process.log)  # until then it may be asked
    async with await at.process.client(prefix="turnkeep-wide-1b") as client:
        answered = await client.ask("s", text=LONG, max_tokens=2, timeout_s=120)
    assert answered.usage.prompt_tokens == len(LONG), "a crashed worker comes back"
    left = psutil.Process(at.process.pid).children(recursive=True)
    assert "nats-server" in {one.name() for one in left}
    at.process.kill()
    await until(lambda: not any(one.is_running() for one in left))


@pytest.mark.packaging
@pytest.mark.process
async def test_a_model_unused_for_a_while_is_unloaded_and_reloaded_for_the_next_message_of_a_session(
    house: Any,
) -> None:
    at = await house(unload_after_s="1")
    first = await at.chat("tiny", LONG)
    process, counted = (
        at.workers()["tiny"],
        {"model": "tiny", "messages": [{"role": "user", "content": "Hi."}]},
    )
    for _ in range(12):
        assert (await at.http.post("/v1/messages/count_tokens", json=counted)).is_success
        await asyncio.sleep(0.25)
    assert process.is_running(), "requests for token counts or embeddings use the model, too"
    await until(lambda: not at.workers())
    async with await at.process.client(prefix="turnkeep-tiny") as client:
        metrics = await client.worker_metrics()
    assert (metrics.device, metrics.model, metrics.running) == ("unloaded", "tiny", 0)
    told = first.json()
    second = await at.chat("tiny", LONG, told["choices"][0]["message"]["content"], "More.")
    session = first.headers["x-turnkeep-session"].removesuffix("begun")
    assert second.headers["x-turnkeep-session"] == f"{session}continued"
    used = second.json()["usage"]["prompt_tokens_details"]
    assert used["cached_tokens"] == told["usage"]["total_tokens"] - 1, "restored"
    left = psutil.Process(at.process.pid).children(recursive=True)
    assert at.process.stop() == 0
    await until(lambda: not any(one.is_running() for one in left))


@pytest.mark.process
async def test_closed_sessions_of_a_model_that_is_not_loaded_leave_the_log_after_their_time_to_live(
    house: Any,
) -> None:
    """Its metrics have the log's size and limit meanwhile."""
    at = await house(closed_ttl_s="6", log_max_bytes="'64MiB'")
    async with await at.process.client(prefix="turnkeep-tiny") as client:
        await client.ask("s", text="Hi.", max_tokens=2, timeout_s=120)
        await client.session("s").close()
        await client.unload()
        await until(lambda: not at.workers())

        async def entries() -> dict[str, int]:
            js = client._wire._nats.jetstream()
            info = await js.stream_info("turnkeep-tiny_log", subjects_filter="turnkeep-tiny.default.s.>")
            return {subject.rsplit(".", 1)[1]: num for subject, num in (info.state.subjects or {}).items()}

        assert await entries() == {"in": 2, "out": 2, "closed": 1}
        async with asyncio.timeout(60):
            # The close stays a little longer.
            while await entries() != {"in": 1, "out": 1, "closed": 1}:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
        metrics = await client.worker_metrics()
    assert metrics.log_bytes > 0
    assert metrics.log_max_bytes == 2**26
    assert at.workers() == {}


@pytest.mark.process
async def test_the_gateways_model_list_shows_for_models_not_loaded_whether_they_accept_images(
    house: Any, taught_model: Path
) -> None:
    at = await house(tiny=taught_model)
    listed = (await at.http.get("/v1/models")).json()["data"]
    assert [(one["id"], one["vision"]) for one in listed] == [("tiny", True), ("wide:1b", False)]
    assert at.workers() == {}


async def test_requests_for_a_loading_model_are_kept_if_the_models_worker_dies_before_receiving_them(
    nats_url: str,
) -> None:
    """The supervisor then cancels `end`."""
    nc, subjects, woken, heard = await nats.connect(nats_url), Subjects("held"), [], asyncio.Queue[bytes]()
    activator = Activator(nc, subjects, lambda: None, lambda: woken.append(1), never)  # type: ignore[arg-type, return-value]
    asked = [f"held.t.s.{kind}" for kind in ("ctl", "ask")]

    async def hear(message: Msg) -> None:
        heard.put_nowait(message.data)

    await activator.begin()
    for number in (2, 4):
        for subject in asked:
            await nc.publish(subject, b"%d" % number, reply="nobody")
        await until(lambda number=number: len(woken) == number)  # type: ignore[misc]
        with anyio.move_on_after(0):
            await activator.end()
        await activator.begin()
    for subject in asked:
        await nc.subscribe(subject, QUEUE, cb=hear)
    await activator.end()
    assert sorted([await heard.get() for _ in range(4)]) == [b"2", b"2", b"4", b"4"]
    await nc.close()


async def test_a_request_to_load_a_model_gets_an_error_reply_if_the_supervisor_raises_an_unexpected_error(
    nats_url: str,
) -> None:
    async def fails(_: object) -> str:
        raise OSError(11, "no more processes")

    nc, subjects = await nats.connect(nats_url), Subjects("failing")
    activator = Activator(nc, subjects, lambda: None, lambda: None, fails)  # type: ignore[arg-type, return-value]
    await activator.open(Settings(prefix="failing"), all_requests=False)
    reply = await nc.request(subjects.serve, encode(LoadRequest()), timeout=10)
    answer = decode_serving(reply.data)
    assert (answer.code, answer.message) == (  # type: ignore[union-attr]
        "internal",
        "an error of turnkeep serve, which is in its log",
    )
    await nc.close()


async def test_requests_of_one_tenant_waiting_for_a_loading_model_leave_room_for_those_of_other_tenants(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.wire.activator._MOST_HELD", 8)
    nc, subjects = await nats.connect(nats_url), Subjects("crowded")
    activator = Activator(nc, subjects, lambda: None, lambda: None, never)  # type: ignore[arg-type, return-value]
    await activator.begin()
    asked = {tenant: await nc.subscribe(f"_INBOX.crowded.{tenant}") for tenant in ("loud", "quiet")}
    for tenant, number in (("loud", 12), ("quiet", 6)):
        for _ in range(number):
            await nc.publish(f"crowded.{tenant}.s.ask", b"{}", reply=f"_INBOX.crowded.{tenant}")
        await nc.flush()
    await until(lambda: asked["quiet"].pending_msgs == 2)
    assert asked["loud"].pending_msgs == 4, "refused"
    await nc.close()


@pytest.mark.packaging
@pytest.mark.process
async def test_a_model_is_not_unloaded_while_it_embeds_a_long_list_of_texts(
    house: Any, embedding_model: Path
) -> None:
    at = await house(unload_after_s="1", tiny=embedding_model)
    asked = encode(EmbedRequest(inputs=("hello " * 280,) * 120))  # seconds, in one request
    async with await at.process.client(prefix="turnkeep-tiny") as client:
        answer = decode_control_reply(await client._wire.ask("turnkeep-tiny.default.any.ctl", asked, 100))
    assert isinstance(answer, Embedded), answer
    await until(lambda: not at.workers())


async def test_settings_reloaded_by_serve_apply_to_the_next_worker_process_too(tmp_path: Path) -> None:
    alone = Supervisor(Settings(), {"a": Settings(other_model="refuse")})
    (model,) = alone._models
    with DataDir.open(tmp_path) as model.directory, structlog.testing.capture_logs() as logs:
        await alone.reload(Settings(), {"a": Settings(max_disk=5)})
        assert with_running_limits(Settings(), tmp_path)[0].max_disk == 5, "as commands say"
    assert (model.settings.max_disk, model.settings.other_model) == (5, "refuse"), "others need a restart"
    assert [(one["event"], one["model"], one["settings"]) for one in logs] == [
        ("these settings need a restart", "a", ["other_model"])
    ]


@pytest.mark.parametrize(
    ("models", "told"), [(("a",), ["models.b", "models.c"]), ((), ["models.a", "models.b", "models.c"])]
)
async def test_serve_logs_that_models_added_to_or_removed_from_its_settings_need_a_restart(
    models: tuple[str, ...], told: list[str]
) -> None:
    served = Supervisor(Settings(), {name: Settings() for name in models})
    with structlog.testing.capture_logs() as logs:
        await served.reload(Settings(), {name: Settings() for name in ("a", "b", "c")})
    with structlog.testing.capture_logs() as logs_of_removed:
        await Supervisor(Settings(), dict.fromkeys("abc", Settings())).reload(
            Settings(), dict.fromkeys(models, Settings())
        )
    for one in (logs, logs_of_removed):
        assert [(line["event"], line["settings"]) for line in one] == [
            ("these settings need a restart", told)
        ]


@pytest.mark.process
async def test_disk_limits_that_serve_with_several_models_reads_again_are_shown_to_commands_on_its_data_dir(
    house: Any, tmp_path: Path
) -> None:
    at, config = await house(max_disk="'1GiB'"), tmp_path / "house.toml"
    config.write_text(config.read_text().replace("1GiB", "2MiB"))
    os.kill(at.process.pid, signal.SIGHUP)
    await until(lambda: with_running_limits(Settings(), at.process.data_dir)[0].max_disk == 2 * 2**20)


@pytest.mark.packaging
@pytest.mark.process
async def test_serve_refuses_to_start_with_a_model_larger_than_the_memory_budget(house: Any) -> None:
    at = await house(memory="'25MiB'")
    assert not at.process.running
    assert at.process.log.splitlines()[-1] == (
        "turnkeep: the model wide:1b can never be loaded: it needs device_memory of 30 MiB, and memory is"
        " 25 MiB; raise memory, or take a smaller model"
    )


@pytest.mark.packaging
@pytest.mark.process
async def test_a_memory_budget_larger_than_the_machines_memory_fails_the_start(house: Any) -> None:
    at = await house(memory="'1024TiB'")
    assert not at.process.running
    assert "memory is 1048576 GiB, and this machine has" in at.process.log.splitlines()[-1]


def test_the_longest_unused_models_are_unloaded_first_and_none_if_all_together_free_too_little_memory() -> (
    None
):
    old, new = IdleModel(1.0, 10, "old"), IdleModel(2.0, 20, "new")
    assert choose_to_unload(0, [new, old]) == []
    assert choose_to_unload(5, [new, old]) == ["old"]
    assert choose_to_unload(11, [new, old]) == ["old", "new"]
    assert choose_to_unload(31, [new, old]) == []


class Busy:
    """A stub of an activator whose model has unanswered requests until `is_busy` is changed."""

    used_s = 0.0
    is_busy = True

    async def has_work(self) -> bool:
        return self.is_busy


async def test_the_idle_time_after_which_a_model_is_unloaded_starts_at_the_end_of_its_last_answer() -> None:
    alone, busy = Supervisor(Settings(), {"a": Settings(unload_after_s=1.0)}), Busy()
    (model,) = alone._models
    model.process = True  # type: ignore[assignment]  # a stub
    model.loaded_s, model.activator = anyio.current_time(), busy  # type: ignore[assignment]  # a stub
    for _ in range(8):
        assert not await alone._is_idle(model)
        await asyncio.sleep(0.1)
    busy.is_busy = False
    await asyncio.sleep(0.5)
    assert not await alone._is_idle(model), "half a second after the end of its answer"
    await asyncio.sleep(0.6)
    assert await alone._is_idle(model)


async def test_serve_publishes_metrics_of_a_model_that_is_being_loaded_with_the_state_unloaded() -> None:
    alone, told = Supervisor(Settings(), {"a": Settings()}), asyncio.Event()
    (model,) = alone._models
    model.needs = UNKNOWN
    model.process = SimpleNamespace()  # type: ignore[assignment]  # a stub, as is the activator

    async def publish() -> None:
        told.set()

    model.activator = SimpleNamespace(publish_metrics=publish)  # type: ignore[assignment]
    publishing = asyncio.create_task(alone._publish_metrics(model))
    async with asyncio.timeout(30):
        await told.wait()
    publishing.cancel()


def test_the_metrics_of_a_model_that_is_not_loaded_have_the_size_and_limit_of_its_log() -> None:
    (model,) = Supervisor(Settings(), {"a": Settings()})._models
    model.retention = SimpleNamespace(num_bytes=5, max_bytes=9)  # type: ignore[assignment]  # a stub
    metrics = model.metrics()
    assert (metrics.device, metrics.log_bytes, metrics.log_max_bytes) == ("unloaded", 5, 9)


async def test_a_model_in_use_is_unloaded_only_after_another_model_has_waited_long_enough_for_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_memory, "_LOOK_S", 0.01)
    both = Supervisor(Settings(), {"a": Settings(), "b": Settings()})
    both._memory.size_bytes = 10
    first, second = both._models
    for model in (first, second):
        model.size_bytes, model.activator, model.loaded_s = 10, Busy(), 0.0  # type: ignore[assignment]  # a stub

    async def wait() -> None:
        async with both._memory.reserve(second):
            pass

    async with asyncio.timeout(30):
        async with both._memory.reserve(first):
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0.1)
            assert not first.leave.is_set()
            monkeypatch.setattr(model_memory, "_TURN_S", 0.05)
            await first.leave.wait()
            assert not waiting.done(), "until the memory is free"
        await waiting


async def test_after_one_model_was_unloaded_for_a_model_that_waits_for_memory_no_second_model_is_unloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is unloaded while the other models are asked whether they have work."""
    monkeypatch.setattr(model_memory, "_LOOK_S", 0.01)
    monkeypatch.setattr(model_memory, "_GRACE_S", 0.0)
    three = Supervisor(Settings(), {name: Settings() for name in ("unloaded", "older", "wanted")})
    three._memory.size_bytes = 20
    unloaded, older, wanted = three._models
    for model in three._models:
        model.size_bytes, model.activator, model.loaded_s = 10, Busy(), 0.0  # type: ignore[assignment]  # a stub
    unloaded.activator.used_s = 1.0

    async def is_asked() -> bool:
        unloaded.let_go()
        return False

    unloaded.activator.has_work = is_asked  # type: ignore[method-assign]
    older.activator.is_busy = False  # type: ignore[attr-defined]

    async def loaded() -> None:
        async with three._memory.reserve(unloaded):
            await unloaded.leave.wait()
            await asyncio.sleep(0.1)

    async with asyncio.timeout(30), three._memory.reserve(older):
        unloading = asyncio.create_task(loaded())
        await until(lambda: unloaded in three._memory.loaded)
        three._memory.loaded.reverse()  # it is asked first
        async with three._memory.reserve(wanted):
            assert not older.leave.is_set()
        await unloading


class Runs:
    """A stub of a worker's runs, each of which ends at once, after `served_s`; None: it was never ready."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, served_s: float | None) -> None:
        self.served_s, self.num = served_s, 0
        self.refused = asyncio.Queue[str]()
        self.supervisor = Supervisor(Settings(), {"a": Settings()})
        (self.model,) = self.supervisor._models
        self.model.needs, self.model.activator = UNKNOWN, self  # type: ignore[assignment]  # a stub
        self.model.retention = SimpleNamespace(run=self.remove)  # type: ignore[assignment]  # a stub
        self.is_removing = False
        monkeypatch.setattr(self.supervisor, "_run_worker", self.run)

    async def run(self, model: Any) -> int:
        self.num += 1
        model.loaded_s = math.inf if self.served_s is None else anyio.current_time() - self.served_s
        await asyncio.sleep(0)
        return 3

    async def remove(self) -> None:
        self.is_removing = True
        try:
            await anyio.sleep_forever()
        finally:
            self.is_removing = False

    async def refuse(self, why: str) -> None:
        self.refused.put_nowait(why)

    async def has_work(self) -> bool:
        return True


async def test_a_model_whose_worker_failed_to_become_ready_is_loaded_again_at_its_next_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "_PAUSES_S", (0.0, 0.0))
    runs = Runs(monkeypatch, None)
    keeping = asyncio.create_task(runs.supervisor._keep(runs.model))
    async with asyncio.timeout(30):
        for number in (1, 2):
            await until(lambda: runs.is_removing)
            runs.model.wake()
            assert "a cannot be loaded: its worker has ended 5 times" in await runs.refused.get()
            assert not runs.is_removing, "the worker removes closed sessions itself"
            await asyncio.sleep(0.1)
            assert runs.num == number * supervisor._MAX_TRIES
            assert not runs.supervisor._memory.loaded, "other models may have its memory"
    keeping.cancel()


async def test_serve_restarts_a_worker_at_once_if_the_worker_had_served_for_a_while_before_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "_PAUSES_S", (1000.0, 1000.0))
    runs = Runs(monkeypatch, supervisor._STABLE_S + 1)
    running = asyncio.create_task(runs.supervisor._run_until_left(runs.model))
    async with asyncio.timeout(30):
        while runs.num < 20:  # noqa: ASYNC110
            await asyncio.sleep(0)
        runs.served_s = 0.0
        await asyncio.sleep(0.1)
    num = runs.num
    await asyncio.sleep(0.1)
    assert runs.num == num, "there is a pause"
    running.cancel()


async def test_serve_still_restarts_a_worker_that_has_ended_more_than_a_thousand_times_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "_PAUSES_S", (0.0, 0.0))
    runs = Runs(monkeypatch, 0.0)
    with structlog.testing.capture_logs():
        running = asyncio.create_task(runs.supervisor._run_until_left(runs.model))
        await until(lambda: running.done() or runs.num > 1100)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_serve_ends_if_its_worker_fails_five_times_in_a_row_before_it_is_ready(
    tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(standby, "_WORKER", (sys.executable, "-c", "raise SystemExit(3)"))
    alone = Supervisor(Settings(data_dir=tmp_path, nats=nats_url, prefix="failing"), {})
    with pytest.raises(supervisor.SupervisorError, match=r"5 times in a row, before it was ready \(code 3\)"):
        await alone.run()


#: A worker's process that measures each model, and serves each but `broken`, for which it ends at once.
_STUB = """
import json, sys
order = json.loads(sys.stdin.readline())
if not order["weighs"] and order["settings"]["model"] == "broken":
    sys.exit(3)
print(sys.argv[1], flush=True)
if not order["weighs"]:
    sys.stdin.read()
"""


@pytest.fixture
async def served(
    tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Supervisor, nats.NATS]]:
    """A supervisor of one model, whose worker `_STUB` answers no requests, and a client's connection."""
    needs = report_line(UNKNOWN).decode().strip()
    monkeypatch.setattr(supervisor, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(standby, "_WORKER", (sys.executable, "-c", _STUB, needs))
    settings = Settings(data_dir=tmp_path, nats=nats_url, prefix="stub", model="sound")
    alone, nc = Supervisor(settings, {}), await nats.connect(nats_url)
    running = asyncio.create_task(alone.run())
    await until(lambda: running.done() or alone.ready.is_set())
    yield alone, nc
    alone.stop()
    await running
    await nc.close()


async def test_requests_to_a_newly_selected_model_that_cannot_be_loaded_get_an_error_with_the_reason(
    served: tuple[Supervisor, nats.NATS],
) -> None:
    alone, nc = served
    subjects = Subjects("stub")
    with structlog.testing.capture_logs() as logs:
        changed = await nc.request(subjects.serve, encode(LoadRequest(model="broken")), timeout=60)
        assert "restarts with broken" in decode_serving(changed.data).said  # type: ignore[union-attr]
        asked = subjects.of(SessionKey("default", "s"), "ctl")
        answer = decode_control_reply((await nc.request(asked, encode(InfoRequest()), timeout=20)).data)
    why = "the model broken cannot be loaded: its worker has ended 5 times in a row"
    assert isinstance(answer, Failed)
    assert (answer.code, why in answer.message) == ("internal", True)
    told = [one["reason"] for one in logs if one["event"] == "a worker has ended" and "reason" in one]
    assert all("its worker has ended 5 times" in reason for reason in told)
    back = await nc.request(subjects.serve, encode(LoadRequest(model="sound")), timeout=60)
    assert "restarts with sound" in decode_serving(back.data).said  # type: ignore[union-attr]
    await until(lambda: alone._models[0].is_loaded)


async def test_clients_are_told_why_a_model_cannot_be_loaded_until_it_is_loaded(
    served: tuple[Supervisor, nats.NATS], nats_url: str
) -> None:
    alone, nc = served
    why = "the model broken cannot be loaded: its worker has ended 5 times in a row"
    options = ("--nats", nats_url, "--prefix", "stub")
    command = (sys.executable, "-m", "commands")
    async with AsyncExitStack() as stack:
        await nc.request(Subjects("stub").serve, encode(LoadRequest(model="broken")), timeout=60)
        asking = await anyio.open_process([*command, "ask", *options, "hello"], stdin=subprocess.DEVNULL)
        stack.push_async_callback(asking.aclose)
        stack.callback(asking.kill)
        told = ""
        async with asyncio.timeout(60):
            while why not in told:
                told += (await asking.stderr.receive()).decode()  # type: ignore[union-attr]  # a pipe
            looked = await anyio.run_process([*command, "info", *options])
            assert why in looked.stdout.decode()
        await nc.request(Subjects("stub").serve, encode(LoadRequest(model="sound")), timeout=60)
        await until(lambda: alone._models[0].is_loaded)
        assert not alone._models[0].metrics().refusal
    await nc.jetstream().purge_stream(
        Subjects("stub").log_stream
    )  # the request would load the next tests' model


async def test_a_model_that_is_asked_twice_to_be_unloaded_is_loaded_by_its_next_request(
    served: tuple[Supervisor, nats.NATS],
) -> None:
    alone, nc = served
    (model,), subjects = alone._models, Subjects("stub")
    for _ in range(2):
        unloaded = await nc.request(subjects.serve, encode(UnloadRequest()), timeout=20)
        assert "is unloaded" in decode_serving(unloaded.data).said  # type: ignore[union-attr]
        await until(lambda: model.process is None)
        await asyncio.sleep(0.2)
    loaded = await nc.request(subjects.serve, encode(LoadRequest()), timeout=20)
    assert "is loaded" in decode_serving(loaded.data).said  # type: ignore[union-attr]
    async with asyncio.timeout(20):
        await until(lambda: model.is_loaded)


async def test_a_request_to_unload_a_model_is_carried_out_even_right_after_a_request_to_load_that_model(
    served: tuple[Supervisor, nats.NATS],
) -> None:
    alone, nc = served
    (model,), subjects = alone._models, Subjects("stub")
    await nc.request(subjects.serve, encode(UnloadRequest()), timeout=20)
    await until(lambda: model.process is None)
    await asyncio.sleep(0.2)
    model.wake()
    await asyncio.sleep(0)
    model.let_go()
    await asyncio.sleep(1.0)
    assert not model.is_loaded


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((errno.EACCES, "Permission denied", "data/models"), "data/models: Permission denied"),
        ((errno.EPERM, "Operation not permitted"), "Operation not permitted"),
        (("no right to it",), "no right to it"),
        ((), "PermissionError"),
    ],
)
def test_a_worker_that_may_not_read_a_file_at_its_start_reports_the_reason_instead_of_a_traceback(
    monkeypatch: pytest.MonkeyPatch, given: tuple[Any, ...], says: str
) -> None:
    sent = list[Refusal]()

    def fails(_: object) -> None:
        raise PermissionError(*given)

    monkeypatch.setattr(main, "Reporter", lambda: SimpleNamespace(send=sent.append))
    monkeypatch.setattr(main, "_work", fails)
    with pytest.raises(SystemExit):
        main.main()
    assert sent == [Refusal(says, is_setting=False)]


async def test_a_worker_process_that_ends_leaves_no_warning_of_an_unclosed_file() -> None:
    program = [sys.executable, "-W", "default", "-P", "-m", "worker.main", "0"]
    ended = await asyncio.to_thread(subprocess.run, program, stdin=subprocess.DEVNULL, capture_output=True)
    assert (ended.returncode, b"ResourceWarning" in ended.stderr) == (0, False), ended.stderr.decode()


async def test_serve_retries_while_the_system_cannot_start_a_process(
    served: tuple[Supervisor, nats.NATS], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the system's limit of processes; also of threads, as asyncio may need one for each process."""
    alone, _ = served
    (model,), start = alone._models, anyio.open_process
    faults = [BlockingIOError(11, "no more processes"), RuntimeError("can't start new thread")] * 4
    left = iter(faults)

    async def fails(*words: Any, **options: Any) -> Any:
        if (fault := next(left, None)) is not None:
            raise fault
        return await start(*words, **options)

    await alone._standby.dismiss()
    monkeypatch.setattr(anyio, "open_process", fails)
    worker = model.process
    assert worker is not None
    with structlog.testing.capture_logs() as logs:
        worker.kill()
        await until(lambda: model.process is not worker and model.is_loaded)
    told = [one["reason"] for one in logs if one["event"] == "a worker has ended" and "reason" in one]
    assert (
        told
        == [
            f"no process can be started: [Errno 11] {why}"
            for why in ("no more processes", "can't start new thread")
        ]
        * 4
    )


async def test_the_model_of_a_worker_can_be_changed_even_while_requests_keep_arriving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, served = Supervisor(Settings(model="old"), {}), list[str | None]()
    (model,) = alone._models
    model.activator = Busy()  # type: ignore[assignment]  # a stub
    model.retention = SimpleNamespace(run=anyio.sleep_forever)  # type: ignore[assignment]  # a stub

    async def run(_: object) -> int:
        served.append(model.settings.model)
        model.process = SimpleNamespace()  # type: ignore[assignment]  # a stub
        await model.leave.wait()
        model.wake()  # a request has come while the worker ends
        model.process = None
        return 0

    async def fits(_: object) -> Any:
        return UNKNOWN

    monkeypatch.setattr(alone, "_run_worker", run)
    monkeypatch.setattr(alone, "_fitting", fits)
    model.wake()
    serving = asyncio.create_task(alone._keep(model))
    await until(lambda: bool(served))
    async with asyncio.timeout(10):
        assert "restarts with new" in await alone._change(model, "new")
    await until(lambda: len(served) > 1)
    assert served == ["old", "new"]
    serving.cancel()


async def test_workers_assume_that_an_external_nats_server_syncs_every_two_minutes_unless_configured(
    tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does by default: so much a power cut may lose, which workers must not take for stored."""

    async def ends(one: Supervisor) -> None:
        one.stop()

    monkeypatch.setattr(Supervisor, "_serve", ends)
    settings = Settings(data_dir=tmp_path, nats=nats_url, prefix="foreign", sync_interval="always")
    alone = Supervisor(settings, {})
    assert alone._models[0].settings.sync_s == 0
    await alone.run()
    assert alone._models[0].settings.sync_s == 120
    told = Supervisor(dataclasses.replace(settings, nats_sync_interval="always"), {})
    await told.run()
    assert told._models[0].settings.sync_s == 0


async def test_stopping_a_worker_whose_standby_process_was_killed_raises_no_error() -> None:
    """As by whoever sends SIGTERM to all of its processes."""
    waiting = Standby()
    process = await waiting.hire()
    process.kill()
    await process.wait()
    await waiting.dismiss()
