"""What a dialect is: functions that read its requests, and write its answers, events and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from turnkeep_client.messages import Chunk, Generated

    from .turn import Fault, Turn

EVENT_STREAM: Final = "text/event-stream"


class Events(Protocol):
    """Writes the events of one stream."""

    @property
    def heartbeat(self) -> bytes:
        """What clients count as life."""

    def start(self, index: int) -> bytes:
        """Write what comes before the answer number `index`."""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Write a part of an answer; empty if there is nothing to say."""

    def finish(self, index: int, result: Generated) -> bytes:
        """Write the end of an answer."""

    def end(self, results: Sequence[Generated]) -> bytes:
        """Write the end of the stream."""

    def error(self, fault: Fault) -> bytes:
        """Write an error, after which nothing comes."""


def _never(_body: bytes) -> None:
    """Answer no request without a model."""


class Dialect(NamedTuple):
    """An API: how its requests are read, and its answers and errors written.

    `names` are those of its fields that have other names in the protocol. `begun` writes an answer that has
    no result yet, where a client may leave it so. `at_once` answers requests that ask a model nothing.
    """

    name: str
    read: Callable[[bytes], Turn]
    whole: Callable[[Turn, str, int, Sequence[Generated]], dict[str, Any]]
    events: Callable[[Turn, str, int], Events]
    error: Callable[[Fault], dict[str, Any]]
    names: Mapping[str, str] = {}
    begun: Callable[[Turn, str, int], dict[str, Any]] | None = None
    media_type: str = EVENT_STREAM
    at_once: Callable[[bytes], dict[str, Any] | None] = _never

    @property
    def is_marked(self) -> bool:
        """Whether events have ids, behind which a client may go on."""
        return self.media_type == EVENT_STREAM
