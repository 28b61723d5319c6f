"""`bench peers` against the real mlx_lm.server, and against servers that do everything wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from bench_runs import PATIENCE_S, turnkeep
from click.testing import CliRunner

from bench.corpus import built_in
from bench.faults import BenchError
from bench.local import LocalWorker
from bench.old import report
from bench.old.peers import measure, server
from bench.old.peers.checks import checks
from bench.old.peers.openai import Address, Server, parse
from bench.old.peers.parts import Parts, Plan
from bench.old.peers.script import Script, chars_per_token
from bench.old.peers.server import MlxServer
from bench.old.peers.sides import Peer, Turnkeep
from bench.old.peers.summary import PeersReport, contexts, series, summarise
from bench.old.peers.turns import ChatTurn, Turn
from bench.old.run import Run
from worker.batch import batch
from worker.commands.cli import main

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def plan(*parts: str, **changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "parts": parts,
        "chats": 1,
        "turns": 6,
        "turn_tokens": 20,
        "max_tokens": 4,
        "turn_timeout_s": 20.0,
        "concurrency": (2,),
        "rounds": 5,
        "lengths": (60,),
        "restarts": 1,
        "endings": ("kill",),
    }
    return Plan(**(fields | changes))


def event(text: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    choices = [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


WELL = HEAD + b": keepalive 1/2\n\n" + event("Hel") + event("lo") + event(None, "stop") + usage(9, 3)
WELL += b"data: [DONE]\n\n"


@asynccontextmanager
async def fake(
    reply: bytes | Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[Server]:
    """Serve every chat completion with the same bytes, or by a function, and then hang up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = next(
                (int(x.split(":")[1]) for x in head.split("\r\n") if x.startswith("content-length")), 0
            )
            body = await reader.readexactly(length)
            if head.startswith("get"):
                writer.write(b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"data": [{"id": "m1"}]}')
            elif isinstance(reply, bytes):
                writer.write(reply)
            else:
                await reply(json.loads(body), writer)
            await writer.drain()
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with listening, Server(Address("fake", f"http://127.0.0.1:{port}/v1")) as peer:
        yield peer


async def ask(peer: Server, timeout_s: float = 10) -> Turn:
    return await peer.complete([{"role": "user", "content": "Hi"}], max_tokens=4, timeout_s=timeout_s)


async def test_a_stream_is_timed_and_counted() -> None:
    asked: list[dict[str, Any]] = []

    async def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        asked.append(body)
        writer.write(HEAD)
        for part in (event("Hel"), event("lo"), event(None, "stop"), usage(9, 3)):
            await asyncio.sleep(0.1)
            writer.write(part)
            await writer.drain()
        writer.write(b"data: [DONE]\n\n")

    async with fake(reply) as peer:
        turn = await ask(peer)
    assert (turn.error, turn.text, turn.tokens, turn.context_tokens, turn.counted) == (
        None,
        "Hello",
        3,
        9,
        False,
    )
    assert turn.first_s is not None
    assert 0.1 <= turn.first_s <= turn.latency_s - 0.3
    assert turn.per_token_s == pytest.approx((turn.latency_s - turn.first_s) / 2)
    assert asked[0]["model"] == "m1"
    assert (asked[0]["temperature"], asked[0]["stream"]) == (0, True)


