"""Grammars over the packaged model's tokens: which are refused, and which tokens the others allow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnkeep_client.messages import (
    ChoiceFormat,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    LarkFormat,
    RegexFormat,
)
from worker.models.tokenizer import Tokenizer
from worker.text.grammar import GrammarError, Grammars

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer(packaged_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(packaged_folder)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def accepts(grammar: Any, tokens: Sequence[int]) -> bool:
    """Say whether these tokens, with or without an end token, are a complete answer by the grammar."""
    whole = tokens[:-1] if tokens and tokens[-1] == 2 else tokens
    return bool(grammar.follow(whole).is_complete)


def allowed(mask: Any) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


async def test_the_token_masks_of_a_grammar_allow_exactly_the_tokens_that_may_follow(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    grammar = await grammars.compiled(ChoiceFormat(("yes", "no, never")))
    assert grammar is not None
    words = {token: tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)}
    begin = {
        token
        for token, text in words.items()
        if text and any(w.startswith(text) for w in (b"yes", b"no, never"))
    }
    matcher = grammar.follow(())
    assert allowed(matcher.masks(())[0]) == begin - tokenizer.controls.ids
    yes = tokenizer.encode("yes", at_start=False)
    matcher.push(yes)
    assert matcher.is_complete
    assert allowed(matcher.masks(())[0]) == tokenizer.eos_ids, "all end tokens, and nothing else"
    assert accepts(grammar, yes)
    assert accepts(grammar, [*yes, min(tokenizer.eos_ids)])
    assert not accepts(grammar, [*yes, *yes])
    assert not accepts(grammar, [])
    no = tokenizer.encode("no", at_start=False)
    assert not accepts(grammar, [*no, min(tokenizer.eos_ids)])


async def test_a_grammar_accepts_its_forced_text_as_single_byte_tokens_or_as_longer_tokens(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    text = '<|im_end|>/"é' + chr(0x1F98A)
    grammar = await grammars.compiled(ChoiceFormat((text,)))
    assert grammar is not None
    words = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    matcher = grammar.follow(())
    for byte in text.encode():
        assert words[bytes([byte])] in allowed(matcher.masks(())[0])
        matcher.push([words[bytes([byte])]])
    assert matcher.is_complete
    assert accepts(grammar, tokenizer.encode(tokenizer.as_text(text), at_start=False))


async def test_token_masks_for_drafts_leave_the_grammar_state_as_is_and_only_allow_an_end_after_a_wrong_draft(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    grammar = await grammars.compiled(RegexFormat("[ab]{1,8}c"))
    assert grammar is not None
    a, c, z = (tokenizer.encode(text, at_start=False)[0] for text in "acz")
    matcher = grammar.follow([a])
    end = min(tokenizer.eos_ids)
    before, *behind = map(allowed, matcher.masks([a, z, a, c]))
    assert behind[0] != tokenizer.eos_ids
    assert behind[1:] == [tokenizer.eos_ids] * 3
    assert allowed(matcher.masks(())[0]) == before
    assert list(map(allowed, matcher.masks([c, end]))) == [before, tokenizer.eos_ids, tokenizer.eos_ids]
    matcher.push([a, c, end])
    assert matcher.is_complete
    ended = grammar.follow([a, z])
    assert list(map(allowed, ended.masks([a, a]))) == [tokenizer.eos_ids] * 3
    again = grammar.follow([a, a, c])
    assert allowed(again.masks(())[0]) == tokenizer.eos_ids
    matcher.push([a])
    assert not matcher.is_complete
    assert allowed(matcher.masks(())[0]) == tokenizer.eos_ids


async def test_the_json_grammar_allows_no_special_tokens_and_no_extra_white_space(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    grammar = await grammars.compiled(JsonObjectFormat())
    assert grammar is not None
    matcher = grammar.follow(tokenizer.encode('{"a', at_start=False))
    assert not allowed(matcher.masks(())[0]) & tokenizer.controls.ids
    spelled = tokenizer.encode(
        tokenizer.as_text('{"<|im_end|>": [true,false, null], "é": {}}'), at_start=False
    )
    assert accepts(grammar, spelled)
    assert not accepts(grammar, tokenizer.encode('{"a":  1}', at_start=False)), "one space at most"
    assert not accepts(grammar, tokenizer.encode('{\n"a": 1}', at_start=False))


async def test_a_compiled_grammar_is_reused_until_64_other_grammars_have_been_compiled(
    grammars: Grammars,
) -> None:
    asked = RegexFormat("a{7}")
    first, second = await asyncio.gather(grammars.compiled(asked), grammars.compiled(RegexFormat("a{7}")))
    assert first is second
    for number in range(64):
        await grammars.compiled(RegexFormat(f"b{{{number + 1}}}"))
    assert await grammars.compiled(asked) is not first


def by_schema(schema: dict[str, Any]) -> JsonSchemaFormat:
    return JsonSchemaFormat(JsonSchema(schema))


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (by_schema({"type": "objekt"}), "Invalid type: objekt"),
        (by_schema({"$ref": "http://127.0.0.1/x"}), "does not fetch"),
        (by_schema({"type": "string", "pattern": "("}), "unclosed group"),
        (by_schema({"minimum": 5, "maximum": 3, "type": "integer"}), "minimum .5. is greater than maximum"),
        (by_schema(deep(300)), "recursion limit exceeded at line 1 column"),
        (by_schema({"multipleOf": True}), "multipleOf"),
        (RegexFormat("a("), "unclosed group"),
        (LarkFormat("start: foo"), r"at 1\(8\): unknown name"),
        (LarkFormat('root: "a"'), "no start rule"),
        (LarkFormat("start: " + '"a"? ' * 3_000), "row has [0-9]+ items; max is 2000"),
        (LarkFormat('start: "a"\nstart: "b"'), "."),
        (
            LarkFormat('start: "<" %json {"anyOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}'),
            "multipleOf",
        ),
        (LarkFormat('start: %json {"title": "a %json", "multipleOf": 123457}'), "multipleOf"),
        (
            LarkFormat("start: a b" + "".join(f'\n{n}: %json {{"multipleOf": 60000}}' for n in "ab")),
            "multipleOf",
        ),
        (JsonSchemaFormat(JsonSchema({"enum": [f"value{n}" for n in range(200_000)]})), "the limit is"),
        (JsonSchemaFormat(JsonSchema({"allOf": [{"type": "string"}, {"type": "null"}]})), "Unsatisfiable"),
    ],
)
async def test_compiling_a_malformed_too_costly_or_unsatisfiable_grammar_raises_an_error(
    grammars: Grammars, asked: Any, says: str
) -> None:
    with pytest.raises(GrammarError, match=says):
        await grammars.compiled(asked)


@pytest.mark.parametrize("steps", [(10_000_000,), (1e30,), (0.0003, 70_001), (97, 98, 99), (123_457, 0)])
async def test_a_json_schema_is_refused_if_its_multiple_of_keywords_are_costly_to_compile_and_else_compiled(
    grammars: Grammars, steps: tuple[float, ...]
) -> None:
    schemas = [{"type": "number", "multipleOf": step} for step in steps]
    with pytest.raises(GrammarError, match="multipleOf"):
        await grammars.compiled(JsonSchemaFormat(JsonSchema({"prefixItems": schemas})))
    for step in (0.01, 5, 1024, 86_400):
        assert await grammars.compiled(JsonSchemaFormat(JsonSchema({"type": "number", "multipleOf": step})))
    data = {"type": "number", "default": {"multipleOf": True}}
    assert await grammars.compiled(JsonSchemaFormat(JsonSchema(data)))


async def test_a_json_schema_with_x_guidance_options_does_not_change_the_options_of_llguidance(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    """The options would allow unlimited white space, or `oneOf` with overlapping alternatives."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for more in ({}, {"x-guidance": {"whitespace_pattern": "[ ]{0,99}"}}, {"x-guidance": 5}):
        grammar = await grammars.compiled(JsonSchemaFormat(JsonSchema({**schema, **more})))
        assert accepts(grammar, tokenizer.encode('{"a": 1}', at_start=False))
        assert not accepts(grammar, tokenizer.encode('{   "a": 1}', at_start=False)), more
    either = {"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}}
    with pytest.raises(GrammarError, match="oneOf"):
        await grammars.compiled(JsonSchemaFormat(JsonSchema(either)))
    named = {"type": "object", "properties": {"x-guidance": {"const": 1}}, "required": ["x-guidance"]}
    grammar = await grammars.compiled(JsonSchemaFormat(JsonSchema(named)))
    assert accepts(grammar, tokenizer.encode('{"x-guidance": 1}', at_start=False))


LENIENT: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]", '["a"]'),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, '{"b": 1}', "[]"),
    ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, '{"a": 1}', "[]"),
    ({"type": "string", "format": "phone"}, '"x"', "1"),
    ({"type": "string", "pattern": "^(?=a).*$"}, '"b"', "1"),
    ({"type": "string", "pattern": r"(a)\1", "maxLength": 2}, '"bc"', '"bcd"'),
    ({"type": "string", "pattern": r"\bfoo\b"}, '"x"', "1"),
    ({"properties": {"pattern": {"type": "string", "pattern": "(?!a)"}}, "required": ["pattern"]},
     '{"pattern": "a"}', '{"pattern": 1}'),
    ({"type": "object", "patternProperties": {"^(?!x)": {"type": "string"}}, "additionalProperties": False},
     '{"x": 1}', "[]"),
    ({"type": "array", "items": {"$ref": "https://a.example/b.json"}}, "[1]", "1"),
    ({"enum": [{"pattern": "(?=a)"}]}, '{"pattern":"(?=a)"}', '{"format":"(?=a)"}'),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "(?<!a)b"}]}, '"c"', "[]"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), LENIENT)
