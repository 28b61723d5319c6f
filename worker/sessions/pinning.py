"""Answers to `pin` and `unpin`: which tokens they mean, and what the store says to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.names.errors import PinRefusedError
from turnkeep_client.messages import Failed, Pinned, PinRequest, Unpinned, UnpinRequest, failure

if TYPE_CHECKING:
    from cache.names.blocks import Tokens
    from cache.store import Store


async def answer(
    store: Store | None, tenant: str, tokens: Tokens, request: PinRequest | UnpinRequest
) -> Pinned | Unpinned | Failed:
    """Pin or unpin the beginning of a session with these tokens; answered within some 2 s."""
    if store is None:
        return _refused("this worker keeps no snapshots, so nothing can be pinned: see its log")
    num_tokens = request.position or len(tokens)
    if not 0 < num_tokens <= len(tokens):
        return _refused(f"the session holds {len(tokens)} tokens: a position must be from 1 to that")
    if isinstance(request, UnpinRequest):
        gone = store.unpin(tenant, tokens[:num_tokens], exactly=request.position is not None)
        return Unpinned(prefixes=tuple(gone), pinned_bytes=store.stats().kept_bytes)
    try:
        pinned = await store.pin(tenant, tokens[:num_tokens])
    except PinRefusedError as error:
        return _refused(str(error))
    return Pinned(
        tokens=pinned.num_tokens,
        stored_tokens=pinned.num_stored,
        size_bytes=pinned.size_bytes,
        pinned_bytes=pinned.pinned_bytes,
        noted=pinned.noted,
    )


def _refused(why: str) -> Failed:
    return failure(None, "invalid_request", why)
