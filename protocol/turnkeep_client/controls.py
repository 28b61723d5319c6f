"""Control requests, sent on `ctl` and `_serve`, and their replies, which come at once; the log has neither.

Decoding a reply accepts unknown fields. Import them from `messages`.
"""

from __future__ import annotations

from struct import unpack
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from .metrics import Metrics  # noqa: TC001  # msgspec reads the annotations
from .requests import (  # noqa: TC001  # msgspec reads the annotations
    Id,
    Message,
    SpecialTokens,
    Text,
    TokenId,
    Tools,
    Variables,
)
from .results import OPEN, Model, Parent, SessionCache


class _Control(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", omit_defaults=True):
    pass


class InfoRequest(_Control, frozen=True, tag="info"):
    """Ask for a session's state (on `ctl`). The answer names `limit` waiting requests after the first `skip`.

    With `snapshot` the answer also names the last stored snapshot of the session's KV.
    """

    skip: Annotated[int, Meta(ge=0, le=2**53)] = 0
    limit: Annotated[int, Meta(ge=0, le=1000)] = 100
    snapshot: bool = False


class MetricsRequest(_Control, frozen=True, tag="metrics"):
    """Ask for the worker's metrics (on the `ctl` of any session, which need not exist)."""


class CancelRequest(_Control, frozen=True, tag="cancel"):
    """Stop a waiting or running request of the session (on `ctl`)."""

    id: Id


class CountRequest(_Control, frozen=True, tag="count"):
    """Count the tokens that a generate with this input would add; nothing runs (on `ctl`).

    For a session that does not exist, count the tokens that it would begin with. `tools` that differ from
    the session's are counted as a generate would add them.
    """

    messages: tuple[Message, ...] | None = None
    text: Text | None = None
    tokens: tuple[TokenId, ...] | None = None
    special_tokens: SpecialTokens | None = None
    raw: bool = False
    tools: Tools | None = None
    chat_template_kwargs: Variables | None = None


class EmbedRequest(_Control, frozen=True, tag="embed"):
    """Embed each of the `inputs`, texts or lists of token ids (on the `ctl` of any session).

    Vectors are truncated to `dimensions` numbers. With `input_tokens` only the first tokens of each input are
    read: so many, or those that fit the model; without it, an input that does not fit is refused. The log
    stores nothing of this.
    """

    inputs: Annotated[tuple[Text | tuple[TokenId, ...], ...], Meta(min_length=1, max_length=256)]
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    input_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class RerankRequest(_Control, frozen=True, tag="rerank"):
    """Score how well each of the `documents` answers the `query` (on the `ctl` of any session).

    The `instruction` describes the task; by default, to find passages that answer a web search. With
    `document_tokens` only the first tokens of each document are read: so many, or those that fit the model;
    without it, a document that does not fit is refused. The log stores nothing of this.
    """

    query: Text
    documents: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=256)]
    instruction: Text | None = None
    document_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class LoadRequest(_Control, frozen=True, tag="load"):
    """Load the model of the prefix, or make another `model` of this machine the prefix's (on `_serve`).

    Sessions go on with it. Answered once the model was checked; then its worker starts.
    """

    model: Text | None = None


class UnloadRequest(_Control, frozen=True, tag="unload"):
    """Unload the model of the prefix (on `_serve`). Its next request loads it again."""


ServeRequest = LoadRequest | UnloadRequest
ControlRequest = InfoRequest | MetricsRequest | CancelRequest | CountRequest | EmbedRequest | RerankRequest


class Cancelled(Struct, frozen=True, kw_only=True, tag_field="type", tag="cancelled"):
    """Answer to `cancel`: the state of the request when it was cancelled."""

    id: str
    was: Annotated[str, Meta(description=OPEN, examples=["waiting", "running"])]


class Serving(Struct, frozen=True, kw_only=True, tag_field="type", tag="serving"):
    """Answer to `load` and `unload`: what happens now, as a sentence."""

    said: str


class Counted(Struct, frozen=True, kw_only=True, tag_field="type", tag="counted", omit_defaults=True):
    """Answer to `count`: the session would have `position` tokens, the last `tokens` of them new.

    `rewritten_from` is set if the chat template would change earlier text: then `tokens` counts all tokens
    from that position on.
    """

    tokens: int
    position: int
    rewritten_from: int | None = None


class Embedded(Struct, frozen=True, kw_only=True, tag_field="type", tag="embedded"):
    """Answer to `embed`: a vector for each input, normalised to Euclidean norm 1, and each input's tokens.

    A vector is base64 of 32-bit floats, little-endian. `tokens` has the number of tokens of each input.
    """

    vectors: tuple[bytes, ...]
    tokens: tuple[int, ...]
    model: str

    @property
    def floats(self) -> list[list[float]]:
        """The vectors as lists of numbers."""
        return [list(unpack(f"<{len(one) // 4}f", one)) for one in self.vectors]


class Reranked(Struct, frozen=True, kw_only=True, tag_field="type", tag="reranked"):
    """Answer to `rerank`: the documents' scores, from 0 to 1, and how many tokens were run for each."""

    scores: tuple[float, ...]
    tokens: tuple[int, ...]
    model: str


class Progress(Struct, frozen=True, kw_only=True):
    """Progress of the running request: `cached_tokens` of its `context_tokens` have KV by now."""

    cached_tokens: int
    context_tokens: int
    generated_tokens: int


class SessionInfo(Struct, frozen=True, kw_only=True, tag_field="type", tag="session"):
    """Answer to `info`. `waiting` names the requested part of the `num_waiting` waiting requests.

    If `policy` is not `full`, `cache` has the policy's numbers. `visible_tokens` tokens keep their KV, at
    most `capacity_tokens`, and the model sees all tokens from the position `visible_from` on. `snapshot` is
    the name of the last stored snapshot, as in `turnkeep cache ls`, if the request asked for it. A fork has a
    `parent`.
    """

    tenant: str
    session: str
    position: int
    state: Annotated[str, Meta(description=OPEN, examples=["idle", "waiting", "running"])]
    active: str | None
    waiting: tuple[str, ...]
    num_waiting: int = 0
    requests: int
    progress: Progress | None
    resident: bool
    kv_live_bytes: int
    policy: str
    cache: SessionCache | UnsetType = UNSET
    capacity_tokens: int | UnsetType = UNSET
    visible_tokens: int | UnsetType = UNSET
    visible_from: int | UnsetType = UNSET
    snapshot: str | UnsetType = UNSET
    parent: Parent | UnsetType = UNSET
    tags: tuple[str, ...] | UnsetType = UNSET
    answered_by: Model | UnsetType = UNSET
    model: str
    worker: Metrics
