"""Writes the message types of the TypeScript client from the schemas of the AsyncAPI document.

`python -m turnkeep_client.typescript` prints them; `--check FILE` compares a file with them.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from typing import Any, Final

from .asyncapi import document, print_or_check

#: The unions of messages, by the channel of the document that has them.
_UNIONS: Final = {"Request": "in", "Result": "out", "ControlRequest": "ctl", "ControlReply": "ctlReply"}
#: What clients check themselves, by the names in `FIELDS`: a request by its type.
_CHECKED: Final = ("in", "ctl")
_PRIMITIVES: Final = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean"}
_HEAD: Final = """\
// The messages of the protocol, written by `python -m turnkeep_client.typescript`: change the messages there.
// A field of a result that is left out has its default.
"""
_WIDTH: Final = 108


def render() -> str:
    """Return the text of the TypeScript module with the types."""
    described = document()
    schemas: dict[str, Any] = described["components"]["schemas"]
    parts = [_HEAD]
    parts += [_interface(name, schema) for name, schema in schemas.items()]
    for union, channel in _UNIONS.items():
        members = " | ".join(described["channels"][channel]["messages"])
        parts.append(f"export type {union} = {members};\n")
    checked = [name for channel in _CHECKED for name in described["channels"][channel]["messages"]]
    parts.append(_fields({name: schemas[name] for name in [*checked, "ForkPoint"]}))
    return "\n".join(parts)


def _fields(schemas: dict[str, Any]) -> str:
    """Write a table of the kinds of each request's fields, for what JavaScript lets pass."""
    lines = ["/** The kinds of each field of a request, by the request's type. */", "export const FIELDS = {"]
    for name, schema in schemas.items():
        fields = dict(schema["properties"])
        tag = fields.pop("type", {"enum": [name]})["enum"][0]
        lines += [f"  {tag}: {{", *(f"    {one}: '{_kinds(kind)}'," for one, kind in fields.items()), "  },"]
    return "\n".join([*lines, "} as const;", ""])


def _kinds(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_kinds(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(map(json.dumps, schema["enum"]))
    return "object" if "$ref" in schema else str(schema["type"])


def _interface(name: str, schema: dict[str, Any]) -> str:
    lines = [*_comment(schema.get("description")), f"export interface {_name(name)} {{"]
    required = schema.get("required", ())
    for field, kind in schema["properties"].items():
        mark = "" if field in required else "?"
        lines += _comment(_described(kind), indent="  ")
        lines.append(f"  {field}{mark}: {_type(kind)};")
    return "\n".join([*lines, "}", ""])


def _type(schema: dict[str, Any]) -> str:
    """Write a JSON schema as a TypeScript type. Raises `ValueError` for a kind that no message uses yet."""
    if "$ref" in schema:
        return _name(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_type(one) for one in schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    match schema.get("type"):
        case None:
            return "unknown"
        case "null":
            return "null"
        case "array" if "prefixItems" in schema:
            return f"readonly [{', '.join(_type(item) for item in schema['prefixItems'])}]"
        case "array":
            item = _type(schema["items"])
            return f"readonly ({item})[]" if " " in item else f"readonly {item}[]"
        case "object":
            values = schema.get("additionalProperties")
            return f"Record<string, {_type(values) if isinstance(values, dict) else 'unknown'}>"
        case "string" if "examples" in schema:  # later versions have further ones
            return " | ".join([*map(json.dumps, schema["examples"]), "(string & {})"])
        case kind if kind in _PRIMITIVES:
            return _PRIMITIVES[kind]
    raise ValueError(f"no type is known for {schema}")


def _described(schema: dict[str, Any]) -> str | None:
    found = [schema.get("description"), *(one.get("description") for one in schema.get("anyOf", ()))]
    return next(filter(None, found), None)


def _comment(text: str | None, indent: str = "") -> list[str]:
    if not text:
        return []
    lines: list[str] = []
    for paragraph in re.split(r"\n\n", text):
        lines += ["", *textwrap.wrap(paragraph, _WIDTH - len(indent))]
    if len(lines) == 2:
        return [f"{indent}/** {lines[1]} */"]
    return [f"{indent}/**", *(f"{indent} * {line}".rstrip() for line in lines[1:]), f"{indent} */"]


def _name(schema: str) -> str:
    return schema.removeprefix("_")


def main(arguments: list[str] | None = None) -> int:
    """Print the types, or check a file: see `print_or_check`."""
    return print_or_check("turnkeep_client.typescript", render, arguments)


if __name__ == "__main__":
    sys.exit(main())
