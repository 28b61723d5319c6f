"""Decides whether a call that a model wrote is valid for an offered tool, and converts its arguments. Pure.

Accepted calls are executed, so a call is accepted only if its tool was offered and its arguments fit the
tool's schema. Arguments are converted only where the schema leaves no doubt: text becomes a number only where
the schema allows no text. Unchecked keywords make a schema allow more; a `not` or `if` that depends on one is
ignored. Patterns and formats are checked if llguidance can compile them.

Calls are checked on the device's thread, so the work for the calls of one answer is limited.
"""

from __future__ import annotations

import json
from collections import deque
from contextlib import suppress
from fractions import Fraction
from operator import ge, gt, le, lt
from typing import TYPE_CHECKING, Any, Final

from worker.models.call_parsers import ParsedCall, is_utf8
from worker.models.written_values import read_json

from .grammar import text_matcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from worker.models.call_parsers import WrittenCall

    _Matches: TypeAlias = Callable[[str], bool | None]
    #: The matchers of patterns and formats by their keyword and value; None for an unsupported one.
    _Matchers: TypeAlias = Mapping[tuple[str, str], _Matches | None]

#: Limit of steps, of 3 microseconds each, for the invalid calls of an answer, as references and alternatives
#: may multiply. Valid calls may take as many steps besides as their size justifies.
_MOST_STEPS: Final = 20_000
#: How many different patterns and formats of an answer's tools are checked; each compiles in 0.3 ms.
_MOST_PATTERNS: Final = 128
_MOST_DEPTH: Final = 100
_KINDS: Final = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
#: Keywords of schemas that allow only some types.
_TYPING: Final = ("type", "const", "enum", "$ref", "anyOf", "oneOf", "allOf", "properties", "items")
#: Python's names of types, which some tools use instead of JSON schema's.
_OTHER_KINDS: Final = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
#: Keywords that are not checked, or only in part.
_UNCHECKED: Final = frozenset(
    (
        *("oneOf", "contains", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    )
)
_WORDS: Final = {"True": True, "False": False, "None": None}
_LIMITS: Final[tuple[tuple[str, Callable[[float, float], bool]], ...]] = (
    ("minimum", ge),
    ("maximum", le),
    ("exclusiveMinimum", gt),
    ("exclusiveMaximum", lt),
    ("multipleOf", lambda value, limit: (Fraction(str(value)) / Fraction(str(limit))).denominator == 1),
)
_SIZES: Final = (
    (str, "minLength", "maxLength"),
    (list, "minItems", "maxItems"),
    (dict, "minProperties", "maxProperties"),
)


class NoCallError(ValueError):
    """Text that looks like a tool call is not a valid call; the message says why."""

    def __init__(self, message: str, *, allows_text: bool = True) -> None:
        super().__init__(message)
        #: Whether the schema that a value does not fit may allow some text.
        self.allows_text = allows_text


class OfferedTools:
    """The tools that one answer may call."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Compile the patterns of `tools`, which are as in OpenAI's chat completions, in up to 0.1 s."""
        functions = [tool["function"] for tool in tools]
        self._schemas = {one["name"]: one.get("parameters") or {} for one in functions}
        self._matchers = _matchers(self._schemas.values())
        self._left_steps: float = _MOST_STEPS

    def __bool__(self) -> bool:
        """Return whether any tool is offered."""
        return bool(self._schemas)

    @property
    def names(self) -> Iterable[str]:
        """The names of the offered tools."""
        return self._schemas.keys()

    def believed(self, written: WrittenCall) -> ParsedCall:
        """Check a call that the model wrote, and return it with converted arguments.

        Raises `NoCallError` for an invalid call. May raise anything for a schema that is not valid, or for
        arguments that JSON cannot have.
        """
        schema = self._schemas.get(written.name)
        if schema is None:
            raise NoCallError(f"{written.name} was not offered")
        arguments = dict(written.arguments)
        num_free = 10 + len(json.dumps(arguments)) / 8  # a valid call's; it is worth that many steps
        fit = _Fit(schema, self._matchers, self._left_steps + num_free)
        try:
            if written.is_mended and any(fit.of_property(name) == {} for name in arguments):
                raise NoCallError("an argument without an end is none of the tool's")  # noqa: TRY301
            if written.is_text:
                arguments = {name: fit.read(text, fit.of_property(name)) for name, text in arguments.items()}
            arguments = fit.converted(arguments, {"type": "object", "allOf": [schema]})
        except Exception:
            self._left_steps = fit.left_steps - num_free
            raise
        self._left_steps = min(self._left_steps, fit.left_steps)
        return ParsedCall(written.name, _as_json(arguments), written.id)


def _matchers(schemas: Iterable[Any]) -> _Matchers:
    """Compile the first `_MOST_PATTERNS` different patterns and formats in `schemas`."""
    found: dict[tuple[str, str], _Matches | None] = {}
    todo = deque(schemas)
    while todo:
        one = todo.popleft()
        if isinstance(one, dict):
            for word in ("pattern", "format"):
                asked = one.get(word)
                if isinstance(asked, str) and (word, asked) not in found and len(found) < _MOST_PATTERNS:
                    found[word, asked] = text_matcher(word, asked)
            todo += one.values()
        elif isinstance(one, list):
            todo += one
    return found


def _as_json(arguments: Mapping[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # A lone surrogate is valid in JSON with escapes, but not in UTF-8.
    return text if text.isascii() or is_utf8(text) else json.dumps(arguments, allow_nan=False)


class _Fit:
    """Checks one call's arguments against a tool's schema, and resolves the references in that schema."""

    def __init__(self, schema: Any, matchers: _Matchers, left_steps: float) -> None:
        self._root = schema
        self._matchers = matchers
        self.left_steps = left_steps
        #: Whether every keyword so far was checked; `not` and `if` depend on this.
        self._is_sure = True

    def _spend(self, num_steps: float) -> None:
        self.left_steps -= num_steps
        if self.left_steps < 0:
            raise NoCallError("the schema takes too long to check")

    def read(self, text: str, schema: Any) -> Any:
        """Return the value that untyped `text` stands for, by the types that the argument's schema allows."""
        value = _value(text)
        if not isinstance(schema, dict) or schema.keys().isdisjoint(_TYPING):
            return value if isinstance(value, dict | list) else text
        for one in (None, text) if text.strip() == "null" else (text,):
            with suppress(NoCallError):
                return self.converted(one, schema)
        return value

    def of_property(self, name: str) -> Any:
        """Return the schema of the argument `name`; an empty schema if the tool defines none."""
        pending, seen = [self._root], 0
        while pending and seen < _MOST_DEPTH:
            self._spend(1 + len(pending) / 100)
            one, seen = pending.pop(0), seen + 1
            if not isinstance(one, dict):
                continue
            if name in (one.get("properties") or {}):
                return one["properties"][name]
            if "$ref" in one:
                pending.append(self._referred(one["$ref"]))
            for word in ("allOf", "anyOf", "oneOf"):
                pending += one.get(word) or ()
        more = self._root.get("additionalProperties") if isinstance(self._root, dict) else None
        return more if isinstance(more, dict) else {}

    def converted(self, value: Any, schema: Any, depth: int = 0, *, converts: bool = True) -> Any:
        """Return `value` if it fits the schema, or else, if `converts`, a conversion that fits.

        Raises `NoCallError` if none fits.
        """
        self._spend(1)
        if depth > _MOST_DEPTH:
            raise NoCallError("the schema is too deep")
        if not isinstance(schema, dict):
            if schema is False:
                raise NoCallError("the schema allows nothing here", allows_text=False)
            return value
        try:
            return self._checked(value, schema, depth, converts=converts)
        except NoCallError as error:
            if not converts or not isinstance(value, str) or error.allows_text:
                raise
            self._spend(len(value) / 100)
            if isinstance(read := _value(value), str):
                raise
        return self._checked(read, schema, depth, converts=converts)

    def _checked(self, value: Any, schema: Mapping[str, Any], depth: int, *, converts: bool) -> Any:
        if value is None and schema.get("nullable") is True:
            return value
        value = self._alone(value, schema)
        if isinstance(value, dict):
            value = self._object(value, schema, depth, converts=converts)
        elif isinstance(value, list):
            value = self._list(value, schema, depth, converts=converts)
        if "$ref" in schema:
            referred = self._referred(schema["$ref"])
            self._is_sure &= referred is not True
            value = self.converted(value, referred, depth + 1, converts=converts)
        for one in schema.get("allOf") or ():
            value = self.converted(value, one, depth + 1, converts=converts)
        for choices in filter(None, map(schema.get, ("anyOf", "oneOf"))):
            value = self._any(value, choices, depth, converts=converts)
        if "not" in schema and self._fits(value, schema["not"], depth):
            raise NoCallError("a value is what must not be")
        if "if" in schema and (is_so := self._fits(value, schema["if"], depth)) is not None:
            one = schema.get("then" if is_so else "else", True)
            value = self.converted(value, one, depth + 1, converts=converts)
        return value

    def _alone(self, value: Any, schema: Mapping[str, Any]) -> Any:
        """Check a value by the keywords without schemas in them; return it, or 3 for 3.0."""
        kinds = _types(schema)
        if kinds and kinds.isdisjoint(_kinds_of(value)):
            wanted = " or ".join(sorted(kinds))
            raise NoCallError(f"a value is no {wanted}", allows_text="string" in kinds)
        if isinstance(value, float) and kinds and "integer" in kinds and "number" not in kinds:
            value = int(value) if abs(value) <= 2**53 else value  # no digits that the model did not write
        allowed = [schema["const"]] if "const" in schema else schema.get("enum")
        if allowed is not None and not any(self._same(value, one) for one in allowed):
            allows_text = any(isinstance(one, str) for one in allowed)
            raise NoCallError("a value is none of the allowed values", allows_text=allows_text)
        _check_limits(value, schema)
        self._is_sure &= schema.keys().isdisjoint(_UNCHECKED) and (kinds is not None or "type" not in schema)
        if isinstance(value, str):
            self._check_text(value, schema)
        return value

    def _fits(self, value: Any, schema: Any, depth: int) -> bool | None:
        """Return whether a value fits a schema unconverted; None if that depends on unchecked keywords."""
        before, self._is_sure = self._is_sure, True
        try:
            self.converted(value, schema, depth + 1, converts=False)
        except NoCallError:
            if self.left_steps < 0:
                raise
            fits: bool | None = False
        else:
            fits = True if self._is_sure else None
        self._is_sure = before and fits is not None
        return fits

    def _same(self, value: Any, other: Any) -> bool:
        """Compare two values as JSON does, where True is not 1."""
        self._spend(0.1)
        if isinstance(value, list) and isinstance(other, list):
            return len(value) == len(other) and all(map(self._same, value, other))
        if isinstance(value, dict) and isinstance(other, dict):
            return (
                len(value) == len(other)
                and all(name in other for name in value)
                and all(self._same(value[name], other[name]) for name in value)
            )
        return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)

    def _check_text(self, text: str, schema: Mapping[str, Any]) -> None:
        for word in ("pattern", "format"):
            if not isinstance(asked := schema.get(word), str):
                continue
            matches, fits = self._matchers.get((word, asked)), None
            if matches is not None:
                self._spend(20 + len(text) / 4)
                fits = matches(text)
            self._is_sure &= fits is not None
            if fits is False:
                raise NoCallError(f"a text has not the {word} {asked}")

    def _any(self, value: Any, choices: Sequence[Any], depth: int, *, converts: bool) -> Any:
        """Return `value` if it fits one of `choices`, else its conversion for the first possible choice."""
        allows_text = False
        for tries_to_convert in (False, True)[: 1 + converts]:
            for one in choices:
                if tries_to_convert and isinstance(value, str):
                    break  # `converted` converts text if no alternative allows text
                try:
                    return self.converted(value, one, depth + 1, converts=tries_to_convert)
                except NoCallError as error:
                    allows_text |= error.allows_text
                    if self.left_steps < 0:
                        raise
        raise NoCallError("a value fits no alternative", allows_text=allows_text)

    def _object(
        self, value: dict[str, Any], schema: Mapping[str, Any], depth: int, *, converts: bool
    ) -> dict[str, Any]:
        required = schema.get("required") or ()
        self._spend(len(required) / 100)
        if not all(name in value for name in required):
            raise NoCallError("an argument is missing")
        known, more = schema.get("properties") or {}, schema.get("additionalProperties", True)
        if schema.get("patternProperties"):
            more = True
        for name in value if "propertyNames" in schema else ():
            self.converted(name, schema["propertyNames"], depth + 1, converts=False)
        return {
            name: self.converted(one, known.get(name, more), depth + 1, converts=converts)
            for name, one in value.items()
        }

    def _list(self, value: list[Any], schema: Mapping[str, Any], depth: int, *, converts: bool) -> list[Any]:
        first, rest = schema.get("prefixItems") or (), schema.get("items", True)
        if isinstance(rest, list):  # the form of drafts before 2020-12
            first, rest = rest, schema.get("additionalItems", True)
        if schema.get("uniqueItems") is True:
            written = [json.dumps(one, sort_keys=True) for one in value]
            self._spend(sum(map(len, written)) / 100)
            if len({*written}) < len(written):
                raise NoCallError("an item is there twice")
        return [
            self.converted(one, first[at] if at < len(first) else rest, depth + 1, converts=converts)
            for at, one in enumerate(value)
        ]

    def _referred(self, reference: Any) -> Any:
        """Return the subschema that a `$ref` names by its path; True (anything) for other references."""
        found = self._root
        if not isinstance(reference, str) or not f"{reference}/".startswith("#/"):
            return True
        self._spend(len(reference) / 100)
        for part in reference[1:].split("/")[1:]:
            if not isinstance(found, dict):
                return True
            found = found.get(part.replace("~1", "/").replace("~0", "~"), True)
        return found


def _check_limits(value: Any, schema: Mapping[str, Any]) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        for word, holds in _LIMITS:
            limit = schema.get(word)
            if isinstance(limit, int | float) and not isinstance(limit, bool) and not holds(value, limit):
                raise NoCallError(f"{value} is against {word} {limit}")
    for kind, least, most in _SIZES:
        if isinstance(value, kind) and not schema.get(least, 0) <= len(value) <= schema.get(most, len(value)):
            raise NoCallError(f"its size is {len(value)}")


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the types in a schema's `type`; None if it is missing, has an unknown name or too many."""
    given = schema.get("type")
    if isinstance(given, list) and len(given) > len(_KINDS):
        return None
    found = {_OTHER_KINDS.get(one, one) for one in ([given] if isinstance(given, str) else given or ())}
    return found if found and found <= _KINDS else None


def _kinds_of(value: Any) -> set[str]:
    """Return the JSON types of a value."""
    match value:
        case bool():
            return {"boolean"}
        case int() | float():
            return {"number", "integer"} if isinstance(value, int) or value.is_integer() else {"number"}
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds[type(value)]}


def _value(text: str) -> Any:
    """Return the value that a text stands for; the text itself if it stands for none."""
    plain = text.strip()
    try:
        return _WORDS[plain] if plain in _WORDS else read_json(plain)
    except ValueError:
        return text
