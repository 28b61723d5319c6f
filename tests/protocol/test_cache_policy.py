"""A session's cache policy in messages: the values that an `open` accepts, and the fields of results."""

from __future__ import annotations

import pytest
from scripted_worker import generated, session_info

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.messages import (
    CachePolicy,
    Generate,
    Open,
    Opened,
    SessionCache,
    decode_control_reply,
    decode_request,
    decode_result,
    encode,
)


def opening(cache: bytes) -> CachePolicy:
    request = decode_request(b'{"type":"open","id":"a","cache":%s}' % cache)
    assert isinstance(request, Open)
    assert decode_request(encode(request)) == request
    return request.cache


@pytest.mark.parametrize(
    ("cache", "meant"),
    [
        (b"{}", CachePolicy()),
        (b'{"policy":"full"}', CachePolicy(policy="full")),
        (b'{"policy":"sink_window"}', CachePolicy(policy="sink_window")),
        (
            b'{"policy":"sink_window","sink":1,"window":32}',
            CachePolicy(policy="sink_window", sink=1, window=32),
        ),
        (b'{"policy":"paged"}', CachePolicy(policy="paged")),
        (
            b'{"policy":"paged","resident":2048,"pin":[[0,200]]}',
            CachePolicy(policy="paged", resident=2048, pin=((0, 200),)),
        ),
    ],
)
def test_an_open_request_can_choose_a_cache_policy_and_its_sizes(cache: bytes, meant: CachePolicy) -> None:
    assert opening(cache) == meant


@pytest.mark.parametrize(
    ("cache", "refusal"),
    [
        (b'{"policy":"lru"}', "cache.policy must be full, paged or sink_window, not 'lru'"),
        (b'{"policy":7}', "cache.policy must be `str | null`, not `int`"),
        (b'{"policy":"full","sink":4}', "cache takes sink with the policy sink_window only"),
        (b'{"sink":4,"window":64}', "cache takes sink and window with the policy sink_window only"),
        (
            b'{"policy":"sink_window","sink":0}',
            (
                "cache needs a sink of 1 to 2147483647 tokens, not 0: attention rests on the first tokens,"
                " and without them in sight answers fall apart"
            ),
        ),
        (b'{"policy":"sink_window","sink":-4}', "cache needs a sink of 1 to 2147483647 tokens, not -4: "),
        (
            b'{"policy":"sink_window","window":0}',
            "cache needs a window of 1 to 2147483647 tokens, not 0",
        ),
        (b'{"policy":"sink_window","window":-1}', "cache needs a window of 1 to 2147483647 tokens, not -1"),
        (b'{"policy":"full","pin":[[0,9]]}', "cache takes pin with the policy paged only"),
        (
            b'{"policy":"paged","prefill":"exact"}',
            ("cache has no field 'prefill'; it takes policy, sink, window, resident, pin"),
        ),
        (b'{"policy":"paged","window":64}', "cache takes window with the policy sink_window only"),
        (b'{"policy":"paged","resident":0}', "cache needs a resident of 1 to 2147483647 tokens, not 0"),
        (
            b'{"policy":"paged","pin":[[9,9]]}',
            "cache needs pins of a start and a larger end, from 0, not [9, 9]",
        ),
        (
            b'{"policy":"paged","pin":[[-1,9]]}',
            "cache needs pins of a start and a larger end, from 0, not [-1, 9]",
        ),
        (b'{"policy":"sink_window","window":1e30}', "cache.window must be `int | null`"),
        (b'{"policy":"sink_window","window":1.5}', "cache.window must be `int | null`, not `float`"),
        (b'{"policy":"sink_window","window":"64"}', "cache.window must be `int | null`, not `str`"),
        (b'{"policy":"sink_window","sink":true}', "cache.sink must be `int | null`, not `bool`"),
        (
            b'{"policy":"sink_window","sinks":4}',
            (
                "cache has no field 'sinks' (did you mean 'sink'?); it takes policy, sink, window, resident,"
                " pin"
            ),
        ),
    ],
)
def test_an_invalid_cache_policy_is_refused_in_one_line(cache: bytes, refusal: str) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        opening(cache)
    assert str(caught.value).startswith(refusal)
    assert "\n" not in str(caught.value)


def test_messages_of_sessions_under_the_policy_full_are_encoded_without_cache_fields() -> None:
    """The bytes are those of versions without cache policies, which old clients and recorded results need."""
    assert encode(Open(id="a")) == b'{"type":"open","id":"a"}'
    assert encode(Opened(id="a", seq=1, position=0)) == b'{"type":"opened","id":"a","seq":1,"position":0}'
    assert encode(generated(4, Generate(id="g"))) == (
        b'{"type":"generated","text":"Hello, w\xc3\xb6rld!","tokens":[11,12,13,14,15,16],'
        b'"finish_reason":"stop","usage":{"prompt_tokens":3,"cached_tokens":1,"prefilled_tokens":2,"completion_tokens":6},'
        b'"seconds":{"queued":0.0,"prefill":0.1,"first_token":0.2,"total":0.5},"kv_live_bytes":1024,'
        b'"id":"g","seq":4,"position":9}'
    )
    info = encode(session_info())
    assert b'"kv_live_bytes":1024,"policy":"full","model":"tiny","worker":' in info
    assert decode_control_reply(info) == session_info()


def test_an_opened_result_has_the_policy_sink_window_and_the_first_visible_position() -> None:
    cache = SessionCache(policy="sink_window", sink=4, window=64)
    body = encode(Opened(id="a", seq=1, position=0, cache=cache, visible_from=0))
    assert body == (
        b'{"type":"opened","id":"a","seq":1,"position":0,'
        b'"cache":{"policy":"sink_window","sink":4,"window":64},"visible_from":0}'
    )
    assert decode_result(body) == Opened(id="a", seq=1, position=0, cache=cache, visible_from=0)


def test_decoding_a_result_keeps_a_cache_policy_that_the_client_does_not_know() -> None:
    body = b'{"type":"opened","id":"a","seq":1,"position":0,"cache":{"policy":"lru","most":4096}}'
    assert decode_result(body) == Opened(id="a", seq=1, position=0, cache=SessionCache(policy="lru"))
