"""Turns a decoding error into one sentence for the sender: what was wrong and what would be right.

Knows the message types only through msgspec's inspection, so a new field needs no change here.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import Any, Final

import msgspec
from msgspec import inspect

from .subjects import ID_PATTERN, ID_RULE

_MAX_ECHO: Final = 64

_PLACE = re.compile(r"(?P<fault>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`")
_OUT_OF_RANGE = re.compile(r"Expected `(int|float)` [<>]")
_LENGTH = re.compile(r"Expected `(?P<kind>str|array)` of length (?P<side>[<>])= (?P<num>\d+)")
_BAD_VALUE = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[([^]]*)\]")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def field_of(error: msgspec.ValidationError) -> str | None:
    """Return the path of the field that is wrong in a body; None if the error is about no single field."""
    found = _PLACE.fullmatch(str(error))
    fault, path = (found["fault"], found["path"] or "") if found else (str(error), "")
    named = _UNKNOWN_FIELD.fullmatch(fault) or _MISSING_FIELD.fullmatch(fault)
    name = named[1] if named else getattr(error.__cause__, "field", "")
    return ".".join(filter(None, (path.lstrip("."), name))) or None


def explain(error: Exception, body: bytes, expected: Any, what: str) -> str:
    """Return a sentence that says why `body` could not be decoded as `expected`, a message type or a union.

    The sentence calls that type `what`. `error` is the exception from decoding: `DecodeError`,
    `ValidationError`, `UnicodeDecodeError`, `RecursionError`.
    """
    if not body.strip():
        return f"the body is empty: {what} must be one JSON object"
    if isinstance(error, msgspec.ValidationError):
        return _explain_fields(str(error), body, expected, what)
    if isinstance(error, RecursionError):
        return f"the body is nested too deeply to be {what}"
    try:
        body.decode()
    except UnicodeDecodeError as undecodable:
        return f"the body is not UTF-8: byte {undecodable.start} is 0x{body[undecodable.start]:02x}"
    hint = "; it holds half of a surrogate pair" if _SURROGATE.search(body) else ""
    return (
        f"the body is not JSON ({error}{hint}): {what} must be one JSON object, this starts {_start(body)!r}"
    )


def _explain_fields(fault: str, body: bytes, expected: Any, what: str) -> str:
    found = _PLACE.fullmatch(fault)
    fault, path = (found["fault"], found["path"] or "") if found else (fault, "")
    at = _type_at(expected, path, body)
    name = path.lstrip(".") or _name(at, what)
    if unknown := _UNKNOWN_FIELD.fullmatch(fault):
        return _explain_unknown(name, unknown[1], at)
    if missing := _MISSING_FIELD.fullmatch(fault):
        return _explain_missing(name, missing[1], at)
    if bad := _BAD_VALUE.fullmatch(fault):
        return _explain_choice(name, bad[1], at, what)
    if _OUT_OF_RANGE.match(fault) and isinstance(
        number := _plain(at)[0], inspect.IntType | inspect.FloatType
    ):
        return f"{name} must be {_number(number)}"
    if length := _LENGTH.fullmatch(fault):
        kind, unit = ("text", "character") if length["kind"] == "str" else ("a list", "item")
        side, num = "least" if length["side"] == ">" else "most", length["num"]
        return f"{name} must be {kind} of at {side} {num} {unit}{'' if num == '1' else 's'}"
    if "matching regex" in fault and isinstance(at, inspect.Metadata) and at.extra_json_schema:
        return f"{name} must be {at.extra_json_schema['description']}"
    if ID_PATTERN in fault.replace("\\\\", "\\"):
        return f"{name} must be {ID_RULE}"
    if fault.startswith("Expected "):
        return f"{name} must be {fault.removeprefix('Expected ').replace(', got ', ', not ')}"
    return f"{name} {fault}" if path else fault


def _explain_unknown(owner: str, field: str, at: inspect.Type | None) -> str:
    allowed = _fields(at)
    return f"{owner} has no field {_echo(field)!r}{_nearest(field, allowed)}; it takes {', '.join(allowed)}"


def _explain_missing(owner: str, field: str, at: inspect.Type | None) -> str:
    rule = (
        f": {ID_RULE}" if field == "id" else f": {_join(_tags(at))}" if field == "type" and _tags(at) else ""
    )
    return f"{owner} needs the field {field!r}{rule}"


def _explain_choice(name: str, value: str, at: inspect.Type | None, what: str) -> str:
    if literals := [each for each in _plain(at) if isinstance(each, inspect.LiteralType)]:
        choices = [str(choice) for each in literals for choice in each.values]
        choices += ["an object"] if _structs(at) else []
    else:
        choices, name = _tags(at), f"the type of {name.removesuffix('.type') if '.' in name else what}"
    value = value.strip("'")
    return f"{name} must be {_join(choices)}, not {_echo(value)!r}{_nearest(value, choices)}"


def _number(at: inspect.IntType | inspect.FloatType) -> str:
    bounds = {"at least": at.ge, "above": at.gt, "at most": at.le, "below": at.lt}
    said = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
    return f"a {'whole ' if isinstance(at, inspect.IntType) else ''}number, {said}"


def _type_at(expected: Any, path: str, body: bytes) -> inspect.Type | None:
    """Return the type expected at `path`, which is msgspec's path to an error, such as `.messages[0].role`.

    Of a union, return the member that the body has there, by its `type`. For a path that ends in a `type`,
    return the union of what is allowed there.
    """
    value = _decoded(body)
    at = _member(_type_info(expected), value)
    for step in _STEP.finditer(path):
        if step[1] is None:
            items = (getattr(each, name, None) for each in _plain(at) for name in ("item_type", "value_type"))
            at = next(filter(None, items), None)
            value = _part(value, step[2])
        elif not (step[1] == "type" and any(each.tag for each in _structs(at))):
            fields = (field for each in _structs(at) for field in each.fields)
            at = next((field.type for field in fields if field.encode_name == step[1]), None)
            value = _part(value, step[1])
        at = _member(_without_null(at), value)
    return at


def _member(at: inspect.Type | None, value: Any) -> inspect.Type | None:
    """Return the struct of a union whose tag an object has; without one, the union."""
    tag = value.get("type") if isinstance(value, dict) else None
    return next((each for each in _structs(at) if each.tag == tag and tag is not None), at)


def _part(value: Any, step: str) -> Any:
    """Return a part of a decoded body; None if it is not there, as of the first of two equal keys."""
    try:
        return value[int(step) if isinstance(value, list) else step]
    except (LookupError, TypeError, ValueError):
        return None


@cache
def _type_info(expected: Any) -> inspect.Type:
    """Inspect a message type. The result is cached: an inspection takes milliseconds."""
    return inspect.type_info(expected)


def _plain(at: inspect.Type | None) -> list[inspect.Type | None]:
    """Return a union's member types, or else the type alone in a list; without msgspec's metadata."""
    at = at.type if isinstance(at, inspect.Metadata) else at
    types: tuple[inspect.Type | None, ...] = at.types if isinstance(at, inspect.UnionType) else (at,)
    return [each.type if isinstance(each, inspect.Metadata) else each for each in types]


def _without_null(at: inspect.Type | None) -> inspect.Type | None:
    if isinstance(at, inspect.UnionType):
        others = [each for each in at.types if not isinstance(each, inspect.NoneType)]
        at = others[0] if len(others) == 1 else at
    return at


def _structs(at: inspect.Type | None) -> list[inspect.StructType]:
    return [each for each in _plain(at) if isinstance(each, inspect.StructType)]


def _fields(at: inspect.Type | None) -> list[str]:
    structs = _structs(at)
    tag = [each.tag_field for each in structs[:1] if each.tag_field]
    return tag + [field.encode_name for each in structs[:1] for field in each.fields]


def _tags(at: inspect.Type | None) -> list[str]:
    return [str(each.tag) for each in _structs(at) if each.tag is not None]


def _name(at: inspect.Type | None, what: str) -> str:
    tags = _tags(at)
    return tags[0] if len(tags) == 1 else what


def _decoded(body: bytes) -> Any:
    """Decode a body that may be invalid; return None if it cannot be decoded."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _nearest(word: str, choices: list[str]) -> str:
    near = difflib.get_close_matches(word[:_MAX_ECHO], choices, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _join(choices: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(choices[:-1]), *choices[-1:])))


def _echo(text: str) -> str:
    return text if len(text) <= _MAX_ECHO else text[:_MAX_ECHO] + "..."


def _start(body: bytes) -> str:
    return _echo(body[: _MAX_ECHO + 1].decode("utf-8", "replace"))
