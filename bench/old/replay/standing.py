"""Which answers of a replayed session can be held against the record's. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnkeep_client.messages import Close, Generated, Rewind

from .turns import first_difference

if TYPE_CHECKING:
    from turnkeep_client.messages import Result

    from .record import Step
    from .turns import Standing


class Following:
    """Follows one session: whether its replay still has the context of the record.

    A turn that differs leaves another history behind: from there on answers may differ for that reason alone,
    until the session is rewound to a position before it. Forced sessions go on from the recorded answer,
    which the tokeniser may cut otherwise than it was sampled: there the number of tokens before an answer
    tells.
    """

    def __init__(self, *, force: bool) -> None:
        self._force = force
        self._position = 0
        #: Where the first difference that is still in the session lies.
        self._apart_from: int | None = None
        self._why: Standing = "after a difference"

    def take(self, step: Step, result: Result | None, history: str | None) -> tuple[Standing, int | None]:
        """Return the standing of a request and the index of its first difference."""
        before, recorded = self._position, step.result
        self._position = recorded.position or 0
        if isinstance(step.request, Rewind | Close):
            if self._apart_from is not None and self._position <= self._apart_from:
                self._apart_from = None
            if isinstance(step.request, Close):
                self._position, self._apart_from = 0, None
        if result is None:
            self._part(before, "after a difference")
            return "no answer", None
        if not isinstance(result, Generated) or not isinstance(recorded, Generated):
            return "comparable", None
        if self._apart_from is not None and not self._force:
            return self._why, None
        if result.usage.prompt_tokens != recorded.usage.prompt_tokens:
            self._part(before, "other context")
            return "other context", None
        index = first_difference(recorded.tokens, result.tokens)
        if index is not None:
            self._part(before, "after a difference")
        elif not self._force and history and step.history and history != step.history:
            # The same number of tokens, and other ones: the prompt was tokenised otherwise.
            self._part(before, "other context")
            return "other context", None
        return "comparable", index

    def _part(self, position: int, why: Standing) -> None:
        if self._apart_from is None:
            self._apart_from, self._why = position, why
