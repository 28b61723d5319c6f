"""Computes the sampling options of `ask` and `chat`.

Options that the user did not give come from the model's recommendations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from turnkeep_client.errors import TurnkeepError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Generated
    from turnkeep_client.sampling import Sampling

#: More tokens than any context: the worker lowers `max_tokens` to the room left in the session's context.
_ALL_THAT_FITS: Final = 2**31 - 1
#: For a model without recommended options, like the packaged one. Small models repeat themselves: in two
#: answers of 300 tokens 41% and 28% of all runs of six words were repeats; with this penalty 1% and none.
#: Temperature 0.2 and top_p 0.9, which SmolLM2's authors recommend, repeat as much, and often do not name
#: Paris as the capital of France.
_CAREFUL: Final = {"repetition_penalty": 1.1}


def preferred(own: Mapping[str, float], given: Sampling) -> dict[str, Any]:
    """Return the options that the user gave, and for the others the model's recommended values (`own`).

    If `own` is empty, a mild repetition penalty takes their place, except with tools or a response format.
    """
    is_plain = not (given.get("response_format") or given.get("tools"))  # JSON must repeat tokens
    return {
        **(own or (_CAREFUL if is_plain else {})),
        **{name: value for name, value in given.items() if value not in (None, ())},
    }


async def asked(client: Client, given: Sampling) -> dict[str, Any]:
    """Ask the worker for its model's recommended options; return `preferred` ones for an answer.

    Without a worker, none are recommended. A missing `max_tokens` becomes very large (see `whole`).
    """
    try:
        own = (await client.worker_metrics()).sampling
    except TurnkeepError:  # the request waits in the log for a worker
        own = {}
    return whole(preferred(own, given))


def whole(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with a very large `max_tokens` if they have none: the answer ends by itself."""
    return {"max_tokens": _ALL_THAT_FITS, **options}


def cut(result: Generated, max_tokens: int) -> str:
    """Return a text that says why an answer was cut short; empty if it was not."""
    if result.finish_reason == "model_changed":
        return "ended where the worker got another model: the answer is cut"
    if result.finish_reason != "length":
        return ""
    num = result.usage.completion_tokens
    if num >= max_tokens:
        return f"ended at max_tokens ({num}): the answer is cut"
    return f"ended at {num} tokens: no more fit into the context, the worker's memory or one result"
