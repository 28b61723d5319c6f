"""Defines every setting of a worker: its default, its range, and the sources of its value.

The command line overrides the `TURNKEEP_*` environment, which overrides `turnkeep.toml`, which overrides the
defaults. A setting has one name in all of them (`--data-dir`, `TURNKEEP_DATA_DIR`, `data_dir`). A table
`[models.NAME]` of the file has settings of one model, which override the file's others. Knows nothing of what
a setting is used for.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import socket
import sys
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

import platformdirs

from cache.names.policy import FULL, Policy
from turnkeep_client.errors import InvalidMessageError, TurnkeepError
from turnkeep_client.messages import DEFAULT_RESIDENT, DEFAULT_SINK, DEFAULT_WINDOW
from turnkeep_client.redact import shown
from turnkeep_client.subjects import DEFAULT_PREFIX, ID_RULE, Subjects, check_id, check_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

CONFIG_NAME: Final = "turnkeep.toml"
_MODELS: Final = "models"
_ENV: Final = "TURNKEEP_"
#: Variables that begin so are no settings: of the tests, and of `turnkeep launch`.
_OTHER_ENV: Final = ("TURNKEEP_TEST_", "TURNKEEP_GATEWAY_")

_KIB: Final = 2**10
_MIB: Final = 2**20
_GIB: Final = 2**30
_TIB: Final = 2**40


class SettingsError(TurnkeepError):
    """A setting is unknown or invalid. The message names it and its source, and says what is valid."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of settings: parses and formats values. `wants` completes the sentence "it must be ...".

    `shape` is the placeholder in the command line's help: the choices, or a word such as SIZE.
    """

    wants: str
    shape: str
    parse: Callable[[object], Any]  # raises ValueError
    show: Callable[[Any], str] = str


_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*")


class Endpoint(NamedTuple):
    """An address to listen on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


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
    match = _SIZE.fullmatch(_text(value))
    unit = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(value)
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def parse_duration(value: object) -> float:
    """Parse seconds from a number or from `5s`, `250ms`, `2m`, `1h`, `7d`. Raises ValueError."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = _DURATION.fullmatch(_text(value))
    if match is None:
        raise ValueError(value)
    return float(match[1]) * _DURATION_UNITS[match[2]]


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(value)
    return value.strip()


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(value)  # noqa: TRY004  # one error type for all invalid values
    return int(value)


def _bits(value: object) -> int:
    bits = _whole(value)
    if bits not in {4, 8}:
        raise ValueError(value)
    return bits


_POLICY_TEXT = re.compile(
    r"(?P<paged>paged(?::\s*(\d{1,9}))?)|sink_window(?::\s*([1-9]\d{0,8}),\s*([1-9]\d{0,8}))?"
)


def _policy(value: object) -> Policy:
    match = _POLICY_TEXT.fullmatch(_text(value))
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


def _count(low: int, high: int) -> Kind:
    return Kind(f"a whole number from {low} to {high}", "N", _within(_whole, low, high))


def _size(low: int, high: int = 1024 * _TIB) -> Kind:
    wants = f"a size from {size_text(low)} to {size_text(high)}, such as 8GiB, 500MB or a number of bytes"
    return Kind(wants, "SIZE", _within(parse_size, low, high), size_text)


def _duration(low: float, high: float) -> Kind:
    wants = f"a duration from {low:g} to {high:.12g} seconds, such as 5, 5s or 2m"
    return Kind(wants, "TIME", _within(parse_duration, low, high), lambda value: f"{value:g}")


def _choice(*words: str) -> Kind:
    def parse(value: object) -> str:
        if value not in words:
            raise ValueError(value)
        return str(value)

    return Kind("one of " + ", ".join(words), "|".join(words), parse)


def _or(word: str, meaning: object, kind: Kind) -> Kind:
    """Extend `kind`: the value `word` means `meaning`, for example no value.

    So a source can undo the value of a source that it overrides.
    """
    return Kind(
        f"{word!r} or {kind.wants}",
        f"{word}|{kind.shape}",
        lambda value: meaning if value == word else kind.parse(value),
        lambda value: word if value == meaning else kind.show(value),
    )


def _name(wants: str, check: Callable[[str], str]) -> Kind:
    def parse(value: object) -> str:
        try:
            return check(_text(value))
        except InvalidMessageError as error:
            raise ValueError(str(error)) from None

    return Kind(wants, "NAME", parse)


def _nats_url(value: object) -> str:
    """Complete `host:port[,host:port]` to URLs; a port may be left out."""
    urls = [
        url if "://" in url else f"nats://{url}" for url in (part.strip() for part in _text(value).split(","))
    ]
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in {"nats", "tls", "ws", "wss"} or not parts.hostname or parts.port == 0:
            raise ValueError(url)
        # Such characters in a password must be percent-encoded: the rest of it would not be sent.
        if parts.query or parts.fragment or (parts.path.strip("/") and parts.scheme in {"nats", "tls"}):
            raise ValueError(url)
    return ",".join(urls)


def _endpoint(value: object) -> Endpoint:
    """Parse `HOST:PORT`, `[::1]:PORT`, or a port of the loopback address."""
    host, _, port = str(_whole(value) if isinstance(value, int) else _text(value)).rpartition(":")
    if host and not _HOST.fullmatch(host):
        raise ValueError(value)
    return Endpoint(host.strip("[]") or "127.0.0.1", _PORT.parse(port))


def _http_url(value: object) -> str:
    url = _text(value)
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username or parts.query:
        raise ValueError(url)
    return url


def policy_text(policy: Policy) -> str:
    """Format a cache policy in the syntax of the setting (`str(policy)` is its identity instead)."""
    return "full" if policy == FULL else _POLICY.show(policy)


def size_text(size_bytes: int) -> str:
    """Format a size in the largest binary unit that keeps it whole: `8GiB`, `1536MiB`, `1000B`."""
    for unit, name in ((_TIB, "TiB"), (_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return f"{size_bytes}B"


def word(name: str) -> str:
    """Replace the characters of a name that prefixes and ids cannot have."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)


