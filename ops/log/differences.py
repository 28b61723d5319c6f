"""Finds where a replayed session first differs from its record, and the likely cause. Pure.

A result's headers name the model and build of its worker (`Turnkeep-Model`, `Turnkeep-Build`). The likely
cause is the first of these values in which record and replay differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from turnkeep_client.messages import OPTIONS, Appended, Failed, Generate, Generated, Opened

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from turnkeep_client.session_log import Exchange

#: Causes of different tokens besides the model: the name in `Entry.build`, and in a sentence.
_BUILD: Final = {"dtype": "dtype", "kv": "KV precision", "device": "device", "version": "version"}
#: Characters of an answer to show on either side of the first difference.
_AROUND: Final = 30


class Difference(Struct, frozen=True, kw_only=True):
    """The first difference between a session and its replay."""

    session: str
    #: The number of the request that differs, from 1, and its id.
    number: int
    id: str
    #: The index of the answer's first different token; None if the context before the answer differs, or if
    #: there is no answer.
    token: int | None = None
    #: What each side has there, as text.
    recorded: str
    replayed: str
    #: The likely cause, as text.
    cause: str


def first_difference(
    session: str, recorded: Sequence[Exchange], replayed: Mapping[str, Exchange], faults: Mapping[str, str]
) -> Difference | None:
    """Compare a session's replay with its record; return the first difference, None if there is none.

    `replayed` and `faults` map request ids to exchanges, and to errors of requests without a result.
    """
    for number, one in enumerate(recorded, 1):
        other = replayed.get(one.request.id)
        found = _fault(one, other, faults) if other is None or _failed(other) else _compared(one, other)
        if found is not None:
            token, was, now, cause = found
            return Difference(
                session=session,
                number=number,
                id=one.request.id,
                token=token,
                recorded=was,
                replayed=now,
                cause=cause,
            )
    return None


_Found = tuple[int | None, str, str, str]


def _failed(one: Exchange) -> bool:
    return isinstance(one.result, Failed)


def _fault(one: Exchange, other: Exchange | None, faults: Mapping[str, str]) -> _Found:
    why = faults.get(one.request.id, "it was not answered")
    if other is not None and isinstance(other.result, Failed):
        why = f"{other.result.code}: {other.result.message}"
    return None, f"{type(one.result).__name__.lower()}", "no result", f"the replaying worker: {why}"


def _compared(one: Exchange, other: Exchange) -> _Found | None:
    was, now = one.result, other.result
    if isinstance(was, Generated) and isinstance(now, Generated):
        longer = was.usage.prompt_tokens - now.usage.prompt_tokens
        token = first_unequal(was.tokens, now.tokens)
        if longer == 0 and token is not None:
            return token, *_around(was.text, now.text), _cause(one, other)
        counts = was.usage.prompt_tokens, now.usage.prompt_tokens
    else:
        counts, longer = (was.position or 0, now.position or 0), (was.position or 0) - (now.position or 0)
    if longer == 0 and one.answered.history == other.answered.history:
        return None
    sides = [f"{count} tokens of context" for count in counts]
    return None, sides[0], sides[1], _cause(one, other, of_prompt=True)


def first_unequal(recorded: tuple[int, ...], replayed: tuple[int, ...]) -> int | None:
    """Return the index of the first token that differs; None if all are equal."""
    if recorded == replayed:
        return None
    pairs = enumerate(zip(recorded, replayed, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(recorded), len(replayed)))


def _around(recorded: str, replayed: str) -> tuple[str, str]:
    """Return a short part of each of two answers, around their first difference."""
    start = max(0, (first_unequal(tuple(map(ord, recorded)), tuple(map(ord, replayed))) or 0) - _AROUND)
    both = (text[start : start + 2 * _AROUND] for text in (recorded, replayed))
    was, now = (f"{'...' if start else ''}{text}" for text in both)
    return was, now


def _cause(one: Exchange, other: Exchange, *, of_prompt: bool = False) -> str:
    """Name the likely cause of different tokens, in an answer or (`of_prompt`) in the prompt."""
    was, now = one.answered, other.answered
    if was.model != now.model:
        return f"another model: {now.model}, the record is of {was.model}"
    if of_prompt:
        return (
            "the prompt became other tokens under a model of the same name: a changed chat template or"
            " tokenizer, or a template that prints the date"
        )
    policies = [result.cache for result in (one.result, other.result) if isinstance(result, _WITH_CACHE)]
    if len(set(policies)) > 1:
        names = [str(policy or "full") for policy in policies]
        return f"another cache policy: {names[1]}, the record is of {names[0]}; see the setting cache_policy"
    if not was.build:
        return f"unknown: the record does not say its dtype and device; the replay has {_listed(now.build)}"
    for name, words in _BUILD.items():
        if (before := was.build.get(name)) != (after := now.build.get(name)):
            return f"another {words}: {after}, the record is of {before}{_defaults(one, name)}"
    return (
        f"model, {', '.join(_BUILD.values())} are the same. Beside other requests sums are rounded otherwise,"
        " which decides between tokens of almost equal probability; replay at --speed 1 to have the same load"
    )


_WITH_CACHE: Final = (Appended, Generated, Opened)


def _listed(build: Mapping[str, str]) -> str:
    return ", ".join(f"{words} {build.get(name, 'unknown')}" for name, words in _BUILD.items())


def _defaults(one: Exchange, changed: str) -> str:
    """Name the sampling options that a request leaves out, if the versions may have different defaults."""
    if changed != "version" or not isinstance(one.request, Generate):
        return ""
    given = msgspec.json.decode(one.asked.body)
    left = [name for name in (*OPTIONS, "response_format") if name not in given and name != "seed"]
    return f"; its defaults may differ ({', '.join(left)})" if left else ""
