"""The images of one session: checks that its log has them, reads them, and copies them for a fork.

Event loop only; files are decoded on a thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from turnkeep_client.images import files_of
from worker.models.vision.image_file import ImageError

from .history import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cache.names.tokens import Tokens
    from turnkeep_client.messages import Append, Generate
    from turnkeep_client.subjects import SessionKey

    from .history import TokenHistory
    from .services import Services

_GONE: Final = "an image of the session is gone from the log: go on in a new session"


class SessionImages:
    """Reads and stores the images of the session `key`."""

    def __init__(self, key: SessionKey, services: Services) -> None:
        self._key = key
        self._fold = services.fold
        self._journal = services.journal
        self._processor = services.formats.tokenizer.image_processor

    async def grids(
        self, history: TokenHistory, request: Append | Generate, *, stores: bool = True
    ) -> dict[str, Sequence[int]]:
        """Return the grids (numbers of patches) of a request's images by digest, for `Fold.extend`.

        If the session's tokens are made anew, includes the grids of all its images. Unless not `stores`,
        stores files that the request has, or that would leave the log with an earlier session of this name.
        Raises `RefusedError` for images that are missing or cannot be read.
        """
        found: dict[str, Sequence[int]] = {}
        files = files_of(request)
        for digest, where in _named(request):
            if digest in found:
                continue
            data = files.get(digest) or await self._journal.image(self._key, digest)
            if data is None:
                why = f"the log has no image {digest} of this session; store its file before the request"
                raise RefusedError("invalid_request", why, field=where)
            try:
                await self._look(digest, data, found)
            except ImageError as error:
                raise RefusedError("invalid_request", str(error), field=where) from None
            if stores:
                await self._journal.store_image(self._key, data)
        for digest in history.conversation.digests if self._fold.is_foreign(history) else ():
            if self._processor is not None and digest not in found:
                try:
                    await self._look(digest, await self.read(digest), found)
                except ImageError as error:
                    raise RefusedError("history_diverged", str(error)) from None
        return found

    async def _look(self, digest: str, data: bytes, found: dict[str, Sequence[int]]) -> None:
        """Add the grid of an image to `found`, if the model sees. Raises `ImageError`."""
        if self._processor is not None:
            one = await self._fold.tokenising.in_thread(self._key.tenant, self._processor.read, data)
            found[digest] = one.grid

    async def read(self, digest: str) -> bytes:
        """Read the file of an image. Raises `ImageError` if the log has lost it."""
        data = await self._journal.image(self._key, digest)
        if data is None:
            raise ImageError(_GONE)
        return data

    async def read_for(self, tokens: Tokens, fingerprint: bytes) -> bytes:
        """Read the file of the image with a fingerprint among a session's tokens. Raises as `read`."""
        (digest, *_) = (span.digest for span in tokens.spans if span.fingerprint == fingerprint)
        return await self.read(digest.hex())

    async def copy(self, history: TokenHistory, fork: SessionKey) -> None:
        """Store the images of `history` for the session `fork`. Raises `RefusedError` if one is gone."""
        spans = (span.digest.hex() for span in history.tokens.spans)
        for digest in dict.fromkeys((*spans, *history.conversation.digests)):
            try:
                await self._journal.store_image(fork, await self.read(digest))
            except ImageError as error:
                raise RefusedError("history_diverged", str(error)) from None


def _named(request: Append | Generate) -> Iterator[tuple[str, str]]:
    """Yield the digest and the field of each image in a request's messages."""
    for number, message in enumerate(request.messages or ()):
        blocks: Sequence[Mapping[str, str] | str] = message.blocks or ()
        for at, block in enumerate(blocks):
            if not isinstance(block, str) and block.get("type") == "image" and "digest" in block:
                yield block["digest"], f"messages[{number}].content[{at}]"
