"""If a request's last message is the assistant's, the answer continues this message, without repeating it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

Start = Any
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
#: Answers are letters, which come back as they were.
LETTERS = {str(token): 100 for token in range(68, 90)}
ASKED = [{"role": "user", "content": "Where?"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "It is in"}]


@pytest.fixture
async def served(local_worker: Start, door: Start, endless_model: Path) -> Any:
    worker = await local_worker(model=str(endless_model))
    started = await door(worker.settings.nats, worker.settings.prefix)
    started.worker = worker
    return started


async def ask(
    http: httpx2.AsyncClient, path: str, messages: list[dict[str, Any]], **more: Any
) -> tuple[str, int, int, str]:
    """Send a request; return text, number of prompt tokens and cached ones, and how the session was found."""
    body = {"messages": messages, "max_tokens": 8, "logit_bias": LETTERS, "temperature": 0.9, **more}
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    how, used = answer.headers["x-turnkeep-session"].split()[1], answer.json()["usage"]
    if path == CHAT:
        text = answer.json()["choices"][0]["message"]["content"]
        return text, used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"], how
    cached = used["cache_read_input_tokens"]
    return answer.json()["content"][0]["text"], used["input_tokens"] + cached, cached, how


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("restarts", [False, True])
async def test_the_session_of_a_prefilled_answer_is_found_by_prefix_and_answer_joined(
    served: Any, http: httpx2.AsyncClient, door: Start, path: str, *, restarts: bool
) -> None:
    said, num_prompt, _, how = await ask(http, path, BEGUN)
    assert (len(said), how) == (8, "begun")
    if restarts:
        settings = served.worker.settings
        await served.stop()
        served = await door(settings.nats, settings.prefix)
    async with httpx2.AsyncClient(base_url=served.url, timeout=20) as client:
        whole = [*ASKED, {"role": "assistant", "content": "It is in" + said}]
        _, _, cached, how = await ask(client, path, [*whole, {"role": "user", "content": "Why?"}])
        assert (how, cached) == ("continued", num_prompt + 8 - 1)
        unlike = [*ASKED, {"role": "assistant", "content": said}, {"role": "user", "content": "Why?"}]
        _, _, _, how = await ask(client, path, unlike)
        assert how == "begun", "the answer alone is another conversation"


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_repeated_request_with_a_prefilled_answer_forks_the_known_conversation(
    http: httpx2.AsyncClient, path: str
) -> None:
    first, num_prompt, _, _ = await ask(http, path, BEGUN)
    again, same, cached, how = await ask(http, path, BEGUN)
    assert (how, same, again != first) == ("forked", num_prompt, True)
    assert cached >= num_prompt - len("It is in") - 1
    other = [*ASKED, {"role": "assistant", "content": "No"}]
    _, shorter, _, how = await ask(http, path, other)
    assert (how, shorter) == ("forked", num_prompt - len("It is in") + len("No"))
    _, _, _, how = await ask(http, path, ASKED)
    assert how == "forked", "without a beginning too"
    certain, _, _, _ = await ask(http, path, BEGUN, temperature=0)
    again, _, _, how = await ask(http, path, BEGUN, temperature=0)
    assert (again, how) == (certain, "repeated")


async def test_the_gateway_and_the_worker_give_the_same_answer_after_a_prefix(
    served: Any, http: httpx2.AsyncClient
) -> None:
    said, num_prompt, _, _ = await ask(http, MESSAGES, BEGUN, temperature=0)
    biases = {int(token): bias for token, bias in LETTERS.items()}
    session = served.worker.client.session("direct")
    asked = {"messages": ASKED, "max_tokens": 8, "logit_bias": biases, "reasoning": {"budget": 0}}
    direct = await session.generate(**asked, prefix="It is in")
    assert (direct.text, direct.usage.prompt_tokens) == (said, num_prompt)
    assert direct.prefix_tokens == len("It is in")
    counted = await http.post(f"{MESSAGES}/count_tokens", json={"messages": BEGUN})
    assert counted.json() == {"input_tokens": num_prompt}
    body = {"messages": BEGUN, "max_tokens": 8, "logit_bias": LETTERS, "temperature": 0, "stream": True}
    streamed = await http.post(CHAT, json=body)
    assert streamed.status_code == 200
    assert "It is in" not in streamed.text
    empty = [*ASKED, {"role": "assistant", "content": ""}]
    plain, shorter, _, _ = await ask(http, MESSAGES, empty, temperature=0)
    assert shorter == num_prompt - len("It is in")
    assert (await session.generate(**asked)).text != plain, "it has other tokens before it"
