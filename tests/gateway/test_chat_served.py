"""Chat and text completions over HTTP: sessions are found by a conversation's content, and continued."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from apis import APIS, Api
from apis import how as how_found
from crafted import LETTERS, assistant, user
from openai import InternalServerError
from parts import CHAT_TEMPLATE

from gateway.sending import Sender
from turnkeep_client.errors import NoServerError

pytestmark = pytest.mark.serves("endless_model")

SYSTEM = {"role": "system", "content": "Answer in rhymes."}


async def ask(door: Any, messages: list[dict[str, Any]], **options: Any) -> tuple[Any, str, str]:
    """Send a chat request; return the answer, the session, and how that was found (`begun`, `forked` ...)."""
    options = {"max_tokens": 8, "logit_bias": LETTERS, "temperature": 0.9, **options}
    raw = await door.openai.chat.completions.with_raw_response.create(model="m", messages=messages, **options)
    session, how = raw.headers["x-turnkeep-session"].split()
    return raw.parse(), session, how


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110  # it is in the log, and tells nobody
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_chat_request_with_the_whole_conversation_prefills_only_its_new_messages(
    local_worker: Any, door: Any, endless_model: Path, *, restarts: bool
) -> None:
    """For ten turns; every second turn sends the contents as a list of parts instead of one string."""
    worker = await local_worker(model=str(endless_model))
    served = await door(worker.settings.nats, worker.settings.prefix)
    messages, sessions, before = [SYSTEM], set(), 0
    for number in range(10):
        messages.append(user(f"And number {number}?"))
        if number % 2:
            messages = [one | {"content": parts(one["content"])} for one in messages]
        answer, session, how = await ask(served, messages)
        sessions.add(session)
        assert how == ("continued" if number else "begun")
        new = answer.usage.prompt_tokens - before
        prefilled = answer.usage.prompt_tokens - answer.usage.prompt_tokens_details.cached_tokens
        # The answer's last token has no KV yet; after a restart the last block is read from the disk.
        assert prefilled == new + bool(number)
        before = answer.usage.prompt_tokens + 8
        messages.append(assistant(answer.choices[0].message.content))
        if restarts and number in {2, 7}:
            await served.stop()
            await worker.stop()
            worker = await local_worker(model=str(endless_model))
            served = await door(worker.settings.nats, worker.settings.prefix)
    assert len(sessions) == 1
    entries = await worker.client.log(sessions.pop())
    first = json.loads(entries[0].body)
    assert first["type"] == "generate", "nothing has to be sent before"
    assert "Answer in rhymes." not in entries[-2].body.decode(), "only new messages are sent"


def parts(content: Any) -> Any:
    if not isinstance(content, str):
        return "".join(part["text"] for part in content)
    return [{"type": "text", "text": text} for text in (content[:3], content[3:])]


async def test_a_gateway_that_could_not_read_the_log_at_its_start_later_finds_earlier_conversations(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, session, _ = await ask(await gateway(), messages := [user("Begin.")])
    messages += [assistant(answer.choices[0].message.content), user("On.")]
    other = await gateway()

    async def unreadable(*_: Any) -> None:
        raise NoServerError("the connection is lost")

    with monkeypatch.context() as patch:
        patch.setattr("gateway.conversations.recover", unreadable)
        with pytest.raises(InternalServerError):
            await ask(other, messages)
    assert (await ask(other, messages))[1:] == (session, "continued")


async def test_a_gateway_forks_a_session_that_another_gateway_has_continued_with_other_messages(
    worker: Any, served: Any, door: Any
) -> None:
    first, session, _ = await ask(served, [user("One?")])
    messages = [user("One?"), assistant(first.choices[0].message.content)]
    other = await door(worker.settings.nats, worker.settings.prefix)
    _, there, how = await ask(other, [*messages, user("Two?")])
    assert (there, how) == (session, "continued")
    answer, here, how = await ask(served, [*messages, user("Too?")], n=2)
    assert how == "forked"
    kinds = (await worker.client.stored.subjects(worker.client.tenant)).values()
    answered = [one for one in kinds if one["in"] > 1]  # a fork that was refused has only an `open`
    assert len(answered) == 3, "a second attempt for the first answer does not send the other one again"
    assert here != session
    assert answer.usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 1


async def test_concurrent_branches_of_a_conversation_each_get_the_answer_to_their_own_message(
    worker: Any,
    served: Any,
) -> None:
    """Each answer equals that of a new session with the same messages."""
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
    chance = random.Random(5)
    known: list[list[dict[str, Any]]] = [[]]
    answers: list[tuple[list[dict[str, Any]], str]] = []
    hows: list[str] = []

    async def talk(own: random.Random) -> None:
        for _ in range(6):
            # On from any answer so far, or with one of its words changed.
            messages = [*own.choice(known), user(f"{own.choice('abc')}?")]
            if len(messages) > 2 and own.random() < 0.2:
                at = own.randrange(len(messages) - 1)
                messages[at] = messages[at] | {"content": messages[at]["content"] + "!"}
            answer, _, how = await ask(served, messages, **options)
            text = answer.choices[0].message.content
            hows.append(how)
            answers.append((messages, text))
            known.append([*messages, assistant(text)])

    await asyncio.gather(*(talk(random.Random(chance.random())) for _ in range(6)))
    assert {"begun", "continued", "forked", "repeated"} <= set(hows)
    biases = {int(token): bias for token, bias in LETTERS.items()}
    for number, (messages, text) in enumerate(answers):
        session = worker.client.session(f"fresh-{number}")
        assert (await session.generate(messages=messages, max_tokens=6, logit_bias=biases)).text == text


async def test_a_conversation_is_not_forked_at_a_position_that_a_running_request_is_rewriting(
    local_worker: Any,
    door: Any,
    model_with_template: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rewrite is the first one of this gateway, and is in the log before the fork is opened."""
    model = model_with_template("counting", "{{ messages | length }} said.\n" + CHAT_TEMPLATE)
    worker = await local_worker(model=str(model))
    served = await door(worker.settings.nats, worker.settings.prefix)
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
    first, _, _ = await ask(served, [user("One?")], **options)
    messages = [user("One?"), assistant(first.choices[0].message.content)]
    opened, ended, planned = Sender._open, asyncio.Event(), asyncio.Event()

    async def late(self: Sender, plan: Any, cache: Any) -> None:
        if plan.how == "forked":
            planned.set()
            await ended.wait()
        await opened(self, plan, cache)

    monkeypatch.setattr(Sender, "_open", late)
    on = asyncio.create_task(ask(served, [*messages, user("And?")], **options | {"max_tokens": 300}))
    await asyncio.sleep(0.05)
    changed = [*messages, user("Or?")]
    fork = asyncio.create_task(ask(served, changed, **options))
    await planned.wait()
    _, _, how = await on
    assert how == "continued"
    ended.set()
    answer, _, _ = await fork
    biases = {int(token): bias for token, bias in LETTERS.items()}
    fresh = worker.client.session("fresh").generate(messages=changed, max_tokens=8, logit_bias=biases)
    assert (await fresh).text == answer.choices[0].message.content


