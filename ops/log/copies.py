"""One file that holds a session's log, and perhaps its KV: written, checked and read, put into another log.

A plain tar: `session.json`, `log.jsonl` with a line for each request and its result, then KV snapshots as
`turnkeep cache export` writes them. Requests without a result are left out: two logs would
have them answered.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
import tempfile
from datetime import datetime  # noqa: TC003  # msgspec reads the annotations
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from turnkeep_client import __version__
from turnkeep_client.errors import InvalidMessageError, TurnkeepError
from turnkeep_client.log import BEGAN_HEADER, BUILD_HEADER, HISTORY_HEADER, MODEL_HEADER, Entry, words
from turnkeep_client.messages import Close, Closed, decode_request, decode_result
from turnkeep_client.stream import LastSequenceError, Unsent
from turnkeep_client.subjects import SessionKey

from .record import pair_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from turnkeep_client.client import Client

FORMAT: Final = 1
#: Exchanges that are stored together; JetStream takes 1,000 messages at most, and an exchange is up to three.
_TOGETHER: Final = 300
#: Attempts to store some exchanges in a log that others write too, with half as many from time to time.
_ATTEMPTS: Final = 60
#: Members that are no snapshots.
OWN: Final = ("session.json", "log.jsonl")
_SESSION, _LOG = OWN


class CopyError(TurnkeepError):
    """A session cannot be exported or imported; nothing was changed."""


class Manifest(Struct, frozen=True, kw_only=True):
    """What a file holds.

    `digest` is that of the log; `kv` are the names and sizes of snapshots, of a model with this `identity`.
    """

    format: int
    version: str
    tenant: str
    session: str
    model: str | None
    began: datetime
    exchanges: int
    digest: str
    kv: tuple[tuple[str, int], ...] = ()
    identity: str | None = None


class Line(Struct, frozen=True, kw_only=True):
    """A request and its result, with the sequences and times that they had in their log."""

    seq: int
    stored: datetime
    request: msgspec.Raw
    answered_seq: int
    answered: datetime
    result: msgspec.Raw
    headers: dict[str, str]


def export(
    target: Path,
    key: SessionKey,
    entries: Sequence[Entry],
    kv: Path | None = None,
    identity: str | None = None,
) -> Manifest:
    """Write a session to a file, with the snapshots of the archive `kv`. Raises `CopyError`, `OSError`."""
    exchanges = list(pair_up(entries))
    if not exchanges:
        raise CopyError(f"the log has no session {key} with answered requests; see turnkeep sessions")
    encoder = msgspec.json.Encoder()
    log = b"".join(
        encoder.encode(
            Line(
                seq=one.asked.seq,
                stored=one.asked.stored,
                request=msgspec.Raw(one.asked.body),
                answered_seq=one.answered.seq,
                answered=one.answered.stored,
                result=msgspec.Raw(one.answered.body),
                headers=_headers(one.answered),
            )
        )
        + b"\n"
        for one in exchanges
    )
    with contextlib.ExitStack() as stack:
        snapshots = stack.enter_context(tarfile.open(kv, "r:")) if kv else None
        members = snapshots.getmembers() if snapshots else []
        manifest = Manifest(
            format=FORMAT,
            version=__version__,
            tenant=key.tenant,
            session=key.session,
            model=exchanges[-1].answered.model,
            began=exchanges[0].asked.stored,
            exchanges=len(exchanges),
            digest=blake2b(log, digest_size=16).hexdigest(),
            kv=tuple((member.name, member.size) for member in members),
            identity=identity,
        )
        made, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # with mode 0600
        stack.callback(Path(name).unlink, missing_ok=True)
        with (
            os.fdopen(made, "wb") as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar,
        ):
            for name_, content in ((_SESSION, encoder.encode(manifest)), (_LOG, log)):
                member = tarfile.TarInfo(name_)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            for member in members:
                tar.addfile(member, snapshots.extractfile(member) if snapshots else None)
        Path(name).replace(target)
    return manifest


def _headers(answered: Entry) -> dict[str, str]:
    build = " ".join(f"{name}={value}" for name, value in answered.build.items())
    found = {MODEL_HEADER: answered.model, HISTORY_HEADER: answered.history, BUILD_HEADER: build}
    return {name: value for name, value in found.items() if value}


def read(source: Path) -> tuple[Manifest, list[Line]]:
    """Read a file and check all of it but the snapshots' contents. Raises `CopyError`."""
    try:
        with tarfile.open(source, "r:") as tar:
            manifest = _manifest(source, _content(tar, _SESSION))
            log = _content(tar, _LOG)
            found = tuple((member.name, member.size) for member in tar.getmembers()[2:])
            last = tar.getmembers()[-1]
            if source.stat().st_size < last.offset_data + last.size:
                raise tarfile.ReadError("it ends too early")
        if blake2b(log, digest_size=16).hexdigest() != manifest.digest or found != manifest.kv:
            raise tarfile.ReadError("its content is not what was written")
        lines = msgspec.json.Decoder(Line).decode_lines(log)
        for line in lines:
            decode_request(bytes(line.request))
            decode_result(bytes(line.result))
    except InvalidMessageError as error:
        raise CopyError(
            f"{source} was written by turnkeep {manifest.version}, and this one cannot read it: {error}"
        ) from None
    except (tarfile.TarError, msgspec.DecodeError, UnicodeDecodeError, EOFError) as error:
        raise CopyError(f"{source} is no sound export of a session ({error}); export it again") from None
    except OSError as error:
        raise CopyError(f"{source} cannot be read: {error.strerror}") from None
    return manifest, lines


