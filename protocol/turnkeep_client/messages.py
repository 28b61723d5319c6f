"""Every message of protocol version 1 as a frozen msgspec Struct, with encoding and decoding.

Requests are decoded strictly: unknown fields are refused by name. Results, chunks and replies are decoded
openly: unknown types, finish reasons, codes and fields are kept, so an old client or worker never overlooks
the result of a newer worker. This module defines only the messages' shapes; the worker decides how a message
changes a session.
"""

from __future__ import annotations

import contextlib
from struct import unpack
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import force_setattr, replace

from .blocks import ContentError, text_of
from .errors import ERROR_CODES, RETRYABLE, AnswerNotParsedError, ErrorCode, InvalidMessageError
from .explain import explain
from .subjects import ID_PATTERN, ID_RULE

if TYPE_CHECKING:
    from collections.abc import Sequence

_T = TypeVar("_T")

VERSION: Final = 1
#: What clients may ask of a worker of this version; `$SRV.INFO` and the worker's log line `ready` name them.
FEATURES: Final = (
    "fork",
    "tools",
    "reasoning",
    "logprobs",
    "penalties",
    "count",
    "embed",
    "priority",
    "deadline",
    "pin",
    "forget",
    "sink_window",
    "paged",
    "response_format",
    "echo",
    "chat_template_kwargs",
    "other_model",
)

#: The options of a generate that a model's authors may recommend, in the model's `generation_config.json`.
RECOMMENDED: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

Id = Annotated[str, Meta(pattern=ID_PATTERN, description=ID_RULE)]
Position = Annotated[int, Meta(ge=0, le=2**53, description="tokens from the session's start")]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Text = Annotated[str, Meta(description="raw text, tokenised without the chat template")]
SpecialTokens = Annotated[
    bool,
    Meta(
        description="whether to parse special tokens that are spelled out; by default in text, and not in"
        " messages"
    ),
]
Deadline = Annotated[float, Meta(gt=0, le=31_536_000, description="seconds after the log stored the request")]
Priority = Annotated[int, Meta(ge=-10, le=10, description="among waiting requests, higher first")]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Tag = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]{1,64}$", description="1 to 64 printable characters")]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Function(Struct, frozen=True, forbid_unknown_fields=True):
    """The function that a tool call names, in OpenAI's shape."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tool call of an assistant message, in OpenAI's shape."""

    id: str
    type: Literal["function"] = "function"
    function: Function


