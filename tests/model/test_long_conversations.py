"""A turn tokenises only what it adds; the tokens equal those of a conversation read from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_templates import TEMPLATES, Chat

from worker.models.tokenizer import Tokenizer
from worker.text import templates

pytestmark = pytest.mark.model

OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
FIRST = (
    "{% for m in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\nRules.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + OPEN
)
SYSTEM_APART = (
    "{% if messages[0].role == 'system' %}{% set chat = messages[1:] %}{% set rules = messages[0].content %}"
    "{% else %}{% set chat = messages %}{% set rules = false %}{% endif %}"
    "{% for m in chat %}{% if loop.index0 == 0 and rules %}({{ rules }}) {% endif %}"
    "{% if loop.index0 % 2 == 0 %}[{{ m.content | trim }}]{% else %} {{ m.content | trim }}<|im_end|>"
    "{% endif %}{% endfor %}"
)
TOOL_RUNS = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n(' + m.content + ')' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ ', ' if not loop.first }}{{ call.id }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}" + OPEN
)
SPEAKER_CHANGES = (
    "{% macro said(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}"
    "{% if loop.previtem is undefined or loop.previtem.role != m.role %}\n{{ m.role }}: "
    "{% else %} / {% endif %}{{ said(m) }}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'assistant' %}\nassistant: {% endif %}"
)
TEMPLATES_HERE = TEMPLATES | {
    "first": FIRST,
    "system apart": SYSTEM_APART,
    "tool runs": TOOL_RUNS,
    "speaker changes": SPEAKER_CHANGES,
}


@pytest.fixture(scope="module")
def tokenizers(with_template: Callable[[str], Tokenizer], tokenizer: Tokenizer) -> dict[str, Tokenizer]:
    return {"packaged": tokenizer} | {name: with_template(text) for name, text in TEMPLATES_HERE.items()}


@pytest.mark.parametrize("name", ["packaged", "trimming", "system apart", "tool runs", "thoughts"])
def test_a_late_turn_of_a_chat_tokenises_and_decodes_no_more_than_an_early_one(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    chat = Chat(tokenizers[name])
    counted: list[int] = []
    encode, decode = chat.tokenizer.encode, chat.tokenizer.decode

    def counting_encode(text: str, **options: Any) -> list[int]:
        counted.append(len(text))
        return encode(text, **options)

    def counting_decode(ids: Sequence[int]) -> str:
        counted.append(len(ids))
        return decode(ids)

    costs = []
    for _ in range(40):
        with monkeypatch.context() as patch:
            patch.setattr(chat.tokenizer, "encode", counting_encode)
            patch.setattr(chat.tokenizer, "decode", counting_decode)
            counted.clear()
            chat.say(("user", "What now?"))
            chat.open()
            costs.append(sum(counted))
        chat.reply("Wait.")
    assert costs[10:12] * 14 == costs[10:38]
    chat.say(("user", "end"))
    assert chat.text == chat.render()


TEXTS = st.sampled_from(["", "a", " b ", "un", "believable", "x<|im_end|>", "</think>c", "é\n", "\n"])
ROLES = st.sampled_from(["user", "user", "assistant", "system", "tool"])
TURNS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.lists(st.tuples(ROLES, TEXTS), min_size=1, max_size=3)),
        st.tuples(st.just("ask"), st.tuples(TEXTS, TEXTS, st.booleans())),
        st.tuples(st.just("ask"), st.tuples(TEXTS, TEXTS, st.booleans())),
        st.tuples(st.just("answer"), st.tuples(TEXTS, st.booleans())),
        st.tuples(st.just("header"), st.none()),
        st.tuples(st.just("raw"), TEXTS),
        st.tuples(st.just("rewind"), st.floats(0, 1)),
    ),
    min_size=8,
    max_size=40,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["packaged", *TEMPLATES_HERE]), turns=TURNS)
def test_a_conversation_that_is_stored_and_loaded_between_any_turns_gets_the_same_tokens(
    tokenizers: dict[str, Tokenizer], name: str, turns: list[tuple[str, Any]]
) -> None:
    """The turns have messages of any role, truncated answers, raw content and rewinds to any position."""
    kept, loaded = Chat(tokenizers[name]), Chat(tokenizers[name])
    stored = loaded.conversation
    for turn in turns:
        packed = loaded.conversation.pack(stored)
        stored = loaded.conversation = stored.unpack(packed)
        assert _take(kept, turn) == _take(loaded, turn)
        assert kept.tokens == loaded.tokens
        assert kept.conversation == loaded.conversation


def _take(chat: Chat, turn: tuple[str, Any]) -> str:
    """Carry out a turn as a session does; return the template's error, or an empty text."""
    kind, what = turn
    try:
        if kind == "say":
            chat.say(*what)
        elif kind == "ask":
            chat.say(("user", what[0]))
            chat.open()
            chat.reply(what[1], end=what[2])
        elif kind == "answer":
            chat.open()
            chat.reply(what[0], end=what[1])
        elif kind == "header":
            chat.open()
        elif kind == "raw":
            chat.raw(what)
        else:
            position = int(what * len(chat.tokens))
            chat.conversation = chat.conversation.rewind(chat.tokens, position)
            del chat.tokens[position:]
    except templates.TemplateError as error:
        return str(error)
    return ""


def test_a_chat_has_the_text_of_the_full_render_if_the_template_treats_its_beginning_specially(
    tokenizers: dict[str, Tokenizer],
) -> None:
    """The chats begin with a system message; some answers lack an end token; one template has a date."""
    for name in ("dated", "first", "system apart"):
        chat = Chat(tokenizers[name])
        chat.say(("system", "Rules."), ("user", "Hi"))
        for turn in range(20):
            chat.open()
            assert chat.text == chat.render(header=True)
            chat.reply(f"Answer {turn}", end=turn % 3 > 0)
            chat.say(("user", f"Question {turn}"))
            assert chat.text == chat.render()
