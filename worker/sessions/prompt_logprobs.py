"""Builds the echo of a generate: the logprobs of the tokens that the request adds before its answer. Pure.

The device computes them, in a turn that `execution` runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from worker.batch.row_sampler import Drawn
from worker.batch.rows import Scores

from .history import RefusedError

if TYPE_CHECKING:
    from turnkeep_client.messages import Generate, PromptToken
    from worker.text.answer import Answer

    from .history import Input

#: Most prompt tokens whose logprobs one result may contain.
MOST_ECHOED: Final = 8192
#: Bytes of one prompt token as JSON, and of each of the likeliest tokens at its position.
_TOKEN_BYTES: Final = 80


def echo_of(request: Generate, extended: Input, max_bytes: int) -> tuple[Scores | None, int]:
    """Return empty scores for the device to fill (None without an echo), and their size as JSON.

    Raises `RefusedError` if they take more than half of the answer's `max_bytes`, or in a paged session.
    """
    if not request.echo:
        return None, 0
    if extended.history.policy.recall:
        raise RefusedError("invalid_request", "a session under the policy paged cannot echo its prompts")
    num_tokens = extended.history.position - extended.kept
    token_bytes = _TOKEN_BYTES * (1 + request.top_logprobs)
    most = min(max_bytes // 2 // token_bytes, MOST_ECHOED)
    if num_tokens > most:
        raise RefusedError(
            "invalid_request",
            f"an echo of {num_tokens} tokens, with {request.top_logprobs} likeliest tokens each, does not fit"
            f" into a result, which takes {most}: append the first part of the prompt before",
        )
    return Scores(max(extended.kept, 1), request.top_logprobs), num_tokens * token_bytes


def told(scores: Scores | None, extended: Input, answer: Answer) -> tuple[PromptToken, ...]:
    """Return the prompt's new tokens with their logprobs; nothing while `scores` is None or incomplete.

    The first token of a session has no logprob.
    """
    tokens = extended.history.tokens
    if scores is None or scores.end < len(tokens):
        return ()
    unsaid = [Drawn(token) for token in tokens[extended.kept : len(tokens) - len(scores.drawn)]]
    return tuple(answer.of_prompt(*drawn) for drawn in (*unsaid, *scores.drawn))