async def test_a_lenient_json_schema_ignores_keywords_for_which_a_strict_schema_is_refused(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, Any], good: str, bad: str
) -> None:
    grammar = await grammars.compiled(JsonSchemaFormat(JsonSchema(schema, strict=False)))
    assert grammar is not None
    assert accepts(grammar, tokenizer.encode(good, at_start=False))
    assert not accepts(grammar, tokenizer.encode(bad, at_start=False))
    if "enum" not in schema:
        assert grammar.warnings or "patternProperties" in schema
        with pytest.raises(GrammarError):
            await grammars.compiled(JsonSchemaFormat(JsonSchema(schema)))


async def test_a_lenient_json_schema_that_is_nested_too_deep_is_refused_with_a_grammar_error(
    grammars: Grammars,
) -> None:
    schema: dict[str, Any] = {"type": "string", "pattern": "(?=a)"}
    for _ in range(400):
        schema = {"type": "array", "items": schema}
    with pytest.raises(GrammarError):
        await grammars.compiled(JsonSchemaFormat(JsonSchema(schema, strict=False)))


async def test_many_slowly_compiling_grammars_of_one_tenant_do_not_delay_those_of_another_tenant(
    grammars: Grammars,
) -> None:
    order: list[str] = []

    async def compiled(tenant: str, step: int) -> None:
        asked = JsonSchemaFormat(JsonSchema({"type": "integer", "multipleOf": step}))
        assert await grammars.compiled(asked, tenant) is not None
        order.append(tenant)

    slow = [asyncio.create_task(compiled("loud", 9_000 + n)) for n in range(12)]
    await asyncio.sleep(0)
    await compiled("quiet", 7)
    await asyncio.gather(*slow)
    assert order.index("quiet") <= 2
