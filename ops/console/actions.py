"""The page's actions on a session. Each returns a text that says what it did, or raises `TurnkeepError`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from ops.log.ending import end

from .variants import VARIANT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from turnkeep_client.client import Client
    from turnkeep_client.session import Session

#: Time limit of an action, and of storing a question in the log.
PATIENCE_S: Final = 20.0


class Details(Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of an action: a request's id, a fork's name, or a position in tokens."""

    id: str = ""
    name: str = ""
    position: int | None = None
    is_variant: bool = False


class Act(NamedTuple):
    """The client and session that an action works on, and its arguments."""

    client: Client
    session: Session
    details: Details


async def _open(act: Act) -> str:
    await act.session.open(timeout_s=PATIENCE_S)
    return "opened again"


async def _cancel(act: Act) -> str:
    return f"cancelled an answer that was {(await act.session.cancel(act.details.id)).was}"


async def _close(act: Act) -> str:
    closed = await end(act.client, act.session.key.session, PATIENCE_S, forget=False)
    return f"closed at position {closed.position}"


async def _forget(act: Act) -> str:
    closed = await end(act.client, act.session.key.session, PATIENCE_S, forget=True)
    rest = "" if closed.settled else "; some of it may stay on the disk until it is evicted"
    return f"removed from the log and the worker's disk{rest}"


async def _fork(act: Act) -> str:
    tags = (VARIANT,) if act.details.is_variant else ()
    await act.session.fork(act.details.name, act.details.position, tags=tags, timeout_s=PATIENCE_S)
    return f"forked as {act.details.name}"


ACTIONS: Final[dict[str, Callable[[Act], Awaitable[str]]]] = {
    "open": _open,
    "cancel": _cancel,
    "close": _close,
    "forget": _forget,
    "fork": _fork,
}
