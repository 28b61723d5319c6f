"""Collects tokens that a session had earlier, to erase their KV: the present ones may not begin with them.

Pure: entries in, tokens out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from turnkeep_client.messages import Append, Close, Failed, Generate
from turnkeep_client.session_log import changes_session

from .history import apply_change, prefilled_by
from .record import Record
from .results import is_close

if TYPE_CHECKING:
    from cache.names.tokens import Tokens
    from worker.wire.consistent_reads import StoredMessage

    from .fold import Fold
    from .history import TokenHistory
    from .record import ResultParts

#: Codes of failures that may follow a prefill. A request that ended with `internal` may crash a worker again.
_AFTER_PREFILL: Final = {"expired", "memory_exceeded"}


class EarlierTokens:
    """Tokens that a session had and lost, as by a rewind, or prefilled for requests that changed nothing.

    Give it all results from the beginning of the log, in order.
    """

    def __init__(self, fold: Fold) -> None:
        #: The token sequences found so far, oldest first.
        self.known: list[Tokens] = []
        #: Requests that may have prefilled tokens which the log lacks, with the histories before them.
        self.unknown: list[tuple[TokenHistory, Append | Generate]] = []
        self._record = Record(fold)

    def add_result(self, entry: StoredMessage, parts: ResultParts) -> None:
        """Apply the next result, and collect tokens that it replaced; a close with `forget` drops all."""
        before = self._record.history.tokens
        self._record.add_result(entry, parts)
        if (last := self._record.take_last()) is None or last[1].repeat_of is not None:
            return
        pending, result = last
        request, after = pending.request, self._record.history
        if is_close(result) and isinstance(request, Close) and request.forget:  # what was before is erased
            self.known, self.unknown = [], []
        elif after.tokens.num_common(before) < len(before):
            self.known.append(before)
        elif isinstance(request, Append | Generate) and not changes_session(result):
            if (prefilled := prefilled_by(parts.value)) is not None:
                self.known.append(apply_change(before, prefilled))
            elif not isinstance(result, Failed) or result.code in _AFTER_PREFILL:
                self.unknown.append((after, request))
