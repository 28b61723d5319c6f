"""Checks requests against this worker's limits: those of its model, its KV memory and its settings.

`execution` calls the checks before anything runs on the device. Event loop only.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from cache.names.policy import FULL
from turnkeep_client.errors import TokenLimit

from .history import RefusedError
from .policies import chosen as policy_of
from .policies import misfit

if TYPE_CHECKING:
    from cache.names.policy import Policy
    from turnkeep_client.messages import (
        CachePolicy,
        Generate,
    )
    from worker.engine.port import EnginePort


#: Limit of different cache policies, each of which takes memory, and slows down a forget. At the limit, only
#: tenants that have chosen less than an equal share of them may choose further ones.
MOST_POLICIES: Final = 64
#: The largest number of tokens of a session that sees only the last ones: it is in memory as a whole.
MOST_TOKENS: Final = 10_000_000


class Limits:
    """Refuses requests that this worker could never run, by raising `RefusedError`."""

    def __init__(
        self,
        engine: EnginePort,
        default: Policy,
        *,
        context_tokens: int,
        block_tokens: int,
        vocab_size: int,
        refusal: str | None = None,
        no_answers: str | None = None,
    ) -> None:
        """`default` is the policy of sessions that choose none.

        `context_tokens` is the largest size of a session that sees all its tokens; token ids are below
        `vocab_size`. A `sink_window` is refused if its window is below `block_tokens`, or if sink and window
        together exceed `context_tokens`. `refusal` says why no session can run, `no_answers` why none gets
        answers.
        """
        self.context_tokens = context_tokens
        self.vocab_size = vocab_size
        self._engine = engine
        self._default = default
        self._block_tokens = block_tokens
        self._refusal = refusal
        self._no_answers = no_answers
        #: The policies of all sessions opened, without the default and full, and the tenant that was first.
        self._policies: dict[Policy, str] = {}

    def check_answer(self, request: Generate) -> None:
        """Refuse an answer of a model that makes none, or with a `logit_bias` of tokens that it lacks."""
        if self._no_answers:
            raise RefusedError("invalid_request", self._no_answers)
        beyond = [token for token in request.logit_bias if token >= self.vocab_size]
        if beyond:
            raise RefusedError(
                "invalid_request",
                f"logit_bias names the token {beyond[0]}; the model's tokens are 0 to {self.vocab_size - 1}",
                field="logit_bias",
            )

    def chosen(self, cache: CachePolicy) -> Policy:
        """Return the policy that an `open` chooses.

        Raises `RefusedError` if the request contradicts itself.
        """
        try:
            return policy_of(cache, self._default)
        except ValueError as error:
            raise RefusedError("invalid_request", str(error), field="cache") from error

    def check_policy(self, policy: Policy) -> None:
        """Refuse a session under a policy that this worker or its model cannot serve."""
        why = self._refusal or misfit(
            policy, block_tokens=self._block_tokens, context_tokens=self.context_tokens
        )
        if why := why or self._engine.refusal(policy):
            raise RefusedError("invalid_request", why, field="cache.policy")

    def note(self, policy: Policy, tenant: str) -> None:
        """Record the policy of an `open` request; refuse a new policy if the tenant has chosen its share.

        Sessions that are open already are not affected.
        """
        if policy in (FULL, self._default, *self._policies):
            return
        chosen = Counter(self._policies.values())
        share = MOST_POLICIES // (len(chosen) or 1)
        if len(self._policies) >= MOST_POLICIES and chosen[tenant] >= share:
            raise RefusedError(
                "invalid_request",
                f"sessions were opened under {len(self._policies)} cache policies since this worker started,"
                f" and it takes no other: choose one of those, or leave cache.policy out for {self._default}",
                field="cache.policy",
            )
        self._policies[policy] = tenant

    def check_size(self, num_prompt: int, policy: Policy, *, room: int) -> None:
        """Refuse a prompt that, with `room` tokens for its answer, exceeds the context or all KV memory."""
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
        needed = self._engine.size_bytes(num_prompt + room, policy)
        smaller = "shorten the session" if policy.window is None else "open it with a smaller window"
        if not self._engine.ever_fits(needed):
            raise RefusedError(
                "memory_exceeded",
                f"{num_prompt} tokens and room for {room} more take {needed} bytes of KV, the limit is "
                f"{self._engine.max_bytes}: {smaller}, or raise device_memory",
            )
