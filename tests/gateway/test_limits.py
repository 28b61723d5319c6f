"""Limits of API keys: how the key file sets them, and refusals beyond them."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest
from crafted import LETTERS

from gateway.keys import ApiKey, KeyLimits, Keys
from gateway.turn import Fault
from turnkeep_client.errors import TurnkeepError

CHAT = "/v1/chat/completions"


def asked(text: str = "Hello.", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 4, "logit_bias": LETTERS, **more}


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def refusal(key: ApiKey) -> float | None:
    """Begin and end a request; if it is refused, return the seconds until it may be sent again, else None."""
    try:
        with key.one_request():
            return None
    except Fault as fault:
        return fault.retry_after_s


def test_the_request_budget_of_an_api_key_refills_with_time_up_to_one_minutes_worth() -> None:
    clock = Clock()
    key = ApiKey("t", KeyLimits(requests=6), clock)
    assert [refusal(key) for _ in range(7)] == [*[None] * 6, 10.0]
    clock.now_s += 9
    assert refusal(key) == pytest.approx(1.0)
    clock.now_s += 1.001
    assert (refusal(key), refusal(key) is None) == (None, False)
    clock.now_s += 1e6
    assert [refusal(key) for _ in range(7)][-2:] == [None, 10.0], "no more than a minute's are saved"


def test_an_api_key_over_its_token_limit_is_refused_until_enough_tokens_have_refilled() -> None:
    clock = Clock()
    key = ApiKey("t", KeyLimits(tokens=600), clock)
    key.spend(900)
    assert refusal(key) == pytest.approx(30.1), "until one is left"
    clock.now_s += 31
    assert refusal(key) is None


@pytest.mark.serves("endless_model")
async def test_a_request_counts_towards_its_api_keys_concurrency_limit_until_its_end_or_a_disconnect(
    gateway: Any, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("few acme at_once=1\n")
    keys = Keys.read(tmp_path / "keys")
    served = await gateway(keys=keys)
    headers = {"authorization": "Bearer few"}
    async with httpx2.AsyncClient(base_url=served.url, timeout=30, headers=headers) as http:
        async with http.stream("POST", CHAT, json=asked(max_tokens=30_000, stream=True)) as stream:
            assert stream.status_code == 200
            answer = await http.post(CHAT, json=asked())
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        async with asyncio.timeout(20):
            while (await http.post(CHAT, json=asked())).status_code == 429:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for body in (b"{", b'{"messages": []}'):
            assert (await http.post(CHAT, content=body)).status_code == 400
        assert (await http.post(CHAT, json=asked())).status_code == 200, "a bad one has ended too"


@pytest.mark.serves("endless_model")
async def test_tokens_prefilled_before_a_request_was_cancelled_count_towards_the_token_limit_of_its_api_key(
    gateway: Any, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("few acme tokens=30/min\n")
    served = await gateway(keys=Keys.read(tmp_path / "keys"))
    headers = {"authorization": "Bearer few"}
    async with httpx2.AsyncClient(base_url=served.url, timeout=30, headers=headers) as http:
        with pytest.raises(httpx2.TimeoutException):
            await http.post(CHAT, json=asked(text="word " * 10_000), timeout=1.0)
        async with asyncio.timeout(20):
            while (await http.post(CHAT, json=asked())).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        answer = await http.post(CHAT, json=asked())
        assert int(answer.headers["retry-after"]) > 300, "thousands of tokens were prefilled"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a", "line 1"),
        ("a b c", "line 1"),
        ("\na b.c", "line 2"),
        ("# a b", "no keys"),
        ("k acme\nclé acme", "line 2: the key has characters that are not ASCII"),
        ("\ufeffk acme", "line 1: the key has characters that are not ASCII"),
        ("k acme requests=60/min\nj acme\nk acme at_once=4\n", "line 3: .* line 1"),
        *(
            (f"# a comment\nk acme {limits}\n", "line 2: .* is no limit")
            for limits in ("requests=60", "requests=0/min", "at_once=4/min", "at_once=1 at_once=2")
        ),
        ("\nk acme speed=1/min", "line 2: .* is no limit"),
        ("\nk acme 9", "line 2: .* is no limit"),
        (None, "cannot be read"),
    ],
)
def test_an_api_key_file_with_an_ill_formed_line_is_refused_with_the_line_number(
    tmp_path: Path, text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / "keys").write_text(text)
    with pytest.raises(TurnkeepError, match=says):
        Keys.read(tmp_path / "keys")
