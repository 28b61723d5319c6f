"""Compiles a request's `response_format` to a grammar, and computes which tokens an answer may have next.

Owns llguidance: no other module imports it. `sessions` compiles on a thread, before a turn begins; the rows
of a batch then get masks of allowed tokens from a `Matcher`. Knows nothing of logits, must not import MLX.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from contextlib import suppress
from decimal import Decimal
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from turnkeep_client.messages import (
    ChoiceFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    LarkFormat,
    RegexFormat,
)
from worker.process.concurrency import Rotation, in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from turnkeep_client.messages import ResponseFormat
    from worker.models.tokenizer import Tokenizer

    Mask: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

#: Largest `response_format`: holds an enum of 10,000 values, which compiles in 40 ms.
MOST_BYTES: Final = 128 * 1024
#: How many of the last used grammars stay compiled; each takes a few hundred KB, rarely some MB.
_MOST_KEPT: Final = 64
#: llguidance's limits do not cover `multipleOf`: a regex for multiples of 1,234,567 compiles for 41 s, for
#: 123,456 0.6 s. Several in one schema multiply, as `allOf` may join them; schemas of one grammar add up.
_MOST_MULTIPLE: Final = 100_000
#: Limit of a grammar's lexer states, each of 1 to 2 KB.
_MOST_STATES: Final = 50_000
#: Limit of the work for the lexer states of one `pattern` of a tool: 2.5 ms.
_MOST_FUEL: Final = 200_000
#: One space may follow a comma and a colon, as models write JSON. With any number of them, an answer could be
#: white space without end.
_JSON_OPTIONS: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


#: Keywords of a schema whose value maps names to schemas, and keywords whose value is data.
_BY_PATTERN: Final = "patternProperties"
_NAMING: Final = ("properties", _BY_PATTERN, "$defs", "definitions", "dependentSchemas")
_DATA: Final = ("const", "enum", "default", "examples")
#: llguidance refuses deeper schemas.
_MOST_LEVELS: Final = 100

#: Without this option, a mask allows only one of several tokenisations of a text that must follow.
_FREE: Final = '%llguidance {"no_forcing": true}'


class GrammarError(Exception):
    """A `response_format` cannot be enforced; the message says why."""


class Grammars:
    """Compiles and caches the grammars of one model. Event loop only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._compiling = Rotation(1)  # one at a time, so that many do not take all CPUs
        self._vocabulary: Any = None

    async def compiled(self, asked: ResponseFormat, tenant: str = "") -> Grammar:
        """Return the grammar of a format that does not allow any text, cached or compiled on a thread.

        Tenants take turns in the compiling. Raises `GrammarError`.
        """
        named = msgspec.json.encode(asked)
        if len(named) > MOST_BYTES:
            raise GrammarError(f"it has {len(named)} bytes, the limit is {MOST_BYTES}")
        name = blake2b(named, digest_size=16).digest()
        if name not in self._kept:
            async with self._compiling.enter(tenant):
                if name not in self._kept:  # another request may have compiled it meanwhile
                    self._kept[name] = await in_thread(self._compile, asked)
        self._kept.move_to_end(name)
        found = self._kept[name]
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return found

    def _compile(self, asked: ResponseFormat) -> Grammar:
        """Compile a grammar on the calling thread; llguidance lets other threads run meanwhile."""
        try:
            import llguidance
        except ImportError:
            raise GrammarError(
                "this worker has no llguidance, which makes answers follow it: pip install llguidance"
            ) from None
        if not self._tokenizer.eos_ids:
            raise GrammarError("this model has no token that ends an answer")
        try:
            source = _source(asked, llguidance.LLMatcher)
        except ValueError as error:
            raise GrammarError(str(error)) from None
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer)
        limits = llguidance.LLParserLimits(max_lexer_states=_MOST_STATES, verbose_errors=False)
        first = llguidance.LLMatcher(self._vocabulary, source, limits=limits, log_level=0)
        if (why := _fault(first, self._tokenizer.eos_ids)) is not None:
            raise GrammarError(why)
        warnings: list[str] = []
        if '"lenient":true' in source.replace(" ", ""):
            check = llguidance.LLMatcher.validate_grammar_with_warnings
            _, warnings = check(source, self._vocabulary, limits=limits)
        return Grammar(first, self._tokenizer.eos_ids, warnings)


class Grammar:
    """A compiled grammar; immutable, so thread-safe. `warnings` name its parts that have no effect."""

    def __init__(self, first: Any, end_tokens: frozenset[int], warnings: Sequence[str] = ()) -> None:
        """`first` is llguidance's matcher before an answer's first token; `follow` copies it."""
        self._first = first
        self.warnings = tuple(warnings)
        self._end_tokens = end_tokens

    def follow(self, answered: Sequence[int]) -> Matcher:
        """Return a matcher for an answer that has these tokens so far."""
        return Matcher(self._first.deep_copy(), self._end_tokens, answered)


