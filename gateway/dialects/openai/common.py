"""Code that OpenAI's dialects share: sampling fields, usage, log probabilities, errors and events. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec import Struct

from gateway.form import Events
from gateway.images import Reading
from gateway.turn import ALL_THAT_FITS, WholeNumber, decoded, refused
from turnkeep_client.content_blocks import ContentWarning, printable
from turnkeep_client.messages import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gateway.turn import Fault
    from turnkeep_client.messages import Generated, LikelyToken, TokenLogprob

#: The number that means "not limited" or "not given" to other servers.
ANY: Final = -1
#: Fields that affect no answer on any server, and so need no warning.
_HARMLESS: Final = {
    *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "cache_control", "betas", "client_metadata"),
}
#: The most items of all lists in a request's messages, or in its tools: about a second of processor time.
MOST_ITEMS: Final = 100_000
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_R = TypeVar("_R", bound=Struct)

#: Most reasoning tokens, by effort; None is no limit.
_BUDGETS: Final = {
    **dict.fromkeys(("high", "xhigh", "max")),
    "medium": 2048,
    "low": 512,
    "minimal": 64,
    "none": 0,
}

#: OpenAI's `finish_reason` in place of reasons that OpenAI does not have.
_REASONS: Final = {
    "tool_calls_malformed": "stop",
    "cancelled": "stop",
    "expired": "length",
    "model_changed": "length",
    "given_up": "length",
}


class StreamOptions(Struct, frozen=True):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = False


#: How the protocol's types are written here: some clients write 2.0 for 2, and JSON has texts as keys.
_KINDS: Final = {int: WholeNumber, float: float, bool: bool, dict: dict[str, float], tuple: str | list[str]}
if TYPE_CHECKING:
    _Options = Struct
else:
    _Options = msgspec.defstruct(
        "_Options",
        [(one.name, _KINDS[one.kind] | None, None) for one in OPTIONS.values()],
        frozen=True,
        kw_only=True,
    )


class SamplingFields(_Options, frozen=True, kw_only=True):
    """The fields that the requests of several APIs share, with all sampling options of the protocol.

    Unknown fields are ignored, with a warning.
    """

    model: str = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: WholeNumber | None = None
    max_tokens: WholeNumber | None = None
    logit_bias: dict[str, float] | None = None
    response_format: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


def with_tokens(options: dict[str, Any], param: str) -> dict[str, Any]:
    """Return `options`; raise a `Fault` about the field `param` if they ask for an answer of no tokens."""
    if options["max_tokens"] < 1:
        raise refused(f"{param} must be 1 or more, not {options['max_tokens']}", param)
    return options


def sampling(asked: SamplingFields, max_tokens: int | None) -> dict[str, Any]:
    """Convert the shared fields to options of a generate request; `max_tokens` None or -1 means no limit.

    Raises `Fault` for an invalid `logit_bias`.
    """
    given = {name: getattr(asked, name) for name in OPTIONS}
    options = {name: _plain(value) for name, value in given.items() if value is not None}
    if options.get("seed") == ANY:
        del options["seed"]
    if "seed" in options:
        options["seed"] %= 2**62
    if options.get("top_k") == ANY:
        options["top_k"] = 0
    options["own_sampling"] = True
    is_all = max_tokens is None or max_tokens == ANY
    options["max_tokens"] = ALL_THAT_FITS if is_all else min(int(max_tokens or 0), ALL_THAT_FITS)
    if asked.logit_bias:
        try:
            options["logit_bias"] = {int(token): bias for token, bias in asked.logit_bias.items()}
        except ValueError:
            raise refused("the keys of logit_bias must be token ids", "logit_bias") from None
    if asked.chat_template_kwargs:
        options["chat_template_kwargs"] = asked.chat_template_kwargs
    if (form := asked.response_format) is not None and form != {"type": "text"}:
        options["response_format"] = _best_effort(form)
    return options


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, WholeNumber) else value


def _best_effort(form: Any) -> Any:
    """Return the response format with `strict: false` for a JSON schema, unless the client set `strict`."""
    match form:
        case {"type": "json_schema", "json_schema": dict() as given} if given.get("strict") is None:
            return {**form, "json_schema": {**given, "strict": False}}
    return form


def request(
    decoder: msgspec.json.Decoder[_R], body: bytes, without_effect: Iterable[str] = ()
) -> tuple[_R, Reading]:
    """Decode a request's body; return it, and a `Reading` with a warning for each field that has no effect.

    Such fields are unknown ones, and those in `without_effect`. Raises `Fault` for an invalid body, and for
    too many items.
    """
    asked = decoded(decoder, body)
    for name in ("messages", "input", "tools"):
        if _has_more_items(getattr(asked, name, None), MOST_ITEMS):
            raise refused(f"{name} has more than {MOST_ITEMS} messages, parts and other items", name)
    known = {*type(asked).__struct_fields__, *_HARMLESS} - {*without_effect}
    given = {name for name, value in decoded(_FIELDS, body).items() if bytes(value) != b"null"}
    return asked, Reading(ContentWarning(printable(name), "has no effect") for name in sorted(given - known))


def _has_more_items(given: Any, most: int) -> bool:
    """Whether a decoded value has more than `most` items, in lists at any depth."""
    num_items, waiting = 0, [given]
    while waiting and num_items <= most:
        match waiting.pop():
            case list() as items:
                num_items += len(items)
                waiting += items
            case dict() as fields:
                waiting += fields.values()
            case Struct() as one:
                waiting += msgspec.structs.astuple(one)
    return num_items > most


def reasoning(effort: str | None, where: str, warnings: list[ContentWarning]) -> dict[str, Any]:
    """Return the generate option `reasoning` for the effort in the field `where`; empty without a limit.

    An unknown effort gets a warning.
    """
    if effort is not None and effort not in _BUDGETS:
        what = f"{printable(effort)} has no effect; efforts are {', '.join(_BUDGETS)}"
        warnings.append(ContentWarning(where, what))
    budget = _BUDGETS.get(effort or "")
    return {} if budget is None else {"reasoning": {"budget": budget}}


def refuse(asked: Struct, names: Iterable[str]) -> None:
    """Raise `Fault` if a request has a value in one of the fields `names`, which are not supported."""
    for name in names:
        if getattr(asked, name) not in (None, False, "", [], {}):
            raise refused(f"{name} is not supported", name)


def finish_reason(result: Generated) -> str:
    """Return OpenAI's `finish_reason` for a result."""
    return _REASONS.get(result.finish_reason, result.finish_reason)


