"""Rendering only a chat's new messages gives the tokens of rendering the whole chat, at any length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from worker.models.tokenizer import Tokenizer
from worker.text import templates
from worker.text.conversation import said_in
from worker.text.segments import MessageRecord, Segment, pack_segments, unpack_segments
from worker.text.templates import Addition, Conversation, TemplateError

pytestmark = pytest.mark.model

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("m.content", "m.content | trim")
FORGETS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip() }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_MARKERS = (
    "{% for m in messages %}### {{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}### Assistant: {% endif %}"
)
NO_SEPARATOR = "{% for m in messages %}{{ m.content }}{% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML
DATED = "Today is {{ strftime_now('%d %b %Y') }}.\n" + CHATML

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
TEMPLATES = {
    "chatml": CHATML,
    "trimming": TRIMMING,
    "thoughts": FORGETS_THOUGHTS,
    "plain": PLAIN_MARKERS,
    "no_separator": NO_SEPARATOR,
    "alternating": ALTERNATING,
    "bos": WITH_BOS,
    "dated": DATED,
    "first": FIRST,
    "system apart": SYSTEM_APART,
    "tool runs": TOOL_RUNS,
    "speaker changes": SPEAKER_CHANGES,
}
#: With these a chat of users and assistants has the text of the full render, wherever it begins.
USUAL = ["chatml", "trimming", "thoughts", "plain", "no_separator", "alternating", "bos", "dated"]
DAY = datetime(2024, 2, 29, tzinfo=UTC)
END = 2  # <|im_end|>


@dataclass
class Chat:
    """Drives a conversation as a session does, and keeps the messages for the full render."""

    tokenizer: Tokenizer
    conversation: Conversation = field(init=False)
    tokens: list[int] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.conversation = Conversation(self.tokenizer, DAY)

    def say(self, *messages: tuple[str, str]) -> Addition:
        new = [{"role": role, "content": content} for role, content in messages]
        self.conversation, addition = self.conversation.add_messages(self.tokens, new)
        self.messages += new
        return self._apply(addition)

    def open(self, *, raw: bool = False) -> Addition:
        self.conversation, addition = self.conversation.start_answer(self.tokens, raw=raw)
        return self._apply(addition)

    def answer(self, tokens: list[int]) -> None:
        self.conversation = self.conversation.add_answer(self.tokens, tokens)
        self.tokens += tokens
        content = self.tokenizer.decode([token for token in tokens if token != END])
        lead = self.tokenizer.answer_lead
        self.messages.append({"role": "assistant", "content": content.removeprefix(lead)})
        assert self.conversation.position == len(self.tokens)

    def reply(self, text: str, *, end: bool = True) -> None:
        self.answer(self.encode(text) + ([END] if end else []))

    def raw(self, text: str) -> None:
        self.conversation, addition = self.conversation.add_raw(self.tokens, self.encode(text))
        self._apply(addition)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, at_start=False)

    def render(self, *, header: bool = False) -> str:
        return self.tokenizer.render(self.messages, add_generation_prompt=header, started=DAY)

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.tokens)

    def _apply(self, addition: Addition) -> Addition:
        self.tokens = self.tokens[: addition.keep] + addition.tokens
        assert self.conversation.position == len(self.tokens)
        return addition


@pytest.fixture(scope="module")
def tokenizers(with_template: Any, tokenizer: Tokenizer) -> dict[str, Tokenizer]:
    return {"packaged": tokenizer} | {name: with_template(text) for name, text in TEMPLATES.items()}


@pytest.fixture
def chat(tokenizer: Tokenizer) -> Chat:
    return Chat(tokenizer)


def test_sampled_tokens_of_an_answer_are_kept_even_if_the_tokenizer_would_split_the_text_differently(
    chat: Chat,
) -> None:
    odd = [token for char in "Hello there" for token in chat.encode(char)]
    assert odd != chat.encode("Hello there")
    chat.say(("user", "Hi"))
    chat.open()
    start = len(chat.tokens)
    chat.answer([*odd, END])
    assert chat.say(("user", "again")).keep == start + len(odd) + 1
    assert chat.tokens[start : start + len(odd)] == odd
    assert chat.text == chat.render()


def test_a_generate_request_after_an_answer_without_end_token_continues_that_answer(chat: Chat) -> None:
    chat.say(("user", "Hi"))
    chat.open()
    chat.reply("Once upon", end=False)
    assert chat.open() == Addition(len(chat.tokens), [])
    chat.reply(" a time")
    chat.messages[-2:] = [{"role": "assistant", "content": "Once upon a time"}]
    assert chat.say(("user", "more")).keep < len(chat.tokens)
    assert chat.text == chat.render()


def test_a_generate_request_after_a_finished_answer_starts_a_new_answer(chat: Chat) -> None:
    chat.say(("user", "Hi"))
    chat.open()
    chat.reply("One.")
    assert chat.tokenizer.decode(chat.open().tokens) == "\n<|im_start|>assistant\n"
    chat.reply("Two.")
    chat.say(("user", "x"))
    assert chat.text == chat.render()


def test_a_sampled_end_token_that_the_template_does_not_write_is_replaced_by_the_templates_end_token(
    chat: Chat,
) -> None:
    """The packaged model may also end an answer with <|endoftext|>, which its template never writes."""
    chat.say(("user", "Hi"))
    chat.open()
    chat.answer([*chat.encode("Bye"), 0])
    chat.messages[-1]["content"] = "Bye"
    before = len(chat.tokens)
    assert chat.say(("user", "x")).keep == before - 1
    assert chat.text == chat.render()


def test_the_sampled_end_token_of_a_harmony_tool_call_is_kept_and_that_of_other_answers_is_replaced(
    packaged_folder: Path,
) -> None:
    hf = AutoTokenizer.from_pretrained(str(packaged_folder))
    names = ("start", "end", "message", "channel", "call", "return")
    hf.add_tokens([f"<|{name}|>" for name in names], special_tokens=True)
    hf.chat_template = (
        "{% for m in messages %}{{ '<|start|>' + m.role }}"
        "{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )
    ends = hf.convert_tokens_to_ids(["<|call|>", "<|return|>"])
    chat = Chat(Tokenizer(hf, ends))
    call = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=f<|message|>{}"
    answers = [(call, "<|call|>", "<|call|>"), ("<|channel|>final<|message|>Yes.", "<|return|>", "<|end|>")]
    for text, end, kept in answers:
        chat.say(("user", "Hi"))
        chat.open()
        before = chat.text
        chat.answer(chat.encode(text + end))
        chat.say(("user", "So?"))
        assert chat.text == f"{before}{text}{kept}<|start|>user<|message|>So?<|end|>"


def test_messages_after_raw_content_are_rendered_as_a_new_conversation_behind_the_raw_tokens(
    chat: Chat,
) -> None:
    chat.raw("Once upon a time")
    assert chat.open().tokens == []
    chat.answer(chat.encode(" there was"))
    chat.messages.clear()
    start = len(chat.tokens)
    assert chat.say(("user", "Hi")).keep == start
    chat.open()
    assert chat.tokenizer.decode(chat.tokens[start:]) == chat.render(header=True)


def test_a_raw_generate_request_after_messages_adds_no_assistant_header_tokens(chat: Chat) -> None:
    chat.say(("user", "Hi"))
    assert chat.open(raw=True).tokens == []


def test_a_generate_request_in_a_session_without_messages_adds_no_assistant_header(chat: Chat) -> None:
    assert chat.open() == Addition(0, [])
    assert chat.say() == Addition(0, [])


@pytest.mark.parametrize(("name", "lead"), [("packaged", ""), ("plain", ""), ("alternating", " ")])
def test_a_space_that_the_chat_template_writes_before_an_answer_is_not_added_twice(
    tokenizers: dict[str, Tokenizer], name: str, lead: str
) -> None:
    chat = Chat(tokenizers[name])
    assert chat.tokenizer.answer_lead == lead
    chat.say(("user", "Hi"))
    chat.open()
    chat.reply(lead + "Hello.")
    before = len(chat.tokens)
    expected = before if name != "plain" else before - 1  # its template writes no end-of-turn token
    assert chat.say(("user", "x")).keep == expected
    assert chat.text == chat.render()


def test_a_rewind_to_the_end_of_a_message_that_ended_inside_a_token_keeps_all_earlier_tokens(
    tokenizers: dict[str, Tokenizer],
) -> None:
    chat = Chat(tokenizers["no_separator"])
    chat.say(("user", "Hel"))
    boundary = len(chat.tokens)
    chat.say(("user", "lo there friend"))
    assert boundary < len(chat.tokens)
    cut = chat.conversation.rewind(chat.tokens, boundary)
    added = cut.add_messages(chat.tokens[:boundary], [{"role": "user", "content": "p"}])[1]
    assert added == Addition(boundary, chat.encode("p"))


def test_a_chat_template_that_rewrites_some_bytes_of_a_character_replaces_all_tokens_of_the_character(
    tokenizers: dict[str, Tokenizer],
) -> None:
    chat = Chat(tokenizers["thoughts"])
    chat.say(("user", "Hi"))
    chat.open()
    start = len(chat.tokens)
    chat.reply("🫠a</think>🫡b")
    assert start <= chat.say(("user", "x")).keep < start + len(chat.encode("🫠"))
    assert chat.text == chat.render()


def test_consecutive_messages_of_one_role_are_joined_if_the_chat_template_requires_alternating_roles(
    tokenizers: dict[str, Tokenizer],
) -> None:
    chat = Chat(tokenizers["alternating"])
    chat.say(("user", "Hi"))
    chat.say(("user", "Hi again"))
    assert chat.text == "[INST] Hi\n\nHi again [/INST]"
    chat.open()
    chat.reply(" Hello.")
    addition = chat.say(("assistant", "And?"))
    assert addition.keep == len(chat.encode("[INST] Hi\n\nHi again [/INST]")) + len(chat.encode(" Hello."))
    chat.say(("user", "Bye"))
    assert chat.text == "[INST] Hi\n\nHi again [/INST] Hello.\n\nAnd?<|im_end|>[INST] Bye [/INST]"
    assert chat.text == chat.render()


def test_a_message_that_the_chat_template_refuses_raises_an_error_with_the_templates_own_words(
    with_template: Any,
) -> None:
    chat = Chat(
        with_template(
            CHATML + "{% if 'no' in messages[-1].content %}{{ raise_exception('Not so') }}{% endif %}"
        )
    )
    chat.say(("user", "Hi"))
    before = chat.conversation
    with pytest.raises(TemplateError, match="Not so"):
        chat.say(("user", "no"))
    assert chat.conversation is before


@pytest.mark.parametrize(
    "messages", [[{"role": "user"}], [{"role": "user", "content": 3}], [{"content": "x"}]], ids=str
)
def test_adding_a_message_without_a_role_or_without_text_content_raises_a_template_error(
    chat: Chat, messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(TemplateError, match="refuses these messages"):
        chat.conversation.add_messages([], messages)


def test_results_of_tool_calls_that_share_an_id_are_assigned_to_the_calls_in_their_order(
    tokenizer: Tokenizer,
) -> None:
    calls = [{"id": name, "function": {"name": "f", "arguments": "{}"}} for name in ("x", "y", "x")]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "content": "r", "tool_call_id": name} for name in ("x", "x", "y", "x")]
    found = Conversation(tokenizer, DAY).with_call_indices([said, *results])
    assert [one.get("call_index") for one in found] == [None, 0, 2, 1, None]
    told = [MessageRecord(one, call_index=one.get("call_index")) for one in found[:2]]
    first = Conversation(tokenizer, DAY).given(told, 0, 9, opens_answer=False)
    more = first.with_call_indices(results[1:])
    assert [one.get("call_index") for one in more] == [2, 1, None], "they may come in several requests"


def test_adding_messages_for_a_model_without_a_chat_template_raises_an_error(
    tokenizers: dict[str, Tokenizer], with_template: Any
) -> None:
    chat = Chat(with_template(None))
    with pytest.raises(TemplateError, match="no chat template; send text or tokens"):
        chat.say(("user", "Hi"))


def test_the_date_that_a_chat_template_writes_is_the_day_on_which_the_session_began(
    tokenizers: dict[str, Tokenizer],
) -> None:
    """A replay on another day gives the same tokens."""
    chat = Chat(tokenizers["dated"])
    chat.say(("user", "Hi"))
    assert chat.text.startswith("Today is 29 Feb 2024.\n<|im_start|>")


def test_messages_added_after_a_rewind_to_any_position_are_rendered_after_the_kept_tokens(chat: Chat) -> None:
    chat.say(("user", "Hi"))
    chat.open()
    header = len(chat.tokens)
    chat.reply("Hello there, friend")
    answered = len(chat.tokens)
    chat.say(("user", "x"))
    for position in range(len(chat.tokens) + 1):
        cut = chat.conversation.rewind(chat.tokens, position)
        assert cut.position == position
        history = chat.tokens[:position]
        after, addition = cut.add_messages(history, [{"role": "user", "content": "new"}])
        assert after.position == addition.keep + len(addition.tokens)
        text = chat.tokenizer.decode(history[: addition.keep] + addition.tokens)
        if header <= position <= answered:
            content = chat.tokenizer.decode(history[header : min(position, answered - 1)])
            messages = [
                chat.messages[0],
                {"role": "assistant", "content": content},
                {"role": "user", "content": "new"},
            ]
            assert text == chat.tokenizer.render(messages, add_generation_prompt=False, started=DAY)
            assert addition.keep == position


def test_a_generate_request_after_a_rewind_into_a_prompt_adds_no_assistant_header(chat: Chat) -> None:
    chat.say(("user", "Hi, how are you?"))
    cut = chat.conversation.rewind(chat.tokens, 5)
    assert cut.start_answer(chat.tokens[:5])[1].tokens == []


def test_a_generate_request_after_a_rewind_into_an_answer_continues_that_answer(chat: Chat) -> None:
    chat.say(("user", "Hi"))
    chat.open()
    chat.reply("Hello there, friend")
    position = len(chat.tokens) - 3
    cut = chat.conversation.rewind(chat.tokens, position)
    assert cut.start_answer(chat.tokens[:position])[1].tokens == []


FRAGMENTS = st.lists(
    st.sampled_from(["un", "believ", "able", " th", "ing", "s", " ", "\n", "1", "é"]), max_size=5
)
TEXTS = FRAGMENTS.map("".join) | st.text(
    st.sampled_from("ab 1\n#:<>é数🙂\u0301") | st.characters(codec="utf-8", categories=["L", "N", "P", "Z"]),
    max_size=12,
)
NAMES = st.sampled_from(["packaged", *USUAL])
ANY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@ANY
@given(name=NAMES, turns=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
def test_messages_added_one_by_one_give_the_same_tokens_as_rendering_the_whole_conversation(
    tokenizers: dict[str, Tokenizer], name: str, turns: list[tuple[str, str]]
) -> None:
    chat = Chat(tokenizers[name])
    for question, answer in turns:
        chat.say(("user", question))
        chat.say(("assistant", answer))
        assert chat.tokens == chat.tokenizer.encode(chat.render(), at_start=True)


@ANY
@given(
    name=NAMES,
    turns=st.lists(
        st.tuples(TEXTS, st.lists(st.integers(0, 49_151), max_size=6) | TEXTS, st.booleans()),
        min_size=1,
        max_size=4,
    ),
)
def test_a_chat_with_sampled_answers_has_the_same_text_as_a_rendering_of_the_whole_conversation(
    tokenizers: dict[str, Tokenizer], name: str, turns: list[tuple[str, list[int] | str, bool]]
) -> None:
    """The sampled tokens are arbitrary; the template may replace some of them."""
    chat = Chat(tokenizers[name])
    for question, sampled, end in turns:
        chat.say(("user", question))
        assert chat.text == chat.render()
        chat.open()
        assert chat.text == chat.render(header=True)
        tokens = chat.encode(sampled) if isinstance(sampled, str) else sampled
        tokens = [token for token in tokens if token not in chat.tokenizer.eos_ids]
        chat.answer(tokens + [END] * end)
    chat.say(("user", "end"))
    assert chat.text == chat.render()


@pytest.mark.parametrize("name", ["packaged", "trimming", "system apart", "tool runs", "thoughts"])
def test_a_late_turn_of_a_long_chat_tokenises_and_decodes_no_more_than_an_early_turn(
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


SHORT_TEXTS = st.sampled_from(["", "a", " b ", "un", "believable", "x<|im_end|>", "</think>c", "é\n", "\n"])
ROLES = st.sampled_from(["user", "user", "assistant", "system", "tool"])
TURNS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.lists(st.tuples(ROLES, SHORT_TEXTS), min_size=1, max_size=3)),
        st.tuples(st.just("ask"), st.tuples(SHORT_TEXTS, SHORT_TEXTS, st.booleans())),
        st.tuples(st.just("ask"), st.tuples(SHORT_TEXTS, SHORT_TEXTS, st.booleans())),
        st.tuples(st.just("answer"), st.tuples(SHORT_TEXTS, st.booleans())),
        st.tuples(st.just("header"), st.none()),
        st.tuples(st.just("raw"), SHORT_TEXTS),
        st.tuples(st.just("rewind"), st.floats(0, 1)),
    ),
    min_size=8,
    max_size=40,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["packaged", *TEMPLATES]), turns=TURNS)
def test_a_conversation_stored_and_loaded_before_each_turn_gets_the_same_tokens_as_if_kept_in_memory(
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


def test_a_chat_that_starts_with_a_system_message_has_after_each_turn_the_text_of_a_full_rendering(
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


def given_answers(tokenizer: Tokenizer, *ends: int, keeps: bool = True) -> Conversation:
    """Return a conversation with a question, whose answer of one token for each of `ends` has as many parts.

    Each part has a call. A part ends with an end-of-turn token if its `end` is true.
    """
    found = Conversation(tokenizer, DAY).given([MessageRecord(QUESTION)], 0, 4, opens_answer=True)
    history = [5] * 4
    for at, end in enumerate(ends):
        said = {"content": f"{at}", "tool_calls": [f"call {at}"]}
        found = found.answered(history, [6, END if end else 7], said, keeps_reasoning=keeps)
        history += [6, END if end else 7]
    return found


QUESTION = {"role": "user", "content": "a"}


def test_an_answer_generated_in_two_parts_has_the_text_and_the_tool_calls_of_both_parts(
    tokenizer: Tokenizer,
) -> None:
    answer = said_in(given_answers(tokenizer, 0, 1)._segments)[-1].message
    assert (answer["content"], answer["tool_calls"]) == ("01", ["call 0", "call 1"])


@pytest.mark.parametrize(("keeps", "thoughts"), [(True, "kept"), (False, "gone")])
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("keep", [4, 5, 6])
def test_a_new_question_drops_earlier_reasoning_even_from_a_truncated_or_rewritten_answer(
    tokenizer: Tokenizer, keeps: bool, thoughts: str, is_cut: bool, keep: int
) -> None:
    """`keep` is before, within or behind what is there of the answer."""
    found = given_answers(tokenizer, 1, keeps=keeps)
    found = found.rewind([5] * 4 + [6, END], 5) if is_cut else found
    found = found.given([MessageRecord(QUESTION)], min(keep, found.position), 20, opens_answer=True)
    assert [one.thoughts for one in said_in(found._segments, drops=True)] == [
        "kept",
        thoughts,
        "kept",
        "kept",
    ]


@pytest.mark.parametrize(
    ("parts", "texts"),
    [
        ([(0, 5, "ab"), (5, 8, "c")], ["ab", "c"]),
        ([(0, 5, "ab"), (3, 8, "c")], ["abc"]),
        ([(0, 5, None), (3, 8, "c")], [None]),
        ([(0, 5, "ab"), (3, 8, None)], [None]),
        ([(0, 5, None), (5, 8, "c")], [None, "c"]),
    ],
)
def test_overlapping_parts_of_raw_text_are_joined_and_the_joined_text_is_known_only_if_both_are_known(
    tokenizer: Tokenizer, parts: list[tuple[int, int, str | None]], texts: list[str | None]
) -> None:
    found = Conversation(tokenizer, DAY)
    for keep, end, text in parts:
        found = found.with_raw(keep, end, text)
    assert [*found.parts()] == texts


@pytest.mark.parametrize(
    ("num_kept", "num_new", "num_shared"),
    [(300, 0, 2), (300, 200, 2), (256, 200, 2), (255, 200, 1), (100, 200, 0), (0, 5, 0)],
)
def test_a_checkpoint_after_a_rewind_reuses_only_stored_parts_of_the_conversation_before_the_rewind_position(
    num_kept: int, num_new: int, num_shared: int
) -> None:
    before = tuple(Segment("raw", at, at + 1, text="old") for at in range(300))
    new = (Segment("raw", at, at + 1, text="new") for at in range(num_kept, num_kept + num_new))
    after = (*before[:num_kept], *new)
    num, parts = pack_segments(after, before)
    assert num == num_shared
    assert unpack_segments(before, num, parts) == after