class Matcher:
    """Tracks one answer and returns masks of the tokens allowed next. One thread at a time."""

    def __init__(self, inner: Any, end_tokens: frozenset[int], answered: Sequence[int]) -> None:
        self._inner = inner
        self._end_tokens = end_tokens
        self._is_lost = False
        self.push(answered)

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return not self._is_lost and self._inner.is_accepting()

    def push(self, tokens: Iterable[int]) -> None:
        """Add tokens to the answer. After a token that the grammar refuses, only end tokens are allowed."""
        for token in tokens:
            if token not in self._end_tokens and not self._is_lost:
                self._is_lost = self._inner.try_consume_tokens([token]) == 0

    def masks(self, draft: Sequence[int]) -> list[Mask]:
        """Return a mask of the tokens allowed next (a bit per id), and one after each token of `draft`.

        After a token that the grammar refuses, only end tokens are allowed, so the draft is rejected there.
        If no other token is allowed, or a limit was reached, the mask has the end tokens.
        """
        found = [self._mask()]
        if draft:
            # A copy: a limit that is reached within the draft must not end the answer.
            ahead = Matcher(self._inner.deep_copy(), self._end_tokens, ())
            ahead._is_lost = self._is_lost
            for token in draft:
                ahead.push((token,))
                found.append(ahead._mask())
        return found

    def _mask(self) -> Mask:
        if not self._is_lost:
            found: Mask = np.frombuffer(self._inner.compute_bitmask(), np.uint8)
            if found.any():
                return found
        ends = np.zeros(max(self._end_tokens) // 8 + 1, np.uint8)
        for token in self._end_tokens:
            ends[token // 8] |= 1 << token % 8
        return ends


def _fault(first: Any, end_tokens: frozenset[int]) -> str | None:
    """Return why a grammar cannot be used; None if it can.

    Also computes the masks of the first two tokens, which take most of the work, on the compiling thread:
    in a batch this would delay all rows.
    """
    tried = first.deep_copy()
    if not tried.is_error():
        allowed = np.flatnonzero(
            np.unpackbits(np.frombuffer(first.compute_bitmask(), np.uint8), bitorder="little")
        )
        begin = [token for token in allowed.tolist() if token not in end_tokens]
        if not begin and not first.is_accepting():
            return f"it allows no answer ({first.stop_reason()})"
        if begin and tried.try_consume_tokens(begin[:1]):
            tried.compute_bitmask()
    if not tried.is_error():
        return None
    return str(tried.get_error()).partition("\n<")[0].strip()[:1000]


def _source(asked: ResponseFormat, matchers: Any) -> str:
    """Write a format as a grammar for llguidance; raises ValueError."""
    match asked:
        case JsonSchemaFormat(json_schema=given):
            _check_multiples([given.schema])
            # With `strict: false` the sender accepts that keywords that cannot be enforced are ignored.
            return _json_source(given.schema, lenient=given.strict is False)
        case JsonObjectFormat():
            return _json_source({"type": "object"}, lenient=False)
        case RegexFormat(regex=regex):
            (made,) = msgspec.json.decode(matchers.grammar_from_regex(regex))["grammars"]
            return f"{made['lark_grammar']}\n{_FREE}"
        case LarkFormat(grammar=grammar):
            _check_embedded(grammar)
            return f"{grammar}\n{_FREE}"  # at the end, to keep the sender's line numbers in errors
        case ChoiceFormat(choices=choices):
            return f"start: {' | '.join(map(_text, choices))}\n{_FREE}"
    raise ValueError(f"its type {asked.__struct_config__.tag!r} has no grammar")


def guided(schema: Mapping[str, Any], *, lenient: bool) -> dict[str, Any]:
    """Return a schema with the worker's llguidance options at its top level, replacing the sender's.

    With `lenient`, keywords that cannot be enforced are ignored.
    """
    schema = _enforceable(schema) if lenient else schema
    return {**schema, "x-guidance": _JSON_OPTIONS | {"lenient": lenient}}


def _enforceable(schema: Any, depth: int = 0) -> Any:
    """Replace the patterns and references of a schema that llguidance refuses even in lenient mode.

    Each is replaced by an unknown format, about which llguidance warns. llguidance itself ignores other
    unsupported keywords.
    """
    if isinstance(schema, list):
        return [_enforceable(one, depth + 1) for one in schema]
    if not isinstance(schema, dict) or depth > _MOST_LEVELS:
        return schema
    found: dict[str, Any] = {}
    is_open = False
    for name, value in schema.items():
        if name == "pattern" and isinstance(value, str) and not _is_regular(value):
            found.setdefault("format", f"the pattern {value}")
        elif name == "$ref" and isinstance(value, str) and not value.startswith("#"):
            found.setdefault("format", f"the schema {value}")
        elif name in _NAMING and isinstance(value, dict):
            named = {key: one for key, one in value.items() if name != _BY_PATTERN or _is_regular(key)}
            is_open = is_open or len(named) < len(value)
            found[name] = {key: _enforceable(one, depth + 1) for key, one in named.items()}
        else:
            found[name] = value if name in _DATA else _enforceable(value, depth + 1)
    return found | {"additionalProperties": True} if is_open else found


@lru_cache(1024)
def _is_regular(pattern: str) -> bool:
    """Return whether llguidance can compile a pattern; it refuses look-ahead, back-references and such."""
    try:
        import llguidance
    except ImportError:
        return True  # without llguidance nothing is enforced
    check = llguidance.LLMatcher
    source = check.grammar_from_json_schema(_text({"type": "string", "pattern": pattern}))
    is_error, _ = check.validate_grammar_with_warnings(source)
    return not is_error


def text_matcher(word: str, asked: str) -> Callable[[str], bool | None] | None:
    """Return a function that checks a text against a schema's `pattern` or `format`; None if unsupported.

    `word` is the keyword, `asked` its value. Each check is linear in the text, as grammars never backtrack.
    All checks share the lexer's states: once these have cost `_MOST_FUEL`, every check gives None.
    """
    try:
        import llguidance
    except ImportError:
        return None
    limits = llguidance.LLParserLimits(initial_lexer_fuel=_MOST_FUEL, verbose_errors=False)
    source = llguidance.LLMatcher.grammar_from_json_schema(_text({"type": "string", word: asked}))
    first = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source, limits=limits, log_level=0)
    if first.is_error():
        return None
    is_spent = False

    def matches(text: str) -> bool | None:
        nonlocal is_spent
        matcher, written = first.deep_copy(), json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")
        num_taken = 0 if is_spent else matcher.try_consume_tokens(list(written))
        is_spent = is_spent or matcher.is_error()
        return None if is_spent else num_taken == len(written) and matcher.is_accepting()

    return matches


def _json_source(schema: dict[str, Any], *, lenient: bool) -> str:
    start = {"name": "start", "lark_grammar": f"start: @schema\n{_FREE}"}
    return _text({"grammars": [start, {"name": "schema", "json_schema": guided(schema, lenient=lenient)}]})


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _check_multiples(schemas: Iterable[Any]) -> None:
    """Raise ValueError if the `multipleOf` of schemas would take too long to compile."""
    if sum(map(_multiple, schemas)) > _MOST_MULTIPLE:
        raise ValueError(f"multipleOf: all in a schema multiplied are over the limit, {_MOST_MULTIPLE}")


def _multiple(schema: Any) -> int:
    """Return the product of all different `multipleOf` values in a schema."""
    steps, todo = set[int](), [schema]
    while todo:
        match todo.pop():
            case dict() as found:
                step = found.get("multipleOf")
                if isinstance(step, int | float) and not isinstance(step, bool):
                    steps.add(_whole(step))
                todo += found.values()
            case list() as found:
                todo += found
    return math.prod(steps - {0})


def _whole(step: float) -> int:
    """Return a `multipleOf` scaled to an integer as llguidance does: 25 for 0.25."""
    number = Decimal(str(step)).normalize().as_tuple()
    exponent = number.exponent if isinstance(number.exponent, int) else 0  # a letter for infinity
    return int("".join(map(str, number.digits)) + "0" * min(exponent, 9))


def _check_embedded(grammar: str) -> None:
    """Apply `_check_multiples` to all JSON schemas within a Lark grammar, as their compile times add up."""
    schemas = []
    for found in re.finditer(r"%json\s*", grammar):
        with suppress(ValueError, RecursionError):  # no schema, or one that llguidance refuses too
            schemas.append(json.JSONDecoder().raw_decode(grammar, found.end())[0])
    _check_multiples(schemas)


def _vocabulary(tokenizer: Tokenizer) -> Any:
    """Build llguidance's tokenizer from the bytes that each token adds to an answer's text.

    The file tokenizer.json would give the same bytes for most tokenizers, but not all; GGUF files lack it.
    This blocks other threads once per worker, for 0.1 s with 49,152 tokens.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    class Vocabulary:
        eos_token_id = min(tokenizer.eos_ids)
        bos_token_id = None
        tokens = tuple(tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
        special_token_ids = sorted(tokenizer.controls.ids)

        def __call__(self, text: bytes | str) -> list[int]:
            text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
            return tokenizer.encode(tokenizer.as_text(text), at_start=False)

    wrapper: Any = TokenizerWrapper(Vocabulary())
    return LLTokenizer(wrapper, eos_token=sorted(tokenizer.eos_ids))
