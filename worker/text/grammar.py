"""Grammars of answers: compiles a request's `response_format`, and follows answers through it.

Owns llguidance: no other module imports it. `sessions` compiles on a thread, before a turn begins; the rows
of a batch then ask a `Matcher` which tokens may come next. Knows nothing of logits, must not import MLX.
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

import anyio
import msgspec
import numpy as np

from turnkeep_client.messages import (
    ChoiceFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    LarkFormat,
    RegexFormat,
    TextFormat,
)
from worker.process.concurrency import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from turnkeep_client.messages import ResponseFormat
    from worker.models.tokenizer import Tokenizer

    Mask: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

#: An enum of 10,000 values; it compiles in 40 ms.
MOST_BYTES: Final = 128 * 1024
#: Compiled grammars are kept, the last ones that were used; one takes a few hundred KB, seldom some MB.
_MOST_KEPT: Final = 64
#: llguidance's limits do not cover `multipleOf`: a regex for multiples of 1,234,567 compiles for 41 s, for
#: 123,456 0.6 s. Several in one schema multiply, as `allOf` may join them; schemas of one grammar add up.
_MOST_MULTIPLE: Final = 100_000
#: A lexer's state takes 1 to 2 KB.
_MOST_STATES: Final = 50_000
#: One space may follow a comma and a colon, as models write JSON. With any number of them, an answer could be
#: white space without end.
_JSON_OPTIONS: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


#: Where a schema has schemas under names, and where it has data.
_BY_PATTERN: Final = "patternProperties"
_NAMING: Final = ("properties", _BY_PATTERN, "$defs", "definitions", "dependentSchemas")
_DATA: Final = ("const", "enum", "default", "examples")
#: llguidance refuses deeper schemas.
_MOST_LEVELS: Final = 100

#: Without it, where only one text can follow, a mask allows only one of the ways to spell it in tokens.
_FREE: Final = '%llguidance {"no_forcing": true}'


class GrammarError(Exception):
    """A `response_format` cannot be followed; the text says why."""


class Grammars:
    """Compiles and keeps the grammars of one model. Event loop only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[bytes, Grammar] = OrderedDict()
        self._lock = anyio.Lock()  # one compiles at a time: many large ones leave the processor to others
        self._vocabulary: Any = None
        self._tokenize: Callable[[bytes], list[int]] = lambda _: []

    async def compiled(self, asked: ResponseFormat) -> Grammar | None:
        """Compile a grammar on a thread, or find it; None if anything may be answered.

        Raises `GrammarError`.
        """
        if isinstance(asked, TextFormat):
            return None
        named = msgspec.json.encode(asked)
        if len(named) > MOST_BYTES:
            raise GrammarError(f"it has {len(named)} bytes, the limit is {MOST_BYTES}")
        name = blake2b(named, digest_size=16).digest()
        if name not in self._kept:
            async with self._lock:
                if name not in self._kept:  # another request may have asked for the same meanwhile
                    self._kept[name] = await in_thread(self._compile, asked)
        self._kept.move_to_end(name)
        found = self._kept[name]
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return found

    def _compile(self, asked: ResponseFormat) -> Grammar:
        """Compile a grammar; llguidance lets other threads run meanwhile."""
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
            # The same few keys again and again; a GPU's step would notice 0.2 ms for each row.
            self._tokenize = lru_cache(1024)(self._vocabulary.tokenize_bytes)
        limits = llguidance.LLParserLimits(max_lexer_states=_MOST_STATES, verbose_errors=False)
        first = llguidance.LLMatcher(self._vocabulary, source, limits=limits, log_level=0)
        if (why := _fault(first, self._tokenizer.eos_ids)) is not None:
            raise GrammarError(why)
        warnings: list[str] = []
        if '"lenient":true' in source.replace(" ", ""):
            check = llguidance.LLMatcher.validate_grammar_with_warnings
            _, warnings = check(source, self._vocabulary, limits=limits)
        return Grammar(first, self._tokenizer.eos_ids, self._tokenize, warnings)


