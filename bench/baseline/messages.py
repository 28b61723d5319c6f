"""What a bench says to its baseline, and what it hears: one JSON object a line.

Times are in seconds since the program had read the command.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct


class Encode(Struct, frozen=True, tag_field="do", tag="encode"):
    """Tokenise a text as it is. Answered by `Tokens`."""

    text: str


class Chat(Struct, frozen=True, tag_field="do", tag="chat"):
    """Tokenise what a user says with the model's chat template, after `system` where it is the `first` turn.

    Answered by `Tokens`.
    """

    system: str
    text: str
    first: bool


class Stream(Struct, frozen=True, tag_field="do", tag="stream"):
    """Generate greedily with `generate_step`, and keep the session's cache. Answered by `Ran`."""

    session: str
    tokens: tuple[int, ...]
    max_tokens: int


class Batch(Struct, frozen=True, tag_field="do", tag="batch"):
    """Generate greedily for several sessions with `BatchGenerator`, and keep their caches.

    `prompts` are in the order of `sessions`. Answered by `Ran`.
    """

    sessions: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int


class Forget(Struct, frozen=True, tag_field="do", tag="forget"):
    """Drop the caches of all sessions. Answered by `Done`."""


class Load(Struct, frozen=True, tag_field="do", tag="load"):
    """Read safetensors files with `mx.load`, one after the other. Answered by `Loaded`."""

    paths: tuple[str, ...]


Command = Encode | Chat | Stream | Batch | Forget | Load


class Hello(Struct, frozen=True, kw_only=True, tag="hello"):
    """The first line: ready. Without a model only `Load` is understood."""

    device: str


class Tokens(Struct, frozen=True, tag="tokens"):
    """Token ids."""

    tokens: tuple[int, ...]


class Row(Struct, frozen=True):
    """One session's new tokens, and when each of them was there."""

    tokens: tuple[int, ...]
    times_s: tuple[float, ...]


class Ran(Struct, frozen=True, tag="ran"):
    """What was generated, in the order of the command's sessions."""

    rows: tuple[Row, ...]
    seconds: float


class Loaded(Struct, frozen=True, tag="loaded"):
    """How long it took to have all the files' tensors in memory."""

    size_bytes: int
    seconds: float


class Done(Struct, frozen=True, tag="done"):
    """Nothing to tell."""


class Refused(Struct, frozen=True, tag="refused"):
    """The command failed; the program goes on."""

    why: str


Reply = Hello | Tokens | Ran | Loaded | Done | Refused

_COMMAND: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_REPLY: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def encode(message: Command | Reply) -> bytes:
    """Write one line."""
    return msgspec.json.encode(message) + b"\n"


def decode_command(line: bytes) -> Command:
    """Read what a bench says. Raises `msgspec.DecodeError`."""
    return _COMMAND.decode(line)


def decode_reply(line: bytes) -> Reply:
    """Read what the program says. Raises `msgspec.DecodeError`."""
    return _REPLY.decode(line)
