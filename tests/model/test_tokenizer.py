"""Tokenizers of each family turn text into tokens and back; streamed text ends at the first stop string."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny_gguf import TEXT, TinyLlama, weights
from transformers import AutoTokenizer

from tests.parts import CHAT_TEMPLATE
from worker.models import gguf_model
from worker.models.model_files import ModelError
from worker.models.tokenizer import TemplateError, Tokenizer
from worker.text.templates import Conversation
from worker.text.text_stream import TextStream

SENTENCES = [TEXT, "Once upon a time there was a cat.", "the thing that they then thought", "  two  spaces"]
MORE = ["", " ", "  lead", "trail ", "a\n\nb", "unseen: Ω≠é 🫠", "the cat's  mat", "x" * 40, "\t1234"]


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    prefix = str(tmp_path_factory.mktemp("spm") / "tiny")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 5),
        model_prefix=prefix,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=prefix + ".model")


@pytest.fixture(scope="module")
def make(
    sentencepiece_model: sentencepiece.SentencePieceProcessor, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Tokenizer]:
    """Make tokenizers of GGUF files that contain the SentencePiece model, as llama files do."""
    spm = sentencepiece_model
    ids = range(spm.vocab_size())
    kinds = [2 if spm.is_unknown(i) else 3 if spm.is_control(i) else 6 if spm.is_byte(i) else 1 for i in ids]
    base = TinyLlama(weights(len(ids))).but(
        tokenizer__ggml__model="llama",
        tokenizer__ggml__pre="default",
        tokenizer__ggml__tokens=[spm.id_to_piece(i) for i in ids],
        tokenizer__ggml__scores=[spm.get_score(i) for i in ids],
        tokenizer__ggml__token_type=kinds,
        tokenizer__ggml__merges=None,
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=2,
        tokenizer__ggml__unknown_token_id=0,
    )

    def make(**fields: object) -> Tokenizer:
        folder = tmp_path_factory.mktemp("gguf")
        path = base.but(**fields).write(folder / "spm.gguf")
        return Tokenizer.from_folder(gguf_model.convert(path, folder, dtype="float16"))

    return make


@pytest.fixture(scope="module")
def llama(make: Callable[..., Tokenizer]) -> Tokenizer:
    return make()


@pytest.mark.parametrize("text", [text for text in [*SENTENCES, *MORE] if not text.startswith(" ")])
def test_a_llama_tokenizer_from_gguf_gives_the_same_tokens_as_sentencepiece(
    llama: Tokenizer, sentencepiece_model: sentencepiece.SentencePieceProcessor, text: str
) -> None:
    expected = sentencepiece_model.encode(text)
    assert llama.encode(text, at_start=True) == ([1, *expected] if text else [])


@pytest.mark.parametrize("text", [*SENTENCES, *MORE])
def test_text_after_the_start_of_a_session_is_tokenised_without_adding_or_losing_spaces(
    llama: Tokenizer, text: str
) -> None:
    tokens = llama.encode(text, at_start=False)
    assert llama.decode(tokens) == text
    stream = TextStream(llama)
    assert "".join(map(stream.push, tokens)) + stream.finish() == text


def test_no_leading_space_is_added_to_the_text_if_the_gguf_file_has_add_space_prefix_false(
    make: Callable[..., Tokenizer],
) -> None:
    tokenizer = make(tokenizer__ggml__add_space_prefix=False, tokenizer__ggml__add_bos_token=False)
    assert tokenizer.decode(tokenizer.encode("the cat", at_start=True)) == "the cat"


def test_a_chat_appended_turn_by_turn_with_a_llama_tokenizer_has_the_same_text_as_if_rendered_as_a_whole(
    make: Callable[..., Tokenizer],
) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    tokenizer = make(tokenizer__chat_template=template)
    conversation, tokens = Conversation(tokenizer), list[int]()
    messages = []
    for question, answer in (("the cat?", "on the mat"), ("  and then?", "é 🫠")):
        messages.append({"role": "user", "content": question})
        conversation, addition = conversation.add_messages(tokens, messages[-1:])
        assert addition.keep == len(tokens)
        tokens += addition.tokens
        assert tokenizer.decode(tokens) == tokenizer.render(
            messages, add_generation_prompt=False, started=datetime.now(UTC)
        )
        conversation, addition = conversation.start_answer(tokens)
        tokens += addition.tokens
        sampled = [*tokenizer.encode(" " + answer, at_start=False), 2]  # the space is the template's
        conversation = conversation.add_answer(tokens, sampled)
        tokens += sampled
        messages.append({"role": "assistant", "content": answer})
    assert tokens.count(1) == 1


def test_a_gguf_file_with_a_sentencepiece_vocabulary_without_scores_is_refused(
    make: Callable[..., Tokenizer],
) -> None:
    with pytest.raises(ModelError, match="no score for every token"):
        make(tokenizer__ggml__scores=None)


@pytest.mark.model
def test_token_ids_beyond_the_vocabulary_decode_to_no_text(tokenizer: Tokenizer) -> None:
    """A model's output may be padded to more ids than the tokenizer has."""
    assert tokenizer.decode([tokenizer.vocab_size, 504, 10**6]) == tokenizer.decode([504])