async def test_a_server_that_counts_nothing_has_its_deltas_counted() -> None:
    async with fake(HEAD + event("a") + event("b") + event("c", "length") + b"data: [DONE]\n\n") as peer:
        turn = await ask(peer)
    assert (turn.error, turn.tokens, turn.counted, turn.context_tokens) == (None, 3, True, None)


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        (b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": "no such\n model"}', "http_400", "no such model"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "http_503", "Service Unavailable"),
        (HEAD + event("a"), "broken_off", "in the middle of an answer"),
        (HEAD + b"data: {oops\n\n", "garbage", "no chat completion chunk: {oops"),
        (HEAD + b"data: [1]\n\n", "garbage", "no chat completion chunk"),
        (HEAD + b"hello\n\n", "garbage", "no server-sent event"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>hi", "garbage", "text/html"),
        (b"\x00\x01 not http at all\r\n\r\n", "no_answer", "the connection ended"),
        (b"", "no_answer", "the connection ended"),
        (HEAD + b'data: {"error": {"message": "out of memory"}}\n\n', "error_event", "out of memory"),
        (
            HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: 9999\r\n\r\n") + event("a"),
            "broken_off",
            "the connection ended",
        ),
    ],
)
async def test_what_a_server_does_wrong_is_an_outcome_with_its_class(
    reply: bytes, kind: str, says: str
) -> None:
    async with fake(reply) as peer:
        turn = await ask(peer)
    assert turn.error == kind
    assert says in peer.messages[kind]
    assert "\n" not in peer.messages[kind]


async def test_a_server_that_hangs_costs_a_turn_its_time() -> None:
    async def hang(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + event("a"))
        await writer.drain()
        await asyncio.sleep(5)

    async with fake(hang) as peer:
        turn = await ask(peer, timeout_s=0.3)
    assert turn.error == "timeout"
    assert turn.latency_s < 2


async def test_nobody_at_the_address_is_told() -> None:
    async with Server(Address("gone", "http://127.0.0.1:1/v1")) as peer:
        turn = await ask(peer)
        assert turn.error == "unreachable"
        with pytest.raises(BenchError, match="gone does not answer: unreachable: nothing answers at"):
            await Peer(peer, "").warm_up()


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("a=http://h:8080", Address("a", "http://h:8080/v1")),
        ("a=https://h/x/v1/", Address("a", "https://h/x/v1")),
        ("a=http://h:1/v1#org/m", Address("a", "http://h:1/v1", "org/m")),
    ],
)
def test_peers_are_read(spec: str, found: Address) -> None:
    assert parse(spec) == found


@pytest.mark.parametrize("spec", ["llama", "a=", "=http://h", "a=ftp://h", "a=http://", "a=http://h:99999"])
def test_what_is_no_peer_is_one_line(spec: str) -> None:
    done = CliRunner().invoke(main, ["bench", "peers", "--smoke", "--peer", spec])
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "must be NAME=URL" in done.stderr


def test_a_peer_that_is_not_installed_is_one_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(server, "_PACKAGE", "no_such_package")
    with pytest.raises(BenchError, match=r"mlx_lm.server is not installed: pip install mlx-lm"):
        MlxServer(tmp_path, tmp_path, {})


def slowly(pause_s: float) -> Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]:
    async def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(pause_s)
        writer.write(WELL)

    return reply


async def compare(client: Any, peer: Server, wanted: Plan) -> Parts:
    sides = [Turnkeep(client), Peer(peer, "fake")]
    chars = await chars_per_token(client, built_in())
    parts = Parts(wanted, sides, Script(built_in(), chars), lambda what: None)
    await parts.run()
    return parts


def ratios(parts: Parts) -> dict[str, Any]:
    found = parts.measured
    summary = summarise(["turnkeep", "fake"], found.turns, found.rounds, found.restarts)
    return {row.measure: row for row in summary.against}


async def test_the_slower_side_is_seen_as_the_slower_one(local_worker, monkeypatch) -> None:
    """First a peer that waits before it answers, then a worker that waits at every step."""
    worker = await local_worker()
    async with fake(slowly(0.4)) as peer:
        found = ratios(await compare(worker.client, peer, plan("chat", turns=5)))
    assert found["time to first token"].high < 1
    assert found["whole turn"].high < 1
    step = batch.Batch.step
    monkeypatch.setattr(batch.Batch, "step", lambda self, *a, **k: time.sleep(0.05) or step(self, *a, **k))
    async with fake(slowly(0.0)) as peer:
        found = ratios(await compare(worker.client, peer, plan("chat", "concurrent", turns=5)))
    assert found["time to first token"].low > 1
    assert found["whole turn"].low > 1
    assert found["tokens per second, 2 at once"].high < 1


