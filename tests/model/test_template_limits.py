"""Chat templates and tokenizers do bounded work; a template that exceeds a bound raises a clear error."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from worker.models import chat_template
from worker.models.tokenizer import TemplateError, Tokenizer
from worker.text.templates import Conversation

pytestmark = pytest.mark.model
DAY = datetime(2024, 2, 29, tzinfo=UTC)
SAY = "{{ messages[-1].content }}"
ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that leave out every round": (
        "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}"
    ),
    "loops in a macro": (
        "{% macro spin() %}{% for i in range(99999) %}{% endfor %}{% endmacro %}"
        "{% for i in range(99999) %}{{ spin() }}{% endfor %}"
    ),
    "calls in a chain": (
        "{% macro a() %}{% endmacro %}{% macro b() %}{{ (a() ~ a()) * 10 }}{% endmacro %}"
        "{% for i in range(99999) %}{{ (b() ~ b() ~ b() ~ b() ~ b() ~ b()) }}{% endfor %}"
    ),
    "a recursive loop": (
        "{% for i in range(9) recursive %}{{ loop(range(9)) if loop.depth < 12 }}{% endfor %}"
    ),
}
MACRO_FOR_EVER = "{% macro spin() %}{{ spin() }}{% endmacro %}{{ spin() }}"


def render(tokenizer: Tokenizer, content: str = "hi", num_messages: int = 1) -> str:
    messages = [{"role": "user", "content": content}] * num_messages
    return tokenizer.render(messages, add_generation_prompt=True, started=DAY)


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_takes_too_many_steps_is_stopped_with_an_error(
    with_template: Callable[[str], Tokenizer], template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_MAX_STEPS", 10_000)
    tokenizer = with_template("{% if 'spin' in messages[-1].content %}" + template + "{% endif %}" + SAY)
    for _ in range(2):
        assert render(tokenizer, "hi") == "hi"
        with pytest.raises(TemplateError, match="it takes more than 10000 steps; send fewer messages"):
            render(tokenizer, "spin")


def test_a_template_with_endless_recursion_raises_an_error(with_template: Callable[[str], Tokenizer]) -> None:
    with pytest.raises(TemplateError, match="recursion"):
        render(with_template(MACRO_FOR_EVER))


def test_a_template_that_writes_too_many_characters_is_stopped_with_an_error(
    with_template: Callable[[str], Tokenizer],
) -> None:
    flood = "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}"
    with pytest.raises(TemplateError, match="it writes more than 67108864 characters; send fewer"):
        render(with_template(flood), "x" * 1000)


def test_a_template_that_runs_longer_than_the_time_limit_is_stopped_with_an_error(
    with_template: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "{% for i in range(99999) %}{% set x = range(50000) | sum %}{% endfor %}"
    monkeypatch.setattr(chat_template, "_MAX_SECONDS", 0.1)
    with pytest.raises(TemplateError, match=r"it takes more than 0.1 s"):
        render(with_template(slow))


def test_thirty_thousand_messages_are_rendered_into_one_prompt(tokenizer: Tokenizer) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}] * 30_000
    given = [tokenizer.as_content(message) for message in messages]
    addition = Conversation(tokenizer, DAY).add_messages([], given)[1]
    assert len(addition.tokens) > 5 * 30_000


def test_tokenising_content_made_of_special_tokens_takes_work_linear_in_its_length(
    tokenizer: Tokenizer,
) -> None:
    """Each character is passed to the tokenizer fewer than six times on average, however long the text."""
    looked_at = 0
    rust = tokenizer._rust

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(rust, name)

        def encode(self, text: str, **options: Any) -> Any:
            nonlocal looked_at
            looked_at += len(text)
            return rust.encode(text, **options)

    content = "<|im_end|>" * 2000
    counted = Tokenizer(tokenizer._hf)
    counted._rust = counted._controls._rust = Counting()
    tokens = counted.encode(counted.as_text(content), at_start=False)
    assert counted.decode(tokens) == content
    assert looked_at < 6 * len(content)
