"""The messages between the supervisor and a worker's process: lines of JSON on its standard streams.

The process reads an `Order` and then settings that have changed, and writes `Report`s.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from turnkeep_client.messages import Made  # noqa: TC001  # msgspec reads the annotations

from .process.settings import Settings


class Order(msgspec.Struct, frozen=True):
    """The first line for a process: what it does."""

    settings: Settings
    #: The name of one of several models, for log lines.
    model: str | None = None
    #: Whether the process only measures the model, and reports its `Needs`; otherwise it serves the model.
    weighs: bool = False
    #: Whether a process that serves reports its log lines, and the steps of its start.
    tells_log: bool = False
    tells_steps: bool = False


class Needs(msgspec.Struct, frozen=True, tag="needs"):
    """What a model is and needs: the report of a process that weighs, and of a worker once it serves."""

    folder: str
    model: str
    context_tokens: int
    sampling: dict[str, int | float]
    reasoning: bool
    vision: bool
    makes: tuple[Made, ...]
    weight_bytes: int
    model_changed_s: float
    #: The device memory to load the model, and to load it with the KV of a long session.
    least_bytes: int = 0
    usual_bytes: int = 0
    #: The memory that this machine has for models.
    memory_bytes: int = 0
    draft_folder: str | None = None


class Refusal(msgspec.Struct, frozen=True, tag="refused"):
    """An error that ends the process, and that a user can fix."""

    reason: str
    #: Whether a setting is wrong.
    is_setting: bool


class ReportLine(msgspec.Struct, frozen=True, tag="line"):
    """A line of the log, or the text of a step of the start."""

    text: str
    is_step: bool = False


class State(msgspec.Struct, frozen=True, tag="state"):
    """What the worker reports every half second."""

    #: Faults that only a restart fixes.
    hangs: tuple[str, ...]
    #: The reasons why it cannot answer now.
    unready: tuple[str, ...]
    #: Whether no other worker serves the prefix.
    is_alone: bool


Report = Needs | Refusal | ReportLine | State

_ENCODER: Final = msgspec.json.Encoder(enc_hook=str)


def _path(kind: type, value: object) -> Any:
    return kind(value)


_ORDERS: Final = msgspec.json.Decoder(Order, dec_hook=_path)
_SETTINGS: Final = msgspec.json.Decoder(Settings, dec_hook=_path)
_REPORTS: Final = msgspec.json.Decoder(Report)


def encode(message: Order | Settings | Report) -> bytes:
    """Encode a message as a line."""
    return _ENCODER.encode(message) + b"\n"


def decode_order(line: bytes) -> Order:
    """Decode the first line for a process."""
    return _ORDERS.decode(line)


def decode_settings(line: bytes) -> Settings:
    """Decode a later line for a process."""
    return _SETTINGS.decode(line)


def decode_report(line: bytes) -> Report:
    """Decode a line from a process."""
    report: Report = _REPORTS.decode(line)
    return report
