"""Builds an answer's grammar, and the splitter that divides it into reasoning, tool calls and text.

A grammar combines the `response_format`, calls of tools and the end of reasoning; `worker.text.grammar`
compiles it. Event loop only.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING, Any, Final

from turnkeep_client.messages import (
    ChoiceFormat,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    LarkFormat,
    NamedTool,
    TextFormat,
)
from worker.process.concurrency import Rotation, in_thread
from worker.text.arguments import OfferedTools
from worker.text.calling import calls_grammar, json_rule
from worker.text.grammar import GrammarError, Grammars
from worker.text.harmony import FINAL, FINAL_HEADER, HarmonySplitter
from worker.text.splitting import AnswerCalls, MarkedSplitter, call_id
from worker.text.thinking import Thinking, mask_without

from .history import RefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnkeep_client.messages import Generate
    from worker.batch.row_sampler import Constraint
    from worker.models.tokenizer import Tokenizer
    from worker.text.splitting import Splitter

    from .history import TokenHistory

#: The markers around reasoning in the harmony format; other messages may follow before the final text.
_ANALYSIS: Final = ("<|channel|>analysis<|message|>", "<|end|>")


class Formats:
    """Makes the grammars and splitters of answers, for one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._grammars = Grammars(tokenizer)
        self._compiling = Rotation(1)  # one answer's patterns at a time, so that many do not take all CPUs

    async def splitter(
        self, tenant: str, place: str, request: Generate, prompt: TokenHistory
    ) -> Splitter | None:
        """Return the splitter of an answer; None if the whole answer is text.

        `place` names the session and the request's sequence; ids of tool calls are derived from it. Raises
        `RefusedError` if the session lacks the tools that the request requires.
        """
        conversation = prompt.conversation
        tools, choice = conversation.plain_tools, request.tool_choice
        answers_messages = conversation.has_messages and not request.raw
        names = [tool["function"]["name"] for tool in tools]
        _check_choice(request, names, answers_messages=answers_messages)
        if not answers_messages:
            return None
        markup = self.tokenizer.markup
        if isinstance(choice, NamedTool):
            tools = [one for one in tools if one["function"]["name"] == choice.function.name]
        tools = tools if choice != "none" else []
        calls = AnswerCalls(
            await self._offered(tenant, tools),
            lambda index: call_id(place, index),
            max_calls=1 if isinstance(choice, NamedTool) or not request.parallel_tool_calls else None,
            ends_at_repeat=choice == "required",  # small models repeat a call until `max_tokens`
        )
        if markup.is_harmony:
            return HarmonySplitter(calls, conversation.begun_answer(prompt.tokens))
        if not calls.offered and markup.reasoning is None:
            return None
        return MarkedSplitter(markup, calls, in_reasoning=conversation.in_reasoning(prompt.tokens))

    async def _offered(self, tenant: str, tools: list[dict[str, Any]]) -> OfferedTools:
        """Compile the patterns of tools on a thread: later, calls are checked on the device's thread."""
        if not tools:
            return OfferedTools(())
        async with self._compiling.enter(tenant):
            return await in_thread(OfferedTools, tools)

    async def grammar(
        self, tenant: str, request: Generate, prompt: TokenHistory, *, splits: bool
    ) -> tuple[Constraint | None, tuple[str, ...]]:
        """Return an answer's grammar (None if it may be any text), and warnings about ineffective options.

        `splits` says that a splitter separates reasoning and calls from text. Raises `RefusedError` if the
        format or the tools do not compile.
        """
        tools = prompt.conversation.plain_tools if splits and request.tool_choice != "none" else []
        is_forced = request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)
        has_strict = any(tool["function"].get("strict") for tool in tools)
        asked = None if isinstance(request.response_format, TextFormat) else request.response_format
        found: Constraint | None = None
        warnings: tuple[str, ...] = ()
        field = what = "response_format"
        try:
            if asked is not None and not (tools and is_forced):  # alone first: its faults are not the tools'
                found = await self._grammars.compiled(asked, tenant)
                warnings = found.warnings
            if tools and (is_forced or has_strict or asked is not None):
                answer = None if is_forced else await in_thread(_answer_rule, request)
                field, what = "tools", "the tools"
                found, warnings = await self._of_calls(tenant, request, tools, answer)
        except GrammarError as error:
            raise RefusedError(
                "invalid_request", f"{what} cannot be followed: {error}", field=field
            ) from error
        markup = self.tokenizer.markup
        if has_strict and markup.form[1] is None:
            warnings = (
                *warnings,
                "this model's calls are not JSON: arguments of strict tools are not enforced",
            )
        if request.reasoning.budget is not None and not markup.has_reasoning:
            warnings = (*warnings, "this model marks no reasoning: its budget has no effect")
        if splits:
            found = self._behind_reasoning(request, prompt, found, may_call=bool(tools))
        return found, warnings

    async def _of_calls(
        self, tenant: str, request: Generate, tools: list[dict[str, Any]], answer: str | None
    ) -> tuple[Constraint, tuple[str, ...]]:
        """Compile a grammar of tool calls, and of an `answer` without any. Raises `GrammarError`.

        A tool whose schema cannot be compiled may be called with any JSON object, unless the tool is strict.
        If schemas cannot be compiled together, this applies to all tools that are not strict.
        """
        if isinstance(request.tool_choice, NamedTool):
            tools = [one for one in tools if one["function"]["name"] == request.tool_choice.function.name]
        try:
            return await self._compiled(tenant, request, tools, answer)
        except GrammarError as error:
            lenient = [tool["function"] for tool in tools if not tool["function"].get("strict")]
            for dropped in filter(None, (await self._unusable(tenant, tools), lenient)):
                for function in dropped:
                    function.pop("parameters", None)
                with contextlib.suppress(GrammarError):
                    found, warnings = await self._compiled(tenant, request, tools, answer)
                    names = ", ".join(function["name"] for function in dropped)
                    why = str(error).partition("\n")[0]  # without the lines of the grammar
                    return found, (*warnings, f"arguments are not held to the schemas of {names}: {why}")
            raise

    async def _unusable(self, tenant: str, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the functions whose schemas cannot be compiled. Raises `GrammarError` if one is strict."""
        found = []
        for tool in tools:
            try:
                await self._check_schema(tenant, tool["function"])
            except GrammarError:
                if tool["function"].get("strict"):
                    raise
                found.append(tool["function"])
        return found

    async def _check_schema(self, tenant: str, function: dict[str, Any]) -> None:
        """Check that a tool's schema compiles. Raises `GrammarError` with the tool's name."""
        schema = JsonSchema(function.get("parameters") or {}, strict=bool(function.get("strict")))
        try:
            await self._grammars.compiled(JsonSchemaFormat(schema), tenant)
        except GrammarError as error:
            raise GrammarError(f"the schema of {function['name']}: {error}") from error

    async def _compiled(
        self, tenant: str, request: Generate, tools: list[dict[str, Any]], answer: str | None
    ) -> tuple[Constraint, tuple[str, ...]]:
        tokenizer = self.tokenizer
        source = await in_thread(  # it compiles patterns to see which can be enforced
            calls_grammar,
            tokenizer.markup,
            tools,
            tokenizer.control_id,
            answer=answer,
            several=request.parallel_tool_calls and not isinstance(request.tool_choice, NamedTool),
        )
        found = await self._grammars.compiled(LarkFormat(source), tenant)
        return found, found.warnings

    def _behind_reasoning(
        self, request: Generate, prompt: TokenHistory, grammar: Constraint | None, *, may_call: bool
    ) -> Constraint | None:
        """Wrap a grammar so that it applies after the reasoning only, and reasoning ends at its token budget.

        `may_call` says that the answer may have tool calls, which a grammar then has too.
        """
        tokenizer, budget = self.tokenizer, request.reasoning.budget
        is_harmony = tokenizer.markup.is_harmony
        pair, is_begun = tokenizer.markup.reasoning, prompt.conversation.in_reasoning(prompt.tokens)
        if is_harmony:  # without calls, anything may stand before the text
            pair, is_begun = (_ANALYSIS, False) if may_call else (("", FINAL), True)
        begun = prompt.conversation.begun_answer(prompt.tokens)
        is_over = is_harmony and FINAL_HEADER.search(begun.encode()) is not None
        if pair is None or is_over or (grammar is None and budget is None):
            return grammar
        opening, closing = (tokenizer.encode(marker, at_start=False) for marker in pair)
        around = () if is_harmony else ("\n", "\n\n")
        spaces = (tokenizer.encode(text, at_start=False) for text in around)
        return Thinking(
            spell=tokenizer.token_bytes,
            opens=pair[0].encode(),
            closes=FINAL_HEADER if pair[1] == FINAL else re.compile(re.escape(pair[1].encode())),
            opening=tuple(opening),
            closing=tuple(closing),
            spaces=tuple(ids[0] for ids in spaces if len(ids) == 1),
            is_begun=is_begun,
            budget=budget,
            grammar=grammar,
            inside=mask_without(tokenizer.eos_ids, tokenizer.vocab_size) if grammar is not None else None,
        )


def _check_choice(request: Generate, names: Sequence[str], *, answers_messages: bool) -> None:
    """Raise `RefusedError` if an answer cannot have the call that the request requires.

    `names` are those of the session's tools. Only an answer to messages has calls.
    """
    choice = request.tool_choice
    if choice in ("auto", "none"):
        return
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        why = f"tool_choice names {choice.function.name}, which is none of the session's tools"
    elif not names:
        why = "tool_choice requires a call, and the session has no tools"
    elif not answers_messages:
        why = "tool_choice requires a call, which only answers to messages have"
    else:
        return
    raise RefusedError("invalid_request", why, field="tool_choice")


def _answer_rule(request: Generate) -> str:
    """Return the grammar rule of an answer without tool calls. Raises `GrammarError`."""
    match request.response_format:
        case None | TextFormat():
            return "text"
        case JsonSchemaFormat(json_schema=given):
            return json_rule(given.schema, is_lenient=given.strict is False)
        case JsonObjectFormat():
            return json_rule({"type": "object"}, is_lenient=False)
        case ChoiceFormat(choices=choices):
            return " | ".join(map(json.dumps, choices))
    raise GrammarError("beside tools, a response_format is json_schema, json_object or choice")
