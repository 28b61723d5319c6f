"""The messages on a session's subject `checkpoint`: long values in parts, each linked to the part before it.

A result in the log links to the last part, by sequence and digest. So the bytes are as trustworthy as the
log, and a message to which no such chain leads is never read. This module does not interpret the bytes.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


class Link(NamedTuple):
    """Identifies a message by its sequence in the log's stream and the digest of its body."""

    seq: int
    digest: bytes

    def __str__(self) -> str:
        return f"{self.seq} {self.digest.hex()}"

    @classmethod
    def parse(cls, text: str) -> Link | None:
        """Parse the text that `str(link)` returns; None for any other text."""
        seq, _, digest = text.partition(" ")
        try:
            return cls(int(seq), bytes.fromhex(digest))
        except ValueError:
            return None


class CheckpointMessage(Struct, frozen=True, tag_field="type", tag="checkpoint", omit_defaults=True):
    """One message: a part of a value's bytes, and in `before` the `Link` to the previous message, as text.

    Encoded as JSON, like all messages of a session.
    """

    part: bytes
    before: str = ""

    def pack(self) -> bytes:
        """Encode this message as the body of a NATS message."""
        return msgspec.json.encode(self)

    @classmethod
    def unpack(cls, body: bytes, link: Link) -> CheckpointMessage | None:
        """Decode the body of a NATS message; None if it is invalid, or its digest is not that of `link`."""
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(body, type=cls) if digest(body) == link.digest else None
        return None


def digest(body: bytes) -> bytes:
    """Return the 16 bytes that identify a message's body."""
    return blake2b(body, digest_size=16).digest()


class _Message(Protocol):
    @property
    def body(self) -> bytes: ...


async def read_value(link: Link | None, read: Callable[[int], Awaitable[_Message | None]]) -> bytes | None:
    """Read a long value, whose last part `link` names; None without a link, or if a part is gone or changed.

    `read` returns the message at a stream sequence.
    """
    parts: list[bytes] = []
    async for message in backwards(link, read):
        if message is None:
            return None
        parts.append(message.part)
    return b"".join(reversed(parts)) if parts else None


async def backwards(
    link: Link | None, read: Callable[[int], Awaitable[_Message | None]]
) -> AsyncIterator[CheckpointMessage | None]:
    """Yield a chain's messages from the last, which `link` names, to the first.

    If a message is missing or changed, yield None and end. `read` is that of `read_value`.
    """
    while link is not None:
        stored = await read(link.seq)
        message = CheckpointMessage.unpack(stored.body, link) if stored is not None else None
        yield message
        link = Link.parse(message.before) if message else None
