"""Fetches the images that requests name by URLs, from the hosts that the gateway's settings name."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from ssl import SSLCertVerificationError
from typing import TYPE_CHECKING, Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from msgspec.structs import replace

from turnkeep_client.content_blocks import check_image
from turnkeep_client.images import MOST_BYTES, digest_of

from .images import Link, attach
from .turn import ClientTurn, Fault, parts_checked, refused

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from turnkeep_client.messages import Message

#: How long one image may take.
_FETCH_S: Final = 15.0
_PIECE_BYTES: Final = 65536
#: The most images of one request, their bytes, and how many of them are fetched at a time.
_MOST_IMAGES: Final = 100
_MOST_BYTES: Final = 32 * 2**20
_AT_ONCE: Final = 4
#: Threads for the images of all requests.
_MOST_THREADS: Final = 16


class ImageFetcher:
    """Fetches images over HTTP and HTTPS, only from `hosts`; redirects must lead to these hosts too."""

    def __init__(self, hosts: Collection[str] = ()) -> None:
        self._hosts = {*hosts}
        #: Of its own: a slow host holds a thread, and the pool of the event loop has other work.
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "image")

    async def fetched(self, turn: ClientTurn) -> ClientTurn:
        """Fetch the images that a turn links to; return the turn with all images' files in its messages.

        Raises `Fault` if a host is not allowed, an image does not come or is no image, or there are too many.
        """
        if not turn.images:
            return turn
        links = {name: one for name, one in turn.images.items() if isinstance(one, Link)}
        fetched, waiting = list[bytes](), [*links.values()]
        if len(links) > _MOST_IMAGES:
            why = f"{len(links)} images are to be fetched; the most are {_MOST_IMAGES}"
            raise refused(why, waiting[_MOST_IMAGES].where)
        while some := waiting[len(fetched) : len(fetched) + _AT_ONCE]:
            fetched += await asyncio.gather(*map(self._image, some))
            if (size := sum(map(len, fetched))) > _MOST_BYTES:
                why = f"the fetched images have more than {_MOST_BYTES} bytes: {size}"
                raise Fault(413, why, code="request_too_large", param=some[-1].where)
        digests = {name: digest_of(file) for name, file in zip(links, fetched, strict=True)}
        messages = tuple(_renamed(one, digests) for one in turn.messages or ())
        attach(messages, {**turn.images, **dict(zip(digests.values(), fetched, strict=True))})
        return replace(turn, messages=messages, images={})

    async def _image(self, link: Link) -> bytes:
        """Return an image's file. Raises `Fault`."""
        self.check(link.url, link.where)
        try:
            async with asyncio.timeout(_FETCH_S):
                data = await asyncio.get_running_loop().run_in_executor(self._threads, self._read, link)
        except TimeoutError:
            raise refused(f"the image did not arrive within {_FETCH_S:.0f} s", link.where) from None
        except HTTPError as error:
            error.close()  # else its connection stays open until it is collected
            raise refused(f"the image cannot be fetched: status {error.code}", link.where) from None
        except (OSError, ValueError, HTTPException) as error:
            raise refused(f"the image cannot be fetched: {_why(error)}", link.where) from None
        with parts_checked():
            return check_image(data, link.where)

    def check(self, url: str, where: str) -> None:
        """Raise `Fault` unless `url` is of HTTP or HTTPS and of one of the hosts; `where` is its path."""
        try:
            parts = urlsplit(url)
            host = parts.hostname or ""
        except ValueError:
            raise refused("the image's URL is not valid", where) from None
        if parts.scheme not in {"http", "https"} or not host or host not in self._hosts:
            why = f"images are not fetched from {host!r}: send the file in base64, or name the host"
            raise refused(f"{why} in the gateway's setting gateway_image_hosts", where)

    def _read(self, link: Link) -> bytes:
        """Read an image, or a part of one that is too large. Raises as `urllib`, and `Fault`."""
        until_s, data = time.monotonic() + _FETCH_S, bytearray()
        opener = urllib.request.build_opener(_Redirects(self, link.where))
        with opener.open(link.url, timeout=_FETCH_S) as response:
            while len(data) <= MOST_BYTES and (piece := response.read1(_PIECE_BYTES)):
                data += piece
                if time.monotonic() > until_s:
                    raise TimeoutError
        return bytes(data)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, fetcher: ImageFetcher, where: str) -> None:
        self._fetcher = fetcher
        self._where = where

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Follow a redirect to one of the hosts. Raises `Fault` for others."""
        self._fetcher.check(newurl, self._where)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _why(error: Exception) -> str:
    """Return in a few words why a fetch failed; `URLError` only holds the reason."""
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, SSLCertVerificationError):
        return f"the gateway cannot verify its host's certificate ({reason.verify_message})"
    return type(reason).__name__ if isinstance(reason, BaseException) else reason


def _renamed(message: Message, digests: Mapping[str, str]) -> Message:
    """Return a message whose images have other digests."""
    if not isinstance(message.content, tuple) or not digests:
        return message
    parts = tuple(
        {**part, "digest": digests[part["digest"]]} if part.get("digest") in digests else part
        for part in message.content
    )
    return replace(message, content=parts).of_keys(message.sent)
