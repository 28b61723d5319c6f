"""The subject grammar: build and parse subjects, and the rule for ids.

Every subject is `<prefix>.<tenant>.<session>.<kind>[.<request id>]`; images have their SHA-256 instead of a
request's id. Metrics go to `<prefix>._metrics.<worker>` and `<prefix>._gateways.<gateway>`, notes of erased
tokens to `<prefix>._erased.<tenant>`, requests to load a model to `<prefix>._serve`; no tenant can have a
name that starts with `_`, since tenants start with a letter or digit.

Workers publish results on `commit`; the log stores each under `out` and then publishes it there, so no
subscriber receives a result that the log refused. Token chunks go the same way, from `chunk` to `tok`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

from .errors import InvalidMessageError

DEFAULT_PREFIX: Final = "turnkeep"
DEFAULT_TENANT: Final = "default"

#: Tenants, sessions, workers and request ids. The look-ahead at the end refuses a trailing newline, which
#: `$` would accept; it means the same in Python and in ECMAScript (JSON Schema).
ID_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}(?![\s\S])"
ID_RULE: Final = "1 to 64 of the characters A-Z a-z 0-9 _ -, the first one a letter or a digit"

#: The durable consumer of the log stream, from which workers pull requests.
CONSUMER: Final = "worker"

#: The session name that gets results of requests under invalid names like `*`; no session can have it.
REFUSED: Final = "_refused"

SessionKind = Literal["in", "commit", "out", "checkpoint", "attempt", "dead", "closed", "ctl", "ask"]
ChunkKind = Literal["chunk", "tok"]
Kind = SessionKind | ChunkKind | Literal["image"]
_SESSION_KINDS: Final = frozenset(get_args(SessionKind))
_NAMED_KINDS: Final = frozenset((*get_args(ChunkKind), "image"))

_ID = re.compile(ID_PATTERN)
_PREFIX = re.compile(r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*(?![\s\S])")


def check_id(what: str, value: str) -> str:
    """Return `value` if it is a valid id, else raise `InvalidMessageError` naming `what`."""
    if not (isinstance(value, str) and _ID.match(value)):
        raise InvalidMessageError(f"{what} {value!r} is not valid: it must be {ID_RULE}")
    return value


def check_prefix(value: str) -> str:
    """Return `value` if it can start a subject, else raise `InvalidMessageError`."""
    if not (isinstance(value, str) and _PREFIX.match(value)):
        raise InvalidMessageError(
            f"subject prefix {value!r} is not valid: it must be words of A-Z a-z 0-9 _ - joined by dots"
        )
    return value


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A session's full name. Use `session_key` to build it from names that are not checked yet."""

    tenant: str
    session: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.session}"


def session_key(tenant: str, session: str) -> SessionKey:
    """Check both names and build the key."""
    return SessionKey(check_id("tenant", tenant), check_id("session", session))


@dataclass(frozen=True, slots=True)
class Subjects:
    """Builds and parses all subjects under one prefix."""

    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        check_prefix(self.prefix)

    def of(self, key: SessionKey, kind: SessionKind) -> str:
        """Return the subject of a session for `kind`."""
        return f"{self.prefix}.{key.tenant}.{key.session}.{kind}"

    def tokens(self, key: SessionKey, request_id: str, kind: ChunkKind = "tok") -> str:
        """Return the subject of one generate's token chunks."""
        return f"{self.prefix}.{key.tenant}.{key.session}.{kind}.{request_id}"

    def image(self, key: SessionKey, digest: str) -> str:
        """Return the subject of an image of a session, or of a piece of one, by its SHA-256 as hex."""
        return f"{self.prefix}.{key.tenant}.{key.session}.image.{digest}"

    @property
    def every_image(self) -> str:
        """The wildcard that matches the images of every session."""
        return f"{self.prefix}.*.*.image.*"

    def log(self, key: SessionKey) -> str:
        """Return the wildcard that matches a session's subjects in the log stream, but for its images."""
        return f"{self.prefix}.{key.tenant}.{key.session}.*"

    def whole(self, key: SessionKey) -> str:
        """Return the wildcard that matches all subjects of a session in the log stream."""
        return f"{self.prefix}.{key.tenant}.{key.session}.>"

    def every(self, kind: SessionKind) -> str:
        """Return the wildcard that matches the subject `kind` of every session."""
        return f"{self.prefix}.*.*.{kind}"

    def same(self, kind: SessionKind) -> str:
        """Return the target of a NATS mapping from `every`: the subject `kind` of the same session."""
        return f"{self.prefix}.{{{{wildcard(1)}}}}.{{{{wildcard(2)}}}}.{kind}"

    def every_token(self, kind: ChunkKind = "tok") -> str:
        """Return the wildcard that matches the token chunks of every generate."""
        return f"{self.prefix}.*.*.{kind}.*"

    def same_tokens(self, kind: ChunkKind) -> str:
        """Return the target of a NATS mapping from `every_token`: the subject `kind` of the same generate."""
        return f"{self.prefix}.{{{{wildcard(1)}}}}.{{{{wildcard(2)}}}}.{kind}.{{{{wildcard(3)}}}}"

    def metrics(self, worker: str) -> str:
        """Return a worker's metrics subject (`*` matches every worker)."""
        return f"{self.prefix}._metrics.{worker}"

    def gateway(self, name: str) -> str:
        """Return a gateway's metrics subject (`*` matches every gateway)."""
        return f"{self.prefix}._gateways.{name}"

    def erased(self, tenant: str) -> str:
        """Return the subject of notes of a tenant's erased tokens (`*`: every tenant)."""
        return f"{self.prefix}._erased.{tenant}"

    @property
    def serve(self) -> str:
        """The subject of requests to load or unload the prefix's model."""
        return f"{self.prefix}._serve"

    @property
    def log_stream(self) -> str:
        """The JetStream stream that holds every session's `in` and `out`."""
        return f"{self.prefix.replace('.', '_')}_log"

    @property
    def token_stream(self) -> str:
        """The JetStream stream that keeps token chunks for some minutes."""
        return f"{self.prefix.replace('.', '_')}_tok"

    @property
    def workers_bucket(self) -> str:
        """The KV bucket with the records of the workers that serve the prefix."""
        return f"{self.prefix.replace('.', '_')}_workers"

    def parse(self, subject: str) -> tuple[SessionKey, Kind, str | None]:
        """Parse a session's subject into key, kind and, for chunks, the request id, for images the digest.

        Raises `InvalidMessageError` for any other subject and for names that break the id rule: NATS accepts
        any name that a wildcard matches.
        """
        head = self.prefix + "."
        parts = subject[len(head) :].split(".") if subject.startswith(head) else []
        kind = parts[2] if len(parts) > 2 else ""
        is_named = kind in _NAMED_KINDS
        if not (is_named or kind in _SESSION_KINDS) or len(parts) != 3 + is_named:
            raise InvalidMessageError(
                f"subject {subject!r} is not of the form {self.prefix}.TENANT.SESSION.KIND"
            )
        key = session_key(parts[0], parts[1])
        return key, cast("Kind", kind), check_id("request id", parts[3]) if is_named else None