class Grammar:
    """A compiled grammar; immutable, so thread-safe. `warnings` say what of it has no effect."""

    def __init__(
        self,
        first: Any,
        end_tokens: frozenset[int],
        tokenize: Callable[[bytes], list[int]],
        warnings: Sequence[str] = (),
    ) -> None:
        """`first` is llguidance's matcher of an answer without tokens."""
        self._first = first
        self.warnings = tuple(warnings)
        self._end_tokens = end_tokens
        self._tokenize = tokenize

    def follow(self, answered: Sequence[int]) -> Matcher:
        """Follow an answer that has these tokens so far."""
        return Matcher(self._first.deep_copy(), self._end_tokens, self._tokenize, answered)


class Matcher:
    """Follows one answer: says which tokens may come next. One thread at a time."""

    def __init__(
        self,
        inner: Any,
        end_tokens: frozenset[int],
        tokenize: Callable[[bytes], list[int]],
        answered: Sequence[int],
    ) -> None:
        self._inner = inner
        self._end_tokens = end_tokens
        self._tokenize = tokenize
        self._is_lost = False
        self.push(answered)

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return not self._is_lost and self._inner.is_accepting()

    def push(self, tokens: Iterable[int]) -> None:
        """Add tokens to the answer. After one that the grammar does not allow, only its end is allowed."""
        for token in tokens:
            if token not in self._end_tokens and not self._is_lost:
                self._is_lost = self._inner.try_consume_tokens([token]) == 0

    def masks(self, draft: Sequence[int]) -> list[Mask]:
        """Return masks of the tokens that may come next, and after each token of `draft`: a bit for each id.

        Behind a token that the grammar does not allow, only the end is allowed: the draft is rejected there.
        A mask allows at least one token; where nothing else is left, or a limit was reached, the end tokens.
        """
        found = [self._mask()]
        if draft:
            # A copy: a limit that is reached behind the draft must not end the answer.
            ahead = Matcher(self._inner.deep_copy(), self._end_tokens, self._tokenize, ())
            ahead._is_lost = self._is_lost
            for token in draft:
                ahead.push((token,))
                found.append(ahead._mask())
        return found

    def forced(self) -> list[int]:
        """Return the tokens that the tokenizer makes of the text that must come next.

        Masks allow its other spellings too. A special token, which is written behind 0xFF, is not drafted.
        """
        # A copy: before a special token, asking for the text ends the matcher that is asked.
        found = b"" if self._is_lost else self._inner.deep_copy().compute_ff_bytes()
        text, _, _ = found.partition(b"\xff")
        return self._tokenize(text) if text else []

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
    """Say why a grammar cannot be followed; None if it can.

    Much of the work is done for the first tokens, where it would hold up all rows: it is done here, on the
    compiling thread, for the first token and after one of those that may be the first.
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
    """Write a grammar for llguidance; raises ValueError."""
    match asked:
        case JsonSchemaFormat(json_schema=given):
            _check_multiples([given.schema])
            # Who says `strict: false` takes the schema without the keywords that cannot be enforced.
            return _json_source(given.schema, lenient=given.strict is False)
        case JsonObjectFormat():
            return _json_source({"type": "object"}, lenient=False)
        case RegexFormat(regex=regex):
            (made,) = msgspec.json.decode(matchers.grammar_from_regex(regex))["grammars"]
            return f"{made['lark_grammar']}\n{_FREE}"
        case LarkFormat(grammar=grammar):
            _check_embedded(grammar)
            return f"{grammar}\n{_FREE}"  # at the end, so that the lines of errors are the sender's
        case ChoiceFormat(choices=choices):
            return f"start: {' | '.join(map(_text, choices))}\n{_FREE}"
    raise ValueError(f"its type {asked.__struct_config__.tag!r} has no grammar")


def guided(schema: Mapping[str, Any], *, lenient: bool) -> dict[str, Any]:
    """Return a schema with our options of llguidance, which reads them at its top, and without the sender's.

    With `lenient`, keywords that cannot be enforced are left out.
    """
    schema = _enforceable(schema) if lenient else schema
    return {**schema, "x-guidance": _JSON_OPTIONS | {"lenient": lenient}}


def _enforceable(schema: Any, depth: int = 0) -> Any:
    """Return a schema without the patterns and references that end in an error, even if it is lenient.

    They become formats that nobody knows, of which llguidance warns. It leaves out other keywords itself.
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
    """Whether a pattern has no look-ahead, reference or the like."""
    try:
        import llguidance
    except ImportError:
        return True  # nothing is enforced then
    check = llguidance.LLMatcher
    source = check.grammar_from_json_schema(_text({"type": "string", "pattern": pattern}))
    is_error, _ = check.validate_grammar_with_warnings(source)
    return not is_error


