"""`turnkeep export` and `import`: a session continues in another log, or the import stores nothing."""

import asyncio
import json
import os
import tarfile
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from ops.log import importing, session_file
from ops.log.importing import Import
from tests.commands.command_runs import command, where
from tests.parts import LocalWorker, make_tiny_model
from turnkeep_client.errors import NoWorkerError, RequestFailedError
from turnkeep_client.log import Entry
from turnkeep_client.session_log import paired
from turnkeep_client.stream import LogStream
from turnkeep_client.subjects import SessionKey
from turnkeep_client.wire import NatsWire

Start = Callable[..., Awaitable[LocalWorker]]
POLICIES = [
    {"policy": "sink_window", "sink": 2, "window": 64},
    {"policy": "paged", "resident": 516},
]
SAY = [{"role": "user", "content": "What is red?"}]


async def exported(
    start: Start, folder: Path, *options: str, policy: dict[str, Any] | None = None, **settings: Any
) -> tuple[LocalWorker, Path]:
    """Start a worker, and export a session with several kinds of requests; return worker and file."""
    worker = await start(**settings)
    session = worker.client.session("garden", cache=policy)
    await session.append(messages=SAY, request_id="a")
    await session.append(messages=SAY, request_id="a")  # a repeat
    with pytest.raises(RequestFailedError):
        await session.rewind(999, request_id="far")
    await session.generate(text="x" * 60, max_tokens=30, temperature=1.0, request_id="g")
    await written(worker, "garden")
    target = folder / "garden.turnkeep"
    data = ("--data-dir", worker.settings.data_dir)
    done = await command("export", "garden", target, *options, *data, *where(worker))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"wrote {5 if policy else 4} requests with their results")
    return worker, target


async def written(worker: LocalWorker, session: str) -> None:
    """Wait until a session's worker has written snapshots, and none is in flight."""
    async with asyncio.timeout(20):
        while True:
            counts = (await worker.client.session(session).info()).worker.snapshots
            if counts.in_flight == 0 < counts.durable:
                return


async def other(start: Start, folder: Path, **settings: Any) -> LocalWorker:
    return await start(prefix=f"other{folder.name}", data_dir=folder / "other", **settings)


async def test_an_imported_session_gives_the_same_next_answer_as_the_original_session(
    local_worker: Start, tmp_path: Path
) -> None:
    worker, file = await exported(local_worker, tmp_path)
    second = await other(local_worker, tmp_path)
    done = await command("import", file, *where(second))
    assert done.returncode == 0, done.stderr
    position = (await worker.client.session("garden").info()).position
    assert done.stdout == f"imported default/garden: 4 requests with their results, at position {position}\n"
    answers = [
        await one.client.session("garden").generate(messages=SAY, max_tokens=20, seed=3, temperature=1.0)
        for one in (worker, second)
    ]
    assert answers[0].tokens == answers[1].tokens
    repeated = await second.client.session("garden").append(messages=SAY, request_id="a")
    assert repeated.repeat_of == 1, "ids are still known, by their places in this log"
    logs = [await one.client.log("garden") for one in (worker, second)]
    kinds = [[(entry.kind, entry.build.get("worker")) for entry in log[:8]] for log in logs]
    assert kinds[0] == kinds[1]
    times = [[entry.first_stored for entry in log[:8] if entry.kind == "out"] for log in logs]
    assert times[0] == times[1], "so replays and further copies have the times of the first log"
    assert (await command("import", file, *where(second))).returncode == 1
    assert (await command("import", file, "--as", "copy", "--tenant", "b", *where(second))).returncode == 0


async def test_only_one_of_two_concurrent_session_imports_under_the_same_name_is_stored(
    local_worker: Start, tmp_path: Path
) -> None:
    """Both find the name unused. The second import must not add to or delete the entries of the first."""
    worker, file = await exported(local_worker, tmp_path)
    second, (_, lines) = await other(local_worker, tmp_path), session_file.read(file)
    both = [Import(second.client, SessionKey("default", "garden")) for _ in range(2)]
    done = await asyncio.gather(*(one.run(lines, lambda *_: None) for one in both), return_exceptions=True)
    assert {type(one) for one in done} == {type(None), session_file.CopyError}, done
    assert len(await second.client.log("garden")) == len(await worker.client.log("garden"))
    position = (await worker.client.session("garden").info()).position
    assert (await second.client.session("garden").info()).position == position


