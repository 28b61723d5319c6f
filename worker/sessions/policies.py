"""Converts a session's cache policy from its `open` request, and to and from its results. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.names.policy import FULL, Policy
from turnkeep_client.messages import DEFAULT_SINK, SessionCache

if TYPE_CHECKING:
    from turnkeep_client.messages import CachePolicy


def chosen(cache: CachePolicy, default: Policy) -> Policy:
    """Return the policy that an `open` request names; `default` if it names none.

    Raises `ValueError` for pinned spans that overlap or do not fit into the resident tokens.
    """
    return default if cache.policy is None else recorded(SessionCache.of(cache))


def misfit(policy: Policy, *, block_tokens: int, context_tokens: int) -> str | None:
    """Return why a worker with these block and context sizes cannot serve a policy; None if it can."""
    if policy.window is None:
        return None
    if policy.window < block_tokens:
        return (
            f"a window of {policy.window} tokens is smaller than this worker's block: it must have"
            f" {block_tokens} or more"
        )
    if policy.recall:
        if (policy.most_tokens or 0) > context_tokens:
            return (
                f"{policy.most_tokens} resident tokens exceed the context: there may be {context_tokens};"
                " with so many use the policy full"
            )
        if policy.pins and policy.pins[-1][1] > context_tokens:
            return f"pins end at {policy.pins[-1][1]}; the context ends at {context_tokens}"
        return None
    if policy.sink + policy.window > context_tokens:
        return (
            f"a sink of {policy.sink} and a window of {policy.window} tokens exceed the context: together"
            f" they may have {context_tokens}"
        )
    return None


def in_words(policy: Policy) -> SessionCache | None:
    """Build the field `cache` of results; None for `full`."""
    if policy.window is None:
        return None
    if policy.recall:
        return SessionCache(policy=policy.name, resident=policy.most_tokens, pin=policy.pins)
    return SessionCache(policy=policy.name, sink=policy.sink, window=policy.window)


def recorded(cache: SessionCache | None) -> Policy:
    """Return the policy that a result names. Raises `ValueError` if this worker does not know it."""
    match cache:
        case None | SessionCache(policy="full"):
            return FULL
        case SessionCache(policy="sink_window", sink=int(sink), window=int(window)) if sink > 0 < window:
            return Policy(sink, window)
        case SessionCache(policy="paged", resident=int(resident), pin=pins):
            return Policy.paged(resident, pins, sink=DEFAULT_SINK)
        case _:
            raise ValueError(f"the log says a cache policy that this worker does not know: {cache.policy}")
