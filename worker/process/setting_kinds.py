"""Defines the kinds of settings, such as sizes and choices: how to parse and format their values."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from cache.names.policy import Policy
from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.messages import DEFAULT_RESIDENT, DEFAULT_SINK, DEFAULT_WINDOW

if TYPE_CHECKING:
    from collections.abc import Callable

KIB: Final = 2**10
MIB: Final = 2**20
GIB: Final = 2**30
TIB: Final = 2**40


@dataclass(frozen=True, slots=True)
class Kind:
    """How to parse and format the values of a setting."""

    #: Completes the sentence "it must be ...".
    wants: str
    #: The placeholder in the command line's help: the choices, or a word such as SIZE.
    shape: str
    #: Raises `ValueError` for a value that is not valid.
    parse: Callable[[object], Any]
    show: Callable[[Any], str] = str


_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*")


class Endpoint(NamedTuple):
    """An address to listen on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class TenantLimits(NamedTuple):
    """Limits of each tenant at a worker; None is no limit."""

    #: Answers decoded at the same time.
    rows: int | None = None
    #: Bytes of KV of running turns.
    memory: int | None = None
    #: Sessions at work.
    sessions: int = 256
    #: How many tenants the metrics name.
    metrics: int = 0


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_SIZE_UNITS: Final = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024), ("", 1024))
}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(|ms|s|m|h|d)")
_DURATION_UNITS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(value: object) -> int:
    """Parse bytes from a number or from `8GiB`, `500MB`, `64k` (KiB) and the like. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(text(value))
    unit = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(value)
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def parse_duration(value: object) -> float:
    """Parse seconds from a number or from `5s`, `250ms`, `2m`, `1h`, `7d`. Raises ValueError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _DURATION.fullmatch(text(value))
    if match is None:
        raise ValueError(value)
    return float(match[1]) * _DURATION_UNITS[match[2]]


def text(value: object) -> str:
    """Return a text without white space around it. Raises ValueError if it is empty, or no `str`."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(value)
    return value.strip()


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(value)  # noqa: TRY004  # one error type for all invalid values
    return int(value)


def bits(value: object) -> int:
    """Parse the number of bits of quantised KV, 4 or 8. Raises ValueError."""
    bits = _whole(value)
    if bits not in {4, 8}:
        raise ValueError(value)
    return bits


_POLICY_TEXT = re.compile(
    r"(?P<paged>paged(?::\s*(\d{1,9}))?)|sink_window(?::\s*([1-9]\d{0,8}),\s*([1-9]\d{0,8}))?"
)


def _policy(value: object) -> Policy:
    match = _POLICY_TEXT.fullmatch(text(value))
    if match is None:
        raise ValueError(value)
    if match["paged"]:
        return Policy.paged(int(match[2] or DEFAULT_RESIDENT), sink=DEFAULT_SINK)
    return Policy(int(match[3] or DEFAULT_SINK), int(match[4] or DEFAULT_WINDOW))


def _within(parse: Callable[[object], float], low: float, high: float) -> Callable[[object], Any]:
    def parse_within(value: object) -> float:
        number = parse(value)
        if not (math.isfinite(number) and low <= number <= high):
            raise ValueError(value)
        return number

    return parse_within


def count(low: int, high: int) -> Kind:
    """Return a `Kind` for whole numbers from `low` to `high`."""
    return Kind(f"a whole number from {low} to {high}", "N", _within(_whole, low, high))


def size(low: int, high: int = 1024 * TIB) -> Kind:
    """Return a `Kind` for sizes from `low` to `high` bytes."""
    wants = f"a size from {size_text(low)} to {size_text(high)}, such as 8GiB, 500MB or a number of bytes"
    return Kind(wants, "SIZE", _within(parse_size, low, high), size_text)


def duration(low: float, high: float) -> Kind:
    """Return a `Kind` for durations from `low` to `high` seconds."""
    wants = f"a duration from {low:g} to {high:.12g} seconds, such as 5, 5s or 2m"
    return Kind(wants, "TIME", _within(parse_duration, low, high), _duration_text)


def _duration_text(seconds: float) -> str:
    """Write a duration in its largest unit of which it is a whole number, as `parse_duration` reads it."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % _DURATION_UNITS[unit] == 0:
            return f"{seconds / _DURATION_UNITS[unit]:.0f}{unit}"
    return f"{seconds:.12g}s"


def choice(*words: str) -> Kind:
    """Return a `Kind` for values that are one of `words`."""

    def parse(value: object) -> str:
        if value not in words:
            raise ValueError(value)
        return str(value)

    return Kind("one of " + ", ".join(words), "|".join(words), parse)


def word_or(word: str, meaning: object, kind: Kind) -> Kind:
    """Return a `Kind` that accepts the values of `kind`, and also `word`, parsed as `meaning` (often None).

    With it the command line can undo a value from the settings file, as in `--nats embedded`.
    """
    return Kind(
        f"{word!r} or {kind.wants}",
        f"{word}|{kind.shape}",
        lambda value: meaning if value == word else kind.parse(value),
        lambda value: word if value == meaning else kind.show(value),
    )


