"""Crafted or damaged export files: an import refuses each in one line, or stores all of it."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from ops.log import session_file
from tests.commands.command_runs import command, where
from tests.parts import LocalWorker
from turnkeep_client.errors import NoWorkerError
from turnkeep_client.log import Entry
from turnkeep_client.session_log import paired
from turnkeep_client.stream import LogStream
from turnkeep_client.subjects import SessionKey

Start = Callable[..., Awaitable[LocalWorker]]

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


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (sparse("session.json", 2**26), "'session.json' is no plain file"),
        (huge("session.json"), "it ends too early"),
        (huge("other"), "it ends too early"),
        (member("session.json", b"", type=tarfile.SYMTYPE, linkname="other")[0], "is no plain file"),
        (member("session.json", b"", type=tarfile.LNKTYPE, linkname="session.json")[0], "is no plain file"),
        (member("session.json", b"", type=tarfile.XHDTYPE)[0], "is no plain file"),
    ],
)
async def test_an_export_with_a_link_or_an_oversized_or_special_member_is_refused(
    tmp_path: Path, head: Any, says: str
) -> None:
    await refused(tar_of(tmp_path / "made.turnkeep", (head, b"")), says)


@pytest.mark.parametrize(
    "session",
    [
        b"[]",
        b"7",
        b'{"format":2}',
        b'{"format":2,"x":' + b"[" * 100_000,
        b"[" * 100_000,
        b'{"format":2,"tenant":"\xff"}',
        b"\xff\xfe\xfd",
        b"\xff\xfe[\0]\0",
        b'{"format":2e400}',
        json.dumps(
            {"format": 2, "version": "1\nroot:", "tenant": "a", "session": "b", "model": None}
            | {"began": "2026-11-20T08:00:00Z", "exchanges": 2, "digest": ""}
        ).encode(),
    ],
    ids=range(10),
)
async def test_an_export_with_an_invalid_manifest_is_refused_in_one_line(
    tmp_path: Path, session: bytes
) -> None:
    await refused(
        packed(tmp_path, sound(tmp_path) | {"session.json": session}), "is no sound export of a session"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("headers", {"Turnkeep-Model": "tiny\r\nNats-Batch-Commit: 1"}),
        ("stored", "2026-11-20T08:00:00"),
        ("request", {"type": "append", "id": "r", "messages": json.loads("[" * 900 + "]" * 900)}),
    ],
)
async def test_an_export_with_an_invalid_log_line_is_refused_in_one_line(
    tmp_path: Path, field: str, value: object
) -> None:
    made = resealed(sound(tmp_path), lambda line: line.update({field: value}))
    await refused(packed(tmp_path, made), "made.turnkeep")


async def test_an_export_with_a_field_of_a_later_version_is_refused_and_the_field_is_named(
    tmp_path: Path,
) -> None:
    made = packed(tmp_path, resealed(sound(tmp_path), lambda line: line["request"].update(novel=1)))
    await refused(
        made, f"was written by turnkeep {session_file.read(tmp_path / 'sound')[0].version}, and this one"
    )
    await refused(made, "novel")


async def refused(file: Path, says: str) -> None:
    done = await command("import", file, "--nats", "nats://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "change",
    [(b'"garden"', b'"gardem"'), (b'"exchanges":2', b'"exchanges":3'), (b'"checksum"', b'"no"')],
)
async def test_an_export_whose_manifest_was_changed_or_has_no_checksum_is_refused(
    tmp_path: Path, change: tuple[bytes, bytes]
) -> None:
    whole = sound(tmp_path)
    assert change[0] in whole["session.json"]
    made = packed(tmp_path, whole | {"session.json": whole["session.json"].replace(*change)})
    await refused(made, "its content is not what was written")


async def test_an_import_drops_result_headers_that_no_export_writes(
    local_worker: Start, tmp_path: Path
) -> None:
    worker = await local_worker()
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
async def test_an_import_whose_acknowledgement_is_lost_removes_what_it_stored_or_names_the_rest(
    local_worker: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stored: bool, is_removed: bool
) -> None:
    """If nothing was stored, a session that another client has begun under this name stays."""
    worker = await local_worker()
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