@pytest.mark.model
def test_the_end_tokens_of_a_model_are_collected_from_all_its_config_files(
    packaged_folder: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(packaged_folder / name, tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": [8]}})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 10]}))
    assert Tokenizer.from_folder(tmp_path).eos_ids == {2, 7, 8, 9, 10}


def folder_with(tiny_model: Path, folder: Path, **config: Any) -> Path:
    """Copy the tiny model without its chat template, and change its tokenizer_config.json."""
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def said_by(folder: Path, **more: Any) -> str:
    tokenizer, messages = Tokenizer.from_folder(folder), [{"role": "user", "content": "Hi"}]
    return tokenizer.render(messages, add_generation_prompt=True, started=datetime.now(UTC), **more)


@pytest.mark.parametrize(
    ("behind", "ends"),
    [("<|im_end|>", {2}), ("\n<|im_end|>\n<|im_start|>", {2}), ("!<|im_end|>", {0}), ("", {0})],
)
def test_a_special_token_of_the_chat_template_ends_answers_only_if_it_directly_follows_the_content(
    tiny_model: Path, tmp_path: Path, behind: str, ends: set[int]
) -> None:
    template = "{% for m in messages %}{{ m.content }}" + behind + "{% endfor %}"
    folder = folder_with(tiny_model, tmp_path / "model", eos_token="<|endoftext|>", chat_template=template)
    (folder / "config.json").write_text("{}")
    assert Tokenizer.from_folder(folder).eos_ids == {0} | ends


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_chat_template_in_the_file_chat_template_json_is_used_for_rendering(
    tiny_model: Path, tmp_path: Path, *, is_stored: bool
) -> None:
    folder = folder_with(tiny_model, tmp_path / "model")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    for _ in range(2):
        tokenizer = Tokenizer.from_folder(folder, tmp_path if is_stored else None)
        assert tokenizer.template == CHAT_TEMPLATE
    assert said_by(folder) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
TOOL_USE = "\n{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}{{ messages[0].content }}  \n"


@pytest.mark.parametrize("in_json", [False, True])
def test_conversations_with_tools_are_rendered_by_the_chat_template_named_tool_use(
    tiny_model: Path, tmp_path: Path, *, in_json: bool
) -> None:
    named = [
        {"name": name, "template": text}
        for name, text in (("default", CHAT_TEMPLATE), ("tool_use", TOOL_USE), ("rag", "{{ documents }}"))
    ]
    folder = folder_with(tiny_model, tmp_path / "model", **({} if in_json else {"chat_template": named}))
    if in_json:
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": named}))
    assert said_by(folder) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert said_by(folder, tools=[TOOL]) == "\nf\nHi  "
    assert Tokenizer.from_folder(folder).markup.renders_tools


def test_a_model_with_several_chat_templates_but_no_default_is_refused_with_the_template_names(
    tiny_model: Path, tmp_path: Path
) -> None:
    named = [{"name": name, "template": CHAT_TEMPLATE} for name in ("rag", "tool_use")]
    folder = folder_with(tiny_model, tmp_path / "model", chat_template=named)
    with pytest.raises(TemplateError, match="has the templates rag, tool_use, and none is its default"):
        said_by(folder)


#: Without unassigned characters: the packaged vocabulary lacks some of their bytes.
TEXTS = st.text(
    st.sampled_from("aab \n<|>é数🙂\u200d\u0301\ufffd")
    | st.characters(codec="utf-8", exclude_categories=["C"]),
    max_size=30,
)
RANDOM = st.lists(st.integers(3, 49_151), max_size=30)


def pieces(tokenizer: Tokenizer, tokens: list[int], stop: list[str]) -> tuple[list[str], str | None]:
    stream = TextStream(tokenizer, stop, lambda _: True)
    found = [stream.push(token) for token in tokens]
    return [*found, stream.finish()], stream.stop


def expected(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Cut the text at the stop string that ends first; if several end there, at the longest of them."""
    for end in range(1, len(text) + 1):
        ending = [string for string in stop if text.endswith(string, 0, end)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.model
@given(tokens=RANDOM)
def test_the_streamed_text_of_random_tokens_equals_the_text_of_the_same_tokens_decoded_as_a_whole(
    tokenizer: Tokenizer, tokens: list[int]
) -> None:
    whole = tokenizer._rust.decode(tokens, skip_special_tokens=False)
    assert tokenizer.decode(tokens) == whole
    assert "".join(pieces(tokenizer, tokens, [])[0]) == whole


@pytest.mark.model
@given(text=TEXTS)
def test_any_text_that_is_tokenised_and_decoded_as_a_stream_is_unchanged(
    tokenizer: Tokenizer, text: str
) -> None:
    tokens = tokenizer.encode(text, at_start=False)
    assume(tokenizer.eos_ids.isdisjoint(tokens))
    assert "".join(pieces(tokenizer, tokens, [])[0]) == text


@pytest.mark.parametrize("word", ["café", "Ã©", "naïf ça"])
def test_an_added_token_whose_letters_are_also_byte_symbols_decodes_to_its_own_text(
    tiny_model: Path, word: str
) -> None:
    hf = AutoTokenizer.from_pretrained(tiny_model)
    hf.add_tokens([word])
    tokenizer = Tokenizer(hf)
    tokens = tokenizer.encode(f"un {word}!", at_start=False)
    assert len(tokens) == len("un !") + 1
    assert tokenizer.decode(tokens) == "".join(pieces(tokenizer, tokens, [])[0]) == f"un {word}!"


@pytest.mark.model
@given(
    tokens=RANDOM | TEXTS,
    stop=st.lists(st.text("aab \n<|>é数🙂\u0301", min_size=1, max_size=4), max_size=6),
    cuts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=4),
)
def test_streamed_text_ends_before_the_first_completed_stop_string_however_tokens_divide_the_text(
    tokenizer: Tokenizer, tokens: list[int] | str, stop: list[str], cuts: list[tuple[int, int]]
) -> None:
    ids = tokenizer.encode(tokens, at_start=False) if isinstance(tokens, str) else tokens
    ids = [token for token in ids if token not in tokenizer.eos_ids]
    whole = tokenizer.decode(ids)
    stop = [*stop, *(part for start, size in cuts if (part := whole[start : start + size]))]
    found, seen = pieces(tokenizer, ids, stop)
    assert ("".join(found), seen) == expected(whole, stop)


@pytest.mark.model
def test_streaming_holds_back_only_text_that_may_become_a_stop_string(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["\n\nUser"])
    sent = [stream.push(token) for char in "ab\n\nUsed" for token in tokenizer.encode(char, at_start=False)]
    assert sent == ["a", "b", "", "", "", "", "", "\n\nUsed"]


@pytest.mark.model
def test_a_character_of_several_tokens_is_streamed_when_the_token_with_its_last_byte_arrives(
    tokenizer: Tokenizer,
) -> None:
    tokens = tokenizer.encode("🫠", at_start=False)
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in tokens] == [""] * (len(tokens) - 1) + ["🫠"]
    assert stream.finish() == ""


@pytest.mark.model
def test_an_incomplete_character_at_the_end_of_an_answer_becomes_one_replacement_character(
    tokenizer: Tokenizer,
) -> None:
    stream = TextStream(tokenizer)
    assert stream.push(tokenizer.encode("🫠", at_start=False)[0]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


@pytest.mark.model
def test_the_text_of_a_special_token_is_streamed_only_if_it_is_a_marker_or_part_of_a_stop_string(
    tokenizer: Tokenizer,
) -> None:
    name = "<repo_name>"
    control, other = tokenizer.control_id(name), tokenizer.encode("a", at_start=False)[0]
    assert control is not None
    for stop, is_marker, shown in [
        ([], None, "aa"),
        (["b"], lambda text: text == name, f"a{name}a"),
        ([f"{name}b"], None, f"a{name}a"),
        ([name], None, "a"),
    ]:
        stream = TextStream(tokenizer, stop, is_marker)
        assert "".join(stream.push(one) for one in (other, control, other)) + stream.finish() == shown