def default_worker() -> str:
    """Build a worker name from the host's name; characters that break the id rule become `-`."""
    name = word(socket.gethostname().split(".")[0])
    return re.sub(r"^[^A-Za-z0-9]+", "", name)[:64] or "worker"


def default_data_dir() -> Path:
    """Return the platform's folder for a user's application data."""
    return Path(platformdirs.user_data_dir("turnkeep"))


def _setting(kind: Kind, default: object, purpose: str) -> Any:
    return dataclasses.field(default=default, metadata={"kind": kind, "purpose": purpose})


def _secret(purpose: str) -> Any:
    metadata = {"kind": _or("none", None, _SECRET), "purpose": purpose, "secret": True}
    return dataclasses.field(default=None, repr=False, metadata=metadata)


def _found(kind: Kind, find: Callable[[], object], found: str, purpose: str) -> Any:
    """Declare a setting whose default is computed at the start; `found` describes that default."""
    return dataclasses.field(
        default_factory=find, metadata={"kind": kind, "purpose": purpose, "found": found}
    )


_PATH = Kind("a path", "PATH", lambda value: value if isinstance(value, Path) else Path(_text(value)))
_PORT = _count(1, 65535)
_ENDPOINT = Kind("HOST:PORT, or a port of 127.0.0.1, such as 9424", "HOST:PORT", _endpoint)
_MODEL = Kind("text", "MODEL", _text)
#: Not on the command line, which other users of the machine can see; `__repr__` leaves such a setting out.
_SECRET = Kind("text", "TEXT", _text, lambda _value: "***")
_POLICY = Kind(
    "sink_window:SINK,WINDOW with two numbers of tokens from 1, such as sink_window:4,1024, or paged:RESIDENT"
    " with one of 260 or more",
    "sink_window:SINK,WINDOW|paged:RESIDENT",
    _policy,
    lambda one: f"paged:{one.most_tokens}" if one.recall else f"sink_window:{one.sink},{one.window}",
)
_OPTIONAL_PATH = _or("none", None, _PATH)
_SYNC = Kind(
    "a duration from 0.001 to 3600 seconds", "TIME", lambda v: f"{_within(parse_duration, 0.001, 3600)(v):g}s"
)
_URL = Kind("a URL such as http://127.0.0.1:4318, without a password", "URL", _http_url)
_NATS_PORT: Final = 4222
_NATS_URLS = _or(
    "embedded", None, Kind("NATS URLs such as nats://host:4222, joined by commas", "URL", _nats_url)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of one worker. Sizes are bytes; names ending in `_s` are seconds.

    The constructor does not check values; `load` does.
    """

    data_dir: Path = _found(
        _PATH,
        default_data_dir,
        "the user's data directory",
        "where the worker keeps log, snapshots and models",
    )
    nats: str | None = _setting(
        _NATS_URLS, None, "the NATS servers to use; by default the worker runs its own"
    )
    nats_creds: Path | None = _setting(
        _OPTIONAL_PATH, None, "a credentials file for the NATS servers: a user's JWT and nkey seed"
    )
    nats_nkey: Path | None = _setting(
        _OPTIONAL_PATH, None, "a file with the nkey seed of a user of the NATS servers"
    )
    nats_user: str | None = _setting(
        _or("none", None, Kind("text", "NAME", _text)), None, "a user of the NATS servers, with a password"
    )
    nats_password: str | None = _secret("the password of nats_user")
    nats_password_file: Path | None = _setting(
        _OPTIONAL_PATH, None, "a file with the password of nats_user, instead of nats_password"
    )
    nats_token: str | None = _secret("the token of the NATS servers")
    nats_token_file: Path | None = _setting(
        _OPTIONAL_PATH, None, "a file with the token of the NATS servers, instead of nats_token"
    )
    nats_ca: Path | None = _setting(
        _OPTIONAL_PATH, None, "a PEM file with the CA of the NATS servers, which then must speak TLS"
    )
    nats_cert: Path | None = _setting(
        _OPTIONAL_PATH, None, "a PEM file with this client's certificate for the NATS servers"
    )
    nats_key: Path | None = _setting(
        _OPTIONAL_PATH, None, "a PEM file with the key of nats_cert, if that file does not hold it"
    )
    nats_port: int | None = _setting(
        _or("auto", None, _PORT),
        None,
        "the port on 127.0.0.1 of the worker's own NATS server; auto is 4222, for clients that of the worker",
    )
    nats_websocket: int | None = _setting(
        _or("off", None, _PORT),
        None,
        "a port on 127.0.0.1 where the worker's own NATS server speaks WebSocket",
    )
    prefix: str = _setting(
        _name("words of A-Z a-z 0-9 _ - joined by dots", check_prefix),
        DEFAULT_PREFIX,
        "the first part of every subject; the workers of a prefix share its sessions",
    )
    model: str | None = _setting(
        _or("packaged", None, _MODEL),
        None,
        "a name of `model list` or its part, an MLX folder, a GGUF file or a hub id;"
        " by default SmolLM2-135M-Instruct",
    )
    draft_model: str | None = _setting(
        _or("none", None, _MODEL),
        None,
        "a smaller model with the same tokenizer, named as model is, that drafts tokens of answers",
    )
    worker: str = _found(
        _name(ID_RULE, lambda name: check_id("worker", name)),
        default_worker,
        "the host's name",
        "this worker's name; each worker of a prefix needs its own",
    )
    dtype: str = _setting(
        _choice("auto", "keep", "float32", "float16", "bfloat16"),
        "auto",
        "type of weights and KV; auto depends on the device, keep is the stored type",
    )
    kv_bits: int | None = _setting(
        _or("full", None, Kind("4 or 8", "8|4", _bits)),
        None,
        "bits per number in KV, in memory and on disk; full is the type of the weights",
    )
    pooling: str = _setting(
        _choice("auto", "last", "rank"),
        "auto",
        "what the model makes of texts: embeddings (last), or scores (rank); auto is what it was trained for",
    )
    cache_policy: Policy = _setting(
        _or("full", FULL, _POLICY),
        FULL,
        "the tokens that keep their KV in a session whose open does not say it; full is all",
    )
    device_memory: int | None = _setting(
        _or("auto", None, _size(_MIB)),
        None,
        "memory for weights, KV and the temporaries of a step; auto depends on the machine",
    )
    max_memory: int | None = _setting(
        _or("auto", None, _size(_MIB)),
        None,
        "memory for KV, part of device_memory; auto is what weights and temporaries leave",
    )
    memory: int | None = _setting(
        _or("auto", None, _size(_MIB)),
        None,
        "memory for all loaded models of turnkeep.toml's [models] together; auto depends on the machine",
    )
    unload_after_s: float | None = _setting(
        _or("off", None, _duration(1, 30 * 86400)),
        600.0,
        "time without a request until a model of turnkeep.toml's [models] is unloaded; off: until another"
        " one needs its memory",
    )
    wired_memory: int | None = _setting(
        _or("off", None, _size(_MIB)),
        None,
        "memory that macOS must not page out, on Metal; other devices have no such limit",
    )
    spare_memory: int = _setting(
        _size(0, _GIB),
        256 * _MIB,
        "freed memory that the process keeps for reuse, and prepares at its start; Linux CPU only",
    )
    snapshots: str = _setting(
        _choice("on", "off", "temporary"),
        "on",
        "whether to keep KV on disk; off writes nothing, temporary removes it when the worker stops",
    )
    cache_key_file: Path | None = _setting(
        _OPTIONAL_PATH,
        None,
        "a file with a key of 32 bytes, raw or in base64, with which snapshots are encrypted; needs the extra"
        " encryption",
    )
    max_disk: int = _setting(
        _size(_MIB), 20 * _GIB, "disk space for snapshots; least recently used ones are evicted"
    )
    min_free_disk: int = _setting(_size(0), _GIB, "disk space that snapshots must leave free")
    remote_tier: str | None = _setting(
        _or("none", None, Kind("a directory, or a URL such as s3://bucket/prefix", "DIR|URL", _text)),
        None,
        "a directory or an object store that workers share: each puts its snapshots there, and fetches those"
        " of others",
    )
    remote_tier_max: int = _setting(
        _size(_MIB),
        100 * _GIB,
        "disk space for a directory as remote_tier; least recently used snapshots are removed",
    )
    keep_behind: int | None = _setting(
        _or("all", None, _count(0, 2**31)),
        4096,
        "tokens behind a session's end whose KV stays on disk although no layer sees it any more",
    )
    writer_queue: int = _setting(
        _size(_MIB),
        512 * _MIB,
        "memory for snapshots that wait to be written; snapshots beyond it are dropped",
    )
    metrics_interval_s: float = _setting(_duration(0.1, 3600), 5.0, "time between two metrics messages")
    metrics_tenants: int = _setting(
        _count(0, 1000), 0, "tenants that the metrics name with figures of their own; 0 names none"
    )
    otlp_endpoint: str | None = _setting(
        _or("none", None, _URL),
        None,
        "the OpenTelemetry collector that gets spans of each turn, by OTLP over HTTP; needs the extra traces",
    )
    block_tokens: int = _setting(_count(8, 8192), 128, "tokens per KV block and per prefill chunk")
    max_batch: int = _setting(_count(1, 1024), 16, "requests decoded at the same time")
    max_rows_per_tenant: int | None = _setting(
        _or("off", None, _count(1, 1024)), None, "answers of one tenant decoded at the same time"
    )
    max_memory_per_tenant: int | None = _setting(
        _or("off", None, _size(_MIB)),
        None,
        "KV size of a tenant's running turns at which no further turn of the tenant starts",
    )
    max_stall_s: float = _setting(
        _duration(0.01, 60),
        0.25,
        "time that a step may take while answers run; prefill gets what decoding leaves",
    )
    max_draft: int | None = _setting(
        _or("auto", None, _count(0, 64)),
        None,
        "tokens that a step may draft for an answer, where that is measured to pay; auto is 8",
    )
    max_waiting: int = _setting(
        _count(1, 1_000_000),
        1024,
        "sessions that this worker works on at the same time; other requests wait in the log",
    )
    max_waiting_per_tenant: int = _setting(
        _count(1, 1_000_000),
        256,
        "part of max_waiting that one tenant may use",
    )
    max_attempts: int = _setting(
        _count(1, 1000),
        3,
        "worker crashes during one request, without progress in between, until it is given up",
    )
    max_context: int | None = _setting(
        _or("auto", None, _count(16, 2**31)),
        None,
        "tokens that one session may hold; auto is the model's limit",
    )
    placeholders: str = _setting(
        _choice("on", "off"),
        "on",
        "whether a text stands for images and the like, which no model here can read; off refuses them",
    )
    idle_timeout_s: float = _setting(
        _duration(0, 30 * 86400),
        300.0,
        "time until an idle session's history leaves memory; its KV stays until evicted",
    )
    ack_wait_s: float = _setting(
        _duration(0.5, 3600), 3.0, "time without a sign of life until a request goes to another worker"
    )
    token_ttl_s: float = _setting(_duration(10, 7 * 86400), 900.0, "time that token chunks can be read back")
    token_max_bytes: int = _setting(
        _size(_MIB), 256 * _MIB, "space for token chunks that can be read back; the oldest are removed first"
    )
    max_message_bytes: int = _setting(
        _size(_KIB, 32 * _MIB), _MIB, "maximum size of one NATS message, headers included"
    )
    other_model: str = _setting(
        _choice("continue", "refuse"),
        "continue",
        "what to do with a session that another model has answered last",
    )
    closed_ttl_s: float | None = _setting(
        _or("off", None, _duration(0, 10 * 365 * 86400)),
        7 * 86400.0,
        "time until a closed session is removed from the log; off keeps it while there is room",
    )
    log_max_bytes: int = _setting(
        _size(16 * _MIB), 10 * _GIB, "maximum size of the log; a full log refuses new requests"
    )
    log_replicas: int | None = _setting(
        _or("keep", None, _count(1, 5)),
        None,
        "copies of the log that a cluster of NATS servers keeps; keep leaves what there is",
    )
    sync_interval: str = _setting(
        _or("always", "always", _SYNC),
        "1s" if sys.platform == "darwin" else "always",
        "when the worker's own NATS server syncs to disk; a power cut loses later writes."
        " On macOS, where a sync takes 5 to 20 ms, the default is 1s",
    )
    health: Endpoint | None = _setting(
        _or("off", None, _ENDPOINT), None, "the address on which /livez and /readyz answer over HTTP"
    )
    log_format: str = _setting(
        _choice("auto", "console", "json"),
        "auto",
        "how log lines are written, to standard error; auto is console on a terminal, else json",
    )
    log_level: str = _setting(
        _choice("debug", "info", "warning", "error"), "info", "the lowest level that is logged"
    )

    @property
    def own_port(self) -> int:
        """The port of the worker's own NATS server."""
        return self.nats_port or _NATS_PORT

    @property
    def nats_place(self) -> str | int:
        """The URLs of the NATS servers without credentials, or the port of the worker's own."""
        return shown(self.nats) if self.nats else self.own_port


#: Settings that several models have in common.
_SHARED: Final = frozenset(
    {"data_dir", "worker", "memory", "health", "sync_interval", "log_format", "log_level"}
    | {field.name for field in dataclasses.fields(Settings) if field.name.startswith("nats")}
)


@dataclass(frozen=True, slots=True)
class Description:
    """One setting, described for the command line and the documentation."""

    name: str
    purpose: str
    wants: str
    shape: str
    default: str
    is_secret: bool = False  # neither an option of the command line, nor ever shown

    @property
    def flag(self) -> str:
        """The setting's command-line option."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The setting's environment variable."""
        return _ENV + self.name.upper()


def describe() -> tuple[Description, ...]:
    """List every setting in the order of `Settings`."""
    return tuple(
        Description(
            field.name,
            field.metadata["purpose"],
            kind.wants,
            kind.shape,
            _default_text(field),
            field.metadata.get("secret", False),
        )
        for field in dataclasses.fields(Settings)
        for kind in [field.metadata["kind"]]
    )


def load(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config_path: Path | None = None,
    cwd: Path | None = None,
    of: str | None = None,
) -> Settings:
    """Collect the settings from all four sources; raises `SettingsError`.

    `flags` maps setting names to values of the command line, None for options that were not given.
    `config_path` must exist if given; without it `turnkeep.toml` in `cwd` is read if it exists. An empty
    environment variable counts as unset. A relative `data_dir` starts at `cwd`, or at the file's folder.

    If the file has models, the settings are those of the model `of`, or else of the first one.

    Flags with `nats` and without `model`, whatever their values, are a client's: NATS_URL names its server
    if nothing else names a server or a data directory.
    """
    given = _Given.read(flags, environ, config_path, cwd)
    if of is not None and of not in given.tables:
        names = "; without such tables, turnkeep serve --model chooses the only model"
        if given.tables:
            names = f"; it has {', '.join(given.tables)}"
        raise SettingsError(f"there is no table [models.{_key(of)}] in {given.path}{names}")
    name = of if of is not None or given.is_one else next(iter(given.tables), None)
    return Settings(**given.common if name is None else given.of(name))


def load_models(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config_path: Path | None = None,
    cwd: Path | None = None,
) -> dict[str, Settings]:
    """Return the settings of each model that the file has a table of; raises `SettingsError`.

    There are none if a model or a prefix is given on the command line or in the environment.
    """
    given = _Given.read(flags, environ, config_path, cwd)
    if given.is_one:
        return {}
    if given.tables and "model" in given.common:
        raise SettingsError(
            f"model in {given.path} is one model, and its [models] are others; make it one of them"
        )
    models = {name: Settings(**given.of(name)) for name in given.tables}
    owners: dict[str, str] = {}
    for name, settings in models.items():
        other = owners.setdefault(Subjects(settings.prefix).log_stream, name)
        if other != name:
            raise SettingsError(
                f"the models {other} and {name} in {given.path} have the same prefix {settings.prefix};"
                " give one of them another"
            )
    return models


class _Given(NamedTuple):
    """The values that were given: by all sources together, by tables of models, and on top of these."""

    path: Path
    common: dict[str, Any]
    tables: dict[str, dict[str, Any]]
    above: dict[str, Any]

    @classmethod
    def read(
        cls,
        flags: Mapping[str, object],
        environ: Mapping[str, str],
        config_path: Path | None,
        cwd: Path | None,
    ) -> _Given:
        cwd = cwd or Path.cwd()
        path = (cwd / config_path) if config_path else cwd / CONFIG_NAME
        written = _file(path, required=config_path is not None)
        tables = _tables(written.pop(_MODELS, {}), path)
        values = _read(written, lambda name: f"{name} in {path}", path.parent)
        variables = {
            key.removeprefix(_ENV).lower(): value
            for key, value in environ.items()
            if key.startswith(_ENV) and not key.startswith(_OTHER_ENV) and value.strip()
        }
        above = _read(variables, lambda name: _ENV + name.upper(), cwd)
        given = {name: value for name, value in flags.items() if value is not None}
        above |= _read(given, lambda name: "--" + name.replace("_", "-"), cwd)
        is_open = (values | above).keys().isdisjoint({"nats", "nats_port", "data_dir"})
        if is_open and "nats" in flags and "model" not in flags and environ.get("NATS_URL", "").strip():
            above |= _read({"nats": environ["NATS_URL"]}, lambda _: "NATS_URL", cwd)
        return cls(path, values | above, tables, above)

    @property
    def is_one(self) -> bool:
        """Whether one model was chosen over those of the file."""
        return not self.above.keys().isdisjoint({"model", "prefix"})

    def of(self, name: str) -> dict[str, Any]:
        """Return the values for one model of the file."""
        prefix = f"{self.common.get('prefix', DEFAULT_PREFIX)}-{word(name)}"
        return {**self.common, "prefix": prefix, **self.tables[name], **self.above}


def _tables(written: object, path: Path) -> dict[str, dict[str, Any]]:
    """Read the tables of models. Raises `SettingsError`."""
    if not isinstance(written, dict) or not all(isinstance(one, dict) for one in written.values()):
        raise SettingsError(f"models in {path} must be tables: [models.NAME], with model = ... in each")
    tables = {}
    for name, table in written.items():
        place = f"[models.{_key(name)}] of {path}"
        nested = next((key for key, value in table.items() if isinstance(value, dict)), None)
        if nested is not None:
            whole = _key(f"{name}.{nested}")
            raise SettingsError(
                f"{place} holds a table {nested}; a name with dots is in quotes: [models.{whole}]"
            )
        if "model" not in table:
            raise SettingsError(f"{place} names no model; give it model = ..., as turnkeep serve takes it")
        if shared := sorted(_SHARED & table.keys()):
            raise SettingsError(f"{shared[0]} in {place} is for all models; write it above the tables")
        tables[name] = _read(table, partial("{1} in {0}".format, place), path.parent)
    return tables


def _key(name: str) -> str:
    """Write a name as TOML does."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'


def _read(raw: Mapping[str, object], source: Callable[[str], str], base: Path) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    values = {}
    for name, value in raw.items():
        if name not in fields:
            known = ("models",) if isinstance(value, dict) else fields
            raise SettingsError(f"{source(name)} is not a setting{_suggest(name, known, source)}")
        kind: Kind = fields[name].metadata["kind"]
        try:
            parsed = kind.parse(value)
        except (ValueError, OverflowError):
            is_secret = kind is _NATS_URLS or "secret" in fields[name].metadata
            shown = "its value" if is_secret else repr(value)
            raise SettingsError(f"{source(name)}: {shown} is not valid: it must be {kind.wants}") from None
        values[name] = base / parsed.expanduser() if isinstance(parsed, Path) else parsed
    return values


def _file(path: Path, *, required: bool) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise SettingsError(f"there is no settings file {path}; --config must name a TOML file") from None
    except OSError as error:
        raise SettingsError(f"the settings file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the settings file {path} is not valid TOML: {error}") from None


def _suggest(name: str, known: Iterable[str], source: Callable[[str], str]) -> str:
    near = difflib.get_close_matches(name.replace("-", "_").lower(), list(known), n=1)
    spelled = source(near[0]).partition(" in ")[0] if near else ""  # the file is named already
    return f"; did you mean {spelled}?" if near else "; see turnkeep serve --help for the list"


def _default_text(field: dataclasses.Field[Any]) -> str:
    found: str | None = field.metadata.get("found")
    kind: Kind = field.metadata["kind"]
    return found or kind.show(field.default)
