"""Detects which messages a chat template drops or refuses, and adapts messages so that no text is lost.

Tested with the templates of the tests and of the packaged model, and with templates that drop or refuse
messages as those of known model families do.
"""

import ast
import json
import random
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_tools import KINDS, STRICT, WITH_TOOLS, text_of, world_of

from tests.model.test_templates import TEMPLATES
from tests.parts import CHAT_TEMPLATE
from turnkeep_client.messages import Failed
from worker.models.control_tokens import unmarked
from worker.models.template_support import TemplateSupport
from worker.models.tokenizer import Tokenizer
from worker.text.conversation import said_in

pytestmark = pytest.mark.model

#: Drops messages of unknown roles and tool results; needs call arguments that are objects.
SILENT = """
{%- if tools %}{{ '<tools>' }}{% endif %}
{%- for m in messages %}
{%- if m.role in ('system', 'user') %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '<call>' + call.function.name }}
{%- for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}{% endfor %}
"""
#: Reads a content as a list of parts only, as many templates of vision models do.
LISTS = """
{%- for m in messages %}{{ '<|im_start|>' + m.role | capitalize + ': ' }}
{%- for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
"""
#: Accepts a system message only first, one call per message, a result only after a call, no user after that.
REFUSING = """
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System must be first') }}{% endif %}
{%- if m.role == 'developer' %}{{ raise_exception('Unexpected role') }}{% endif %}
{%- if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}
{%- endif %}
{%- if m.role == 'user' and not loop.first and messages[loop.index0 - 1].role == 'tool' %}
{{- raise_exception('after a tool comes the assistant') }}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}{# tools #}
"""
#: Needs alternating roles (except calls and results) and ids of nine characters. Drops text beside calls.
#: Renders all system messages first.
MISTRAL_SMALL = """
{%- for m in messages if m.role == 'system' %}[SYSTEM]{{ m.content }}{% endfor %}
{%- set ns = namespace(number=0) %}
{%- for m in messages if m.role in ('user', 'assistant') and not m.tool_calls %}
{%- if (m.role == 'user') != (ns.number % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.number = ns.number + 1 %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls is defined %}[TOOL_CALLS]
{%- for call in m.tool_calls %}
{%- if not call.id or call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- call.function | tojson }}{% endfor %}
{%- elif m.role == 'tool' %}
{%- if not m.tool_call_id is defined or m.tool_call_id | length != 9 %}{{ raise_exception('which call?') }}
{%- endif %}[TOOL_RESULTS]{{ m.content }}
{%- elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}{# tools #}
"""
#: Refuses every system message with an error.
NO_SYSTEM = """
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}
"""
#: Refuses conversations without a user's message, as Qwen 3.5's template does.
WANTS_QUESTION = """
{%- set ns = namespace(asked=false) %}
{%- for m in messages[::-1] if m.role == 'user' and not (m.content | trim).startswith('<tool_response>') %}
{%- set ns.asked = true %}{% endfor %}
{%- if not ns.asked %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System must be first') }}{% endif %}
{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}
{{- '<tool_response>\n' + m.content + '\n</tool_response>' if m.role == 'tool' else m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}{# tools #}
"""
#: Has its own form for developer messages.
KNOWS_DEVELOPER = """
{%- for m in messages %}{{ '<|start|>' + ('developer' if m.role == 'system' else m.role) }}
{{- m.content + '<|end|>' }}{% endfor %}
"""


def installed() -> dict[str, str]:
    """Return the chat templates in transformers' code, by module: of Llama 4, and of vision models."""
    folder = Path(find_spec("transformers").submodule_search_locations[0])  # type: ignore[union-attr,index]
    found: dict[str, str] = {}
    for path in folder.glob("models/*/processing_*.py"):
        if "{%" in (source := path.read_text("utf-8")):
            for node in ast.walk(ast.parse(source)):
                if (
                    isinstance(node, ast.Constant)
                    and "{%" in str(node.value)
                    and "messages" in str(node.value)
                ):
                    found[path.stem] = max(found.get(path.stem, ""), str(node.value), key=len)
    return found


ALL = (
    {"packaged": CHAT_TEMPLATE, "parts": CHAT_TEMPLATE, "with_tools": WITH_TOOLS, "strict": STRICT}
    | {
        "silent": SILENT,
        "lists": LISTS,
        "ids": MISTRAL_SMALL,
        "refusing": REFUSING,
        "no_system": NO_SYSTEM,
        "question": WANTS_QUESTION,
        "developer": KNOWS_DEVELOPER,
    }
    | TEMPLATES
    | KINDS
    | installed()
)


@pytest.fixture(scope="module")
def tokenizers(
    model_with_template: Callable[[str, str], Path], packaged_folder: Path
) -> dict[str, Tokenizer]:
    folders = {name: model_with_template(f"support-{name}", text) for name, text in ALL.items()}
    return {
        name: Tokenizer.from_folder(folder)
        for name, folder in {**folders, "packaged": packaged_folder}.items()
    }


