"""Which entries on a session's `out` a worker can have written: others are read by nobody. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import HISTORY_HEADER
from turnkeep_client.messages import decode_asked, decode_result
from turnkeep_client.session_log import changes_session, is_failure

if TYPE_CHECKING:
    from turnkeep_client.messages import Result

    from .consistent_reads import StoredMessage


def worker_result(entry: StoredMessage) -> Result | None:
    """Decode an entry of `out`; None if no worker can have written it.

    A worker's result answers an earlier request, has the digest of the history, and has the request itself.
    """
    try:
        result = decode_result(entry.body)
    except InvalidMessageError:
        return None
    if result.seq is None or not 0 < result.seq < entry.seq:
        return None
    if not is_failure(result) and HISTORY_HEADER not in entry.headers:
        return None
    return result if not changes_session(result) or decode_asked(entry.body) is not None else None


def answered_seq(entry: StoredMessage) -> int:
    """Return the sequence of the request that an `out` entry answers; 0 if the entry is not a result."""
    result = worker_result(entry)
    return (result.seq or 0) if result else 0
