"""Control requests, sent on `ctl` and `_serve`: they are answered at once, and the log does not store them.

Import them from `messages`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .requests import (  # noqa: TC001  # msgspec reads the annotations
    Id,
    Message,
    SpecialTokens,
    Text,
    TokenId,
    Tools,
    Variables,
)


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
