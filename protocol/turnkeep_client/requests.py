"""Requests on `in`, decoded strictly, and their parts; `sampling` has generates. Import from `messages`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from .content_blocks import ContentError, content_of, with_digests
from .errors import FieldError
from .subjects import ID_PATTERN, ID_RULE

Id = Annotated[str, Meta(pattern=ID_PATTERN, description=ID_RULE)]
Position = Annotated[int, Meta(ge=0, le=2**53, description="tokens from the session's start")]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Text = Annotated[str, Meta(description="raw text, tokenised without the chat template")]
_SPELLED: Final = (
    "whether to parse special tokens that are spelled out; by default in text, and not in messages"
)
SpecialTokens = Annotated[bool, Meta(description=_SPELLED)]
Deadline = Annotated[float, Meta(gt=0, le=31_536_000, description="seconds after the log stored the request")]
Priority = Annotated[int, Meta(ge=-10, le=10, description="among waiting requests, higher first")]
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


TOOL_NAME_RULE: Final = "1 to 128 of the characters A-Z a-z 0-9 _ . -"


class ToolFunction(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that a model may call; `parameters` is a JSON schema of an object."""

    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9_.\-]{1,128}$",
            extra_json_schema={"description": TOOL_NAME_RULE},
        ),
    ]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool, in OpenAI's shape. The chat template gets it exactly as sent, with its keys in that order."""

    type: Literal["function"] = "function"
    function: ToolFunction


