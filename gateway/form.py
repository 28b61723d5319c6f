"""Defines `Form`: how requests are read, and answers, events and errors are written. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from turnkeep_client.messages import Chunk, Failed, Generated

    from .logged_answers import LoggedAnswer
    from .turn import ClientTurn, Fault

    Body: TypeAlias = dict[str, Any]

EVENT_STREAM: Final = "text/event-stream"


class Events(Protocol):
    """Encodes the events, or lines, of one streamed response. By default, no events open or close it."""

    @property
    def heartbeat(self) -> bytes:
        """Bytes to send while there is no event; they have no content, but show that the stream is alive."""

    def start(self, index: int) -> bytes:  # noqa: ARG002  # the number of the answer, for several
        """Encode the events that open answer number `index`."""
        return b""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Encode the events for a chunk of an answer; return empty bytes if the chunk adds nothing."""

    def finish(self, index: int, result: Generated) -> bytes:
        """Encode the events that close an answer."""

    def end(self, results: Sequence[Generated]) -> bytes:  # noqa: ARG002  # for the usage of all answers
        """Encode the events that close the stream."""
        return b""

    def error(self, fault: Fault) -> bytes:
        """Encode the error event that ends the stream."""


class ModelLoad(NamedTuple):
    """A request that only loads or, if `unloads`, unloads a model, and the JSON body of its response."""

    body: Body
    unloads: bool


class AnswerObject(NamedTuple):
    """How an API writes answers as objects with a status, which other requests refer to."""

    #: Returns the JSON body of an answer with a result, a failure or, while it runs, neither.
    write: Callable[[ClientTurn, str, int, Generated | Failed | None], Body]
    #: Returns the ids of the answers whose parts a request's body names.
    named: Callable[[bytes], set[str]]
    #: Parses such a request, given these answers by id.
    read: Callable[[bytes, Mapping[str, LoggedAnswer]], ClientTurn]


class Form(NamedTuple):
    """How the requests of some paths are read, and their answers, events and errors are written.

    Functions that write answers get the turn, the answer's id and when it began, in seconds since 1970.
    """

    name: str
    read: Callable[[bytes], ClientTurn]
    #: Returns the JSON body of the response with all answers to a request.
    whole: Callable[[ClientTurn, str, int, Sequence[Generated]], Body]
    events: Callable[[ClientTurn, str, int], Events]
    error: Callable[[Fault], Body]
    #: This API's names of the protocol's fields, where they differ.
    names: Mapping[str, str] = {}
    media_type: str = EVENT_STREAM
    object: AnswerObject | None = None
    #: Fields of the response to a request that only counts tokens, beside the count.
    counted: Mapping[str, str] = {}
    #: Recognises a request that only loads or unloads a model; returns None for others.
    loading: Callable[[bytes], ModelLoad | None] = lambda _body: None

    @property
    def is_marked(self) -> bool:
        """Whether events have ids, by which a client can resume the stream."""
        return self.media_type == EVENT_STREAM