@lru_cache(256)
def text_matcher(word: str, asked: str) -> Callable[[str], bool] | None:
    """Return what says whether a text has a `pattern` or `format` of a schema; None if nobody can say.

    It takes a time that grows with the text only, as grammars have no regular expressions that backtrack.
    """
    try:
        import llguidance
    except ImportError:
        return None
    limits = llguidance.LLParserLimits(max_lexer_states=_MOST_STATES, verbose_errors=False)
    source = llguidance.LLMatcher.grammar_from_json_schema(_text({"type": "string", word: asked}))
    first = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source, limits=limits, log_level=0)
    if first.is_error():
        return None

    def matches(text: str) -> bool:
        matcher, written = first.deep_copy(), json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")
        num_taken = matcher.try_consume_tokens(list(written))
        return matcher.is_error() or (num_taken == len(written) and matcher.is_accepting())

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
    """Return the product of the `multipleOf` in a schema."""
    steps, todo = set[int](), [schema]
    while todo:
        match todo.pop():
            case dict() as found:
                if isinstance(step := found.get("multipleOf"), int | float):
                    steps.add(_whole(step))
                todo += found.values()
            case list() as found:
                todo += found
    return math.prod(steps - {0})


def _whole(step: float) -> int:
    """Return a step as llguidance counts it: 0.25 as 25, as it scales all numbers to whole ones."""
    number = Decimal(str(step)).normalize().as_tuple()
    exponent = number.exponent if isinstance(number.exponent, int) else 0  # a name for infinity
    return int("".join(map(str, number.digits)) + "0" * min(exponent, 9))


def _check_embedded(grammar: str) -> None:
    """Check the JSON schemas within a Lark grammar as others, together: each takes its time."""
    schemas = []
    for found in re.finditer(r"%json\s*", grammar):
        with suppress(ValueError, RecursionError):  # no schema, or one that llguidance refuses too
            schemas.append(json.JSONDecoder().raw_decode(grammar, found.end())[0])
    _check_multiples(schemas)


def _vocabulary(tokenizer: Tokenizer) -> Any:
    """Build llguidance's tokenizer from the bytes that each token adds to an answer's text.

    The file tokenizer.json would say the same of most tokenizers, but not of all, and GGUF files have none.
    This holds up other threads, for 0.1 s of 49,152 tokens, once a worker.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    class Vocabulary:
        eos_token_id = min(tokenizer.eos_ids)
        bos_token_id = None
        tokens = tuple(tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
        special_token_ids = sorted(tokenizer.control_ids)

        def __call__(self, text: bytes | str) -> list[int]:
            text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
            return tokenizer.encode(tokenizer.as_text(text), at_start=False)

    wrapper: Any = TokenizerWrapper(Vocabulary())
    return LLTokenizer(wrapper, eos_token=sorted(tokenizer.eos_ids))