async def test_a_peer_that_fails_is_counted_and_the_other_side_goes_on(local_worker) -> None:
    worker = await local_worker()
    calls = 0

    async def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        assert [m["role"] for m in body["messages"]] == (["user", "assistant"] * 9)[: len(body["messages"])]
        writer.write(WELL if calls % 2 else HEAD + event("a"))

    async with fake(reply) as peer:
        parts = await compare(worker.client, peer, plan("chat"))
    summary = summarise(["turnkeep", "fake"], parts.measured.turns, [], [])
    assert [side.errors for side in summary.sides] == [{}, {"broken_off": 3}]
    assert {row.pairs for row in summary.against} == {3}
    found = {check.name: check for check in checks(summary, same_weights=False)}
    assert found["every turn of every side was answered"].detail == "fake: 3 broken_off"


def made(side: str, number: int, context: int, text: str = "x") -> ChatTurn:
    turn = Turn(started_s=0, latency_s=2, first_s=1, tokens=2, context_tokens=context, text=text)
    return ChatTurn(side=side, chat=0, number=number, turn=turn)


def test_contexts_that_drift_apart_are_told() -> None:
    turns = [made("a", 1, 1000), made("b", 1, 1009), made("a", 2, 1000), made("b", 2, 1011, "y")]
    found = contexts(turns, "a", "b")
    assert found is not None
    assert (found.pairs, found.differing, found.first_difference, found.equal_answers) == (2, 1, 2, 1)
    assert [c.passed for c in checks(summarise(["a", "b"], turns, [], []), same_weights=True)] == [
        True,
        False,
    ]


def test_growth_is_held_against_the_first_side_where_both_grow() -> None:
    def grown(side: str, number: int, per_token_s: float) -> ChatTurn:
        first_s = 0.5 + per_token_s * 100 * number
        turn = Turn(started_s=0, latency_s=9, first_s=first_s, tokens=2, context_tokens=100 * number)
        return ChatTurn(side=side, chat=0, number=number, turn=turn)

    turns = [
        grown(side, n, slope) for n in range(1, 9) for side, slope in (("a", 0.001), ("b", 0.004), ("c", 0))
    ]
    found = {one.side: one for one in summarise(["a", "b", "c"], turns, [], []).growth}
    assert found["b"].seconds == pytest.approx(4)
    assert found["b"].ratio == pytest.approx(0.25)
    assert (found["a"].ratio, found["c"].ratio) == (None, None)


def test_fewer_than_five_pairs_have_no_interval() -> None:
    turns = [made(side, number, 10) for number in range(5) for side in "ab"]
    assert all(row.low is None for row in summarise(["a", "b"], turns[:8], [], []).against)
    assert all(row.low == row.high == 1 for row in summarise(["a", "b"], turns, [], []).against)
    assert series(turns, [], [])["a: whole turn"].values == (2,) * 5


def test_conversations_differ_and_come_again_with_their_seed() -> None:
    def texts(seed: int) -> list[str]:
        script = Script(built_in(), 4.0, seed)
        talks = [script.conversation() for _ in range(2)]
        return [talk.say(50) for talk in talks for _ in range(3)]

    assert texts(1) == texts(1)
    assert len(set(texts(1))) == 6
    assert all(150 < len(text) <= 200 for text in texts(1))