class _ChosenFunction(Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedTool(Struct, frozen=True, forbid_unknown_fields=True):
    """The tool that an answer must call, in OpenAI's shape."""

    function: _ChosenFunction
    type: Literal["function"] = "function"


class Reasoning(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How an answer's reasoning is limited and kept. After `budget` tokens the worker ends the reasoning.

    Without `keep` the next user message drops the reasoning from the session, and the answer's text is
    prefilled again. Some chat templates drop reasoning by themselves.
    """

    keep: bool = True
    budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


Part = Annotated[
    dict[str, Any],
    Meta(
        description="with a type: a text has its text; an image its file as base64 in data, or the file's"
        " SHA-256 in digest; a placeholder stands for others"
    ),
]


class Message(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """One chat message in OpenAI's shape; rendered by the model's chat template.

    A `content` of several parts is joined on construction, so it is then a string, or null if an assistant
    only calls tools. Only with images it stays a list of parts, in which each image has its digest.
    """

    #: The dict that was sent for a decoded message, but with images by their digests; encoding a request
    #: again writes this dict.
    sent: ClassVar[dict[str, Any] | None] = None
    #: The parts that were sent, but images by their digests; None without images.
    blocks: ClassVar[list[Any] | None] = None
    #: The files of the images that were sent with the message, by their digests.
    files: ClassVar[dict[str, bytes]] = {}
    role: Role
    content: str | tuple[Part, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = ()
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.content, tuple):
            try:
                files = dict[str, bytes]()
                blocks = with_digests(self.content, "content", files)
                force_setattr(self, "content", content_of(blocks, "content", []))
                if isinstance(self.content, tuple):
                    force_setattr(self, "files", files)
                    force_setattr(self, "blocks", blocks)
            except ContentError as error:
                raise FieldError(error.where, f"has no valid {error.where}: {error}") from None
        if self.tool_calls is None:
            force_setattr(self, "tool_calls", ())
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            why = "needs content; only an assistant message with tool_calls may have none"
            raise FieldError("content", why)

    def as_sent(self) -> dict[str, Any]:
        """Return the message as a dict for the chat template, with its keys in the order sent.

        A message with only tool calls gets an empty `content`, which a template may require.
        """
        return _in_order({"role": self.role, "content": "", **msgspec.to_builtins(self)}, self.sent)  # type: ignore[no-any-return]

    def of_keys(self, given: Any) -> Message:
        """Let `encode` write this message with its keys in the order of the dict `given`; return it."""
        force_setattr(self, "sent", _in_order(msgspec.to_builtins(self), given))
        return self


def _in_order(value: Any, given: Any) -> Any:
    """Return a JSON value whose objects have their keys in the order of the similar value `given`."""
    match value, given:
        case dict(), dict():
            names = dict.fromkeys((*given, *value))
            return {name: _in_order(value[name], given.get(name)) for name in names if name in value}
        case list() | tuple(), list() if len(value) == len(given):
            return [_in_order(*both) for both in zip(value, given, strict=True)]
    return value


#: Defaults of cache policies, in tokens.
DEFAULT_SINK: Final = 4
DEFAULT_WINDOW: Final = 1024
DEFAULT_RESIDENT: Final = 4096
#: By cache policy: the fields that it has, with their defaults.
POLICIES: Final[dict[str, dict[str, Any]]] = {
    "full": {},
    "sink_window": {"sink": DEFAULT_SINK, "window": DEFAULT_WINDOW},
    "paged": {"resident": DEFAULT_RESIDENT, "pin": ()},
}
_MOST_TOKENS: Final = 2**31 - 1
#: Fields that count tokens, and why they have bounds. `CachePolicy` checks them, as msgspec gives no reason.
_SPANS: Final = {
    "sink": ": attention rests on the first tokens, and without them in sight answers fall apart",
    "window": "",
    "resident": "",
}
_Span = Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": _MOST_TOKENS})]


class CachePolicy(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which tokens keep their KV. A missing `policy` is the worker's default.

    `full` keeps all tokens. `sink_window` keeps the first `sink` tokens (4 by default) and the last `window`
    (1024); a token sees only these, the session may continue without end, and its KV has a fixed size.
    `paged` keeps all tokens on SSD and `resident` of them (4096) on the device: the first and the last ones,
    the spans `pin` (start, end), and the chunks that matter most to the current turn. An answer sees the
    tokens on the device; a prompt sees all tokens, read from SSD.
    With `snapshots` `none`, the session's KV is never written to disk; `paged` cannot have it.
    """

    policy: Literal["full", "sink_window", "paged"] | None = None
    sink: _Span | None = None
    window: _Span | None = None
    resident: _Span | None = None
    pin: tuple[tuple[int, int], ...] | None = None
    snapshots: Literal["none"] | None = None

    def __post_init__(self) -> None:
        for policy, names in POLICIES.items():
            given = [name for name in names if getattr(self, name) is not None]
            if given and self.policy != policy:
                raise FieldError(given[0], f"takes {' and '.join(given)} with the policy {policy} only")
        for name, why in _SPANS.items():
            if (given := getattr(self, name)) is not None and not 1 <= given <= _MOST_TOKENS:
                raise FieldError(name, f"needs a {name} of 1 to {_MOST_TOKENS} tokens, not {given}{why}")
        for start, end in self.pin or ():
            if not 0 <= start < end <= _MOST_TOKENS:
                why = f"needs pins of a start and a larger end, from 0, not [{start}, {end}]"
                raise FieldError("pin", why)
        if self.policy == "paged" and self.snapshots is not None:
            why = "keeps the KV of a paged session on SSD: snapshots none needs another policy"
            raise FieldError("snapshots", why)


class ForkPoint(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where a fork begins: with the first `position` tokens of another session of the tenant.

    Without `position`: with all tokens that the session has after its last result. With `expect_position`,
    the fork is refused unless the session then has that many tokens.
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
        if self.from_ is not None and self.cache != CachePolicy():
            why = "open takes from or a cache policy, not both: a fork keeps its parent's policy"
            raise FieldError("cache.policy", why)


#: Variables that the worker itself passes to a chat template.
_OWN_VARIABLES: Final = ("messages", "tools", "add_generation_prompt")
Variables = Annotated[
    dict[str, Any],
    Meta(max_length=64, description="variables for the chat template, such as enable_thinking"),
]


class Input(_Request, frozen=True):
    """The fields that an append and a generate have in common."""

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


def check_rendering(tools: Tools, variables: dict[str, Any]) -> list[str]:
    """Check the tools and variables of a request for the chat template; return the tools' names.

    Raises `FieldError` for a variable that the worker passes itself, and for two tools of one name.
    """
    if own := next((name for name in _OWN_VARIABLES if name in variables), None):
        why = f"the request has {own} in chat_template_kwargs, which the template gets otherwise"
        raise FieldError("chat_template_kwargs", why)
    # A copy of a decoded request has its tools as dicts.
    names = [tool["function"]["name"] if isinstance(tool, dict) else tool.function.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise FieldError("tools", f"the request has two tools of the name {twice}")
    return names


class Append(Input, frozen=True, tag="append"):
    """Add exactly one of `messages`, `text`, `tokens` to the session and prefill it at once.

    `tools` and `chat_template_kwargs` become those of the session, as with a generate.
    """

    tools: Tools | None = None

    def __post_init__(self) -> None:
        if self.num_inputs != 1:
            raise ValueError(f"append takes exactly one of messages, text, tokens; it has {self.num_inputs}")
        check_rendering(self.tools or (), self.chat_template_kwargs or {})


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
    """The answer is JSON that fits the schema, on one line."""

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
    """The answer is one of the texts in `choices`."""

    choices: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1, max_length=4096)]


class TextFormat(_Format, frozen=True, tag="text"):
    """The answer is any text, as without a format."""


ResponseFormat = JsonSchemaFormat | JsonObjectFormat | RegexFormat | LarkFormat | ChoiceFormat | TextFormat


class Rewind(_Request, frozen=True, tag="rewind"):
    """Drop all tokens of the session from `position` on."""

    position: Position


class Close(_Request, frozen=True, tag="close"):
    """End the session. Only an `open` can use its name again; after some days it is removed from the log.

    `forget` removes the session's content, even if it is closed already: at once from the worker's disk,
    except prefixes that other sessions share, and soon from the log, except the close and its result.
    Snapshots of tokens that the session had before go too: those that a rewind or the chat template removed,
    those of a cancelled request, and those of closed sessions of this name that are still in the log.

    `cancel` also cancels the session's earlier appends and generates without a result; if no worker runs, the
    next worker cancels them before it continues one. With `cancel` or `forget`, even a session of which no
    request has run can be closed.
    """

    forget: bool = False
    cancel: bool = False
