"""Parses stored messages into entries of the log.

Pure: takes a stored message, returns an entry. The client reads the messages from the stream.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from .errors import InvalidMessageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .subjects import SessionKey, Subjects

#: Header of a result: digest of the session's token ids after this result.
HISTORY_HEADER: Final = "Turnkeep-History"
#: Header of a result: the last checkpoint of the session's history, by its stream sequence and digest.
CHECKPOINT_HEADER: Final = "Turnkeep-Checkpoint"
#: Header of a result: the message with data too long for the result. For a fork's `open` that is the history
#: copied from its parent, else the token ids that the request's input added.
PARTS_HEADER: Final = "Turnkeep-Parts"
#: Header of the first request of a session copied from another log: the time when that log stored it.
BEGAN_HEADER: Final = "Turnkeep-Began"
#: Header of a generate copied from another log: the seed that it was answered with, if it has none itself.
SEED_HEADER: Final = "Turnkeep-Seed"
#: Header of a result copied from another log: the time when that log stored it.
STORED_HEADER: Final = "Turnkeep-Stored"
#: Header of a result: the name of the model that made it. Of an answer's first chunk: digests of the model.
MODEL_HEADER: Final = "Turnkeep-Model"
#: Header of a result: the worker that made it, and what else its tokens may depend on, as `name=value` words.
BUILD_HEADER: Final = "Turnkeep-Build"

#: Header of a note that a session is about to be closed: the sequence of the close.
CLOSE_HEADER: Final = "Turnkeep-Close"

#: JetStream's header, used as the fence: store a message only if its subject's last one has this sequence.
EXPECT_HEADER: Final = "Nats-Expected-Last-Subject-Sequence"

#: Header of the empty message that ends a token stream: the sequence of the request, now answered.
ENDED_HEADER: Final = "Turnkeep-Ended"
#: Header of an empty message that stops other workers from continuing an answer: the request's sequence.
SEALED_HEADER: Final = "Turnkeep-Sealed"

#: JetStream's error code for a stream that has reached its `max_bytes`.
STREAM_FULL: Final = 10077

#: What helps if the log is full, as the end of a sentence.
ROOM_REMEDY: Final = "; close sessions with forget, or restart the worker with a larger --log-max-bytes"


def with_remedy(code: int | None, description: str | None) -> str:
    """Return what JetStream says with an error; if the log is full, also what helps."""
    return f"{description}{ROOM_REMEDY if code == STREAM_FULL else ''}"


def why_refused(code: int | None, description: str | None) -> str:
    """Return the text for a request that the log refuses with this JetStream error."""
    return f"the log refused the request: {with_remedy(code, description)}"


class Stored(NamedTuple):
    """One message that a JetStream stream has stored."""

    seq: int
    body: bytes
    headers: Mapping[str, str]


class Entry(NamedTuple):
    """One request (`in`) or result (`out`) of the log, stored at the server's time `stored`.

    `headers` are those of its sender; of NATS's own only the fence (`EXPECT_HEADER`).
    """

    seq: int
    key: SessionKey
    kind: Literal["in", "out"]
    stored: datetime
    body: bytes
    headers: Mapping[str, str]

    @property
    def model(self) -> str | None:
        """The name of the model that made a result; None if the result does not say."""
        return self.headers.get(MODEL_HEADER)

    @property
    def history(self) -> str | None:
        """The digest of the session's tokens after a result; None if no worker made it."""
        return self.headers.get(HISTORY_HEADER)

    @property
    def build(self) -> Mapping[str, str]:
        """The `worker` that made a result, its `version`, `dtype`, `device`, `kv` precision, where known."""
        return words(self.headers.get(BUILD_HEADER, ""))

    @property
    def first_stored(self) -> datetime:
        """The time when the log stored this entry; for a copied result, when the original log did."""
        with suppress(ValueError):
            copied = datetime.fromisoformat(self.headers.get(STORED_HEADER, ""))
            return copied if copied.tzinfo else self.stored
        return self.stored

    @property
    def seed(self) -> int | None:
        """The seed that a copied request was answered with; None if the request has one, or is no copy."""
        header = self.headers.get(SEED_HEADER, "")
        return int(header) if re.fullmatch("[0-9]{1,17}", header) else None


def entry(subjects: Subjects, stored: Stored) -> Entry | None:
    """Parse a stored message; return None if its subject is not the `in` or `out` of a session."""
    try:
        key, kind, _ = subjects.parse(stored.headers["Nats-Subject"])
    except InvalidMessageError:
        return None
    if kind not in ("in", "out"):
        return None
    time = datetime.fromisoformat(stored.headers["Nats-Time-Stamp"])
    own = {
        name: value
        for name, value in stored.headers.items()
        if name == EXPECT_HEADER or not name.startswith("Nats-")
    }
    return Entry(stored.seq, key, "in" if kind == "in" else "out", time, stored.body, own)


def words(header: str) -> dict[str, str]:
    """Parse a header of `name=value` words, separated by spaces."""
    return dict(word.split("=", 1) for word in header.split() if "=" in word)


def derived_seed(key: SessionKey, seq: int) -> int:
    """Return the seed of a generate that has none: a hash of the session and the request's sequence.

    So a worker that resumes the answer samples the same tokens, and a replay can use the same seed.
    """
    return int.from_bytes(blake2b(f"{key}:{seq}".encode(), digest_size=7).digest(), "big")
