"""A turn renders only the messages that it adds; the tokens equal those of a full render anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_templates import TEMPLATES, Chat

from cache.names.errors import CutOffError
from worker.models.tokenizer import Tokenizer
from worker.text import conversation, templates
from worker.text.locality import num_first
from worker.text.templates import Conversation

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
NEAR = TEMPLATES | {
    "first": FIRST,
    "system apart": SYSTEM_APART,
    "tool runs": TOOL_RUNS,
    "speaker changes": SPEAKER_CHANGES,
}
LOOKING_BACK = {
    "numbers": "{% for m in messages %}{{ loop.index }}. {{ m.content }}\n{% endfor %}",
    "thirds": "{% for m in messages %}{{ '|' if loop.index0 % 3 == 0 }}{{ m.content }}{% endfor %}",
    "length": "{{ messages | length }} messages: {% for m in messages %}{{ m.content }}{% endfor %}",
    "from the end": "{% for m in messages %}{{ m.content if loop.revindex0 < 3 }};{% endfor %}",
    "last": "{% for m in messages %}{{ messages[-1].content }}{{ m.content }}{% endfor %}",
    "last, renamed": (
        "{% set end = messages[-1] %}{% for m in messages %}{{ end.content }}{{ m.content }}{% endfor %}"
    ),
    "counter": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}"
        "{{ ns.n }}{{ m.content }}{% endfor %}"
    ),
    "counting macro": (
        "{% set ns = namespace(n=0) %}{% macro said(m) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endmacro %}"
        "{% for m in messages %}{{ said(m) }}{% endfor %}"
    ),
    "stops": (
        "{% for m in messages %}{% if m.content == 'a' %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "header": (
        "{% for m in messages %}{{ m.content }}{{ '.' if add_generation_prompt else ';' }}{% endfor %}"
    ),
    "header, renamed": (
        "{% if add_generation_prompt %}{% set dot = '.' %}{% endif %}"
        "{% for m in messages %}{{ m.content }}{{ dot }}{% endfor %}"
    ),
    "twice": (
        "{% for m in messages %}{{ m.role }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    ),
    "within": "{% for m in messages %}{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}",
    "chosen": "{% for m in messages if m.role == 'user' %}{{ loop.index0 % 2 }}{{ m.content }}{% endfor %}",
    "reversed": "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}",
    "sorted": "{% for m in messages | sort(attribute='content') %}{{ m.content }}{% endfor %}",
    "joined": "{{ messages | map(attribute='content') | join }}",
    "alternately": (
        "{% set c = cycler('a', 'b') %}{% for m in messages %}{{ c.next() }}{{ m.content }}{% endfor %}"
    ),
    "changes": "{% for m in messages %}{{ m.role if loop.changed(m.role) }}{{ m.content }}{% endfor %}",
    "loop, renamed": "{% for m in messages %}{% set l = loop %}{{ l.length }}{{ m.content }}{% endfor %}",
    "all at once": "{% filter upper %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfilter %}",
    "no loop": "{{ messages[0].content }}",
}


@pytest.fixture(scope="module")
def tokenizers(with_template: Callable[[str], Tokenizer], tokenizer: Tokenizer) -> dict[str, Tokenizer]:
    return {"packaged": tokenizer} | {
        name: with_template(text) for name, text in (NEAR | LOOKING_BACK).items()
    }


@pytest.mark.parametrize("name", ["packaged", *NEAR])
def test_a_template_that_depends_only_on_neighbouring_messages_is_recognised(
    tokenizers: dict[str, Tokenizer], name: str
) -> None:
    assert num_first(tokenizers[name].template) in (1, 2)


@pytest.mark.parametrize("name", LOOKING_BACK)
def test_a_template_that_depends_on_distant_messages_is_recognised(
    tokenizers: dict[str, Tokenizer], name: str
) -> None:
    assert num_first(tokenizers[name].template) is None


def test_a_missing_or_invalid_template_counts_as_depending_on_distant_messages() -> None:
    assert num_first(None) is None
    assert num_first("{% for m in messages %}") is None


@pytest.mark.parametrize("name", ["packaged", "trimming", "system apart", "tool runs", "thoughts"])
def test_a_late_turn_of_a_chat_renders_and_tokenises_no_more_than_an_early_one(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Counts the rendered messages and tokenised characters of turns that all have the same text."""
    chat = Chat(tokenizers[name])
    rendered, encoded = [], []
    render, encode = chat.tokenizer.render, chat.tokenizer.encode

    def counting_render(messages: Any, **options: Any) -> str:
        rendered.append(len(messages))
        return render(messages, **options)

    def counting_encode(text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(text, **options)

    costs = []
    for _ in range(40):
        with monkeypatch.context() as patch:
            patch.setattr(chat.tokenizer, "render", counting_render)
            patch.setattr(chat.tokenizer, "encode", counting_encode)
            rendered.clear()
            encoded.clear()
            chat.say(("user", "What now?"))
            chat.open()
            costs.append((sum(rendered), sum(encoded)))
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
        st.tuples(st.just("shorten"), st.none()),
    ),
    min_size=8,
    max_size=40,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["packaged", *NEAR]), begin=st.booleans(), turns=TURNS)
def test_any_mix_of_turns_gives_the_same_tokens_as_rendering_the_whole_conversation(
    tokenizers: dict[str, Tokenizer], name: str, begin: bool, turns: list[tuple[str, Any]]
) -> None:
    """The turns have messages of any role, truncated answers, raw content and rewinds to any position.

    Between them the conversation is shortened, stored and loaded.
    """
    near, full = Chat(tokenizers[name]), Chat(tokenizers[name])
    steady = [("ask", ("so?", "yes", True))] * 16
    for turn in [*(steady if begin else ()), *turns]:
        before = near.conversation, list(near.tokens), list(near.messages)
        try:
            outcome = _take(near, turn)
        except CutOffError:
            _, near.tokens, near.messages = before
            near.conversation = full.conversation
            outcome = _take(near, turn)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(templates, "num_first", lambda _: None)
            patch.setattr(conversation, "num_first", lambda _: None)
            assert _take(full, turn) == outcome
        assert near.tokens == full.tokens
        steps = near.conversation._segments
        assert steps == full.conversation._segments[len(full.conversation._segments) - len(steps) :]


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
        elif kind == "shorten":
            packed = chat.conversation.shortened().pack()
            chat.conversation = Conversation.unpack(chat.tokenizer, packed)
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


def test_a_shortened_conversation_has_about_the_same_size_however_long_it_was(
    tokenizers: dict[str, Tokenizer],
) -> None:
    """The conversation continues and rewinds a little; a longer rewind raises `CutOffError`."""
    sizes = []
    for num_turns in (40, 400):
        chat = Chat(tokenizers["system apart"])
        chat.say(("system", "Rules."))
        for _ in range(num_turns):
            chat.say(("user", "What now?"))
            chat.open()
            chat.reply(" Wait.")
            if len(chat.messages) % 50 == 0:
                chat.conversation = chat.conversation.shortened()
        whole_text = chat.render()
        chat.conversation = chat.conversation.shortened()
        sizes.append(len(chat.conversation.pack()))
        chat.conversation = chat.conversation.rewind(chat.tokens, len(chat.tokens) - 10)
        with pytest.raises(CutOffError):
            chat.conversation.rewind(chat.tokens, 30)
        assert whole_text.startswith(chat.tokenizer.decode(chat.tokens[:-10]))
    assert sizes[1] < sizes[0] * 1.1