def _content(tar: tarfile.TarFile, name: str) -> bytes:
    member = tar.next()
    file = tar.extractfile(member) if member is not None and member.name == name else None
    if file is None:
        raise tarfile.ReadError(f"there is no {name} where it belongs")
    return file.read()


def _manifest(source: Path, content: bytes) -> Manifest:
    form = json.loads(content).get("format")
    if form != FORMAT:
        raise CopyError(
            f"{source} has format {form}, and this version reads {FORMAT}; take the other version"
        )
    return msgspec.json.decode(content, type=Manifest)


def of_file(source: Path) -> list[Entry]:
    """Read the entries of a file, as `Client.log` would. Raises `CopyError`."""
    manifest, lines = read(source)
    key, found = SessionKey(manifest.tenant, manifest.session), list[Entry]()
    for line in lines:
        found.append(Entry(line.seq, key, "in", line.stored, bytes(line.request), None, None))
        model, history = line.headers.get(MODEL_HEADER), line.headers.get(HISTORY_HEADER)
        build, body = words(line.headers.get(BUILD_HEADER, "")), bytes(line.result)
        found.append(Entry(line.answered_seq, key, "out", line.answered, body, model, history, build))
    return found


class Import:
    """Puts a session into a log, so that a worker finds no request of it without its result."""

    def __init__(self, client: Client, key: SessionKey) -> None:
        self._stream, self._subjects, self._key = client.stored, client.subjects, key
        self._new_seqs: dict[int, int] = {}

    async def check(self) -> None:
        """Raise `CopyError` if the log has such a session."""
        if await self._stream.subjects(self._key.tenant, self._key.session):
            raise CopyError(
                f"the log has a session {self._key} already; import it under another name, with --as"
            )

    async def run(self, lines: Sequence[Line], progress: Callable[[int, int, str], None]) -> None:
        """Store all exchanges, or none; up to 300 at a time appear at once. Raises `CopyError`."""
        await self.check()
        await self._stream.allow_batches()
        done = 0
        try:
            while done < len(lines):
                done += await self._store(lines[done : done + _TOGETHER], first=done == 0)
                progress(done, len(lines), "importing")
        except BaseException:
            if done:
                await self._stream.purge(self._key)
            raise

    async def _store(self, lines: Sequence[Line], *, first: bool) -> int:
        """Store some of the exchanges together; return how many."""
        for attempt in range(_ATTEMPTS):
            some = lines[: max(1, len(lines) >> (attempt // 6))]
            last = await self._stream.last_seq()
            try:
                await self._stream.store(list(self._messages(some, last + 1, first=first)), last)
            except LastSequenceError:  # somebody else has written
                continue
            return len(some)
        raise CopyError("others write to the log all the time; import the session when it is less busy")

    def _messages(self, lines: Sequence[Line], seq: int, *, first: bool) -> Iterator[Unsent]:
        """Yield what the log is to hold: results name sequences, which are those of the new log."""
        for line in lines:
            headers = {BEGAN_HEADER: line.stored.isoformat()} if first else {}
            first = False
            self._new_seqs[line.seq] = seq
            yield Unsent(self._subjects.of(self._key, "in"), bytes(line.request), headers)
            seq += 1
            result = msgspec.json.decode(line.result, type=dict[str, msgspec.Raw])
            result["seq"] = msgspec.Raw(str(self._new_seqs[line.seq]).encode())
            if (of := result.get("repeat_of")) is not None:
                new = self._new_seqs.get(json.loads(bytes(of)), 1)
                result["repeat_of"] = msgspec.Raw(str(new).encode())
            if isinstance(decode_request(bytes(line.request)), Close) and isinstance(
                decode_result(bytes(line.result)), Closed
            ):  # by this note the session leaves the log in time
                yield Unsent(self._subjects.of(self._key, "closed"), b"", {})
                seq += 1
            yield Unsent(self._subjects.of(self._key, "commit"), msgspec.json.encode(result), line.headers)
            seq += 1
