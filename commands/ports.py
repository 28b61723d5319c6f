"""The ports of this machine that `serve` opens, by the options that choose them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from worker.process.setting_kinds import Endpoint
from worker.process.settings import SettingsError

if TYPE_CHECKING:
    from worker.process.settings import Settings


class Beside(NamedTuple):
    """The ports of what `serve` runs beside the worker; None is not run, and 0 any free port."""

    gateway: int | None = None
    console: int | None = None


NOTHING: Final = Beside()


def ports_of(settings: Settings, beside: Beside) -> dict[str, Endpoint]:
    """Map each option that opens a port to its address. Raises `SettingsError` if two have the same port."""
    from worker.wire.broker import HOST

    own = {} if settings.nats else {"nats_port": settings.own_port, "nats_websocket": settings.nats_websocket}
    found = {
        "--" + name.replace("_", "-"): Endpoint(HOST, port)
        for name, port in {**own, **beside._asdict()}.items()
        if port
    }
    if settings.health is not None and settings.health.port:
        found["--health"] = settings.health
    owners: dict[int, str] = {}
    for option, (_, port) in found.items():
        other = owners.setdefault(port, option)
        if other != option:
            raise SettingsError(f"{other} and {option} have the same port {port}; give one of them another")
    return found
