"""Turns with tools under several chat templates: each prompt has the template's text, and is prefilled once.

The templates were written for these tests, in the style of the model families that their names say.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_fold import STORED
from test_tools import CALL, CLOCK, WEATHER, ask, generated, text_of, user, world_of

from turnkeep_client.messages import Message, Reasoning
from worker.models.tokenizer import Tokenizer

#: Drops reasoning before the last user message; puts consecutive tool results into one turn.
QWEN3 = """
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- '# Tools in <tool_call> with tool_call.name\n' }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content and loop.index0 < ns.last %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
#: Puts the tools into the first user message; tool results have a role of their own.
LLAMA3 = """
{%- set ns = namespace(told=false) %}
{%- for message in messages %}
{%- if message.role == 'user' and tools and not ns.told %}
{%- set ns.told = true %}
{{- '<|im_start|>user\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
{{- message.content | trim + '<|im_end|>' }}
{%- elif message.role == 'tool' %}{{ '<|im_start|>ipython\n' + message.content + '<|im_end|>' }}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
#: Knows no tools, puts a first system message into the first user message, and needs alternating roles, so
#: that tool results are joined.
GEMMA3 = """
{%- set first = '' %}
{%- if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if (message.role in ('user', 'tool')) != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<|im_start|>' + ('model' if message.role == 'assistant' else 'user') + '\n' }}
{{- (first if loop.first else '') + message.content | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}
"""
#: Puts the tools before the last user message, so that they move with each user message.
MISTRAL = """
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS]' + tools | tojson }}{% endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- elif message.role == 'assistant' %}{{ message.content + '<|im_end|>' }}{# [TOOL_CALLS] #}
{%- else %}{{ message.content }}{% endif %}{% endfor %}
"""
ONE = '{"name": "weather", "arguments": {"city": "Rome"}}'
CALLS = {"mistral": (f"[TOOL_CALLS][{ONE}]", f"[TOOL_CALLS][{ONE}, {ONE}]")}
KINDS = {"qwen3": QWEN3, "llama3": LLAMA3, "gemma3": GEMMA3, "mistral": MISTRAL}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def tokenizer(kind: str, model_with_template: Callable[[str, str], Path]) -> Tokenizer:
    return Tokenizer.from_folder(model_with_template(f"kind-{kind}", KINDS[kind]))


def told(messages: list[Message]) -> list[dict[str, Any]]:
    return [{"content": "", **msgspec.to_builtins(message)} for message in messages]


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dropped"])
async def test_each_prompt_is_the_whole_conversation_as_rendered_and_keeps_the_tokens_before_a_change(
    kind: str, tokenizer: Tokenizer, *, keep: bool
) -> None:
    thought = "" if kind == "gemma3" else "<think>\nHm.\n</think>\n\n"
    call, twice = CALLS.get(kind, (CALL, CALL + CALL))
    answers = [thought + call, "Sunny.", "Fine.", thought + "Well.", thought + twice, "Two.", "So."]
    answers += [thought + call, "Rain.", "End."]
    rounds: list[list[Message]] = [
        [Message(role="system", content="Be brief."), user("Weather?")],
        [Message(role="tool", content="sunny", tool_call_id="abcdefghi")],
        [user("Thanks.")],
        [user("And now?")],
        [user("Twice?")],
        [Message(role="tool", content=text, tool_call_id="abcdefghi") for text in ("a", "b")],
        [user("So?")],
        [user("Tomorrow?")],
        [Message(role="tool", content="rain", tool_call_id="abcdefghi")],
        [user("Bye.")],
    ]
    world = world_of(tokenizer, *answers)
    messages: list[Message] = []
    for number, (new, answer) in enumerate(zip(rounds, answers, strict=True)):
        result = await generated(
            world, ask(number, *new, tools=(WEATHER, CLOCK), reasoning=Reasoning(keep=keep))
        )
        assert len(result.tool_calls) == answer.count("weather"), result
        messages += new
        wanted = reference(tokenizer, messages)
        context = tokenizer.decode(world.engine.contexts[-1])  # type: ignore[attr-defined]
        assert context == wanted, "the text that the template gives the whole conversation"
        messages.append(Message(role="assistant", content=answer))
    contexts: list[list[int]] = world.engine.contexts  # type: ignore[attr-defined]
    for number, (before, after) in enumerate(pairwise(contexts), 1):
        kept = len(common(tokenizer.decode(before), tokenizer.decode(after)))
        texts = [reference(tokenizer, messages[: index(messages, turn)]) for turn in (number - 1, number)]
        assert kept >= len(common(*texts)) - 1, "no less is kept than the template leaves as it was"
    await world.assert_fold_is_life()
    assert text_of(world).endswith("End.<|im_end|>")


def reference(tokenizer: Tokenizer, messages: list[Message]) -> str:
    """Render the whole conversation at once, with the header of an answer."""
    tools = [msgspec.to_builtins(tool) for tool in (WEATHER, CLOCK)]
    return tokenizer.render(told(messages), add_generation_prompt=True, started=STORED, tools=tools)


def index(messages: list[Message], turn: int) -> int:
    """Return the index in `messages` of answer number `turn`, counted from 0."""
    ends = [at for at, message in enumerate(messages) if message.role == "assistant"]
    return ends[turn]


def common(one: str, other: str) -> str:
    size = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return one[: size if size is not None else min(len(one), len(other))]
