"""Answers follow a `response_format`: a schema, a regex, a grammar or a choice."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import date  # pydantic reads it
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from pydantic import BaseModel, Field
from raw_wire import user

from turnkeep_client.client import Client
from turnkeep_client.errors import AnswerNotParsedError, InvalidMessageError, RequestFailedError

EOS = 2


class Person(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(max_length=12)]
    age: Annotated[int, msgspec.Meta(ge=0, le=99)]


@dataclass
class Light:
    colour: Literal["red", "green"]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    born: date


class Owner(BaseModel):
    full_name: Annotated[str, Field(alias="fullName", max_length=12)]
    pets: Annotated[
        list[Annotated[Cat | Dog, Field(discriminator="kind")]], Field(min_length=1, max_length=2)
    ]
    town: Literal["Rome"] | None = None


def by_schema(schema: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema, **options}}


@pytest.fixture
async def client(local_worker: Callable[..., Awaitable[Any]]) -> Client:
    client: Client = (await local_worker()).client
    return client


async def test_an_answer_requested_in_the_format_of_a_python_type_is_parsed_into_that_type(
    client: Client,
) -> None:
    messages = user("Who wrote Hamlet, and how old did the writer get?")

    async def answered(kind: type, max_tokens: int) -> Any:
        session = client.session(f"{kind.__name__}{max_tokens}")
        return await session.generate(messages=messages, response_format=kind, max_tokens=max_tokens)

    answer, light, model, cut = await asyncio.gather(
        answered(Person, 150), answered(Light, 60), answered(Owner, 300), answered(Person, 4)
    )
    assert isinstance(answer.parsed(Person).age, int)
    assert set(answer.parsed(dict)) == {"name", "age"}
    assert light.parsed(Light).colour in {"red", "green"}
    owner = model.parsed(Owner)
    assert 1 <= len(owner.pets) <= 2
    assert {type(pet) for pet in owner.pets} <= {Cat, Dog}
    with pytest.raises(AnswerNotParsedError, match=r"the answer is no Light: .*it begins"):
        model.parsed(Light)
    with pytest.raises(AnswerNotParsedError, match=r"the answer is no Owner: (?s:.*)fullName"):
        light.parsed(Owner)
    with pytest.raises(AnswerNotParsedError, match="not whole: its finish_reason is 'length' after 4 tokens"):
        cut.parsed(Person)


async def test_an_answer_in_the_format_of_a_tuple_of_python_types_is_parsed_into_that_tuple(
    client: Client,
) -> None:
    kind = tuple[Light, Light]
    answer = await client.session("lights").generate(text="x", response_format=kind, max_tokens=100)
    assert [type(one) for one in answer.parsed(kind)] == [Light, Light]
    with pytest.raises(InvalidMessageError, match=r"list has no JSON schema: .*Cat'> is not supported$"):
        client.session("cats").generate(text="x", response_format=list[Cat])


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"type": "regex", "regex": "[a-c]{3}-[0-9]{2}"}, r"[a-c]{3}-[0-9]{2}"),
        ({"type": "lark", "grammar": 'start: "<" /[a-z]{4}/ ">" end?\nend: "!"'}, r"<[a-z]{4}>!?"),
        ({"type": "choice", "choices": ['a "quoted"\none', "é", "b\\"]}, 'a "quoted"\none|é|b\\\\'),
        ({"type": "json_schema", "json_schema": {"schema": {"enum": [12, "x"]}}}, '12|"x"'),
        (
            {
                "type": "json_schema",
                "json_schema": {"schema": {"uniqueItems": True, "enum": [1]}, "strict": False},
            },
            "1",
        ),
    ],
)
async def test_a_model_with_random_weights_answers_in_the_requested_regex_grammar_choice_or_json_schema(
    client: Client, asked: dict[str, Any], expected: str
) -> None:
    """Greedy, sampled, and with more min_tokens than the format allows; the tokenizer is byte-level."""
    for number, options in enumerate(({}, {"temperature": 1.5, "seed": 4}, {"min_tokens": 50})):
        answer = await client.session(f"s{number}").generate(
            text="x", max_tokens=60, response_format=asked, **options
        )
        assert answer.finish_reason == "stop"
        assert answer.tokens[-1] == EOS
        assert re.fullmatch(expected, answer.text)


async def test_logit_bias_penalties_and_stop_strings_apply_to_the_tokens_that_a_response_format_allows(
    client: Client,
) -> None:
    one = {"type": "regex", "regex": "[abc]{6}"}
    tokens = [
        (
            await client.session(f"{text}1").generate(
                text="x", response_format={"type": "choice", "choices": [text]}
            )
        ).tokens[0]
        for text in "bz"
    ]
    options = {"text": "x", "response_format": one, "logit_bias": dict.fromkeys(tokens, 100.0)}
    biased = await client.session("s").generate(**options, logprobs=True, top_logprobs=3)
    assert biased.text == "bbbbbb"
    assert len(biased.logprobs) == 7
    fewer = await client.session("t").generate(**options, repetition_penalty=100.0, frequency_penalty=2.0)
    assert set(fewer.text) == {"a", "b", "c"}
    stopped = await client.session("u").generate(**options, stop="bb")
    assert (stopped.text, stopped.finish_reason) == ("", "stop")


async def test_a_request_with_a_response_format_that_cannot_be_enforced_is_refused_and_adds_nothing(
    client: Client,
) -> None:
    """`tests/model/test_grammar.py` has all kinds."""
    session = client.session("s")
    await session.append(text="before")
    for asked, says in (
        (by_schema({"type": "objekt"}), "Invalid type: objekt"),
        ({"type": "regex", "regex": "a("}, "unclosed group"),
        ({"type": "lark", "grammar": 'root: "a"'}, "no start rule"),
    ):
        with pytest.raises(RequestFailedError, match=says) as refused:
            await session.generate(text="x", response_format=asked)
        assert refused.value.code == "invalid_request"
        assert "backtrace" not in refused.value.message
        assert (await session.info()).position == len("before")


async def test_a_request_with_both_ignore_eos_and_a_response_format_is_refused(client: Client) -> None:
    options: dict[str, Any] = {"text": "x", "ignore_eos": True, "max_tokens": 3}
    with pytest.raises(InvalidMessageError, match="ignore_eos without a response_format only"):
        client.session("s").generate(**options, response_format={"type": "json_object"})
    assert (await client.session("s").generate(**options, response_format={"type": "text"})).text


async def test_response_formats_are_refused_without_llguidance_and_by_models_without_an_end_token(
    client: Client, monkeypatch: pytest.MonkeyPatch, local_worker: Any, endless_model: Path, tmp_path: Path
) -> None:
    asked = {"type": "regex", "regex": "a+"}
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(RequestFailedError, match=r"invalid_request: .*no llguidance.*pip install llguidance"):
        await client.session("s").generate(text="x", response_format=asked)
    assert (await client.session("s").generate(text="x", response_format={"type": "text"})).tokens
    monkeypatch.undo()
    assert (await client.session("t").generate(text="x", response_format=asked)).text[0] == "a"
    endless = await local_worker(model=str(endless_model), prefix="endless", data_dir=tmp_path / "endless")
    with pytest.raises(RequestFailedError, match="no token that ends an answer"):
        await endless.client.session("s").generate(text="x", response_format=asked)