def test_a_port_that_is_taken_is_one_line(tmp_path: Path, tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        peer = MlxServer(tiny_model, tmp_path, {}, port=port)
        with pytest.raises(BenchError, match=f"mlx_lm.server cannot use port {port}: Address already in use"):
            peer.start()
    assert peer.pid is None


@pytest.mark.process
def test_a_smoke_run_against_the_real_server_ends_well(tmp_path: Path, tiny_model: Path) -> None:
    process = turnkeep("peers", "--smoke", "--out", tmp_path, "--model", tiny_model)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    found = report.read(next(tmp_path.glob("peers-*.json")), PeersReport)
    assert found.complete
    assert [side.name for side in found.sides] == ["turnkeep", "mlx_lm.server"]
    assert all(not side.errors for side in found.summary.sides)
    assert {one.ending for one in found.restarts} == {"warm", "kill"}
    # The same template: the same context. Of later turns only a model that writes text can promise that: the
    # random one's answers are no UTF-8, and a peer gets them back as text.
    first = {turn.side: turn.turn.context_tokens for turn in found.turns if turn.number == 1}
    assert first["turnkeep"] == first["mlx_lm.server"] > 30
    assert found.summary.contexts[0].pairs == 2
    libraries = {side.blas for side in found.sides}
    assert len(libraries) == 1
    assert "against mlx_lm.server" in out
    assert next(tmp_path.glob("peers-*.html")).read_text().count("<svg") == 5


@pytest.mark.process
def test_ctrl_c_keeps_the_report_and_leaves_no_process(tmp_path: Path, tiny_model: Path) -> None:
    options = ("--part", "chat", "--corpus", "built-in", "--chats", 1000, "--turns", 3, "--turn-tokens", 20)
    process = turnkeep(
        "peers", *options, "--max-tokens", 4, "--checkpoint", 0.2, "--out", tmp_path, "--model", tiny_model
    )
    path = wait_for_turns(tmp_path, process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3  # the worker, its NATS server, and the peer
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "partial report: " in out
    found = report.read(path, PeersReport)
    assert (found.complete, found.ending) == (False, "interrupted")
    assert len(found.turns) >= 2
    assert psutil.wait_procs(family, timeout=10)[1] == []


@pytest.mark.process
def test_a_peer_that_dies_ends_the_run_in_one_line_and_leaves_no_process(
    tmp_path: Path, tiny_model: Path
) -> None:
    options = ("--part", "chat", "--corpus", "built-in", "--chats", 1000, "--turns", 3, "--turn-tokens", 20)
    process = turnkeep(
        "peers", *options, "--max-tokens", 4, "--checkpoint", 0.2, "--out", tmp_path, "--model", tiny_model
    )
    path = wait_for_turns(tmp_path, process)
    family = psutil.Process(process.pid).children(recursive=True)
    next(one for one in family if "mlx_lm" in one.cmdline()).kill()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("turnkeep: the peer mlx_lm.server ended with exit code -9")
    assert report.read(path, PeersReport).ending.startswith("fault: the peer mlx_lm.server ended")
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_a_peer_that_never_answers_is_one_line_and_no_report(tmp_path: Path, tiny_model: Path) -> None:
    bench = measure.PeersBench(plan("chat"), built_in(), ("gone=http://127.0.0.1:1",), str(tiny_model))
    with pytest.raises(BenchError, match="gone does not answer: unreachable"):
        asyncio.run(Run(tmp_path).conduct(bench))
    assert list(tmp_path.iterdir()) == []


def test_the_model_folder_of_a_worker_is_the_one_it_was_given_or_made(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("TURNKEEP_MODEL", raising=False)
    given = tmp_path / "given"
    given.mkdir()
    assert LocalWorker(tmp_path, "--model", str(given)).model_folder == given
    with pytest.raises(BenchError, match="folder of the model packaged is not known"):
        _ = LocalWorker(tmp_path).model_folder
    made = tmp_path / "models" / "smol"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    assert LocalWorker(tmp_path).model_folder == made


def wait_for_turns(folder: Path, process: subprocess.Popen[str]) -> Path:
    """Wait until a checkpoint has turns of both sides."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        for path in folder.glob("peers-*.json"):
            if len({turn.side for turn in report.read(path, PeersReport).turns}) == 2:
                return path
        time.sleep(0.1)
    raise AssertionError("no checkpoint had two sides")
