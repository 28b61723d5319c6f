"""A gateway beside a worker, and one for several models."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from crafted import LETTERS
from parts import free_port

from commands.gateway_note import noted, noted_gateway
from tests.gateway.test_command import launched
from turnkeep_client.messages import MetricsRequest, decode_control, encode, failure
from worker.metrics_collector import unloaded_metrics
from worker.process.datadir import starting_pid

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}


async def until_served(http: httpx2.AsyncClient, *, served: bool) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                answers = (await http.get("/health")).status_code == 200
            except httpx2.TransportError:
                answers = False
            if answers == served:
                return
            await asyncio.sleep(0.05)


@pytest.mark.process
async def test_a_gateway_started_by_a_worker_ends_when_its_worker_ends(
    worker_process: Any, tiny_model: Path
) -> None:
    """Also if a worker is killed and starts again while its old gateway is still running."""
    port = free_port()
    process = worker_process("--gateway", str(port), "--gateway-ttl-s", "1s", model=tiny_model)
    process.start()
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
        await until_served(http, served=True)
        answer = await http.post("/v1/chat/completions", json=HELLO)
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 2)
        async with await process.client() as client, asyncio.timeout(60):
            while not all(one.is_closed for one in await client.sessions()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        process.kill()
        await until_served(http, served=False)
        process.start()
        await until_served(http, served=True)
        assert process.stop() == 0
        with pytest.raises(httpx2.ConnectError):
            await http.get("/")
    assert process.log.count(f"the gateway is at http://127.0.0.1:{port}/v1") == 2


@pytest.mark.process
async def test_a_stream_ends_with_an_error_event_when_a_worker_stops_with_its_gateway(
    worker_process: Any, endless_model: Path
) -> None:
    port, written = free_port(), ""
    process = worker_process("--gateway", str(port), model=endless_model)
    process.start()
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        await until_served(http, served=True)
        asked = HELLO | {"max_tokens": 2_000, "logit_bias": LETTERS, "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=asked) as response:
            async for part in response.aiter_text():
                if not written:
                    os.kill(process.pid, signal.SIGTERM)
                written += part
    assert "send the request again" in written.strip().splitlines()[-1]


@pytest.mark.process
def test_launch_waits_for_the_gateway_of_a_starting_worker_but_not_for_a_gateway_on_another_port(
    worker_process: Any, tiny_model: Path
) -> None:
    port = free_port()
    process = worker_process("--gateway", str(port), model=tiny_model)
    process.start()
    while starting_pid(process.data_dir) is None:
        time.sleep(0.02)
    command = [sys.executable, "-P", "-m", "commands", "launch", "--data-dir", str(process.data_dir)]
    done = subprocess.run(
        [*command, "--print", "pi"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "waiting for the gateway of the worker that is starting" in done.stderr
    assert "--model tiny" in done.stdout, "it is found, though not on the usual port"
    other = ["--gateway", f"http://127.0.0.1:{free_port()}", "--print", "pi"]
    done = subprocess.run([*command, *other], capture_output=True, text=True, timeout=10, check=False)
    assert done.returncode == 1, "it does not wait for another port"
    assert f"this worker's is at http://127.0.0.1:{port}" in done.stderr
    assert process.stop() == 0


@pytest.mark.process
def test_launch_finds_a_gateway_that_was_started_apart_for_the_data_directory_and_waits_for_its_worker(
    worker_process: Any,
) -> None:
    process = worker_process()
    process.start()
    until_s = time.monotonic() + 60
    while '"event": "ready"' not in process.log and time.monotonic() < until_s:
        time.sleep(0.02)
    command = [sys.executable, "-P", "-m", "commands"]
    place = ["--data-dir", str(process.data_dir)]
    with subprocess.Popen(
        [*command, "gateway", *place, "--listen", "0.0.0.0:0"], stderr=subprocess.PIPE, text=True
    ) as gateway:
        try:
            told = gateway.stderr.readline()  # type: ignore[union-attr]
            port = told.partition("/v1")[0].rpartition(":")[2]
            while noted_gateway(process.data_dir) is None and time.monotonic() < until_s:
                time.sleep(0.02)
            process.lose_worker()
            with subprocess.Popen(
                [*command, "launch", *place, "--print", "other"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as launch:
                assert "of the worker that is starting" in launch.stderr.readline()  # type: ignore[union-attr]
                process.go_on()
                printed, errors = launch.communicate(timeout=30)
        finally:
            gateway.kill()
    assert (launch.returncode, f"http://127.0.0.1:{port}" in printed) == (0, True), errors
    assert noted_gateway(process.data_dir) is None, "a killed gateway is not used"
    assert process.stop() == 0


def test_a_gateway_that_ends_removes_only_its_own_address_file_from_the_data_directory(
    tmp_path: Path,
) -> None:
    with noted(tmp_path, "http://0.0.0.0:1"):
        assert noted_gateway(tmp_path) == "http://127.0.0.1:1"
        with noted(tmp_path, "http://127.0.0.1:2"):
            assert noted_gateway(tmp_path) == "http://127.0.0.1:2"
        assert noted_gateway(tmp_path) == "http://127.0.0.1:1", "the one that still runs"
        later = ExitStack()
        later.enter_context(noted(tmp_path, "http://127.0.0.1:1"))
    with later:
        assert noted_gateway(tmp_path) == "http://127.0.0.1:1"
    with noted(tmp_path, "http://127.0.0.1:3"), noted(tmp_path / "absent", "http://127.0.0.1:4"):
        assert noted_gateway(tmp_path) == "http://127.0.0.1:3"
    assert not [*tmp_path.iterdir()]
    (tmp_path / "gateway-127.0.0.1:5").write_text("http://127.0.0.1:5")
    assert noted_gateway(tmp_path) is None, "it was killed"


def test_a_gateway_that_cannot_write_its_address_file_on_a_full_disk_runs_and_ends_without_an_error(
    tmp_path: Path,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with noted(tmp_path, "http://127.0.0.1:1"):
            assert noted_gateway(tmp_path) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*tmp_path.iterdir()]


@pytest.mark.process
async def test_a_worker_restarts_its_killed_gateway_and_keeps_answering_meanwhile(
    worker_process: Any,
) -> None:
    port = free_port()
    process = worker_process("--gateway", str(port))
    process.start()
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
        await until_served(http, served=True)
        (gateway,) = [one for one in psutil.Process(process.pid).children() if "gateway" in one.cmdline()]
        gateway.kill()
        await until_served(http, served=False)
        async with await process.client() as client:
            result = await client.session("s").generate(text="a", max_tokens=2)
        assert result.usage.completion_tokens == 2
        await until_served(http, served=True)


@pytest.mark.process
def test_a_worker_whose_gateway_port_is_in_use_fails_before_it_loads_the_model(
    worker_process: Any, nats_url: str
) -> None:
    taken = nats_url.rpartition(":")[2]
    process = worker_process("--gateway", taken)
    process.start()
    while process.running:
        time.sleep(0.05)
    told = f"port {taken} of 127.0.0.1 is taken by another program; choose another with --gateway PORT"
    assert told in process.log
    assert "loading weights" not in process.log


@pytest.mark.process
async def test_the_command_gateway_checks_api_keys_and_sends_cors_and_explain_headers_and_ends_at_eof(
    local_worker: Any, tmp_path: Path
) -> None:
    worker, port, site = await local_worker(), free_port(), "https://chat.example"
    (tmp_path / "keys").write_text("secret acme at_once=2\n")
    command = [
        *(sys.executable, "-m", "commands", "gateway", "--nats", worker.settings.nats),
        *("--prefix", worker.settings.prefix, "--data-dir", str(tmp_path), "--listen", str(port)),
        *("--keys", str(tmp_path / "keys"), "--cors", site, "--explain", "--until-eof"),
    ]
    with (tmp_path / "log").open("wb") as log:
        gateway = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log)  # noqa: ASYNC220
    try:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            await until_served(http, served=True)
            said = [*HELLO["messages"], {"role": "assistant", "content": "No."}, *HELLO["messages"]]
            headers = {"authorization": "Bearer secret", "origin": site}
            assert (await http.post("/v1/chat/completions", json=HELLO)).status_code == 401
            answer = await http.post("/v1/chat/completions", json=HELLO | {"messages": said}, headers=headers)
            assert answer.headers["access-control-allow-origin"] == site
            assert "differs=tools" in answer.headers["x-turnkeep-explain"], "nothing was asked before"
            assert gateway.stdin is not None
            gateway.stdin.close()
            await until_served(http, served=False)
    finally:
        gateway.kill()
        gateway.wait()
    assert "0 of a conversation's 3 messages were found" in (tmp_path / "log").read_text()


@pytest.fixture
async def served(local_worker: Any, door: Any, tmp_path: Path) -> Any:
    """A gateway with the models `one` and `two`, which have workers, and `gone`, which has none."""
    one = await local_worker()
    prefixes = {"one": one.settings.prefix, "two": f"{one.settings.prefix}-two", "gone": "no-worker-here"}
    await local_worker(prefix=prefixes["two"], data_dir=tmp_path / "two")
    return await door(one.settings.nats, prefixes=prefixes)


async def test_a_request_to_a_model_that_could_not_be_loaded_gets_the_reason_unless_it_is_loaded_now(
    worker: Any, door: Any
) -> None:
    why, loads = "the model m cannot be loaded: there is no model at /gone", asyncio.Event()
    told = unloaded_metrics(worker="w", version="1", model="m", refusal=why)

    async def reply(message: Any) -> None:
        if isinstance(decode_control(message.data), MetricsRequest):
            await message.respond(encode(told))
        elif loads.is_set():  # before, requests wait for the model
            await message.respond(encode(failure(None, "unknown_session", "no such session")))

    subscription = await worker.app._nc.subscribe("broken.default.any.ctl", cb=reply)
    started = await door(worker.settings.nats, prefix="broken", patience_s=0.5)
    async with httpx2.AsyncClient(base_url=started.url, timeout=30) as http:
        refused = await http.post("/v1/chat/completions", json=HELLO)
        loads.set()
        later = await http.post("/v1/chat/completions", json=HELLO)
    await subscription.unsubscribe()
    assert (refused.status_code, refused.json()["error"]["message"]) == (500, f"internal: {why}")
    assert why not in later.text


async def test_a_model_without_a_worker_is_listed_without_context_length_and_requests_to_it_get_503(
    served: Any, http: httpx2.AsyncClient, tmp_path: Path
) -> None:
    listed = (await http.get("/v1/models")).json()["data"]
    contexts = [(one["id"], one.get("context_window")) for one in listed]
    assert contexts == [("one", 2048), ("two", 2048), ("gone", None)]
    refused = await http.post("/v1/responses", json={"model": "gone", "input": "Hello."})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
    assert (await http.get("/v1/models/two")).json() == listed[1]
    unknown = await http.post("/v1/responses", json={"model": "three", "input": "Hello."})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    code, said, complained = await launched(tmp_path, "--gateway", served.url, "--of", "gone", "other")
    assert (code, said) == (1, "")
    assert complained == f"turnkeep: no worker of the model gone answers the gateway at {served.url}\n"
