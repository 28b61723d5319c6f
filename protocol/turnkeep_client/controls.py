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

    With `snapshot` the answer also names the longest stored snapshot of the session's KV.
    """

    skip: Annotated[int, Meta(ge=0, le=2**53)] = 0
    limit: Annotated[int, Meta(ge=0, le=1000)] = 100
    snapshot: bool = False


class MetricsRequest(_Control, frozen=True, tag="metrics"):
    """Ask for the worker's metrics (on the `ctl` of any session, which need not exist)."""


class CancelRequest(_Control, frozen=True, tag="cancel"):
    """Stop a waiting or running request of the session (on `ctl`). Answered once its result is in the log."""

    id: Id


class CountRequest(_Control, frozen=True, tag="count"):
    """Count the tokens that a generate with this input would add; nothing runs (on `ctl`).

    For a session that does not exist or is closed, count the tokens that a new one would begin with. `tools`
    that differ from the session's are counted as a generate would add them.
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

    Vectors are truncated to `dimensions` numbers. `input_tokens` cuts each input to at most so many tokens,
    and to those that fit the model; without it, an input that does not fit is refused. The log stores neither
    the request nor the answer.
    """

    inputs: Annotated[tuple[Text | tuple[TokenId, ...], ...], Meta(min_length=1, max_length=256)]
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    input_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class RerankRequest(_Control, frozen=True, tag="rerank"):
    """Score how well each of the `documents` answers the `query` (on the `ctl` of any session).

    The `instruction` describes the task; by default, to find passages that answer a web search.
    `document_tokens` cuts each document to at most so many tokens, and to those that fit the model; without
    it, a document that does not fit is refused. The log stores neither the request nor the answer.
    """

    query: Text
    documents: Annotated[tuple[Text, ...], Meta(min_length=1, max_length=256)]
    instruction: Text | None = None
    document_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class LoadRequest(_Control, frozen=True, tag="load"):
    """Load the prefix's model, or put `model`, another one of this machine, in its place (on `_serve`).

    Existing sessions continue with that model. The answer comes once the model was checked; then its worker
    starts.
    """

    model: Text | None = None


class UnloadRequest(_Control, frozen=True, tag="unload"):
    """Unload the model of the prefix (on `_serve`). Its next request loads it again."""


ServeRequest = LoadRequest | UnloadRequest
ControlRequest = InfoRequest | MetricsRequest | CancelRequest | CountRequest | EmbedRequest | RerankRequest


class Cancelled(Struct, frozen=True, kw_only=True, tag_field="type", tag="cancelled"):
    """Answer to `cancel`: `was` is the state of the request when it was cancelled."""

    id: str
    was: Annotated[str, Meta(description=OPEN, examples=["waiting", "running"])]


class Serving(Struct, frozen=True, kw_only=True, tag_field="type", tag="serving"):
    """Answer to `load` and `unload`: `said` is a sentence that says what happens now."""

    said: str


class Counted(Struct, frozen=True, kw_only=True, tag_field="type", tag="counted", omit_defaults=True):
    """Answer to `count`: with the input the session would have `position` tokens, the last `tokens` new.

    `rewritten_from` is set if the chat template would change earlier text: then `tokens` counts all tokens
    from that position on.
    """

    tokens: int
    position: int
    rewritten_from: int | None = None


class Embedded(Struct, frozen=True, kw_only=True, tag_field="type", tag="embedded"):
    """Answer to `embed`: a vector for each input, normalised to Euclidean norm 1, and each input's tokens.

    A vector is base64 of 32-bit floats, little-endian. `tokens` has the number of tokens of each input.
    `model` is the name of the worker's model.
    """

    vectors: tuple[bytes, ...]
    tokens: tuple[int, ...]
    model: str

    @property
    def floats(self) -> list[list[float]]:
        """The vectors as lists of numbers."""
        return [list(unpack(f"<{len(one) // 4}f", one)) for one in self.vectors]


class Reranked(Struct, frozen=True, kw_only=True, tag_field="type", tag="reranked"):
    """Answer to `rerank`: for each document its score, from 0 to 1, and how many tokens were run for it.

    `model` is the name of the worker's model.
    """

    scores: tuple[float, ...]
    tokens: tuple[int, ...]
    model: str


class Progress(Struct, frozen=True, kw_only=True):
    """Progress of the running request: `cached_tokens` of its `context_tokens` have KV by now.

    `generated_tokens` counts the tokens of its answer until now.
    """

    cached_tokens: int
    context_tokens: int
    generated_tokens: int


class SessionInfo(Struct, frozen=True, kw_only=True, tag_field="type", tag="session"):
    """Answer to `info`: the state of a session, and the metrics of its worker.

    Fields from `cache` to `answered_by` are left out if they do not apply.
    """

    tenant: str
    session: str
    position: Annotated[int, Meta(description="the session's number of tokens")]
    state: Annotated[str, Meta(description=OPEN, examples=["idle", "waiting", "running"])]
    active: Annotated[
        str | None,
        Meta(
            description="the id of the request that the worker carries out, perhaps once the device has room"
        ),
    ]
    waiting: Annotated[
        tuple[str, ...], Meta(description="the ids of the waiting requests that skip and limit select")
    ]
    num_waiting: Annotated[int, Meta(description="how many requests wait behind the active one")] = 0
    requests: Annotated[int, Meta(description="how many requests were answered, without repeats")]
    progress: Annotated[Progress | None, Meta(description="null unless a turn runs on the device")]
    resident: Annotated[bool, Meta(description="whether KV of the session is on the device now")]
    kv_live_bytes: Annotated[int, Meta(description="the size of that KV in bytes")]
    policy: Annotated[str, Meta(description="the name of the session's cache policy")]
    cache: Annotated[
        SessionCache | UnsetType, Meta(description="the policy's numbers, unless it is full with snapshots")
    ] = UNSET
    capacity_tokens: Annotated[
        int | UnsetType, Meta(description="unless the policy is full: the most tokens that the model sees")
    ] = UNSET
    visible_tokens: Annotated[
        int | UnsetType, Meta(description="unless the policy is full: how many tokens the model sees now")
    ] = UNSET
    visible_from: Annotated[
        int | UnsetType,
        Meta(description="unless the policy is full: the model sees all from this position on"),
    ] = UNSET
    snapshot: Annotated[
        str | UnsetType,
        Meta(description="if requested: the tokens' longest stored snapshot, as in turnkeep cache list"),
    ] = UNSET
    parent: Annotated[Parent | UnsetType, Meta(description="where a fork began")] = UNSET
    tags: tuple[str, ...] | UnsetType = UNSET
    answered_by: Annotated[Model | UnsetType, Meta(description="the model of the last turn")] = UNSET
    model: Annotated[str, Meta(description="the name of the worker's model")]
    worker: Metrics
