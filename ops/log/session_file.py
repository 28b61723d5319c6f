"""Writes, checks and reads the file of an exported session: the session's log and, optionally, its KV.

The file is a plain tar: `session.json`, `log.jsonl` with a line for each request and its result, then KV
snapshots as `turnkeep cache export` writes them. A line also has data that did not fit into the result, such
as the history that a fork copied. Requests without a result are not exported: after an import, the workers of
both logs would answer them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tarfile
import tempfile
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct

from turnkeep_client import __version__
from turnkeep_client.errors import InvalidMessageError, TurnkeepError
from turnkeep_client.log import BUILD_HEADER, HISTORY_HEADER, MODEL_HEADER, PARTS_HEADER, SEED_HEADER, Entry
from turnkeep_client.messages import decode_request, decode_result
from turnkeep_client.session_log import paired, read_part
from turnkeep_client.subjects import SessionKey, session_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.session_log import Exchange, SessionLog

FORMAT: Final = 2
#: The members of the tar that are not snapshots.
OWN: Final = ("session.json", "log.jsonl")
_SESSION, _LOG = OWN
#: Stands between the content of `session.json` and the content's digest at the end.
_CHECKSUM: Final = b',"checksum":"'
#: The result headers to export. All others are left out, since the NATS server obeys some of them.
HEADERS: Final = (MODEL_HEADER, HISTORY_HEADER, BUILD_HEADER)
_CONTROL: Final = re.compile("[\x00-\x1f\x7f]")

#: A time with its time zone: times with and without one cannot be compared.
_Time = Annotated[datetime, Meta(tz=True)]
_Seed = Annotated[int, Meta(ge=0, lt=10**17)]


class CopyError(TurnkeepError):
    """A session cannot be exported or imported; the message says if a part of it was left in the log."""


class Manifest(Struct, frozen=True, kw_only=True):
    """The content of `session.json`, which says what an exported file contains."""

    #: The format of the file, and the version of Turnkeep that wrote it.
    format: int
    version: str
    tenant: str
    session: str
    #: The last turn's model.
    model: str | None
    #: When the log stored the first request.
    began: _Time
    #: The number of requests.
    exchanges: int
    #: The digest of `log.jsonl`.
    digest: str
    #: The name and the size in bytes of each snapshot in the file.
    kv: tuple[tuple[str, int], ...] = ()


class _Form(Struct):
    format: int


class ExchangeLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request and its result, with their sequences and times in the original log."""

    seq: int
    stored: _Time
    request: msgspec.Raw
    answered_seq: int
    answered: _Time
    result: msgspec.Raw
    #: The result's headers.
    headers: dict[str, str]
    #: Data of the result that did not fit into its message; only workers need it.
    parts: bytes | None = None
    #: The seed that a worker derived from the place of a request without one.
    seed: _Seed | None = None
    #: In the first line: the entries of all images, by digest.
    images: dict[str, bytes] = {}


async def read_parts(client: Client, log: SessionLog) -> dict[int | str, bytes]:
    """Read what a session has in the log besides its requests and results.

    Returns data that did not fit into a result by the sequence of the result, and the entries of images by
    digest. Raises `CopyError` if some data is gone from the log.
    """
    found: dict[int | str, bytes] = {}
    found.update(await client.stored.image_entries(log.key))
    for one in log.exchanges:
        if PARTS_HEADER in one.answered.headers:
            part = await read_part(client.stored, one.answered)
            if part is None:
                raise CopyError(
                    f"a part of {log.key} is gone from the log, which the result at sequence"
                    f" {one.answered.seq} names"
                )
            found[one.answered.seq] = part
    return found


def export(
    target: Path,
    session: SessionLog,
    parts: Mapping[int | str, bytes],
    kv: Path | None = None,
) -> Manifest:
    """Write a session to the file `target`: its answered requests, and the snapshots in the archive `kv`.

    `parts` is what `read_parts` returns. Returns the file's manifest. Raises `CopyError` for a session
    without answered requests, and `OSError`; then `target` is as before.
    """
    key, exchanges = session.key, session.exchanges
    if not exchanges:
        raise CopyError(f"the log has no session {key} with answered requests; see turnkeep sessions")
    log = _lines(exchanges, parts)
    with contextlib.ExitStack() as stack:
        snapshots = stack.enter_context(tarfile.open(kv, "r:")) if kv else None
        members = snapshots.getmembers() if snapshots else []
        manifest = _manifest_of(key, exchanges, log, members)
        made, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # with mode 0600
        stack.callback(Path(name).unlink, missing_ok=True)
        with (
            os.fdopen(made, "wb") as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar,
        ):
            for name_, content in ((_SESSION, _signed(msgspec.json.encode(manifest))), (_LOG, log)):
                member = tarfile.TarInfo(name_)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            for member in members:
                tar.addfile(member, snapshots.extractfile(member) if snapshots else None)
        Path(name).replace(target)
    return manifest


def exported(session: SessionLog, parts: Mapping[int | str, bytes]) -> IO[bytes]:
    """Return what `export` writes as an open file without a name, which leaves nothing on the disk.

    Raises as `export`.
    """
    with tempfile.TemporaryDirectory(prefix="turnkeep-") as folder:
        file = Path(folder) / "session"
        export(file, session, parts)
        return file.open("rb")


def _manifest_of(
    key: SessionKey, exchanges: Sequence[Exchange], log: bytes, members: Sequence[tarfile.TarInfo]
) -> Manifest:
    return Manifest(
        format=FORMAT,
        version=__version__,
        tenant=key.tenant,
        session=key.session,
        model=exchanges[-1].answered.model,
        began=exchanges[0].asked.stored,
        exchanges=len(exchanges),
        digest=_digest(log),
        kv=tuple((member.name, member.size) for member in members),
    )