@pytest.mark.parametrize("more", [{}, {"seed": 7}])
async def test_a_chat_request_with_n_above_1_returns_n_answers_and_any_of_those_can_be_continued(
    served: Any, more: dict[str, Any]
) -> None:
    """A seed makes them repeatable, not equal."""
    answer, _, _ = await ask(served, [SYSTEM, user("Hello.")], n=3, **more)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert answer.usage.completion_tokens == 24
    _, _, how = await ask(served, [SYSTEM, user("Hello."), assistant(texts[1]), user("Go on.")])
    assert how == "continued"
    stream = await served.openai.chat.completions.create(
        model="m", messages=[user("Hi.")], n=2, max_tokens=5, stream=True, logit_bias=LETTERS
    )
    ends = [one async for chunk in stream for one in chunk.choices if one.finish_reason]
    assert sorted(one.index for one in ends) == [0, 1]


async def test_a_text_completion_runs_the_prompt_without_added_tokens_and_closes_its_session(
    worker: Any,
    served: Any,
) -> None:
    options: dict[str, Any] = {"model": "m", "prompt": "Once upon", "max_tokens": 6, "temperature": 0}
    answer = await served.openai.completions.create(**options, logprobs=2)
    (choice,) = answer.choices
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len("Once upon"), 6)
    assert "".join(choice.logprobs.tokens) == choice.text
    direct = await worker.client.session("direct").generate(text="Once upon", max_tokens=6)
    assert direct.text == choice.text
    stream = await served.openai.completions.create(**options, stream=True)
    assert "".join([one.text async for chunk in stream for one in chunk.choices]) == choice.text

    async def all_are_closed() -> bool:
        found = await worker.client.stored.subjects("default")
        kinds = [kinds for key, kinds in found.items() if key.session.startswith("gw-")]
        return all("closed" in one for one in kinds) and not served.index.sessions

    await until(all_are_closed)


async def test_a_repeated_chat_request_is_sampled_again_unless_its_temperature_is_zero(served: Any) -> None:
    first, session, _ = await ask(served, [user("One?")], temperature=0.0)
    again, where, how = await ask(served, [user("One?")], temperature=0.0)
    assert (where, how) == (session, "repeated")
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.id != first.id
    texts = set()
    for _ in range(3):
        answer, _, how = await ask(served, [user("Two?")])
        assert how != "repeated"
        texts.add(answer.choices[0].message.content)
    assert len(texts) > 1


