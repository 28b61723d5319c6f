"""The checks of a model's calls cost little, whatever it writes: their thread serves all tenants."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from worker.models.call_parsers import Written
from worker.text import arguments
from worker.text.arguments import NoCallError, Offered
from worker.text.grammar import text_matcher


def offered(parameters: Any) -> Offered:
    return Offered([{"type": "function", "function": {"name": "f", "parameters": parameters}}])


def fitted(value: Any, schema: Any, **defined: Any) -> Any:
    """Return an argument, converted by its schema; raises `NoCallError` if it does not fit."""
    tools = offered({"properties": {"x": schema}, "$defs": defined})
    return json.loads(tools.believed(Written("f", {"x": value})).arguments)["x"]


def test_a_schemas_patterns_are_compiled_before_its_calls_and_matched_a_limited_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: Counter[str] = Counter()

    def counting(word: str, asked: str) -> Any:
        counted["compiled"] += 1
        matches = text_matcher(word, asked)
        assert matches is not None

        def match(text: str) -> bool | None:
            counted["matched"] += 1
            return matches(text)

        return match

    monkeypatch.setattr(arguments, "text_matcher", counting)
    patterns = [{"type": "string", "pattern": f"^x{{{num}}}y$"} for num in range(300)]
    either = {"anyOf": [{"$ref": "#/$defs/any"}] * 70}
    tools = offered({"$defs": {"any": {"anyOf": patterns[:100]}}, "properties": {"a": either}})
    for _ in range(20):
        with pytest.raises(NoCallError, match="too long"):
            tools.believed(Written("f", {"a": "q"}))
    assert counted["compiled"] == 100
    assert counted["matched"] < 1_500
    tools = offered({"$defs": {"any": {"anyOf": patterns}}, "properties": {"a": either}})
    assert counted["compiled"] == 228
    assert tools.believed(Written("f", {"a": "q"})), "one of the patterns is not checked"


LONG = [[num] for num in range(9_000)]


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        (8_999, {"enum": list(range(9_000))}),
        (LONG, {"const": LONG}),
        ({"a": 1}, {"required": ["a"] * 90_000}),
        ("a" * 9_000, {"pattern": "^a*$"}),
        (LONG, {"uniqueItems": True}),
        (['["' + "a" * 90_000 + '"]'], {"items": {"type": "array"}}),
        (1, {"$ref": "#/$defs/" + "a" * 90_000}),
        (1, {"not": {"enum": list(range(2, 9_000))}}),
    ],
)
def test_a_long_check_is_made_once_but_a_schema_that_asks_for_it_often_allows_no_call(
    value: Any, schema: Any
) -> None:
    assert fitted(value, schema)
    with pytest.raises(NoCallError, match="too long"):
        fitted(value, {"anyOf": [{"$ref": "#/$defs/never"}] * 2_000}, never={"allOf": [schema, False]})


def test_an_answer_may_have_many_valid_calls_though_all_their_checks_take_long() -> None:
    tools = offered({"properties": {"x": {"items": {"pattern": "^[0-9]+$"}}}})
    for _ in range(2_000):
        assert tools.believed(Written("f", {"x": []}))
    for _ in range(3):
        assert tools.believed(Written("f", {"x": [str(num) for num in range(200)]}))


def test_texts_for_which_a_pattern_is_too_costly_are_accepted_unchecked() -> None:
    schema = {"items": {"pattern": "^((a{1,100}){1,100}){1,100}$"}}
    with pytest.raises(NoCallError):
        fitted(["b"], schema)
    assert fitted(["a" * 200, "a", "b"], schema) == ["a" * 200, "a", "b"]