def named(wants: str, check: Callable[[str], str]) -> Kind:
    """Return a `Kind` for names. `check` raises `InvalidMessageError` for a name that is not valid."""

    def parse(value: object) -> str:
        try:
            return check(text(value))
        except InvalidMessageError as error:
            raise ValueError(str(error)) from None

    return Kind(wants, "NAME", parse)


def _hosts(value: object) -> str:
    """Normalise host names joined by commas. Raises ValueError."""
    names = [one.strip().lower() for one in text(value).split(",")]
    if not all(map(_HOST.fullmatch, names)):
        raise ValueError(value)
    return ",".join(names)


def _nats_url(value: object) -> str:
    """Complete `host:port[,host:port]` to NATS URLs; ports may be missing. Raises ValueError."""
    urls = [
        url if "://" in url else f"nats://{url}" for url in (part.strip() for part in text(value).split(","))
    ]
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in {"nats", "tls", "ws", "wss"} or not parts.hostname or parts.port == 0:
            raise ValueError(url)
        # A password with one of ?, # and /, not percent-encoded, would be truncated there.
        if parts.query or parts.fragment or (parts.path.strip("/") and parts.scheme in {"nats", "tls"}):
            raise ValueError(url)
    return ",".join(urls)


def context_folder() -> Path:
    """Return the folder in which the `nats` command line keeps its contexts."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "nats" / "context"


def _context(value: object) -> Path:
    """Return the file of a context: of its name, or a path, which has a slash or ends with `.json`.

    Raises ValueError.
    """
    if isinstance(value, Path):
        return value
    name = text(value)
    return Path(name) if "/" in name or name.endswith(".json") else context_folder() / f"{name}.json"


def _tenants(value: object) -> TenantLimits:
    """Parse a table of the settings file, or `NAME=VALUE,NAME=VALUE`. Raises ValueError."""
    if not isinstance(value, dict):
        pairs = [pair.partition("=") for pair in text(value).split(",")]
        value = {name.strip(): given.strip() for name, _, given in pairs}
        if len(value) < len(pairs):  # a limit is given twice
            raise ValueError(value)
    if value.keys() - _TENANTS.keys():
        raise ValueError(value)
    return TenantLimits(**{name: _TENANTS[name].parse(given) for name, given in value.items()})


def _tenants_text(tenants: TenantLimits) -> str:
    return ",".join(f"{name}={_TENANTS[name].show(value)}" for name, value in tenants._asdict().items())


def _endpoint(value: object) -> Endpoint:
    """Parse `HOST:PORT`, `[::1]:PORT`, or only a port, for the loopback address. Raises ValueError."""
    host, _, port = str(_whole(value) if isinstance(value, int) else text(value)).rpartition(":")
    if host and not _HOST.fullmatch(host):
        raise ValueError(value)
    return Endpoint(host.strip("[]") or "127.0.0.1", PORT.parse(port))


def _http_url(value: object) -> str:
    url = text(value)
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.query:
        raise ValueError(url)
    return url


def size_text(size_bytes: int) -> str:
    """Format a size in the largest binary unit that keeps it whole: `8GiB`, `1536MiB`, `1000B`."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return f"{size_bytes}B"


PATH = Kind("a path", "PATH", lambda value: value if isinstance(value, Path) else Path(text(value)))
PLACE = Kind("a directory, or a URL such as s3://bucket/prefix", "DIR|URL", text)
PORT = count(1, 65535)
ENDPOINT = Kind("HOST:PORT, or a port of 127.0.0.1, such as 9424", "HOST:PORT", _endpoint)
MODEL = Kind("text", "MODEL", text)
POLICY = Kind(
    "sink_window:SINK,WINDOW with two numbers of tokens from 1, such as sink_window:4,1024, or paged:RESIDENT"
    " with one of 260 or more",
    "sink_window:SINK,WINDOW|paged:RESIDENT",
    _policy,
    lambda one: f"paged:{one.most_tokens}" if one.recall else f"sink_window:{one.sink},{one.window}",
)
OPTIONAL_PATH = word_or("none", None, PATH)
CONTEXT = word_or("none", None, Kind("a context's name, or the path of its file", "NAME|PATH", _context))
SYNC = Kind(
    "a duration from 0.001 to 3600 seconds", "TIME", lambda v: f"{_within(parse_duration, 0.001, 3600)(v):g}s"
)
URL = Kind("a URL such as http://127.0.0.1:4318, without a password", "URL", _http_url)
HOSTS = word_or("none", "", Kind("names of hosts such as images.example, joined by commas", "HOST", _hosts))
NATS_URLS = word_or(
    "embedded", None, Kind("NATS URLs such as nats://host:4222, joined by commas", "URL", _nats_url)
)
_TENANTS: Final = {
    "rows": word_or("off", None, count(1, 1024)),
    "memory": word_or("off", None, size(MIB)),
    "sessions": count(1, 1_000_000),
    "metrics": count(0, 1000),
}
TENANTS = Kind(
    "some of rows, memory, sessions and metrics, such as rows=4,memory=2GiB,sessions=64,metrics=50",
    "NAME=VALUE,...",
    _tenants,
    _tenants_text,
)