async def test_tools_and_messages_are_logged_with_their_json_keys_in_the_order_sent(
    local_worker: Any, door: Any, model_with_template: Callable[[str, str], Path]
) -> None:
    template = CHAT_TEMPLATE + "{% for tool in tools or [] %}{{ (tool | tojson)[:40] }}{% endfor %}"
    worker = await local_worker(model=str(model_with_template("ordered", template)))
    served = await door(worker.settings.nats, worker.settings.prefix)
    tools = [
        {"type": "function", "function": {"description": "d", "name": "f", "x": 1}},
        {"function": {"name": "g", "strict": None}, "type": "function"},
    ]
    call = {"function": {"arguments": "{}", "name": "f"}, "id": "c1", "type": "function"}
    told = [{"content": "Hi.", "role": "user"}, {"tool_calls": [call], "role": "assistant", "content": ""}]
    _, session, _ = await ask(served, [*told, user("Hello.")], tools=tools)
    body = (await worker.client.log(session))[0].body
    assert b'[{"type":"function","function":{"description":"d","name":"f"}},' in body
    assert b'{"function":{"name":"g"},"type":"function"}]' in body
    assert b'"messages":' + json.dumps(told, separators=(",", ":")).encode()[:-1] + b"," in body


async def test_a_text_completion_with_several_prompts_returns_the_answers_in_the_order_of_the_prompts(
    served: Any,
) -> None:
    """Each answer equals that of a request with this prompt alone; each prompt is counted once in `usage`."""
    more = {"model": "m", "max_tokens": 6, "seed": 3, "n": 2}
    create = served.openai.completions.create
    alone = [await create(prompt=one, **more) for one in ("One", "Two more", [65, 66, 67])]
    texts = [choice.text for answer in alone for choice in answer.choices]
    several = await create(prompt=["One", "Two more"], **more)
    assert [choice.text for choice in several.choices] == texts[:4]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone[:2])
    streamed = [""] * 4
    stream = await create(
        prompt=[[65, 66, 67], [65, 66, 67]], stream=True, stream_options={"include_usage": True}, **more
    )
    async for event in stream:
        for choice in event.choices:
            streamed[choice.index] += choice.text
        if event.usage:
            assert event.usage.prompt_tokens == 2 * alone[2].usage.prompt_tokens
    assert streamed == texts[4:] * 2


ASKED = [user("Where?")]
BEGUN = [*ASKED, assistant("It is in")]


async def ask_at(
    http: httpx2.AsyncClient, api: Api, messages: list[dict[str, Any]], **more: Any
) -> tuple[str, int, int, str]:
    """Send a request; return text, number of prompt tokens and cached ones, and how the session was found."""
    body = api.body(messages, 8, **{"logit_bias": LETTERS, "temperature": 0.9, **more})
    answer = await http.post(api.path, json=body)
    return api.text(answer.json()), *api.usage(answer.json())[:2], how_found(answer)


@pytest.mark.parametrize(("api", "restarts"), [(APIS["chat"], False), (APIS["messages"], True)])
async def test_an_answer_that_a_client_sends_back_joined_to_the_answer_prefix_continues_the_conversation(
    served: Any, http: httpx2.AsyncClient, door: Any, api: Api, *, restarts: bool
) -> None:
    said, num_prompt, _, how = await ask_at(http, api, BEGUN)
    assert (len(said), how) == (8, "begun")
    if restarts:
        settings = served.worker.settings
        await served.stop()
        served = await door(settings.nats, settings.prefix)
    whole = [*ASKED, {"role": "assistant", "content": "It is in" + said}]
    _, _, cached, how = await ask_at(served.http, api, [*whole, user("Why?")])
    assert (how, cached) == ("continued", num_prompt + 8 - 1)
    unlike = [*ASKED, {"role": "assistant", "content": said}, user("Why?")]
    _, _, _, how = await ask_at(served.http, api, unlike)
    assert how == "begun", "the answer alone is another conversation"


async def test_a_prefilled_assistant_message_gives_the_same_answer_as_the_prefix_option_of_the_worker(
    served: Any, http: httpx2.AsyncClient
) -> None:
    said, num_prompt, _, _ = await ask_at(http, APIS["messages"], BEGUN, temperature=0)
    biases = {int(token): bias for token, bias in LETTERS.items()}
    session = served.worker.client.session("direct")
    asked = {"messages": ASKED, "max_tokens": 8, "logit_bias": biases, "reasoning": {"budget": 0}}
    direct = await session.generate(**asked, prefix="It is in")
    assert (direct.text, direct.usage.prompt_tokens) == (said, num_prompt)
    assert direct.prefix_tokens == len("It is in")
    counted = await http.post("/v1/messages/count_tokens", json={"messages": BEGUN})
    assert counted.json() == {"input_tokens": num_prompt}
    body = {"messages": BEGUN, "max_tokens": 8, "logit_bias": LETTERS, "temperature": 0, "stream": True}
    streamed = await http.post(APIS["chat"].path, json=body)
    assert streamed.status_code == 200
    assert "It is in" not in streamed.text
    empty = [*ASKED, {"role": "assistant", "content": ""}]
    plain, shorter, _, _ = await ask_at(http, APIS["messages"], empty, temperature=0)
    assert shorter == num_prompt - len("It is in")
    assert (await session.generate(**asked)).text != plain, "it has other tokens before it"