def _lines(exchanges: Sequence[Exchange], parts: Mapping[int | str, bytes]) -> bytes:
    """Return the content of `log.jsonl`: a line of JSON for each request with its result."""
    encoder = msgspec.json.Encoder()
    images = {name: entry for name, entry in parts.items() if isinstance(name, str)}
    return b"".join(
        encoder.encode(
            ExchangeLine(
                seq=one.asked.seq,
                stored=one.asked.stored,
                request=msgspec.Raw(one.asked.body),
                answered_seq=one.answered.seq,
                answered=one.answered.first_stored,
                result=msgspec.Raw(one.answered.body),
                headers={name: value for name in HEADERS if (value := one.answered.headers.get(name))},
                parts=parts.get(one.answered.seq),
                seed=one.seed,
                images={} if number else images,
            )
        )
        + b"\n"
        for number, one in enumerate(exchanges)
    )


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()


def _signed(manifest: bytes) -> bytes:
    """Append the digest of a manifest to the manifest's JSON."""
    return manifest[:-1] + _CHECKSUM + _digest(manifest[:-1]).encode() + b'"}'


def read(source: Path) -> tuple[Manifest, list[ExchangeLine]]:
    """Read an exported session, and check everything but the content of snapshots. Raises `CopyError`."""
    if not source.is_file():
        raise CopyError(f"{source} is no file; save the export to one first")
    try:
        with source.open("rb") as file:
            members = _members(file)
            manifest = _manifest(source, _content(file, members, _SESSION))
            log = _content(file, members, _LOG)
            found = tuple((member.name, member.size) for member in members)
        lines = msgspec.json.Decoder(ExchangeLine).decode_lines(log)
        if (_digest(log), found, len(lines)) != (manifest.digest, manifest.kv, manifest.exchanges):
            raise tarfile.ReadError("its content is not what was written")
        _check(manifest, lines)
    except InvalidMessageError as error:
        raise CopyError(
            f"{source} was written by turnkeep {manifest.version}, and this one cannot read it: {error}"
        ) from None
    except RecursionError:
        raise CopyError(
            f"{source} is no sound export of a session (it nests too deep); export it again"
        ) from None
    except (tarfile.TarError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CopyError(f"{source} is no sound export of a session ({error}); export it again") from None
    except OSError as error:
        raise CopyError(f"{source} cannot be read: {error.strerror}") from None
    return manifest, lines


def _check(manifest: Manifest, lines: Sequence[ExchangeLine]) -> None:
    """Raise `InvalidMessageError` or `tarfile.ReadError` if a line cannot have come from a log."""
    session_key(manifest.tenant, manifest.session)
    for line in lines:
        decode_request(bytes(line.request))
        decode_result(bytes(line.result))
        if not all(map(re.compile("[0-9a-f]{64}").fullmatch, line.images)):
            raise tarfile.ReadError("an image in it has no SHA-256 as its name")
        if any(map(_CONTROL.search, line.headers.values())):
            raise tarfile.ReadError("a header has a line break or another control character")


def _members(file: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar; after each, `file` is at the start of this member's content.

    Members must be plain files: a sparse file of 512 bytes could take gigabytes in memory, and a link has the
    content of another member. Raises `tarfile.TarError`.
    """
    end, at = os.fstat(file.fileno()).st_size, 0
    while (block := file.read(tarfile.BLOCKSIZE)) != bytes(tarfile.BLOCKSIZE):
        member = tarfile.TarInfo.frombuf(block, "ascii", "backslashreplace")
        if member.type not in {tarfile.REGTYPE, tarfile.AREGTYPE}:
            raise tarfile.ReadError(f"{member.name!r} is no plain file")
        at += tarfile.BLOCKSIZE
        if not 0 <= member.size <= end - at:
            raise tarfile.ReadError("it ends too early")
        yield member
        at += -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        file.seek(at)


def _content(file: IO[bytes], members: Iterator[tarfile.TarInfo], name: str) -> bytes:
    member = next(members, None)
    if member is None or member.name != name:
        raise tarfile.ReadError(f"there is no {name} where it belongs")
    return file.read(member.size)


def _manifest(source: Path, content: bytes) -> Manifest:
    form = msgspec.json.decode(content, type=_Form).format
    if form != FORMAT:
        raise CopyError(
            f"{source} has format {form}, and this version reads {FORMAT}; take the other version"
        )
    signed, _, digest = content.rpartition(_CHECKSUM)
    if digest != _digest(signed).encode() + b'"}':
        raise tarfile.ReadError("its content is not what was written")
    manifest = msgspec.json.decode(content, type=Manifest)
    if _CONTROL.search(f"{manifest.version}{manifest.model}"):
        raise tarfile.ReadError("a name in it has a line break or another control character")
    return manifest


def of_file(source: Path) -> SessionLog:
    """Return the session in an exported file as a log, with the original sequences. Raises `CopyError`."""
    manifest, lines = read(source)
    key, found = SessionKey(manifest.tenant, manifest.session), list[Entry]()
    for line in lines:
        seed = {} if line.seed is None else {SEED_HEADER: str(line.seed)}
        found.append(Entry(line.seq, key, "in", line.stored, bytes(line.request), seed))
        found.append(Entry(line.answered_seq, key, "out", line.answered, bytes(line.result), line.headers))
    return paired(key, found)
