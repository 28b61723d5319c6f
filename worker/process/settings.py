"""Defines every setting of a worker: its name, kind, default and purpose.

A setting has one name in all of its sources (`--data-dir`, `TURNKEEP_DATA_DIR`, `data_dir`), which
`setting_sources` reads. What no user sets is in `constants`. Knows nothing of how a setting is used.
"""

from __future__ import annotations

import dataclasses
import re
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import platformdirs

from cache.names.policy import FULL, Policy
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.redact import shown
from turnkeep_client.subjects import DEFAULT_PREFIX, ID_RULE, check_id, check_prefix

from . import setting_kinds as kinds

if TYPE_CHECKING:
    from collections.abc import Callable

#: The prefix of all settings' environment variables.
ENV: Final = "TURNKEEP_"
_NATS_PORT: Final = 4222


class SettingsError(TurnkeepError):
    """A setting is unknown or invalid. The message names it and its source, and says what is valid."""


def word(name: str) -> str:
    """Return a name with `-` for each character that is not allowed in prefixes and ids."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)


def default_worker() -> str:
    """Build a worker name from the host's name; characters that break the id rule become `-`."""
    name = word(socket.gethostname().split(".")[0])
    return re.sub(r"^[^A-Za-z0-9]+", "", name)[:64] or "worker"


def default_data_dir() -> Path:
    """Return the platform's folder for a user's application data."""
    return Path(platformdirs.user_data_dir("turnkeep"))


def _setting(kind: kinds.Kind, default: object, purpose: str) -> Any:
    return dataclasses.field(default=default, metadata={"kind": kind, "purpose": purpose})