async def test_a_session_of_more_than_a_thousand_log_entries_is_imported_completely_into_a_busy_log(
    local_worker: Start, tmp_path: Path
) -> None:
    sound(tmp_path, 600)
    worker = await local_worker()
    busy = asyncio.create_task(chatter(worker))
    done = await command("import", tmp_path / "sound", *where(worker))
    busy.cancel()
    assert done.returncode == 0, done.stderr
    assert (await worker.client.stored.subjects("default", "garden"))[KEY] == {"in": 600, "out": 600}


async def test_a_request_with_more_token_ids_than_fit_one_log_message_is_stored_and_exported_in_parts(
    local_worker: Start, endless_model: Path, tmp_path: Path
) -> None:
    tokens = [128 + (7 * i + i // 131) % 130 for i in range(7000)]  # two bytes each
    limited = {"model": str(endless_model), "max_message_bytes": 32 * 2**10}
    cache = {"policy": "sink_window", "sink": 2, "window": 64}
    worker, second = await local_worker(**limited), await other(local_worker, tmp_path, **limited)
    await worker.client.session("long", cache=cache).append(tokens=tokens)
    stored = [one async for _, one in worker.client.stored.every(SessionKey("default", "long"), "checkpoint")]
    assert [len(one.body) > 2**14 for one in stored] == [True, False] * 2, "the tokens, then the request"
    file = tmp_path / "long.turnkeep"
    assert (await command("export", "long", file, *where(worker))).returncode == 0
    assert (await command("import", file, *where(second))).returncode == 0
    answers = [await one.client.session("long").generate(max_tokens=8) for one in (worker, second)]
    assert {(one.position, one.tokens) for one in answers} == {(7008, answers[0].tokens)}
    verified = await command("sessions", "--verify", *where(second))
    assert verified.returncode == 0, verified.stdout


async def test_a_session_import_that_does_not_fit_into_the_log_stores_nothing(
    local_worker: Start, tmp_path: Path
) -> None:
    sound(tmp_path, 600)
    worker = await local_worker(log_max_bytes=2**18, max_message_bytes=2**16)
    done = await command("import", tmp_path / "sound", *where(worker))
    assert (done.returncode, done.stdout) == (1, "")
    assert "maximum bytes exceeded" in done.stderr
    assert done.stderr.count("\n") == 1
    assert await worker.client.stored.subjects() == {}


@pytest.mark.parametrize("num_before", [0, 1])
async def test_a_session_import_interrupted_while_the_nats_server_stores_a_part_leaves_nothing_in_the_log(
    local_worker: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    """The server may still be storing the last part when it is asked whether it has it, or to remove it."""
    monkeypatch.setattr(importing, "_TOGETHER", 90)  # so that there are two batches
    sound(tmp_path, 70)
    worker, (_, lines) = await local_worker(), session_file.read(tmp_path / "sound")
    call, num_commits = NatsWire.api, 0

    async def interrupted(self: NatsWire, subject: str, body: bytes, headers: Any = None) -> Any:
        nonlocal num_commits
        if "Nats-Batch-Commit" in (headers or {}):
            num_commits += 1
            if num_commits == num_before + 1 and (task := asyncio.current_task()):
                task.cancel()  # as Ctrl-C does; the message was written by then
        return await call(self, subject, body, headers)

    monkeypatch.setattr(NatsWire, "api", interrupted)
    task = asyncio.create_task(Import(worker.client, KEY).run(lines, lambda *_: None))
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.5)
    assert await worker.client.stored.subjects() == {}


async def chatter(worker: LocalWorker) -> None:
    """Send requests without pause, so that the log is always busy."""
    while True:
        await worker.client.session("busy").append(tokens=[5])


async def test_an_imported_session_restores_its_kv_after_cache_import_of_the_same_export_file(
    local_worker: Start, tmp_path: Path
) -> None:
    """Also between caches that are encrypted with different keys."""
    pytest.importorskip("cryptography")
    first_key, second_key = (tmp_path / name for name in ("first.key", "second.key"))
    for path in (first_key, second_key):
        path.touch(mode=0o600)
        path.write_bytes(os.urandom(32))
    given = ("--kv", "--cache-key-file", str(first_key))
    worker, file = await exported(local_worker, tmp_path, *given, cache_key_file=first_key)
    await worker.stop()
    data = ("--data-dir", tmp_path / "other", "--cache-key-file", second_key)  # which is new
    done = await command("cache", "import", file, *data)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("; skipped 0\n")
    second = await other(local_worker, tmp_path, cache_key_file=second_key)
    refused = await command("cache", "import", file, *data)
    assert refused.returncode == 1
    assert "is in use by process" in refused.stderr
    await continues_with_its_kv(second, file)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["policy"])
async def test_a_cache_with_kv_of_the_full_policy_alone_accepts_an_import_of_kv_of_any_other_policy(
    local_worker: Start, tmp_path: Path, policy: dict[str, Any]
) -> None:
    wide = str(make_tiny_model(tmp_path / "wide", hidden_size=128))
    worker, file = await exported(local_worker, tmp_path, "--kv", policy=policy, model=wide)
    await worker.stop()
    second = await other(local_worker, tmp_path, model=wide)
    await second.client.session("s").generate(text="z" * 99, max_tokens=1)
    await second.stop()
    done = await command("cache", "import", file, "--data-dir", second.settings.data_dir)
    assert done.returncode == 0, done.stderr
    await continues_with_its_kv(await other(local_worker, tmp_path, model=wide), file)


async def continues_with_its_kv(worker: LocalWorker, file: Path) -> None:
    """Import the session in a file into a worker's log, whose cache has its KV, and ask it."""
    done = await command("import", file, *where(worker))
    assert done.returncode == 0, done.stderr
    answer = await worker.client.session("garden").generate(text="y", max_tokens=1)
    assert answer.usage.cached_tokens >= answer.usage.prompt_tokens - 3, "restored, not prefilled"


async def test_importing_a_truncated_or_altered_session_file_fails_with_one_line_and_stores_nothing(
    local_worker: Start, tmp_path: Path
) -> None:
    worker, file = await exported(local_worker, tmp_path, "--kv")
    whole = file.read_bytes()
    log_at = whole.index(b'{"seq"')
    for damaged, says in (
        (b"", "is no sound export of a session"),
        (b"hello" * 1000, "is no sound export of a session"),
        (whole[: log_at + 100], "is no sound export of a session"),
        (whole[:-40_000], "is no sound export of a session"),
        (whole.replace(b"What is red?", b"What is bad?"), "its content is not what was written"),
        (whole.replace(b'"format":2', b'"format":1'), "has format 1, and this version reads 2"),
    ):
        file.write_bytes(damaged)
        done = await command("import", file, "--as", "copy", *where(worker))
        assert (done.returncode, done.stdout) == (1, ""), done.stdout
        assert says in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
    assert set(await worker.client.stored.subjects()) == {SessionKey("default", "garden")}
    file.write_bytes(whole)
    done = await command("import", file, "--nats", worker.settings.nats, "--prefix", "none")
    assert done.stderr == (
        "turnkeep: there is no log of the prefix 'none'; start a worker with: turnkeep serve"
        f" --nats {worker.settings.nats} --prefix none\n"
    )


async def test_the_command_replay_repeats_a_session_from_an_exported_file_with_the_same_results(
    local_worker: Start, tmp_path: Path
) -> None:
    worker, file = await exported(local_worker, tmp_path)
    await worker.client.session("garden").close(forget=True)
    done = await command("replay", "--file", file, "--speed", "max", *where(worker))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same: 1 sessions, 2 requests" in done.stdout


async def test_the_command_export_overwrites_an_existing_file_only_with_the_option_force(
    worker: LocalWorker, tmp_path: Path
) -> None:
    await worker.client.session("garden").append(tokens=[5])
    target = tmp_path / "precious"
    target.write_text("mine")
    done = await command("export", "garden", target, *where(worker))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"turnkeep: there is a file {target} already; choose another name, or overwrite it with --force\n"
    )
    assert target.read_text() == "mine"
    assert (await command("export", "garden", target, "--force", *where(worker))).returncode == 0
    assert session_file.read(target)[0].exchanges == 1