def prompt(tokenizer: Tokenizer, *messages: dict[str, Any], **more: Any) -> str:
    told = tokenizer.adapted([*messages], None, Counter())
    day = datetime(2026, 1, 1, tzinfo=UTC)
    return tokenizer.render(told, add_generation_prompt=False, started=day, **more)


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(arguments: str, number: int = 0) -> dict[str, Any]:
    return {"id": f"abcdefgh{number}", "type": "function", "function": {"name": "f", "arguments": arguments}}


def result(content: str, number: int = 0) -> dict[str, Any]:
    return say("tool", content, tool_call_id=f"abcdefgh{number}")


TOOL = {"type": "function", "function": {"name": "f", "description": "what-it-does"}}
ASKED, ANSWERED = say("user", "asked"), say("assistant", "answered")
CALLING = say("assistant", "", tool_calls=[call('{"key": "argument"}')])
TWICE = say("assistant", "", tool_calls=[call('{"key": "one"}'), call('{"key": "two"}', 1)])
BROKEN = say("assistant", "", tool_calls=[call("broken-argument {")])
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "system": [say("system", "told"), ASKED],
    "developer": [say("developer", "told"), ASKED],
    "system and developer": [say("system", "told"), say("developer", "more-told"), ASKED],
    "late system": [ASKED, ANSWERED, say("system", "told"), say("user", "again")],
    "late developer": [ASKED, ANSWERED, say("developer", "told"), say("user", "again")],
    "system alone": [say("system", "told")],
    "system last": [ASKED, say("system", "told")],
    "call": [ASKED, CALLING, result("found"), ANSWERED, say("user", "again")],
    "two calls": [ASKED, TWICE, result("first"), result("second", 1), ANSWERED, say("user", "again")],
    "ids of any length": [
        ASKED,
        say("assistant", "", tool_calls=[{**call('{"key": "argument"}'), "id": "call_1"}]),
        say("tool", "found", tool_call_id="call_1"),
        say("tool", "without-id"),
    ],
    "text before a call": [ASKED, ANSWERED, CALLING, result("found"), say("assistant", "more-said")],
    "text beside a call": [ASKED, {**CALLING, "content": "I-look"}, result("found"), ANSWERED],
    "broken call": [ASKED, BROKEN, result("found"), ANSWERED],
    "array for arguments": [ASKED, say("assistant", "", tool_calls=[call('["in-a-list"]')]), result("found")],
    "user after result": [ASKED, CALLING, result("found"), say("user", "again")],
    "users in a row": [ASKED, say("user", "once-more"), say("user", "and-again"), ANSWERED],
    "assistants in a row": [ASKED, ANSWERED, say("assistant", "more-said"), say("user", "again")],
    "assistant first": [ANSWERED, ASKED],
    "assistant alone": [ANSWERED],
    "call first": [CALLING, result("found")],
    "system and call": [say("system", "told"), CALLING, result("found"), ANSWERED],
    "result first": [result("found")],
    "system and assistant": [say("system", "told"), ANSWERED, ASKED],
}


def texts(messages: list[dict[str, Any]]) -> list[str]:
    found = [message["content"] for message in messages if message["content"]]
    calls = [one["function"]["arguments"] for message in messages for one in message.get("tool_calls", ())]
    return found + [text.strip('[]{}"').removeprefix('key": "') for text in calls]


@pytest.mark.parametrize("name", ALL)
def test_the_text_of_every_message_is_in_the_prompt_under_every_chat_template(
    tokenizers: dict[str, Tokenizer], name: str
) -> None:
    lost = [
        (kind, text)
        for kind, messages in CONVERSATIONS.items()
        for said in (prompt(tokenizers[name], *messages), prompt(tokenizers[name], *messages, tools=[TOOL]))
        for text in texts(messages)
        if text not in said
    ]
    assert lost == []


@pytest.mark.parametrize("name", ["lists", "refusing", "question", "ids", "mistral"])
async def test_the_prompt_contains_all_messages_however_they_are_split_into_requests(
    tokenizers: dict[str, Tokenizer], name: str
) -> None:
    draw, tokenizer = random.Random(name), tokenizers[name]
    kinds = [say("system", "told"), say("developer", "more-told"), ASKED, ANSWERED, say("tool", "found")]
    world = world_of(tokenizer, *["Fine."] * 99)
    sent: list[str] = []
    for number in range(24):
        messages = [[one] for one in draw.choices(kinds, k=draw.choice([1, 1, 2, 3]))]
        if draw.random() < 0.3:
            messages.append(draw.choice([[CALLING, result("found")], [BROKEN, result("found")]]))
        told = [
            message | {"content": f"{message['content']}-{number}"} for one in messages for message in one
        ]
        kind = draw.choice(["append", "append", "generate"] if number < 23 else ["append"])
        body = json.dumps({"type": kind, "id": f"q{number}", "messages": told})
        answer = await world.ask(body.encode())
        assert not isinstance(answer, Failed), (told, answer)
        sent += [message["content"] for message in told]
    said = text_of(world)
    assert [text for text in sent if text not in said] == []
    conversation = world.session.history.conversation
    whole = conversation._render(said_in(conversation._segments), header=False)
    assert unmarked(whole).removesuffix("\n").startswith(said.removesuffix("\n"))
    await world.assert_fold_is_life()


