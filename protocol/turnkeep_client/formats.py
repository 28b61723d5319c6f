"""Builds response formats from Python types. Recognises pydantic models by their methods, without import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_origin

import msgspec

from .errors import InvalidMessageError
from .requests import JsonSchema, JsonSchemaFormat, ResponseFormat

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeAlias

    #: A format as in the protocol, or a Python type that the answer's JSON must fit.
    Format: TypeAlias = ResponseFormat | Mapping[str, Any] | type


def response_format(asked: Format) -> Any:
    """Return a request's `response_format`: a given format as it is, or the JSON schema of a Python type.

    A type is a `msgspec.Struct`, a dataclass, a TypedDict, a pydantic model, or one made of the first three,
    such as `list[Person]`. Its schema allows no other fields. Raises `InvalidMessageError`
    for a type without a JSON schema.
    """
    if not isinstance(asked, type) and get_origin(asked) is None:
        return asked
    name = getattr(asked, "__name__", str(asked))
    try:
        write = getattr(asked, "model_json_schema", None)
        schema = write() if write is not None else msgspec.json.schema(asked)
    except (TypeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise InvalidMessageError(f"{name} has no JSON schema: {why}") from None
    return JsonSchemaFormat(JsonSchema(_closed(schema), name=name))


def _closed(schema: Any) -> Any:
    """Forbid additional properties in all objects of a schema that do not mention them."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closes = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
    return ({"additionalProperties": False} if closes else {}) | {
        name: _closed(one) for name, one in schema.items()
    }