KEY = SessionKey("default", "garden")
HEADERS = {"Turnkeep-Model": "tiny", "Turnkeep-History": "00" * 16}
STORED = datetime(2026, 11, 20, 8, tzinfo=UTC)
#: Counts and times of an append.
COUNTS = {"tokens": 1, "cached_tokens": 0, "prefilled_tokens": 1, "kv_live_bytes": 1, "seconds": 0.1}


def sound(folder: Path, num_requests: int = 2) -> dict[str, bytes]:
    """Export a session of some appends; return the content of the file's members by name."""
    entries = []
    for number in range(num_requests):
        asked = {"type": "append", "id": f"r{number}", "tokens": [5]}
        said = {
            "type": "appended",
            "id": f"r{number}",
            "seq": 2 * number + 1,
            "position": number + 1,
            **COUNTS,
        }
        bodies = [json.dumps(body).encode() for body in (asked, said)]
        entries += [
            Entry(2 * number + 1, KEY, "in", STORED, bodies[0], {}),
            Entry(2 * number + 2, KEY, "out", STORED, bodies[1], HEADERS),
        ]
    session_file.export(folder / "sound", paired(KEY, entries), {})
    with tarfile.open(folder / "sound") as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def tar_of(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with path.open("wb") as file:
        for member, content in members:
            file.write(member.tobuf(tarfile.GNU_FORMAT) if isinstance(member, tarfile.TarInfo) else member)
            file.write(content + bytes(-len(content) % 512))
        file.write(bytes(10240))
    return path


def member(name: str, content: bytes, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.size = len(content)
    for field, value in fields.items():
        setattr(made, field, value)
    return made, content


def packed(folder: Path, whole: dict[str, bytes]) -> Path:
    return tar_of(folder / "made.turnkeep", *(member(name, content) for name, content in whole.items()))


def resealed(whole: dict[str, bytes], change: Callable[[dict[str, Any]], None]) -> dict[str, bytes]:
    """Change the first line of the log, and compute the checksums again, so that they are right."""
    first, *rest = whole["log.jsonl"].splitlines()
    line = json.loads(first)
    change(line)
    log = b"\n".join([json.dumps(line).encode(), *rest])
    head = json.loads(whole["session.json"]) | {"digest": blake2b(log, digest_size=16).hexdigest()}
    head.pop("checksum", None)
    return {"session.json": session_file._signed(json.dumps(head).encode()), "log.jsonl": log}


def sparse(name: str, real_bytes: int) -> bytes:
    """Return a tar header of GNU's sparse form: 512 bytes for a file of `real_bytes`."""
    made = tarfile.TarInfo(name)
    made.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(made.tobuf(tarfile.GNU_FORMAT))
    block[386:410] = f"{real_bytes:011o}\0{0:011o}\0".encode()
    block[483:495] = f"{real_bytes:011o}\0".encode()
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


def huge(name: str) -> bytes:
    """Return a tar header of a member of 2^63 bytes."""
    made = tarfile.TarInfo(name)
    made.size = 2**63
    return made.tobuf(tarfile.GNU_FORMAT)


Make = Callable[[Path], Path]


def begins(head: Any) -> Make:
    return lambda folder: tar_of(folder / "made.turnkeep", (head, b""))


def says_of_itself(session: bytes) -> Make:
    return lambda folder: packed(folder, sound(folder) | {"session.json": session})


def manifest(before: bytes, after: bytes) -> Make:
    """Change the manifest of a sound file, but not its checksum."""

    def make(folder: Path) -> Path:
        whole = sound(folder)
        assert before in whole["session.json"]
        return packed(folder, whole | {"session.json": whole["session.json"].replace(before, after)})

    return make


def first_line(change: Callable[[dict[str, Any]], None]) -> Make:
    return lambda folder: packed(folder, resealed(sound(folder), change))


LATER = {"format": 2, "version": "1\nroot:", "tenant": "a", "session": "b", "model": None}
LATER |= {"began": "2026-11-20T08:00:00Z", "exchanges": 2, "digest": ""}
NESTED = {"type": "append", "id": "r", "messages": json.loads("[" * 900 + "]" * 900)}
NO_FILE, UNSOUND, CHANGED = "is no plain file", "is no sound export of a session", "not what was written"
REFUSED: dict[str, tuple[Make, str]] = {
    "sparse first file": (begins(sparse("session.json", 2**26)), f"'session.json' {NO_FILE}"),
    "huge first file": (begins(huge("session.json")), "it ends too early"),
    "huge other file": (begins(huge("other")), "it ends too early"),
    "symbolic link": (
        begins(member("session.json", b"", type=tarfile.SYMTYPE, linkname="other")[0]),
        NO_FILE,
    ),
    "hard link": (
        begins(member("session.json", b"", type=tarfile.LNKTYPE, linkname="session.json")[0]),
        NO_FILE,
    ),
    "extended header": (begins(member("session.json", b"", type=tarfile.XHDTYPE)[0]), NO_FILE),
    "manifest is a list": (says_of_itself(b"[]"), UNSOUND),
    "manifest is a number": (says_of_itself(b"7"), UNSOUND),
    "manifest without fields": (says_of_itself(b'{"format":2}'), UNSOUND),
    "manifest nested too deep": (says_of_itself(b'{"format":2,"x":' + b"[" * 100_000), UNSOUND),
    "manifest not UTF-8": (says_of_itself(b'{"format":2,"tenant":"\xff"}'), UNSOUND),
    "manifest in UTF-16": (says_of_itself(b"\xff\xfe[\0]\0"), UNSOUND),
    "format beyond floats": (says_of_itself(b'{"format":2e400}'), UNSOUND),
    "later format": (says_of_itself(json.dumps(LATER).encode()), UNSOUND),
    "another session name": (manifest(b'"garden"', b'"gardem"'), CHANGED),
    "another count": (manifest(b'"exchanges":2', b'"exchanges":3'), CHANGED),
    "no checksum": (manifest(b'"checksum"', b'"no"'), CHANGED),
    "line break in a header": (
        first_line(lambda line: line["headers"].update({"Turnkeep-Model": "a\r\nb: 1"})),
        "a line break",
    ),
    "time without zone": (
        first_line(lambda line: line.update(stored="2026-11-20T08:00:00")),
        "made.turnkeep",
    ),
    "request nested too deep": (first_line(lambda line: line.update(request=NESTED)), "made.turnkeep"),
    "unknown field": (first_line(lambda line: line["request"].update(novel=1)), "was written by turnkeep "),
    "unknown field is named": (first_line(lambda line: line["request"].update(novel=1)), "novel"),
}


@pytest.mark.parametrize(("make", "says"), REFUSED.values(), ids=REFUSED)
def test_importing_a_session_file_with_forged_or_oversized_content_fails_with_the_reason_in_one_line(
    tmp_path: Path, make: Make, says: str
) -> None:
    with pytest.raises(session_file.CopyError) as refused:
        session_file.read(make(tmp_path))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


async def test_a_session_import_drops_headers_of_results_that_a_session_export_never_writes(
    worker: LocalWorker, tmp_path: Path
) -> None:
    more = {"Nats-Batch-Commit": "1", "Nats-Rollup": "sub", "Turnkeep-Checkpoint": "1 00"}
    made = resealed(sound(tmp_path, 4), lambda line: line["headers"].update(more))
    done = await command("import", packed(tmp_path, made), "--as", "copy", *where(worker))
    assert done.returncode == 0, done.stderr
    key = SessionKey("default", "copy")
    assert (await worker.client.stored.subjects())[key] == {"in": 4, "out": 4}
    found = [stored.headers async for _, stored in worker.client.stored.every(key, "out")]
    assert [set(one) & more.keys() for one in found[:-1]] == [set()] * 3  # the last one ends the batch


async def no_purge(*_: Any) -> None:
    raise NoWorkerError("nor does it here")


@pytest.mark.parametrize(("is_stored", "is_removed"), [(True, True), (False, True), (True, False)])
async def test_a_session_import_without_nats_acknowledgement_removes_what_it_stored_or_says_what_is_left(
    worker: LocalWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stored: bool, is_removed: bool
) -> None:
    """If nothing was stored, a session that another client has begun under this name stays."""
    file = packed(tmp_path, sound(tmp_path))
    store = LogStream.store

    async def lost(self: LogStream, messages: Any, after: int) -> None:
        if is_stored:
            await store(self, messages, after)
        else:
            body = b'{"type":"append","id":"other","tokens":[5]}'
            await self._api.api(self._subjects.of(KEY, "in"), body, {})
        raise NoWorkerError("JetStream does not answer")

    monkeypatch.setattr(LogStream, "store", lost)
    if not is_removed:
        monkeypatch.setattr(LogStream, "purge", no_purge)
    done = await command("import", file, *where(worker))
    if not is_removed:
        assert done.stderr == (
            "turnkeep: JetStream does not answer; a part of default/garden may be in the log, since it could"
            " not be removed (nor does it here); close that session with forget before you import it again\n"
        )
        return
    assert done.stderr.startswith("turnkeep: JetStream does not answer; start a worker")
    left = await worker.client.stored.subjects()
    assert left.get(KEY, {}).get("in", 0) == (0 if is_stored else 1)