class ToolFunction(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that a model may call; `parameters` is a JSON schema of an object."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool, in OpenAI's shape. The chat template gets it as it was sent, with its keys in their order."""

    type: Literal["function"] = "function"
    function: ToolFunction


class _ChosenFunction(Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedTool(Struct, frozen=True, forbid_unknown_fields=True):
    """The tool that an answer must call, in OpenAI's shape."""

    function: _ChosenFunction
    type: Literal["function"] = "function"


class Reasoning(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What becomes of an answer's reasoning. After `budget` tokens it is ended.

    Without `keep` it leaves the session when the next user message comes; the answer's text is then prefilled
    again. Some chat templates drop it by themselves.
    """

    keep: bool = True
    budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


Part = Annotated[
    dict[str, Any],
    Meta(description="with a type: a text has its text; a placeholder stands for images and the like"),
]


class Message(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """One chat message in OpenAI's shape; rendered by the model's chat template.

    The parts of a content are joined on construction, so `content` is a string, or null if an assistant only
    calls tools.
    """

    #: A decoded message as it was sent, which is how a request is encoded again.
    sent: ClassVar[dict[str, Any] | None] = None
    role: Role
    content: str | tuple[Part, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = ()
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.content, tuple):
            try:
                force_setattr(self, "content", text_of(self.content, "content", []))
            except ContentError as error:
                raise ValueError(f"has no valid {error.where}: {error}") from None
        if self.tool_calls is None:
            force_setattr(self, "tool_calls", ())
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("needs content; only an assistant message with tool_calls may have none")

    def as_sent(self) -> dict[str, Any]:
        """Return the message as a chat template wants it, with its keys in the order in which they were sent.

        A template may require the content that a message with only tool calls lacks.
        """
        return _in_order({"role": self.role, "content": "", **msgspec.to_builtins(self)}, self.sent)  # type: ignore[no-any-return]

    def of_keys(self, given: Any) -> Message:
        """Return the message, encoded with its keys in the order of those that were `given`."""
        force_setattr(self, "sent", _in_order(msgspec.to_builtins(self), given))
        return self


def _in_order(value: Any, given: Any) -> Any:
    """Return a value of JSON with the keys of its objects in the order of another one like it."""
    match value, given:
        case dict(), dict():
            names = dict.fromkeys((*given, *value))
            return {name: _in_order(value[name], given.get(name)) for name in names if name in value}
        case list() | tuple(), list() if len(value) == len(given):
            return [_in_order(*both) for both in zip(value, given, strict=True)]
    return value


#: What a `sink_window` or `paged` keeps where the `open` does not say it.
DEFAULT_SINK: Final = 4
DEFAULT_WINDOW: Final = 1024
DEFAULT_RESIDENT: Final = 4096

_MOST_TOKENS: Final = 2**31 - 1
# The bounds are checked after decoding, so that a refusal can give their reason.
_Span = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": _MOST_TOKENS})]


class CachePolicy(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which tokens keep their KV, and at what precision. A missing `policy` is the worker's default.

    `full` keeps all tokens. `sink_window` keeps the first `sink` tokens (4 by default) and the last `window`
    (1024); a token sees only these, the session may continue without end, and its KV has a fixed size.
    `paged` keeps all tokens on SSD and `resident` of them (4096) on the device: the first and the last ones,
    the spans `pin` (start, end), and the chunks that matter most to the current turn. An answer sees the
    tokens on the device; a prompt sees all tokens, read from SSD. With `kv_bits`, a worker whose KV has
    another precision refuses the session.
    """

    policy: Literal["full", "sink_window", "paged"] | None = None
    sink: _Span | None = None
    window: _Span | None = None
    resident: _Span | None = None
    pin: tuple[tuple[int, int], ...] | None = None
    kv_bits: Literal[4, 8] | None = None

    def __post_init__(self) -> None:
        for policy, names in (("sink_window", ("sink", "window")), ("paged", ("resident", "pin"))):
            given = [name for name in names if getattr(self, name) is not None]
            if given and self.policy != policy:
                raise ValueError(f"takes {' and '.join(given)} with the policy {policy} only")
        if self.sink is not None and not 1 <= self.sink <= _MOST_TOKENS:
            raise ValueError(
                f"needs a sink of 1 to {_MOST_TOKENS} tokens, not {self.sink}: attention rests on the first"
                " tokens, and without them in sight answers fall apart"
            )
        if self.window is not None and not 1 <= self.window <= _MOST_TOKENS:
            raise ValueError(f"needs a window of 1 to {_MOST_TOKENS} tokens, not {self.window}")
        if self.resident is not None and not 1 <= self.resident <= _MOST_TOKENS:
            raise ValueError(f"needs 1 to {_MOST_TOKENS} resident tokens, not {self.resident}")
        for start, end in self.pin or ():
            if not 0 <= start < end <= _MOST_TOKENS:
                raise ValueError(f"needs pins of a start and a larger end, from 0, not [{start}, {end}]")


class ForkPoint(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where a new session begins: with the first `position` tokens of another session of the tenant.

    Without `position`: with all tokens that the session has after its last result. With `expect_position`,
    only if it has that many then.
    """

    session: Id
    position: Position | None = None
    expect_position: Position | None = None


class _Request(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", omit_defaults=True
):
    id: Id
    expect_position: Position | None = None


class Open(_Request, frozen=True, tag="open"):
    """Start a session explicitly. Optional: the first append or generate starts it too.

    With `from` it is a fork: it begins with tokens of another session and keeps that session's cache policy.
    `tags` are names under which operators find it.
    """

    cache: CachePolicy = CachePolicy()
    from_: ForkPoint | None = msgspec.field(name="from", default=None)
    tags: Annotated[tuple[Tag, ...], Meta(max_length=16)] = ()

    def __post_init__(self) -> None:
        if self.from_ is not None and self.cache.policy is not None:
            raise ValueError("open takes from or a cache policy, not both: a fork keeps its parent's policy")


#: Variables that a template gets from the worker.
_OWN_VARIABLES: Final = ("messages", "tools", "add_generation_prompt")

Variables = Annotated[
    dict[str, Any],
    Meta(max_length=64, description="variables for the chat template, such as enable_thinking"),
]


class _Input(_Request, frozen=True):
    messages: tuple[Message, ...] | None = None
    text: Text | None = None
    tokens: tuple[TokenId, ...] | None = None
    special_tokens: SpecialTokens | None = None
    chat_template_kwargs: Variables | None = None
    deadline_s: Deadline | None = None
    priority: Priority = 0

    @property
    def num_inputs(self) -> int:
        """Count how many of `messages`, `text` and `tokens` are given."""
        return sum(part is not None for part in (self.messages, self.text, self.tokens))


Tools = Annotated[tuple[Tool, ...], Meta(max_length=512)]


def _check_rendering(tools: Tools, variables: dict[str, Any]) -> list[str]:
    """Check what a chat template gets besides messages; return the names of the tools."""
    if own := next((name for name in _OWN_VARIABLES if name in variables), None):
        raise ValueError(f"the request has {own} in chat_template_kwargs, which the template gets otherwise")
    # Those of a decoded request are objects: it may be copied.
    names = [tool["function"]["name"] if isinstance(tool, dict) else tool.function.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"the request has two tools of the name {twice}")
    return names


class Append(_Input, frozen=True, tag="append"):
    """Add exactly one of `messages`, `text`, `tokens` to the session and prefill it at once.

    `tools` and `chat_template_kwargs` are those of the session from then on, as in a generate.
    """

    tools: Tools | None = None

    def __post_init__(self) -> None:
        if self.num_inputs != 1:
            raise ValueError(f"append takes exactly one of messages, text, tokens; it has {self.num_inputs}")
        _check_rendering(self.tools or (), self.chat_template_kwargs or {})


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A JSON schema, in OpenAI's shape. `name` and `description` have no effect.

    A keyword that cannot be enforced is refused; with `strict` false it is ignored.
    """

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class _Format(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class JsonSchemaFormat(_Format, frozen=True, tag="json_schema"):
    """The answer is JSON that the schema describes, on one line."""

    json_schema: JsonSchema


class JsonObjectFormat(_Format, frozen=True, tag="json_object"):
    """The answer is a JSON object, on one line."""


class RegexFormat(_Format, frozen=True, tag="regex"):
    """The whole answer matches a regular expression, in the syntax of Rust's regex crate."""

    regex: Annotated[str, Meta(min_length=1)]


class LarkFormat(_Format, frozen=True, tag="lark"):
    """The answer follows a grammar in llguidance's variant of Lark."""

    grammar: Annotated[str, Meta(min_length=1)]


class ChoiceFormat(_Format, frozen=True, tag="choice"):
    """The answer is one of some texts."""

    choices: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1, max_length=4096)]


class TextFormat(_Format, frozen=True, tag="text"):
    """The answer is any text, as without a format."""


ResponseFormat = JsonSchemaFormat | JsonObjectFormat | RegexFormat | LarkFormat | ChoiceFormat | TextFormat


class Generate(_Input, frozen=True, tag="generate"):
    """Sample tokens, after appending at most one of `messages`, `text`, `tokens`.

    `logit_bias` (added to the logits of token ids), penalties, temperature, `top_k`, `top_p` and `min_p`
    apply in this order. A temperature of 0 takes the most likely token; `top_k` 0 and `top_p` 1 are off. The
    `repetition_penalty` is for the answer's tokens and the session's tokens; under `sink_window` only for the
    session's tokens that the model sees when the answer begins. `presence_penalty` and `frequency_penalty`
    are for the answer's tokens, as in OpenAI's API. A missing seed is derived from the request, so an
    interrupted answer continues with the same tokens.

    The model's end tokens are not drawn before the answer has `min_tokens` tokens; with `ignore_eos` they do
    not end it. With `logprobs`, each token of the answer has the logarithm of its probability by the model
    itself, before everything above, and the `top_logprobs` likeliest tokens. `echo` says the same of each
    token that the request adds before its answer; only with `echo` may `max_tokens` be 0. `raw` leaves out
    the assistant header that the chat template would add after messages. The answer, from its first token or
    the end of its reasoning on, follows the `response_format`; then it ends, even before `min_tokens`.

    `prefix` is the beginning of the answer, given by the client: it belongs to the prompt, and to the answer
    in later turns. With `own_sampling`, options that the request leaves out are those that the model's
    authors recommend (`generation_config.json`).

    `tools` stay those of the session until a request gives others, or none (`[]`). `tool_choice` says whether
    the answer may call them (`auto`), must not (`none`), must (`required`), or must call the one that it
    names. Without `parallel_tool_calls` the answer ends with its first call. `chat_template_kwargs` stay
    those of the session in the same way (`{}`: none).
    """

    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 256
    prefix: Annotated[str, Meta(description="the answer's first text, given")] = ""
    own_sampling: bool = False
    tools: Tools | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    temperature: Annotated[float, Meta(ge=0, le=100)] | UnsetType = UNSET
    top_p: Annotated[float, Meta(gt=0, le=1)] | UnsetType = UNSET
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | UnsetType = UNSET
    min_p: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | UnsetType = UNSET
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[Annotated[int, Meta(ge=0, le=2**31 - 1)], Bias], Meta(max_length=1024)] = {}
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0
    echo: bool = False
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[tuple[Stop, ...], Meta(max_length=16)] | Stop = ()
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
            raise ValueError("generate takes top_logprobs with logprobs only: set logprobs to true")
        if not self.max_tokens and not self.echo:
            raise ValueError("generate takes max_tokens 0 with echo only: an answer has a token at least")
        names = _check_rendering(self.tools or (), self.chat_template_kwargs or {})
        if isinstance(self.tool_choice, NamedTool) and self.tools is not None:
            chosen = self.tool_choice.function.name
            if chosen not in names:
                raise ValueError(f"generate has a tool_choice of {chosen}, which is none of its tools")
        if self.ignore_eos and not isinstance(self.response_format, TextFormat | None):
            raise ValueError(
                "generate takes ignore_eos without a response_format only:"
                " such an answer ends when it is whole"
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"generate needs min_tokens of at most max_tokens ({self.max_tokens}), not {self.min_tokens}"
            )


class Rewind(_Request, frozen=True, tag="rewind"):
    """Forget every token from `position` on."""

    position: Position


class Close(_Request, frozen=True, tag="close"):
    """End the session. Only an `open` can use its name again; after some days it is removed from the log.

    `forget` removes the session's content at once: from the worker's disk, except prefixes that other
    sessions or a pin share, and from the log, except the close and its result. Snapshots of tokens that the
    session no longer had, after a rewind or a cancelled request, stay on the disk until they are evicted.
    """

    forget: bool = False


Request = Open | Append | Generate | Rewind | Close


class _Result(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    id: str
    seq: int
    position: int
    repeat_of: int | None = None


class SessionCache(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The cache policy of a session.

    Under `sink_window` it keeps the first `sink` tokens and the last `window`. Under `paged`, `resident`
    tokens are on the device, always including the spans `pin`.
    """

    policy: str
    sink: int | None = None
    window: int | None = None
    resident: int | None = None
    pin: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        """Name the policy with its numbers."""
        if self.resident is not None:
            pins = "".join(f", always {start}-{end}" for start, end in self.pin)
            return f"{self.policy} ({self.resident} tokens on the device{pins})"
        if self.sink is None or self.window is None:
            return self.policy
        return f"{self.policy} (the first {self.sink} tokens and the last {self.window})"


class Model(Struct, frozen=True, kw_only=True):
    """A model by its name, and by digests of its weights and of its tokenizer, as hex."""

    name: str
    weights: str = ""
    tokenizer: str = ""


class Change(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request did to the session's tokens: so workers read a log without a model.

    The first `kept` tokens stay; behind them come those of the `input`, then the answer's. `input` is base64
    of the ids as LEB128 numbers; if it is long, other messages of the log have it, which the result's header
    `Turnkeep-Parts` names. If the session was tokenised anew for another tokenizer, the first `raw` tokens
    are raw content. With `holds_answer`, the input ends with the answer: the result's tokens are another
    tokenizer's.
    """

    kept: int
    input: str = ""
    raw: int = 0
    holds_answer: bool = False


class _Bounded(_Result, frozen=True, kw_only=True):
    """The fields `cache` and `visible_from`, set if the session's policy is not `full`.

    The model sees all tokens from the position `visible_from` on. Of the earlier tokens it sees only the
    sinks, or under `paged` only those on the device.
    """

    cache: SessionCache | None = None
    visible_from: int | None = None


class Parent(Struct, frozen=True, kw_only=True):
    """The session that a fork was made from, and the number of tokens that the fork took from it."""

    session: str
    position: int


class Opened(_Bounded, frozen=True, tag="opened"):
    """Answer to `open`. `cache` is the session's policy; it is left out if the policy is `full`.

    A fork has a `parent`, and `position` counts the tokens that it took from it; `model` is its parent's.
    """

    model: Model | None = None
    parent: Parent | None = None
    tags: tuple[str, ...] = ()


class Rewound(_Bounded, frozen=True, tag="rewound"):
    """Answer to `rewind`."""


class Closed(_Result, frozen=True, tag="closed"):
    """Answer to `close`; `position` is the session's last one.

    After `forget`, `forgotten` counts the removed snapshots and `removed_entries` the entries removed from
    the log. `settled` is false if some of the session's own tokens may be left on the disk: the disk did not
    answer in time, a file could not be removed, another session's turn uses a snapshot, there are
    snapshots that a worker cannot read, or another worker did not answer. It says nothing of workers that do
    not run. Tokens that another open session has too are not its own.
    """

    forgotten: int | None = None
    removed_entries: int | None = None
    settled: bool = True


class _Turned(_Bounded, frozen=True, kw_only=True):
    """What a turn did to the tokens, and with which `model`.

    `previous_model` is that of the session's turn before, if it was another one.
    """

    change: Change | None = None
    model: Model | None = None
    previous_model: Model | None = None
    rewritten_from: int | None = None


class Appended(_Turned, frozen=True, tag="appended"):
    """Answer to `append`; `tokens = cached_tokens + prefilled_tokens`: all session tokens but the last.

    The following generate runs the last token, whose logits give the answer's first token. After an empty
    append the counts are zero. `kv_live_bytes` is the size of the KV that the next token sees; under `paged`
    it includes the sketches (2-bit copies of the keys) of all tokens. `rewritten_from` is set if the chat
    template changed earlier text, or the model has another tokenizer than the one before: the tokens from
    that position on were replaced and prefilled again.
    `warnings` are as in a `Generated`.
    """

    tokens: int
    cached_tokens: int
    prefilled_tokens: int
    kv_live_bytes: int
    seconds: float
    warnings: tuple[str, ...] = ()


_OPEN: Final = "later versions have other values too"
FinishReason = Literal[
    "stop",
    "length",
    "cancelled",
    "expired",
    "tool_calls",
    "tool_calls_malformed",
    "model_changed",
    "given_up",
]
#: The finish reasons of answers that were ended from outside: by their client, a deadline, or their worker.
STOPPED: Final = frozenset({"cancelled", "expired", "model_changed", "given_up"})
_OpenReason = Annotated[str, Meta(description=_OPEN, examples=list(get_args(FinishReason)))]
_OpenCode = Annotated[str, Meta(description=_OPEN, examples=list(ERROR_CODES))]


class Usage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of one generate: `prompt_tokens = cached_tokens + prefilled_tokens`.

    `reasoning_tokens` of the `completion_tokens` are reasoning.
    """

    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


class Seconds(Struct, frozen=True, kw_only=True):
    """Times of one generate: in the queue, in prefill, to the first token, total."""

    queued: float
    prefill: float
    first_token: float
    total: float


class LikelyToken(Struct, frozen=True, omit_defaults=True):
    """A token and the logarithm of its probability.

    `token` is its text. `bytes` are its bytes if these are not whole characters.
    """

    id: int
    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None


class TokenLogprob(LikelyToken, frozen=True, omit_defaults=True):
    """One token of an answer. `top` are the `top_logprobs` likeliest tokens in its place, likeliest first."""

    top: tuple[LikelyToken, ...] = ()


class PromptToken(Struct, frozen=True, omit_defaults=True):
    """One token of a prompt, as `TokenLogprob` has it of an answer's.

    `logprob` is null for the first token of a session.
    """

    id: int
    token: str
    logprob: float | None
    bytes: tuple[int, ...] | None = None
    top: tuple[LikelyToken, ...] = ()


class CalledFunction(Struct, frozen=True):
    """The function of a tool call; `arguments` is JSON as text."""

    name: str
    arguments: str


class Called(Struct, frozen=True):
    """One tool call of an answer, in OpenAI's shape."""

    id: str
    function: CalledFunction
    type: str = "function"


class Generated(_Turned, frozen=True, tag="generated"):
    """Answer to `generate`. `tokens` are all ids that were added. `text` leaves out the stop string (`stop`).

    With `logprobs`, the field of that name has an item for each token; with `echo`, `prompt_logprobs` for
    each token that the request added before them. `reasoning` and `tool_calls` are not in the text. A call of
    no offered tool, or that does not fit its schema, or cannot be parsed, is in the text; an answer with no
    other call then has the `finish_reason` `tool_calls_malformed`. `warnings` say what of the request had no
    effect, or was told to the model in another form: placeholders, and messages as the chat template renders
    them. `prefix_tokens` is how many of the prompt's tokens, its last ones, are the request's `prefix`;
    `resumed_tokens` is how many of the answer's an earlier worker had published. An answer that another model
    had begun ends as it was streamed, with the `finish_reason` `model_changed`.
    One that the worker failed to complete does so with `given_up`; then `warnings` say why.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: _OpenReason
    usage: Usage
    seconds: Seconds
    kv_live_bytes: int
    stop: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[PromptToken, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[Called, ...] = ()
    warnings: tuple[str, ...] = ()
    prefix_tokens: int = 0
    resumed_tokens: int = 0

    def parsed(self, kind: type[_T]) -> _T:
        """Parse the text as JSON of a type: one that msgspec knows, such as `dict`, or a pydantic model.

        Raises `AnswerNotParsedError`.
        """
        if self.finish_reason != "stop":
            raise AnswerNotParsedError(
                f"the answer is not whole: its finish_reason is {self.finish_reason!r} after"
                f" {self.usage.completion_tokens} tokens"
            )
        read = getattr(kind, "model_validate_json", None)
        try:
            found: _T = read(self.text) if read else msgspec.json.decode(self.text, type=kind)
        except ValueError as error:  # of msgspec and of pydantic
            raise AnswerNotParsedError(
                f"the answer is no {getattr(kind, '__name__', kind)}: {error}; it begins {self.text[:80]!r}"
            ) from error
        return found


class Failed(Struct, frozen=True, kw_only=True, tag_field="type", tag="failed", omit_defaults=True):
    """Answer to a request that changed nothing. `id` is null if the body has no valid one."""

    id: str | None
    code: _OpenCode
    message: str
    retryable: bool
    seq: int | None = None
    position: int | None = None
    repeat_of: int | None = None


def failure(
    request_id: str | None,
    code: ErrorCode,
    message: str,
    *,
    seq: int | None = None,
    position: int | None = None,
) -> Failed:
    """Build a `failed`; the code decides `retryable`."""
    retryable = code in RETRYABLE
    return Failed(id=request_id, code=code, message=message, retryable=retryable, seq=seq, position=position)


class DeadLetter(Struct, frozen=True, kw_only=True, tag_field="type", tag="dead"):
    """Why workers gave up the request at sequence `seq`. Stored on the session's subject `dead`."""

    seq: int
    id: str | None
    request: str
    position: int
    attempts: int
    reason: str
    worker: str
    model: str


class UnknownResult(Struct, frozen=True, kw_only=True):
    """A result whose type or shape this version does not know; `body` is its JSON."""

    type: str
    seq: int
    id: str | None = None
    position: int | None = None
    repeat_of: int | None = None
    body: bytes = b""


KnownResult = Opened | Appended | Generated | Rewound | Closed | Failed
Result = KnownResult | UnknownResult


class CallPart(Struct, frozen=True, omit_defaults=True):
    """A part of the tool call number `index`, from 0: `id` and `name` once, then text of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Chunk(Struct, frozen=True, omit_defaults=True):
    """A part of an answer: some of its tokens, and what is said of them; `i` is the index of the first.

    `text` has only whole characters. `logprobs` has an item for each token, if the request asks for them.
    `reasoning` and `tool_calls` are not in the text; a call is told when it is complete. The first chunk has
    the `warnings` of the result.

    `seq` is the generate's stream sequence, or that of the one it repeats: ignore chunks with another `seq`.
    """

    i: int
    tokens: tuple[int, ...]
    text: str
    seq: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[CallPart, ...] = ()
    warnings: tuple[str, ...] = ()


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Join consecutive chunks of one answer; at least one."""
    return replace(
        chunks[0],
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        text="".join(chunk.text for chunk in chunks),
        logprobs=tuple(one for chunk in chunks for one in chunk.logprobs),
        reasoning="".join(chunk.reasoning for chunk in chunks),
        tool_calls=tuple(one for chunk in chunks for one in chunk.tool_calls),
    )


class InfoRequest(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="info", omit_defaults=True
):
    """Ask for a session's state (on `ctl`). The answer names `limit` waiting requests after the first `skip`.

    With `snapshot` the answer also names the last stored snapshot of the session's KV, and its pins.
    """

    skip: Annotated[int, Meta(ge=0, le=2**53)] = 0
    limit: Annotated[int, Meta(ge=0, le=1000)] = 100
    snapshot: bool = False


class MetricsRequest(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="metrics"):
    """Ask for the worker's metrics (on the `ctl` of any session, which need not exist)."""


class CancelRequest(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="cancel"):
    """Stop a waiting or running request of the session (on `ctl`)."""

    id: Id


class PinRequest(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="pin", omit_defaults=True
):
    """Keep the KV of the session's first `position` tokens on disk until `unpin` (on `ctl`).

    Without a position: all tokens so far. The pin belongs to the tenant and the prefix, not to the session:
    it outlives session and worker, and serves every session with the same prefix.
    """

    position: Annotated[int, Meta(ge=1, le=2**53, description="tokens from the session's start")] | None = (
        None
    )


class UnpinRequest(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="unpin", omit_defaults=True
):
    """Unpin all pinned prefixes of the session, or the one with `position` tokens (on `ctl`)."""

    position: Annotated[int, Meta(ge=1, le=2**53, description="tokens from the session's start")] | None = (
        None
    )


class CountRequest(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="count", omit_defaults=True
):
    """Count the tokens that a generate with this input would add; nothing runs (on `ctl`).

    Of a session that does not exist: the tokens that it would begin with. Other `tools` than the session's
    are counted as a generate would add them.
    """

    messages: tuple[Message, ...] | None = None
    text: Text | None = None
    tokens: tuple[TokenId, ...] | None = None
    special_tokens: SpecialTokens | None = None
    raw: bool = False
    tools: Tools | None = None
    chat_template_kwargs: Variables | None = None


class EmbedRequest(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="embed", omit_defaults=True
):
    """Make a vector of each of the `inputs`, texts or token ids (on `ctl`, of any session's name).

    Vectors are cut to `dimensions` numbers. Nothing of this is in the log.
    """

    inputs: Annotated[tuple[Text | tuple[TokenId, ...], ...], Meta(min_length=1, max_length=256)]
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


ControlRequest = (
    InfoRequest | MetricsRequest | CancelRequest | PinRequest | UnpinRequest | CountRequest | EmbedRequest
)


class Cancelled(Struct, frozen=True, kw_only=True, tag_field="type", tag="cancelled"):
    """Answer to `cancel`: the state of the request when it was cancelled."""

    id: str
    was: Annotated[str, Meta(description=_OPEN, examples=["waiting", "running"])]


class Pinned(Struct, frozen=True, kw_only=True, tag_field="type", tag="pinned"):
    """Answer to `pin`. `stored_tokens` of the `tokens` are on disk or being written; they take `size_bytes`.

    `pinned_bytes` is the size of all pins in the worker's cache. `noted`: whether the pin itself is on disk.
    """

    tokens: int
    stored_tokens: int
    size_bytes: int
    pinned_bytes: int
    noted: bool


class Unpinned(Struct, frozen=True, kw_only=True, tag_field="type", tag="unpinned"):
    """Answer to `unpin`: the lengths in tokens of the unpinned prefixes."""

    prefixes: tuple[int, ...]
    pinned_bytes: int


class Counted(Struct, frozen=True, kw_only=True, tag_field="type", tag="counted", omit_defaults=True):
    """Answer to `count`: the session would have `position` tokens, the last `tokens` of them new.

    `rewritten_from` is set if the chat template would change earlier text: then `tokens` are those from there
    on.
    """

    tokens: int
    position: int
    rewritten_from: int | None = None


class Embedded(Struct, frozen=True, kw_only=True, tag_field="type", tag="embedded"):
    """Answer to `embed`: the vectors of the inputs, each of length 1, and how many tokens each input has.

    A vector is base64 of 32-bit floats, little-endian.
    """

    vectors: tuple[bytes, ...]
    tokens: tuple[int, ...]
    model: str

    @property
    def floats(self) -> list[list[float]]:
        """The vectors as lists of numbers."""
        return [list(unpack(f"<{len(one) // 4}f", one)) for one in self.vectors]


class Histogram(Struct, frozen=True):
    """Counts by upper bound; `counts` has one more entry than `bounds`, for values above the last."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    count: int


class SnapshotCounters(Struct, frozen=True, kw_only=True):
    """Counters of the snapshots; two sums hold at all times.

    `accepted = durable + sum(dropped) + failed + cancelled + in_flight` counts snapshots. `free + pinned +
    evictable = capacity` counts bytes. `pinned` bytes must not be evicted now: pinned prefixes (`kept`) and
    blocks that are being written or loaded. `rejected` counts files that failed a check, `timed_out` loads
    that the disk did not answer in time. Of the remote tier: bytes put there and fetched, snapshots that were
    not put, and calls that failed.
    """

    accepted: int = 0
    durable: int = 0
    dropped: dict[str, int] = {}
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    in_flight_bytes: int = 0
    written_bytes: int = 0
    restored_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    evicted: int = 0
    rejected: int = 0
    timed_out: int = 0
    capacity_bytes: int = 0
    free_bytes: int = 0
    pinned_bytes: int = 0
    evictable_bytes: int = 0
    kept_bytes: int = 0
    remote_put_bytes: int = 0
    remote_fetched_bytes: int = 0
    remote_dropped: int = 0
    remote_failed: int = 0


#: The name of tenants that have no figures of their own; no tenant can have it.
OTHER_TENANTS: Final = "_other"

TokenKind = Literal["prefilled", "cached", "restored", "generated"]


class TenantFigures(Struct, frozen=True, kw_only=True):
    """A worker's figures by tenant, empty unless its setting `metrics_tenants` asks for them.

    The first tenants that a worker sees have their own figures; all others share the name `_other`.
    `requests` counts results by outcome, which is `ok` or an error's code; `sessions` counts sessions with
    waiting or running requests. `cached_tokens` counts tokens whose KV was reused, `restored_tokens` the
    cached tokens whose KV was read from disk.
    """

    requests: dict[str, dict[str, int]] = {}
    sessions: dict[str, int] = {}
    prefilled_tokens: dict[str, int] = {}
    cached_tokens: dict[str, int] = {}
    restored_tokens: dict[str, int] = {}
    generated_tokens: dict[str, int] = {}


#: The device of a model that is not loaded now: its first request loads it.
UNLOADED: Final = "unloaded"


class Metrics(Struct, frozen=True, kw_only=True, tag_field="type", tag="metrics"):
    """A worker's state, published every few seconds. Times are in seconds, sizes in bytes.

    `waiting` counts the sessions that wait in the worker; `waiting_for_memory` of them wait only for device
    memory. `returned` counts requests handed back to the log's consumer because their tenant has its maximum
    of sessions at work. `ignored` counts, by kind, entries and chunks that no worker can have published.
    `kv_layers` names the layers of each kind of KV. `sampling` has the options of a generate that the model's
    authors recommend; the worker applies none by itself. `others` names the other workers of the prefix that
    run. `context_tokens` is the most that a session with all
    of its KV may hold. A `device` of `unloaded` says that the first request loads the model.

    `interval_s` is the time until the next message; `max_message_bytes` is the size of the largest request
    that the log takes. `queue_time` and `request_duration` count the appends and generates from the moment
    when the log stored them, by the server's clock: `queue_time` until they began to run, `request_duration`
    until the results of successful ones were stored. Workers of earlier versions send none of these.
    `decoding_s` adds up the steps that decoded answers, so that tokens a second can leave out
    idle time. `by_tenant` is sent only on the metrics subject, never in an answer to a control request.
    """

    worker: str
    version: str
    model: str
    device: str
    others: tuple[str, ...] = ()
    uptime_s: float
    requests: dict[str, dict[str, int]]
    waiting: int
    waiting_for_memory: int
    returned: int = 0
    log_bytes: int = 0
    log_max_bytes: int = 0
    max_message_bytes: int = 0
    ignored: dict[str, int] = {}
    running: int
    sessions: int
    sessions_by_policy: dict[str, int] = {}
    resident_sessions: int
    prefilled_tokens: int
    cached_tokens: int
    generated_tokens: int
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    recalled_tokens: int = 0
    evicted_tokens: int = 0
    decoding_s: float = 0.0
    time_to_first_token: Histogram
    time_per_output_token: Histogram
    batch_size: Histogram
    event_loop_lag: Histogram
    interval_s: float = 5.0
    queue_time: Histogram | UnsetType = UNSET
    request_duration: Histogram | UnsetType = UNSET
    resident_kv_bytes: int
    context_tokens: int = 0
    kv_layers: dict[str, str] = {}
    sampling: dict[str, int | float] = {}
    max_memory_bytes: int
    device_memory_bytes: int = 0
    mlx_active_bytes: int
    mlx_peak_bytes: int
    estimated_scratch_bytes: int = 0
    measured_scratch_bytes: int = 0
    process_bytes: int
    snapshots: SnapshotCounters
    by_tenant: TenantFigures = TenantFigures()


class GatewayMetrics(Struct, frozen=True, kw_only=True, tag_field="type", tag="gateway"):
    """What an HTTP gateway has done since its start, published every `interval_s` seconds.

    `requests` counts HTTP requests by status, `answers` by how their conversation was found (`begun`,
    `continued`, `forked`, `repeated`), `tokens` by kind (`reused`, `prefilled`, `generated`). `resumed`
    answers outlived a worker. Of the moment are `running`, the requests that are being answered, and
    `conversations`, the ones that are known.
    """

    gateway: str
    version: str
    uptime_s: float
    interval_s: float = 5.0
    running: int
    conversations: int
    requests: dict[str, int]
    answers: dict[str, int]
    tokens: dict[str, int]
    resumed: int


class Progress(Struct, frozen=True, kw_only=True):
    """Progress of the running request: `cached_tokens` of its `context_tokens` have KV by now."""

    cached_tokens: int
    context_tokens: int
    generated_tokens: int


class SessionInfo(Struct, frozen=True, kw_only=True, tag_field="type", tag="session"):
    """Answer to `info`. `waiting` names the requested part of the `num_waiting` waiting requests.

    If `policy` is not `full`, `cache` has the policy's numbers. `visible_tokens` tokens keep their KV, at
    most `capacity_tokens`, and the model sees all tokens from the position `visible_from` on. `snapshot` is
    the name of the last stored snapshot, as in `turnkeep cache ls`, and `pinned` has the lengths in tokens of
    the pinned prefixes, if the request asked for the snapshot. A fork has a `parent`.
    """

    tenant: str
    session: str
    position: int
    state: Annotated[str, Meta(description=_OPEN, examples=["idle", "waiting", "running"])]
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
    pinned: tuple[int, ...] | UnsetType = UNSET
    parent: Parent | UnsetType = UNSET
    tags: tuple[str, ...] | UnsetType = UNSET
    answered_by: Model | UnsetType = UNSET
    model: str
    worker: Metrics


ControlReply = SessionInfo | Metrics | Cancelled | Pinned | Unpinned | Counted | Embedded | Failed


class _Named(Struct):
    id: Id | None = None


class _Sent(Struct):
    """What of a request a chat template gets as it was sent."""

    tools: tuple[dict[str, Any], ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None


_REQUEST: Final[msgspec.json.Decoder[Request]] = msgspec.json.Decoder(Request)
_RESULT: Final[msgspec.json.Decoder[KnownResult]] = msgspec.json.Decoder(KnownResult)
_UNKNOWN_RESULT: Final = msgspec.json.Decoder(UnknownResult)
_CHUNK: Final = msgspec.json.Decoder(Chunk)
_CONTROL: Final[msgspec.json.Decoder[ControlRequest]] = msgspec.json.Decoder(ControlRequest)
_CONTROL_REPLY: Final[msgspec.json.Decoder[ControlReply]] = msgspec.json.Decoder(ControlReply)
_METRICS: Final = msgspec.json.Decoder(Metrics)
_GATEWAY_METRICS: Final = msgspec.json.Decoder(GatewayMetrics)
#: The values stay raw, so only the request decoder parses them, at any nesting.
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAMED: Final = msgspec.json.Decoder(_Named)
_SENT: Final = msgspec.json.Decoder(_Sent)
_ENCODER: Final = msgspec.json.Encoder()


def encode(message: Struct | dict[str, Any]) -> bytes:
    """Encode as JSON; raises `InvalidMessageError` for values that JSON cannot hold."""
    if isinstance(message, UnknownResult):
        return message.body
    if isinstance(message, Append | Generate | CountRequest) and message.messages:
        message = replace(message, messages=[one.sent or one for one in message.messages])
    try:
        return _ENCODER.encode(message)
    except UnicodeEncodeError:
        raise InvalidMessageError(
            "text must be whole Unicode characters, not half a surrogate pair"
        ) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidMessageError(f"the message cannot be written as JSON: {error}") from None


def decode_request(body: bytes) -> Request:
    """Decode a body from `in`; raises `InvalidMessageError` with a sentence for the sender.

    The request's `tools` are checked, but stay objects whose keys have the order that the sender chose; its
    messages have it in `sent`.
    """
    return _as_sent(_decode(_REQUEST, body, "a request"), body)


def decode_answered(body: bytes) -> Request:
    """Decode a request of the log that has its result; raises `InvalidMessageError`.

    An open of an earlier version may have chosen a `prefill` in its `cache`, which is left out.
    """
    try:
        return decode_request(body)
    except InvalidMessageError:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            match msgspec.json.decode(body):
                case {"type": "open", "cache": {"prefill": "exact" | "resident"} as cache} as fields:
                    del cache["prefill"]
                    return decode_request(encode(fields))
        raise


def decode_control(body: bytes) -> ControlRequest:
    """Decode a body from `ctl`; raises `InvalidMessageError`."""
    return _as_sent(_decode(_CONTROL, body, "a control request"), body)


def decode_ask(body: bytes, request_id: str) -> Generate:
    """Decode a body from `ask`: a generate whose `type` and `id` may be left out.

    A missing id becomes `request_id`. Raises `InvalidMessageError`.
    """
    fields = _decode(_FIELDS, body, "a generate")
    fields.setdefault("type", msgspec.Raw(b'"generate"'))
    fields.setdefault("id", msgspec.Raw(_ENCODER.encode(request_id)))
    try:
        request = decode_request(_ENCODER.encode(fields))
    except InvalidMessageError as error:
        raise InvalidMessageError(str(error), request_id=_named(body)) from None  # no id of the worker's
    if not isinstance(request, Generate):
        kind = type(request).__struct_config__.tag
        raise InvalidMessageError(
            f"ask takes a generate, not {kind}: publish that on the session's in", request_id=request.id
        )
    return request


def decode_result(body: bytes) -> Result:
    """Decode a body from `out`; raises `InvalidMessageError` if it has no `type` or no `seq`.

    If this version does not know the type or shape of a newer worker's result, returns an `UnknownResult`.
    """
    try:
        return _decode(_RESULT, body, "a result")
    except InvalidMessageError:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return replace(_UNKNOWN_RESULT.decode(body), body=body)
        raise


def encode_repeat(body: bytes, *, seq: int, repeat_of: int) -> bytes:
    """Encode an earlier result `body` as the answer to a repeat of its request at `seq`; keeps all fields."""
    fields = _decode(_FIELDS, body, "a result")
    numbers = {"seq": seq, "repeat_of": repeat_of}
    return _ENCODER.encode(fields | {name: msgspec.Raw(str(number)) for name, number in numbers.items()})


def decode_chunk(body: bytes) -> Chunk:
    """Decode one token chunk; raises `InvalidMessageError`."""
    return _decode(_CHUNK, body, "a chunk")


def decode_control_reply(body: bytes) -> ControlReply:
    """Decode the answer to a control request; raises `InvalidMessageError`."""
    return _decode(_CONTROL_REPLY, body, "a control reply")


def decode_metrics(body: bytes) -> Metrics:
    """Decode a metrics message; raises `InvalidMessageError`."""
    return _decode(_METRICS, body, "a metrics message")


def decode_gateway_metrics(body: bytes) -> GatewayMetrics:
    """Decode a gateway's metrics message; raises `InvalidMessageError`."""
    return _decode(_GATEWAY_METRICS, body, "a gateway's metrics message")


def _as_sent(request: _T, body: bytes) -> _T:
    """Give a decoded request the tools as they were sent: a `Tool` would put their keys in its own order.

    Its messages note how they were sent.
    """
    if isinstance(request, Append | Generate | CountRequest) and (request.tools or request.messages):
        sent = _SENT.decode(body)
        if request.tools:
            force_setattr(request, "tools", sent.tools)
        for message, one in zip(request.messages or (), sent.messages or (), strict=True):
            force_setattr(message, "sent", one)
    return request


def _decode(decoder: msgspec.json.Decoder[_T], body: bytes, what: str) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = explain(error, body, decoder.type, what)
        raise InvalidMessageError(text, request_id=_named(body)) from None


def _named(body: bytes) -> str | None:
    """Return the id in an otherwise invalid body; None if there is none."""
    try:
        return _NAMED.decode(body).id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
