"""Checks requests against this worker's limits: those of its model, its KV memory and its settings.

`execution` calls the checks before anything runs on the device. Event loop only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Final

from cache.names.policy import FULL
from turnkeep_client.errors import TokenLimit
from turnkeep_client.messages import SessionCache
from worker.process.equal_share import most_of_each

from .history import RefusedError, policy_of

if TYPE_CHECKING:
    from cache.names.policy import Policy
    from turnkeep_client.messages import (
        CachePolicy,
        Generate,
    )
    from worker.engine.port import EnginePort


#: Limit of different cache policies, each of which takes memory, and slows down a forget.
MOST_POLICIES: Final = 64
#: The largest number of tokens of a session that sees only the last ones: it is in memory as a whole.
MOST_TOKENS: Final = 10_000_000
#: Bytes of a result and its headers besides the tokens of input and answer and their text. This includes
#: text held back for a stop string: 256 characters of up to 6 bytes each as JSON.
_RESULT_BYTES: Final = 4096
_MOST_INPUT: Final = 8192
_MOST_REQUEST: Final = 2**17


@dataclass(slots=True, eq=False)
class RequestLimits:
    """Refuses requests that this worker could never run, by raising `RefusedError`."""

    engine: EnginePort
    #: The policy of sessions that choose none.
    default: Policy
    _: KW_ONLY
    #: The largest size of a session that sees all its tokens.
    context_tokens: int
    #: The least window of a `sink_window`.
    block_tokens: int
    #: Token ids are below it.
    vocab_size: int
    #: The most bytes of a result in the log, and of a reply.
    max_result_bytes: int = 2**20
    #: Why no session can run.
    refusal: str | None = None
    #: Why none gets answers.
    no_answers: str | None = None
    #: The policies of all sessions opened, without the default and full, and the tenant that was first.
    _policies: dict[Policy, str] = field(default_factory=dict)

    @property
    def answer_bytes(self) -> int:
        """The bytes that an answer and its input may take, so that the log takes its result."""
        return max(self.max_result_bytes - _RESULT_BYTES, self.max_result_bytes // 4)

    @property
    def most_input(self) -> int:
        """The most characters of an input's encoded tokens in a result; longer ones are stored before it."""
        return min(_MOST_INPUT, self.max_result_bytes // 16)

    @property
    def most_request(self) -> int:
        """The most bytes of a request in its result; longer requests are stored before it."""
        return min(_MOST_REQUEST, self.max_result_bytes // 8)

    def check_answer(self, request: Generate) -> None:
        """Raise `RefusedError` if the model makes no answers, or lacks a token of the `logit_bias`."""
        if self.no_answers:
            raise RefusedError("invalid_request", self.no_answers)
        beyond = [token for token in request.logit_bias if token >= self.vocab_size]
        if beyond:
            raise RefusedError(
                "invalid_request",
                f"logit_bias names the token {beyond[0]}; the model's tokens are 0 to {self.vocab_size - 1}",
                field="logit_bias",
            )

    def chosen_policy(self, cache: CachePolicy) -> Policy:
        """Return the policy that an `open` chooses, which is the default policy if it names none.

        Raises `RefusedError` for pinned spans that overlap or do not fit into the resident tokens.
        """
        try:
            policy = self.default if cache.policy is None else policy_of(SessionCache.of(cache))
        except ValueError as error:
            raise RefusedError("invalid_request", str(error), field="cache") from error
        return replace(policy, has_snapshots=cache.snapshots is None)

    def check_policy(self, policy: Policy) -> None:
        """Raise `RefusedError` if this worker or its model cannot serve sessions under a policy."""
        why = self.refusal or misfit(
            policy, block_tokens=self.block_tokens, context_tokens=self.context_tokens
        )
        if why := why or self.engine.refusal(policy):
            raise RefusedError("invalid_request", why, field="cache.policy")

    def note(self, policy: Policy, tenant: str) -> None:
        """Record the policy of an `open` request. Raises `RefusedError` if there are too many policies.

        A tenant may add as many as `most_of_each` says. Open sessions are not affected.
        """
        if policy in (FULL, self.default, *self._policies):
            return
        chosen = Counter(self._policies.values())
        if chosen[tenant] >= most_of_each(chosen, MOST_POLICIES):
            raise RefusedError(
                "invalid_request",
                f"sessions were opened under {len(self._policies)} cache policies since this worker started,"
                f" and it takes no other: choose one of those, or leave cache.policy out for {self.default}",
                field="cache.policy",
            )
        self._policies[policy] = tenant

    def check_size(self, num_prompt: int, policy: Policy, *, room: int) -> None:
        """Raise `RefusedError` if a prompt and `room` new tokens exceed the context or all KV memory."""
        most, what = self.context_tokens, "the context"
        if policy.is_endless:
            most, what = MOST_TOKENS, "the limit of any session"
        if num_prompt + room > most:
            raise RefusedError(
                "context_exceeded",
                f"the session would hold {num_prompt} tokens and {room} new ones, {what} is {most}: "
                "rewind it, or start a new session",
                limit=TokenLimit(asked=num_prompt, allowed=most),
            )
        needed = self.engine.size_bytes(num_prompt + room, policy)
        smaller = "shorten the session" if policy.window is None else "open it with a smaller window"
        if needed > self.engine.max_bytes:
            raise RefusedError(
                "memory_exceeded",
                f"{num_prompt} tokens and room for {room} more take {needed} bytes of KV, the limit is "
                f"{self.engine.max_bytes}: {smaller}, or raise device_memory",
            )


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
        if not policy.has_snapshots:
            return "a paged session keeps its KV on SSD: snapshots none needs another cache.policy"
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
