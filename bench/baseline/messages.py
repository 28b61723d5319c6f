"""What a bench says to its baseline, and what it hears: one JSON object a line."""

from __future__ import annotations

import msgspec
from msgspec import Struct


class Say(Struct, frozen=True, tag="say"):
    """Answer a prompt in each of these sessions, greedily, and keep their caches. Answered by `Said`."""

    sessions: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int


class Forget(Struct, frozen=True, tag="forget"):
    """Drop the caches of all sessions. Answered by an empty `Said`."""


Command = Say | Forget


class Row(Struct, frozen=True):
    """One session's new tokens, and the seconds after which each of them was there."""

    tokens: tuple[int, ...]
    times_s: tuple[float, ...]


class Said(Struct, frozen=True, tag="said"):
    """What was generated, in the order of the sessions. The first line, without any, says: ready."""

    rows: tuple[Row, ...] = ()


class Refused(Struct, frozen=True, tag="refused"):
    """The command failed; the program goes on."""

    why: str


_COMMAND: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_REPLY: msgspec.json.Decoder[Said | Refused] = msgspec.json.Decoder(Said | Refused)


def encode(message: Struct) -> bytes:
    """Write one line."""
    return msgspec.json.encode(message) + b"\n"


def decode_command(line: bytes) -> Command:
    """Read what a bench says. Raises `msgspec.DecodeError`."""
    return _COMMAND.decode(line)


def decode_reply(line: bytes) -> Said | Refused:
    """Read what the program says. Raises `msgspec.DecodeError`."""
    return _REPLY.decode(line)
