"""Reads API keys from a file, each with its tenant and limits, and checks requests against the limits."""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple

from turnkeep_client.errors import InvalidMessageError, TurnkeepError
from turnkeep_client.subjects import DEFAULT_TENANT, check_id

from .turn import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

_LIMIT: Final = re.compile(r"(requests|tokens)=([1-9]\d*)/min|(at_once)=([1-9]\d*)")
_MINUTE_S: Final = 60.0
#: How long a client with too many requests at once should wait.
_PAUSE_S: Final = 1.0


class KeyLimits(NamedTuple):
    """A key's limits; None means no limit."""

    #: Requests per minute.
    requests: int | None = None
    #: Prefilled and generated tokens per minute, together.
    tokens: int | None = None
    #: Requests that run at the same time.
    at_once: int | None = None


_UNLIMITED: Final = KeyLimits()


class _Bucket:
    """A token bucket for a limit of `size` per minute: full at first, and refilled continuously."""

    def __init__(self, size: int | None, clock: Callable[[], float]) -> None:
        self._size = size
        self._clock = clock
        self._left = float(size or 0)
        self._seen_s = clock()

    def wait_s(self, needed: float) -> float:
        """Return the seconds until the amount `needed` is available; 0 if it is available now."""
        if self._size is None:
            return 0.0
        now_s = self._clock()
        self._left = min(self._size, self._left + (now_s - self._seen_s) * self._size / _MINUTE_S)
        self._seen_s = now_s
        return max(0.0, (needed - self._left) * _MINUTE_S / self._size)

    def take(self, amount: float) -> None:
        """Subtract an amount, even if less than that is left."""
        self._left -= amount


class ApiKey:
    """One API key: its tenant, its limits and their use so far. Event loop only."""

    def __init__(
        self, tenant: str, limits: KeyLimits = _UNLIMITED, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tenant = tenant
        self._limits = limits
        self._requests = _Bucket(limits.requests, clock)
        self._tokens = _Bucket(limits.tokens, clock)
        self._num_running = 0

    @contextmanager
    def one_request(self) -> Iterator[None]:
        """Count one request, as running inside the block. Raises `Fault` if a limit of the key is reached."""
        limits = self._limits
        if limits.at_once is not None and self._num_running >= limits.at_once:
            raise _too_many(f"{limits.at_once} requests at once", _PAUSE_S)
        if wait_s := self._requests.wait_s(1):
            raise _too_many(f"{limits.requests} requests a minute", wait_s)
        if wait_s := self._tokens.wait_s(1):
            raise _too_many(f"{limits.tokens} tokens a minute", wait_s)
        self._requests.take(1)
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def spend(self, num_tokens: int) -> None:
        """Count an answer's tokens against the key's limit, once the answer has ended."""
        self._tokens.take(num_tokens)


class Keys:
    """All API keys. Without keys, every request belongs to the default tenant, and has no limits."""

    def __init__(self, keys: Mapping[bytes, ApiKey] | None = None) -> None:
        """`keys` maps SHA-256 digests to keys, so that the time of a look-up reveals nothing about keys."""
        self._keys = keys
        self._anybody = ApiKey(DEFAULT_TENANT)

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Read a file with a key, its tenant and optional limits in each line. Raises `TurnkeepError`."""
        found: dict[bytes, ApiKey] = {}
        places: dict[bytes, int] = {}
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TurnkeepError(f"the keys cannot be read from {path}: {error}") from None
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) < 2:
                raise TurnkeepError(f"{path}, line {number}: it must be a key, a tenant, and perhaps limits")
            # A header would have other bytes. A byte order mark is not ASCII either.
            if not words[0].isascii():
                raise TurnkeepError(f"{path}, line {number}: the key has characters that are not ASCII")
            digest = _digest(words[0])
            if (first := places.setdefault(digest, number)) != number:
                raise TurnkeepError(
                    f"{path}, line {number}: it has the key of line {first}; each key has one line"
                )
            try:
                found[digest] = ApiKey(check_id("tenant", words[1]), _limits(words[2:]))
            except InvalidMessageError as error:
                raise TurnkeepError(f"{path}, line {number}: {error}") from None
        if not found:
            raise TurnkeepError(f"{path} has no keys: nobody could ask anything")
        return cls(found)

    @property
    def tenant(self) -> str:
        """The first key's tenant, as which the gateway sends requests of its own."""
        return next(iter((self._keys or {b"": self._anybody}).values())).tenant

    @property
    def are_needed(self) -> bool:
        """Whether requests must have an API key."""
        return self._keys is not None

    def of(self, headers: Mapping[str, str], names: Sequence[str]) -> ApiKey:
        """Return the API key in a request's `authorization` or another of `names`. Raises `Fault` (401)."""
        if self._keys is None:
            return self._anybody
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else next(filter(None, map(headers.get, names)), "")
        if (found := self._keys.get(_digest(key))) is None:
            shown = ", or ".join(("Authorization: Bearer KEY", *(f"{name}: KEY" for name in names)))
            raise Fault(401, f"the API key ({shown}) is missing or unknown", code="invalid_api_key")
        return found


def _limits(words: Sequence[str]) -> KeyLimits:
    """Parse the words of a line that are limits. Raises `InvalidMessageError`."""
    found: dict[str, int] = {}
    for word in words:
        match = _LIMIT.fullmatch(word)
        name, number = (match[1] or match[3], match[2] or match[4]) if match else ("", "")
        if not match or name in found:
            raise InvalidMessageError(
                f"{word!r} is no limit: limits are requests=60/min, tokens=100000/min, at_once=4, each once"
            )
        found[name] = int(number)
    return KeyLimits(**found)


def _too_many(what: str, wait_s: float) -> Fault:
    return Fault(
        429,
        f"the limit of this API key is {what}",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
    )


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