@pytest.mark.parametrize("name", [name for name in ALL if name != "developer"])
def test_a_developer_message_is_rendered_as_system_if_the_chat_template_has_no_developer_role(
    tokenizers: dict[str, Tokenizer], name: str
) -> None:
    by_developer = prompt(tokenizers[name], say("developer", "told"), ASKED)
    assert by_developer == prompt(tokenizers[name], say("system", "told"), ASKED)


def test_a_tool_call_and_its_result_get_the_same_id_if_the_chat_template_requires_nine_characters(
    tokenizers: dict[str, Tokenizer],
) -> None:
    (_, calling, found, *_) = tokenizers["ids"].adapted(CONVERSATIONS["ids of any length"], None, Counter())
    assert calling["tool_calls"][0]["id"] == found["tool_call_id"]
    kept = tokenizers["ids"].adapted([ASKED, CALLING, result("found")], None, Counter())
    assert kept[2]["tool_call_id"] == "abcdefgh0"


AS_RESULT = "<|im_start|>user\n<tool_response>\nfound\n</tool_response><|im_end|>\n"
AS_CALL = '<tool_call>\n{"name": "f", "arguments": broken-argument {}\n</tool_call>'


@pytest.mark.parametrize(
    ("name", "messages", "noted", "said"),
    [
        ("silent", CONVERSATIONS["developer"], {"developer as system": 1}, "system\ntold"),
        ("developer", CONVERSATIONS["developer"], {}, "<|start|>developertold<|end|>"),
        ("silent", [ASKED, CALLING, result("found")], {"tool results as user messages": 1}, AS_RESULT),
        ("silent", [ASKED, BROKEN], {"calls as text": 1}, AS_CALL),
        (
            "no_system",
            CONVERSATIONS["system"],
            {"system at the head of the first user message": 1},
            "<start_of_turn>user\ntold\n\nasked<end_of_turn>\n",
        ),
        (
            "refusing",
            CONVERSATIONS["late system"],
            {"late system within user messages": 1},
            "user\n<system>\ntold\n</system>\n\nagain<|im_end|>",
        ),
        ("refusing", CONVERSATIONS["user after result"], {"tool and user in a row joined": 1}, "again"),
        ("ids", CONVERSATIONS["users in a row"], {"user and user in a row joined": 2}, "and-again"),
        (
            "ids",
            CONVERSATIONS["text beside a call"],
            {"calls beside text as text": 1, "tool results as user messages": 1},
            "I-look",
        ),
        ("with_tools", CONVERSATIONS["system"], {}, "<|im_start|>system\ntold<|im_end|>"),
        ("lists", [ASKED, ANSWERED], {}, "User: asked<|im_end|>\n<|im_start|>Assistant: answered"),
    ],
)
def test_each_adaptation_of_messages_to_a_chat_template_is_counted_by_kind_and_keeps_their_text(
    tokenizers: dict[str, Tokenizer],
    name: str,
    messages: list[dict[str, Any]],
    noted: dict[str, int],
    said: str,
) -> None:
    found = Counter[str]()
    tokenizers[name].adapted(messages, None, found)
    assert found == noted
    assert said in prompt(tokenizers[name], *messages)


def test_a_user_message_directly_after_a_user_message_of_an_earlier_request_is_reported_as_joined_to_it(
    tokenizers: dict[str, Tokenizer],
) -> None:
    noted = Counter[str]()
    tokenizers["ids"].adapted([say("user", "again")], ASKED, noted)
    assert noted == {"user and user in a row joined": 1}


def test_only_developer_messages_are_adapted_for_a_chat_template_that_renders_all_other_kinds_of_messages(
    tokenizers: dict[str, Tokenizer],
) -> None:
    assert tokenizers["with_tools"].support == TemplateSupport(developer=False)


def test_the_adaptations_of_messages_that_a_chat_template_needs_are_listed_in_words_for_the_user(
    tokenizers: dict[str, Tokenizer],
) -> None:
    assert tokenizers["silent"].support.in_words() == ["developer as system", "tool results as user messages"]
    lists = ["contents as lists of parts", "developer as system", "calls as text"]
    assert tokenizers["lists"].support.in_words() == lists
    assert tokenizers["refusing"].support.in_words() == [
        "late system within user messages",
        "developer as system",
        "several calls of a message as text",
        "tool results as user messages, unless they follow calls that it renders",
        "tool and tool in a row joined",
        "tool and user in a row joined",
        "user and tool in a row joined",
    ]