def usage(results: Iterable[Generated], num_prompts: int = 1) -> dict[str, Any]:
    """Add up the token counts of all answers; each of the `num_prompts` prompts counts once."""
    found = [result.usage for result in results]
    answers = len(found) // num_prompts
    of_prompts = [found[at : at + answers] for at in range(0, len(found), answers)]
    num_prompt = sum(max(one.prompt_tokens for one in some) for some in of_prompts)
    num_answers = sum(one.completion_tokens for one in found)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answers,
        "total_tokens": num_prompt + num_answers,
        "prompt_tokens_details": {
            "cached_tokens": sum(max(one.cached_tokens for one in some) for some in of_prompts)
        },
        "completion_tokens_details": {"reasoning_tokens": sum(one.reasoning_tokens for one in found)},
    }


def likelihoods(tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Return, in OpenAI's format, each token's log probability and those of the likeliest alternatives."""
    return [_likelihood(one) | {"top_logprobs": [*map(_likelihood, one.top)]} for one in tokens]


def _likelihood(token: LikelyToken) -> dict[str, Any]:
    written = token.token.encode() if token.bytes is None else token.bytes
    return {"token": token.token, "logprob": token.logprob, "bytes": list(written)}


def error(fault: Fault) -> dict[str, Any]:
    """Convert a `Fault` to the JSON of OpenAI's errors."""
    fields = {"message": fault.message, "type": fault.kind, "param": fault.param, "code": fault.code}
    return {"error": fields}


def event(body: dict[str, Any]) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class CompletionStream(Events):
    """Encodes the events that streams of chat and text completions share; each has the fields `head`."""

    #: A comment, which shows clients that the stream is alive. No blank line follows it: after an event with
    #: an id, the decoder of OpenAI's library for Python takes each blank line for the end of an empty event.
    heartbeat: Final = b": waiting\n"

    def __init__(self, head: dict[str, Any], *, include_usage: bool, num_prompts: int = 1) -> None:
        self.head = head
        self.num_prompts = num_prompts
        self.include_usage = include_usage

    def choice(self, index: int, said: dict[str, Any], logprobs: Any, reason: str | None) -> bytes:
        """Encode one event of answer number `index`."""
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}
        usage: dict[str, Any] = {"usage": None} if self.include_usage else {}
        return event({**self.head, "choices": [choice], **usage})

    def end(self, results: Sequence[Generated]) -> bytes:
        """Encode the events that close the stream: the usage, if the request asks for it, and `[DONE]`."""
        done = b"data: [DONE]\n\n"
        if not self.include_usage:
            return done
        return event({**self.head, "choices": [], "usage": usage(results, self.num_prompts)}) + done

    def error(self, fault: Fault) -> bytes:
        """Encode the error event that ends the stream."""
        return event(error(fault))
