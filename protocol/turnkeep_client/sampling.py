"""The request `generate`, and the table of its sampling options. Import it from `messages`.

A sampling option is a field of `Generate` that `_option` describes. Flags of commands, options of chat, the
HTTP APIs and the reference page are made from `OPTIONS`: name, type, range, text, names in other APIs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypedDict, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType, structs
from msgspec.structs import force_setattr

from .errors import FieldError
from .requests import (
    Input,
    NamedTool,
    Reasoning,
    ResponseFormat,
    TextFormat,
    Tool,
    Tools,
    check_rendering,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .formats import Format

_COUNT: Final[dict[str, Any]] = {"ge": 0, "le": 2**31 - 1}
_Text = Annotated[str, Meta(min_length=1, max_length=256)]


def _option(text: str, *, names: Mapping[str, str] | None = None, **limits: Any) -> Meta:
    """Describe a sampling option: its help text, its names in other APIs where they differ, its range."""
    return Meta(description=text, extra={"names": names or {}}, **limits)


class Generate(Input, frozen=True, tag="generate"):
    """Sample tokens, after appending at most one of `messages`, `text`, `tokens`.

    `logit_bias` (added to the logits of token ids), penalties, temperature, `top_k`, `top_p` and `min_p`
    apply in this order. A temperature or `top_p` of 0 takes the most likely token; `top_k` 0 and `top_p` 1
    are off. The `repetition_penalty` is for the answer's tokens and the session's tokens; under `sink_window`
    only for the session's tokens that the model sees when the answer begins. `presence_penalty` and
    `frequency_penalty` are for the answer's tokens, as in OpenAI's API. A missing seed is derived from the
    request, so an interrupted answer continues with the same tokens.

    The model's end tokens are not drawn before the answer has `min_tokens` tokens; with `ignore_eos` they do
    not end it. With `logprobs`, each token of the answer has the logarithm of its probability by the model
    itself, before everything above, and the `top_logprobs` likeliest tokens. With `max_tokens` 0 the request
    is only prefilled, and the answer is empty. `raw` leaves out the assistant header that the chat template
    would add after messages. The answer, from its first token or the end of its reasoning on, follows the
    `response_format`; then it ends, even before `min_tokens`.

    `prefix` is the beginning of the answer, given by the client: it belongs to the prompt, and to the answer
    in later turns. With `own_sampling`, options that the request leaves out take the values that the model's
    authors recommend (`generation_config.json`).

    `tools` stay those of the session until a request gives others, or none (`[]`). `tool_choice` says whether
    the answer may call them (`auto`), must not (`none`), must (`required`), or must call the one that it
    names. Without `parallel_tool_calls` the answer ends with its first call. `chat_template_kwargs` stay
    those of the session in the same way (`{}`: none).
    """

    max_tokens: Annotated[
        int,
        _option(
            "Maximum tokens of one answer.",
            names={"ollama": "num_predict", "responses": "max_output_tokens"},
            **_COUNT,
        ),
    ] = 256
    prefix: Annotated[str, Meta(description="the answer's first text, given")] = ""
    own_sampling: bool = False
    tools: Tools | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    temperature: (
        Annotated[float, _option("0 always takes the most likely token.", ge=0, le=100)] | UnsetType
    ) = UNSET
    top_p: (
        Annotated[float, _option("Only the likeliest tokens with this total probability.", ge=0, le=1)]
        | UnsetType
    ) = UNSET
    top_k: Annotated[int, _option("Only the N most likely tokens; 0 is all.", **_COUNT)] | UnsetType = UNSET
    min_p: (
        Annotated[float, _option("Only tokens at least X times as likely as the likeliest.", ge=0, le=1)]
        | UnsetType
    ) = UNSET
    repetition_penalty: (
        Annotated[
            float, _option("Above 1: repeat fewer tokens.", names={"ollama": "repeat_penalty"}, gt=0, le=100)
        ]
        | UnsetType
    ) = UNSET
    presence_penalty: Annotated[
        float, _option("Above 0: repeat fewer of the answer's tokens.", ge=-2, le=2)
    ] = 0.0
    frequency_penalty: Annotated[float, _option("The same, times how often a token occurs.", ge=-2, le=2)] = (
        0.0
    )
    logit_bias: Annotated[
        dict[Annotated[int, Meta(ge=0, le=2**31 - 1)], Annotated[float, Meta(ge=-100, le=100)]],
        _option("Add a number from -100 to 100 to the logit of a token id.", max_length=1024),
    ] = msgspec.field(default_factory=dict)
    min_tokens: Annotated[int, _option("No end of the answer before N tokens.", **_COUNT)] = 0
    ignore_eos: Annotated[bool, _option("Go on behind the model's end of the answer.")] = False
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0
    seed: Annotated[int, _option("Seed of the sampling.", ge=0, le=2**63 - 1)] | None = None
    stop: (
        Annotated[
            tuple[_Text, ...],
            _option("End before one of these texts.", names={"anthropic": "stop_sequences"}, max_length=16),
        ]
        | _Text
    ) = ()
    raw: bool = False
    response_format: ResponseFormat | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            force_setattr(self, "stop", (self.stop,))
        if self.num_inputs > 1:
            raise ValueError(
                f"generate takes at most one of messages, text, tokens; it has {self.num_inputs}"
            )
        if self.top_logprobs and not self.logprobs:
            why = "generate takes top_logprobs with logprobs only: set logprobs to true"
            raise FieldError("top_logprobs", why)
        names = check_rendering(self.tools or (), self.chat_template_kwargs or {})
        if isinstance(self.tool_choice, NamedTool) and self.tools is not None:
            chosen = self.tool_choice.function.name
            if chosen not in names:
                why = f"tool_choice names {chosen}, which is none of the tools"
                raise FieldError("tool_choice", why)
        if self.ignore_eos and not isinstance(self.response_format, TextFormat | None):
            raise FieldError(
                "ignore_eos",
                "generate takes ignore_eos without a response_format only:"
                " such an answer ends when it is whole",
            )
        if self.min_tokens > self.max_tokens:
            raise FieldError(
                "min_tokens",
                f"generate needs min_tokens of at most max_tokens ({self.max_tokens}), not {self.min_tokens}",
            )


class Sampling(TypedDict, total=False):
    """The options of a generate; the defaults are those of `messages.Generate`."""

    max_tokens: int
    prefix: str
    own_sampling: bool
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int
    seed: int | None
    stop: Sequence[str] | str
    raw: bool
    tools: Sequence[Tool | Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    reasoning: Reasoning | Mapping[str, Any]
    response_format: Format | None
    special_tokens: bool | None
    deadline_s: float | None
    priority: int


class SamplingOption(NamedTuple):
    """A sampling option of `Generate`."""

    name: str
    #: Its type: int, float, bool, dict or tuple.
    kind: type
    #: Its help text and range.
    meta: Meta
    #: Its names in other APIs, by API, where they differ.
    names: Mapping[str, str]
    #: Whether a model's authors can recommend a value.
    is_recommended: bool

    def name_in(self, api: str) -> str:
        """Return the option's name in another API, such as `ollama`."""
        return self.names.get(api, self.name)


def _options() -> Iterator[SamplingOption]:
    for field in structs.fields(Generate):
        for part in (field.type, *get_args(field.type)):
            for meta in getattr(part, "__metadata__", ()):
                if meta.extra is not None:
                    kind = getattr(part.__origin__, "__origin__", part.__origin__)
                    yield SamplingOption(field.name, kind, meta, meta.extra["names"], field.default is UNSET)


#: The sampling options, by name.
OPTIONS: Final = {one.name: one for one in _options()}
#: Those that a model's authors may recommend, in the model's `generation_config.json`.
RECOMMENDED: Final = tuple(one.name for one in OPTIONS.values() if one.is_recommended)
