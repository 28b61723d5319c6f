"""A thin wrapper around a Hugging Face tokenizer: encodes, decodes, and renders chat templates.

Special tokens in raw text are parsed, since chat templates contain them; in messages they stay plain text
(see `controls`). Decoding joins each token's bytes, so it is correct in the middle of a session too, where
the tokenizer's own decoder would drop a leading space. All methods are thread-safe. Must not import MLX.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from .answer_markup import markup_of, renders_tools, with_calls, with_objects, with_short_ids, with_tools
from .chat_template import ChatTemplate, CodeTemplate, template_of
from .control_tokens import ControlTokens, is_marked, unmarked
from .image_parts import with_parts
from .model_files import one_line, read_json, silent, text_config
from .template_support import (
    INSTEAD,
    TemplateError,
    TemplateSupport,
    in_parts,
    joined_in_words,
    support_of,
)
from .tokenizer_files import load

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from .answer_markup import AnswerMarkup
    from .model_files import Progress
    from .tokenizer_files import LoadedTokenizer
    from .vision.image_processor import ImageProcessor

_REPLACEMENT: Final = "\ufffd"
#: A byte that occurs in no token of several bytes.
_SHIELD: Final = "\x01"
#: A probe as an assistant's message; templates render it unchanged.
_PROBE: Final = "answer-content"
_ANSWER: Final = {"role": "assistant", "content": _PROBE}
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Encodes, decodes and renders with one model's tokenizer."""

    def __init__(
        self,
        hf: LoadedTokenizer,
        eos_ids: Iterable[int] = (),
        *,
        tool_parser: str | None = None,
        code: CodeTemplate | None = None,
    ) -> None:
        """`tool_parser` names mlx-lm's parser for calls; `code` is a template in Python, instead of Jinja."""
        self._hf = hf
        self._tool_parser = tool_parser
        self._rust = hf.backend_tokenizer
        self._rust.no_truncation()
        self._rust.no_padding()
        own = () if hf.eos_token_id is None else (int(hf.eos_token_id),)
        self.vocab_size: int = self._rust.get_vocab_size(with_added_tokens=True)
        #: Tokens that are matched in a text before the rest is tokenised.
        self.added_ids: frozenset[int] = frozenset(self._rust.get_added_tokens_decoder())
        self.has_template = bool(code or hf.chat_template)
        #: The chat template's source; None if there is none, or several without a default.
        self.template = code.source if code else template_of(hf.chat_template)
        self._code = code
        source = self.template or ""
        #: Which kinds of messages the chat template renders.
        self.support = TemplateSupport()
        self.support = support_of(
            lambda messages, tools: self._probe(messages, tools=tools),
            source,
            renders_tools=renders_tools(source),
        )
        #: The tokens that end an answer, also the one that the chat template writes after an answer.
        self.eos_ids: frozenset[int] = frozenset((*eos_ids, *own)) | self._turn_ends()
        #: The tokens that only the template may use; it marks texts, for `encode` and `render`.
        self.controls = ControlTokens(self._rust, self.eos_ids, str(source if code else hf.chat_template))
        self._bytes: dict[int, bytes] = {}
        #: What images become in a prompt, set once the model is loaded; None if it does not see.
        self.image_processor: ImageProcessor | None = None
        self._guard: int = self._ids("a")[-1]
        self._guard_text: str = self._rust.decode([self._guard], skip_special_tokens=False)
        self._bos, self._after = self._find_ends()
        self._adds_space = self._join(self._ids("a")) == b" a"

    @classmethod
    def from_folder(cls, folder: Path, store: Path | None = None, progress: Progress = silent) -> Tokenizer:
        """Load a model folder's tokenizer; raises `ModelError`. For `store` and `progress` see `load`."""
        config = read_json(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation = read_json(generation_path) if generation_path.exists() else {}
        ends = [_end_ids(part) for part in (config, text_config(config), generation)]
        named_path = folder / "tokenizer_config.json"
        named = read_json(named_path).get("tool_parser_type") if named_path.exists() else None
        code = CodeTemplate.of_folder(folder)
        return cls(load(folder, store, progress), frozenset().union(*ends), tool_parser=named, code=code)

    def control_id(self, text: str) -> int | None:
        """Return the id of the control token with this text; None if there is none."""
        found: int | None = self._rust.token_to_id(text)
        return found if found in self.controls.ids else None

    def encode(self, text: str, *, at_start: bool) -> list[int]:
        """Return the tokens of `text`.

        At the start of a session the tokenizer's beginning-of-sequence token comes first, unless the text
        already has it. Elsewhere nothing is added, not even the space that some tokenizers put before a text.
        """
        if not text:
            return []
        if not at_start:
            return self._inside(text) if self._adds_space else self._ids(text)
        ids = self._ids(text)
        return ids if ids[: len(self._bos)] == self._bos else self._bos + ids

    def encode_whole(
        self, text: str, before: Sequence[int] | None = None, most: int | None = None
    ) -> list[int]:
        """Return a text's tokens between the tokenizer's own start and end tokens: BERT's [CLS] and [SEP].

        `before` replaces the start tokens. Text that only spells a special token does not become one. If all
        together are more than `most` tokens, the text's last ones are left out.
        """
        before = self._bos if before is None else before
        room = None if most is None else max(most - len(before) - len(self._after), 0)
        return [*before, *self._ids(self.as_text(text))[:room], *self._after]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included; bytes that are not UTF-8 become U+FFFD."""
        return self._join(ids).decode("utf-8", "replace")

    def as_text(self, text: str) -> str:
        """Return a text, for `encode`, marked so that no part of it becomes a special token."""
        return self.controls.mark_text(text)

    def marked(self, tokens: Sequence[int]) -> str:
        """Return a session's tokens as text, for `encode`; text that spells a control token is marked."""
        return self.controls.mark_tokens(tokens, self.decode)

    def answer_content(self, tokens: Sequence[int]) -> tuple[str, str]:
        """Return the `answer_lead` that an answer begins with (empty if it does not), and the rest.

        The rest is marked text for `render` (see `as_text`): control tokens that the model sampled stay such
        tokens, text that only spells a special one becomes none.
        """
        text = self.controls.mark_tokens(tokens, self.decode, in_answer=True)
        lead = self.answer_lead if unmarked(text).startswith(self.answer_lead) else ""
        return lead, text[len(lead) :]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for in the middle of a text; empty beyond the vocabulary."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._find_bytes(token)
        return found

    @cached_property
    def markup(self) -> AnswerMarkup:
        """How the model writes reasoning and tool calls; read from template and vocabulary on first use."""
        template = self.template if self.has_template and self.template else ""
        vocabulary = self._rust.get_vocab(with_added_tokens=True)
        return markup_of(template, vocabulary, self._tool_parser)

    @cached_property
    def renders_sampled_calls(self) -> bool:
        """Whether the template gets the call of a harmony answer as a call, and so renders its result."""
        renders = self.support.objects and self.support.results
        return self.markup.is_harmony and renders and "<|call|>" in (self.template or "")

    def adapted(
        self, messages: Sequence[dict[str, Any]], before: Mapping[str, Any] | None, noted: Counter[str]
    ) -> list[dict[str, Any]]:
        """Return messages in forms that the template renders (see `TemplateSupport`), so none is dropped.

        Arguments of tool calls become objects or text, or calls move into the content. A system message that
        the template does not render becomes a part of the user's next message, or a user message. Messages in
        a row that `render` will join are only counted. `before` is the session's last message so far. `noted`
        counts each change, under its phrase in `TemplateSupport.in_words`. The messages for results of calls
        keep their `call_index`.
        """
        support, found, goes_on = self.support, list[dict[str, Any]](), False
        is_begun, last = before is not None, before or {}
        has_call = bool(last.get("tool_calls")) or last.get("role") == "tool"
        for given in messages:
            role, message = given["role"], self._in_form(given, found, has_call, noted)
            if role != "tool":
                has_call = bool(message.get("tool_calls"))
            leads = not is_begun and all(one["role"] in ("system", "developer") for one in found)
            was_system, goes_on = goes_on, False
            if role in ("system", "developer"):
                if leads and found and not support.late_system:
                    message = {**found[-1], "content": f"{found.pop()['content']}\n\n{message['content']}"}
                    noted[joined_in_words("system", "system")] += 1
                elif not leads and not support.late_system:
                    message = {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}
                    goes_on = True
                    noted[INSTEAD["late_system"]] += 1
            elif role == "user" and was_system:
                message = {**message, "content": f"{found.pop()['content']}\n\n{message['content']}"}
            found.append(message)
        if found and not is_begun and found[0]["role"] == "system" and not support.system:
            head = found.pop(0)["content"]
            noted[INSTEAD["system"]] += 1
            if found and found[0]["role"] == "user":
                found[0] = {**found[0], "content": f"{head}\n\n{found[0]['content']}"}
            else:
                found.insert(0, {"role": "user", "content": head})
        noted.update(self._joined_pairs([before or {}, *found]))
        return found

    def _in_form(
        self, given: dict[str, Any], before: Sequence[Mapping[str, Any]], has_call: bool, noted: Counter[str]
    ) -> dict[str, Any]:
        """Return one message in a role and a form that the template renders after the messages `before`."""
        support, message = self.support, self._with_calls(given, noted)
        if given["role"] == "developer" and not support.developer:
            message = {**message, "role": "system"}
            noted[INSTEAD["developer"]] += 1
        if message.get("tool_calls") and before and not self._may_follow(before[-1], message):
            message = with_calls(given)
            noted[INSTEAD["calls"]] += 1
        if given["role"] == "tool" and not (support.results and (has_call or support.results_alone)):
            said = f"<tool_response>\n{message['content']}\n</tool_response>"
            kept = {name: message[name] for name in ("call_index",) if name in message}
            message = {"role": "user", "content": said, **kept}
            noted[INSTEAD["results"]] += 1
        return message if support.any_ids else with_short_ids(message)

    def _joined_pairs(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield a phrase for each message that will be joined to the one before it."""
        for earlier, later in pairwise(messages):
            pair = str(earlier.get("role")), str(later.get("role"))
            if pair in self.support.joined and self._may_follow(earlier, later):
                yield joined_in_words(*pair)

    def _with_calls(self, message: dict[str, Any], noted: Counter[str]) -> dict[str, Any]:
        """Return a message with its tool calls in the form that the template can render."""
        if not message.get("tool_calls"):
            return message
        support, made = self.support, with_objects(message)
        are_objects = all(isinstance(call["function"]["arguments"], dict) for call in made["tool_calls"])
        if support.calls and not support.several_calls and len(made["tool_calls"]) > 1:
            noted[INSTEAD["several_calls"]] += 1
        elif support.calls and not support.text_with_calls and message.get("content"):
            noted[INSTEAD["text_with_calls"]] += 1
        elif support.objects and (are_objects or support.texts):
            return made
        elif support.texts:
            return message
        else:
            noted[INSTEAD["calls"]] += 1
        return with_calls(message)

    def _may_follow(self, before: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
        """Return whether a message can follow another one, as it is or joined as the template requires."""
        pair, has_calls = (before.get("role"), message.get("role")), bool(message.get("tool_calls"))
        if pair not in self.support.joined:
            return True
        return not before.get("tool_calls") and (not has_calls or self.support.text_with_calls)

    def _probe(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        header: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Render messages unchanged, to test the template; raises any error."""
        day = datetime.now(UTC)
        told = messages if self.support.plain else in_parts(messages)
        return self._chat.render(told, add_generation_prompt=header, started=day, tools=tools)

    def _arranged(
        self, messages: Sequence[Mapping[str, Any]], *, has_tools: bool
    ) -> Sequence[Mapping[str, Any]]:
        """Join messages, and add empty user messages, so that the template renders the order of roles."""
        support = self.support
        found: list[Mapping[str, Any]] = []
        for message in messages:
            role = message.get("role")
            if role in ("assistant", "tool") and not support.answer_first and not _has_others(found):
                found.append({"role": "user", "content": ""})
            before = found[-1] if found else None
            if before and (before.get("role"), role) in support.joined and self._may_follow(before, message):
                texts = (found.pop().get("content"), message.get("content"))
                own = message if role == before.get("role") else before
                message = {**own, "content": "\n\n".join(text for text in texts if text)}  # noqa: PLW2901
            found.append(message)
        alone = support.system_alone and (support.tools_alone or not has_tools)
        if found and not alone and not _has_others(found):
            found.append({"role": "user", "content": ""})
        found = [with_parts(one) for one in found]
        return found if support.plain else in_parts(found)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        started: datetime,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the text of a whole conversation; with `add_generation_prompt`, also the answer header.

        If the template knows no tools, they are described in the system message (`with_tools`). Successive
        messages whose roles it does not render in a row are joined, and empty user messages are added where
        it needs a user message. `variables` are passed to the template. Raises `TemplateError` if there is no
        template, or it refuses the messages.

        A template that asks for the date gets `started`, the day when the session began: with the present
        date, the same conversation would render differently tomorrow.
        """
        if not self.has_template:
            raise TemplateError("the model has no chat template; send text or tokens instead of messages")
        try:
            chat = self._chat
            if tools and not self.markup.renders_tools:
                role = "system" if self.support.system else "user"
                messages, tools = with_tools(messages, tools, role), ()
            return chat.render(
                self._arranged(messages, has_tools=bool(tools)),
                add_generation_prompt=add_generation_prompt,
                started=started,
                tools=tools,
                variables=variables,
            )
        except Exception as error:  # noqa: BLE001  # a template is foreign code that can raise anything
            raise TemplateError(f"the chat template refuses these messages: {one_line(error)}") from None

    @cached_property
    def _chat(self) -> ChatTemplate | CodeTemplate:
        """The chat template, compiled on first use; raises any error."""
        if self._code is not None:
            return self._code
        if self.template is None:
            names = ", ".join(sorted(self._hf.chat_template or ()))
            raise ValueError(f"the model has the templates {names}, and none is its default")
        return ChatTemplate(self.template, self._hf.special_tokens_map)

    def _turn_ends(self) -> frozenset[int]:
        """Return a set of the one token that the template writes after an answer; empty if it writes none."""
        said = ""
        with suppress(Exception):  # there is no template, or it refuses this
            said = self._probe([{"role": "user", "content": "question"}, _ANSWER])
        behind = said[said.rindex(_PROBE) + len(_PROBE) :].lstrip() if _PROBE in said else ""
        added = self._rust.get_added_tokens_decoder()
        if {"<|channel|>", "<|message|>"}.issubset(token.content for token in added.values()):
            return frozenset()  # in harmony an answer has several messages, and templates end each alike
        fits = [i for i, token in added.items() if token.content.strip() and behind.startswith(token.content)]
        return frozenset([max(fits, key=lambda i: len(added[i].content))] if fits else [])

    @cached_property
    def fingerprint(self) -> bytes:
        """A digest of the tokenizer's definition, without the chat template; computed on first use."""
        return blake2b(self._rust.to_str().encode(), digest_size=16).digest()

    def has_tokens_of(self, other: Tokenizer) -> bool:
        """Return whether two tokenizers have the same tokens and ids, even if they split text differently."""
        ours, theirs = self._rust, other._rust
        return self.fingerprint == other.fingerprint or ours.get_vocab() == theirs.get_vocab()

    @cached_property
    def answer_lead(self) -> str:
        """The text that the chat template writes between the assistant header and an answer's content.

        Some templates write a space there. The model samples that space as part of its answer; the message's
        content is the answer without the space.
        """
        question = {"role": "user", "content": "question"}
        try:
            header, answered = self._probe([question], header=True), self._probe([question, _ANSWER])
        except Exception:  # noqa: BLE001  # a template is foreign code that can raise anything
            return ""
        lead, found, _ = answered.removeprefix(header).partition(_PROBE)
        return lead if found and answered.startswith(header) else ""

    def _ids(self, text: str) -> list[int]:
        if is_marked(text):
            return self.controls.encode(text, lambda piece: self.encode(piece, at_start=False))
        # Unlike `encode`, it lets other threads run meanwhile, which takes a second for a text of a megabyte.
        ids: list[int] = self._rust.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _inside(self, text: str) -> list[int]:
        """Encode `text` without the space that the tokenizer would add at its start.

        A shield character is encoded before the text, and its tokens are then removed.
        """
        ids = self._ids(_SHIELD + text)
        head = b""
        for i, token in enumerate(ids):
            head += self.token_bytes(token)
            if head == b" " + _SHIELD.encode():
                return ids[i + 1 :]
        return self._ids(text)  # the vocabulary lacks this byte; accept an added space

    def _join(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self.token_bytes, ids))

    def _find_bytes(self, token: int) -> bytes:
        name: str | None = self._rust.id_to_token(token)
        if name is None:
            return b""
        if token in self.added_ids and not name.isascii() and max(name) < "\u0100":
            return str(name).encode()  # a byte-level decoder would take its letters for bytes
        # Decode after another token, because decoders drop a space at the beginning.
        text: str = self._rust.decode([self._guard, token], skip_special_tokens=False)[
            len(self._guard_text) :
        ]
        if _REPLACEMENT not in text:
            return text.encode()
        if byte := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(byte[1], 16)])
        if all(char in _BYTE_OF for char in name):
            return bytes(_BYTE_OF[char] for char in name)
        return text.encode()

    def _find_ends(self) -> tuple[list[int], list[int]]:
        """Return the tokenizer's own start tokens, and its end tokens (see `encode_whole`)."""
        plain = self._ids("a")
        ids: list[int] = self._rust.encode("a", add_special_tokens=True).ids
        for i in range(len(ids) - len(plain) + 1):
            if ids[i : i + len(plain)] == plain:
                return ids[:i], ids[i + len(plain) :]
        return [], []


def _byte_alphabet() -> dict[str, int]:
    """Map each character of byte-level BPE to its byte (the table of GPT-2's encoder)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF: Final = _byte_alphabet()


def _has_others(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether any message has another role than system or developer."""
    return any(message.get("role") not in ("system", "developer") for message in messages)


def _end_ids(config: Mapping[str, Any]) -> frozenset[int]:
    ends = config.get("eos_token_id")
    found = map(str, ends if isinstance(ends, list) else [ends])  # some files have texts
    return frozenset(int(one) for one in found if one.isdecimal())
