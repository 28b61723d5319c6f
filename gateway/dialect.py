"""Defines `Dialect`: an HTTP API, as functions that read requests and write answers, events and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from turnkeep_client.messages import Chunk, Generated

    from .turn import Fault, Turn

EVENT_STREAM: Final = "text/event-stream"


class Events(Protocol):
    """Encodes the events, or lines, of one streamed response."""

    @property
    def heartbeat(self) -> bytes:
        """Bytes to send while there is no event; clients ignore them, but know that the stream is alive."""

    def start(self, index: int) -> bytes:
        """Encode the events that open answer number `index`."""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Encode the events for a chunk of an answer; return empty bytes if the chunk adds nothing."""

    def finish(self, index: int, result: Generated) -> bytes:
        """Encode the events that close an answer."""

    def end(self, results: Sequence[Generated]) -> bytes:
        """Encode the events that close the stream."""

    def error(self, fault: Fault) -> bytes:
        """Encode the error event that ends the stream."""


def _never(_body: bytes) -> None:
    """Return None: the default for `at_once` in a `Dialect` whose requests all need a worker."""


class Dialect(NamedTuple):
    """One HTTP API: how to read its requests, and write its answers, events and errors.

    `names` maps the protocol's field names to this API's, where they differ. `begun` writes an answer without
    a result, for APIs with background answers. `at_once` answers a request that needs no worker, and returns
    None for others.
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
        """Whether events have ids, by which a client can resume the stream."""
        return self.media_type == EVENT_STREAM