def _found(kind: kinds.Kind, find: Callable[[], object], found: str, purpose: str) -> Any:
    """Declare a setting whose default is computed at the start; `found` describes that default."""
    return dataclasses.field(
        default_factory=find, metadata={"kind": kind, "purpose": purpose, "found": found}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of one worker. Sizes are bytes; names ending in `_s` are seconds.

    The constructor does not check values; `load` does.
    """

    data_dir: Path = _found(
        kinds.PATH,
        default_data_dir,
        "the user's data directory",
        "where the worker keeps log, snapshots and models",
    )
    nats: str | None = _setting(
        kinds.NATS_URLS, None, "the NATS servers to use; by default the worker runs its own"
    )
    nats_context: Path | None = _setting(
        kinds.CONTEXT,
        None,
        "a context of the nats command line that says how to log in to the NATS servers, and which they are",
    )
    nats_creds: Path | None = _setting(
        kinds.OPTIONAL_PATH,
        None,
        "a credentials file for the NATS servers (a user's JWT and nkey seed), or an nkey seed alone",
    )
    nats_ca: Path | None = _setting(
        kinds.OPTIONAL_PATH, None, "a PEM file with the CA of the NATS servers, which then must speak TLS"
    )
    nats_port: int | None = _setting(
        kinds.word_or("auto", None, kinds.PORT),
        None,
        "the port on 127.0.0.1 of the worker's own NATS server; auto: 4222, for other commands the worker's",
    )
    nats_websocket: int | None = _setting(
        kinds.word_or("off", None, kinds.PORT),
        None,
        "a port on 127.0.0.1 where the worker's own NATS server speaks WebSocket",
    )
    prefix: str = _setting(
        kinds.named("words of A-Z a-z 0-9 _ - joined by dots", check_prefix),
        DEFAULT_PREFIX,
        "the first part of every subject; the workers of a prefix share its sessions",
    )
    model: str | None = _setting(
        kinds.word_or("packaged", None, kinds.MODEL),
        None,
        "a name of `model list` or its part, an MLX folder, a GGUF file or a hub id;"
        " by default SmolLM2-135M-Instruct",
    )
    draft_model: str | None = _setting(
        kinds.word_or("none", None, kinds.MODEL),
        None,
        "a smaller model with the same tokenizer, named as model is, that drafts tokens of answers",
    )
    worker: str = _found(
        kinds.named(ID_RULE, lambda name: check_id("worker", name)),
        default_worker,
        "the host's name",
        "this worker's name; each worker of a prefix needs its own",
    )
    dtype: str = _setting(
        kinds.choice("auto", "keep", "float32", "float16", "bfloat16"),
        "auto",
        "type of weights and KV; auto depends on the device, keep is the stored type",
    )
    kv_bits: int | None = _setting(
        kinds.word_or("full", None, kinds.Kind("4 or 8", "8|4", kinds.bits)),
        None,
        "bits per number in KV, in memory and on disk; full is the type of the weights",
    )
    cache_policy: Policy = _setting(
        kinds.word_or("full", FULL, kinds.POLICY),
        FULL,
        "the tokens that keep their KV in a session whose open does not say it; full is all",
    )
    memory: int | None = _setting(
        kinds.word_or("auto", None, kinds.size(kinds.MIB)),
        None,
        "memory of this machine that all loaded models may use together; auto depends on the machine",
    )
    device_memory: int | None = _setting(
        kinds.word_or("auto", None, kinds.size(kinds.MIB)),
        None,
        "memory that one model may use, for its weights, KV and the temporaries of a step; auto depends on"
        " the machine",
    )
    unload_after_s: float | None = _setting(
        kinds.word_or("off", None, kinds.duration(1, 30 * 86400)),
        600.0,
        "time without a request until a model of turnkeep.toml's [models] is unloaded; off: until another"
        " one needs its memory",
    )
    snapshots: str = _setting(
        kinds.choice("on", "off", "temporary"),
        "on",
        "whether to keep KV on disk; off writes nothing, temporary removes it when the worker stops",
    )
    cache_key_file: Path | None = _setting(
        kinds.OPTIONAL_PATH,
        None,
        "a file with a key of 32 bytes, raw or in base64, with which snapshots are encrypted; needs the extra"
        " encryption",
    )
    max_disk: int = _setting(
        kinds.size(kinds.MIB),
        20 * kinds.GIB,
        "disk space for snapshots; least recently used ones are evicted",
    )
    min_free_disk: int = _setting(kinds.size(0), kinds.GIB, "disk space that snapshots must leave free")
    remote_tier: str | None = _setting(
        kinds.word_or("none", None, kinds.PLACE),
        None,
        "a directory or an object store that workers share: each puts its snapshots there, and fetches those"
        " of others",
    )
    otlp_endpoint: str | None = _setting(
        kinds.word_or("none", None, kinds.URL),
        None,
        "the OpenTelemetry collector that gets spans of each turn, by OTLP over HTTP; needs the extra traces",
    )
    max_batch: int = _setting(kinds.count(1, 1024), 16, "requests decoded at the same time")
    tenants: kinds.TenantLimits = _setting(
        kinds.TENANTS,
        kinds.TenantLimits(),
        "limits of each tenant: rows (answers decoded at the same time), memory (KV of running turns at which"
        " no further turn starts), sessions (at work here); and metrics: how many tenants the metrics name",
    )
    max_context: int | None = _setting(
        kinds.word_or("auto", None, kinds.count(16, 2**31)),
        None,
        "tokens that one session may hold; auto is the model's limit",
    )
    gateway_ttl_s: float | None = _setting(
        kinds.word_or("off", None, kinds.duration(1, 10 * 365 * 86400)),
        30 * 86400.0,
        "time until a gateway removes a conversation that nobody continued; off keeps it",
    )
    gateway_image_hosts: str = _setting(
        kinds.HOSTS,
        "",
        "hosts from which a gateway fetches images whose URLs requests have; it asks no others",
    )
    max_message_bytes: int = _setting(
        kinds.size(kinds.KIB, 32 * kinds.MIB), kinds.MIB, "maximum size of one NATS message, headers included"
    )
    other_model: str = _setting(
        kinds.choice("continue", "refuse"),
        "continue",
        "what to do with a session that another model has answered last",
    )
    closed_ttl_s: float | None = _setting(
        kinds.word_or("off", None, kinds.duration(0, 10 * 365 * 86400)),
        7 * 86400.0,
        "time until a closed session is removed from the log; off keeps it while there is room",
    )
    log_max_bytes: int = _setting(
        kinds.size(16 * kinds.MIB),
        10 * kinds.GIB,
        "maximum size of the log; a full log refuses new requests, but no closes",
    )
    log_replicas: int | None = _setting(
        kinds.word_or("keep", None, kinds.count(1, 5)),
        None,
        "copies of the log that a cluster of NATS servers keeps; keep leaves what there is",
    )
    sync_interval: str = _setting(
        kinds.word_or("always", "always", kinds.SYNC),
        "1s" if sys.platform == "darwin" else "always",
        "when the worker's own NATS server syncs to disk; a power cut loses later writes."
        " On macOS, where a sync takes 5 to 20 ms, the default is 1s",
    )
    nats_sync_interval: str = _setting(
        kinds.word_or("always", "always", kinds.SYNC),
        "120s",
        "when a NATS server of yours syncs to disk: the sync_interval of its own configuration",
    )
    health: kinds.Endpoint | None = _setting(
        kinds.word_or("off", None, kinds.ENDPOINT),
        None,
        "the address on which /livez and /readyz answer over HTTP",
    )
    log_format: str = _setting(
        kinds.choice("auto", "console", "json"),
        "auto",
        "how log lines are written, to standard error; auto is console on a terminal, else json",
    )
    log_level: str = _setting(
        kinds.choice("auto", "debug", "info", "warning", "error"),
        "auto",
        "the lowest level that is logged; auto is info, on a terminal without details",
    )

    @property
    def own_port(self) -> int:
        """The port of the worker's own NATS server."""
        return self.nats_port or _NATS_PORT

    @property
    def nats_place(self) -> str | int:
        """The URLs of the NATS servers, without credentials, or the port of the worker's own server."""
        return shown(self.nats) if self.nats else self.own_port

    @property
    def sync_s(self) -> float:
        """Seconds between syncs of the NATS server; 0 if it syncs each entry before it acknowledges it."""
        return 0.0 if self.sync_interval == "always" else kinds.parse_duration(self.sync_interval)


#: Settings that must be the same for all models of one file.
SHARED: Final = frozenset(
    {
        "data_dir",
        "worker",
        "memory",
        "tenants",
        "health",
        "gateway_ttl_s",
        "gateway_image_hosts",
        "sync_interval",
        "log_format",
        "log_level",
    }
    | {field.name for field in dataclasses.fields(Settings) if field.name.startswith("nats")}
)

#: Settings that a running worker takes over when they are read again.
RELOADED: Final = frozenset({"max_disk", "min_free_disk"})


def changed_names(before: Settings, after: Settings) -> set[str]:
    """Return the names of the settings whose values differ."""
    names = (field.name for field in dataclasses.fields(Settings))
    return {name for name in names if getattr(before, name) != getattr(after, name)}


@dataclass(frozen=True, slots=True)
class Description:
    """One setting, described for the command line and the documentation."""

    name: str
    purpose: str
    wants: str
    shape: str
    default: str

    @property
    def flag(self) -> str:
        """The setting's command-line option."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The setting's environment variable."""
        return ENV + self.name.upper()


def describe() -> tuple[Description, ...]:
    """List every setting in the order of `Settings`."""
    return tuple(
        Description(
            field.name,
            field.metadata["purpose"],
            kind.wants,
            kind.shape,
            _default_text(field),
        )
        for field in dataclasses.fields(Settings)
        for kind in [field.metadata["kind"]]
    )


def _default_text(field: dataclasses.Field[Any]) -> str:
    found: str | None = field.metadata.get("found")
    kind: kinds.Kind = field.metadata["kind"]
    return found or kind.show(field.default)
