"""Holds the sizes and times that no user sets. Tests give a worker others, by its constructor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The constants of one worker. Sizes are bytes; names ending in `_s` are seconds."""

    #: Tokens per KV block and per prefill chunk.
    block_tokens: int = 128
    #: How long a step may take while answers run; prefill gets what decoding leaves.
    max_stall_s: float = 0.25
    #: Tokens that a step may draft for an answer; None is the device's number.
    max_draft: int | None = None
    #: Memory for KV; None is what weights and the temporaries of a step leave of `device_memory`.
    kv_bytes: int | None = None
    #: Memory for snapshots that wait to be written; snapshots beyond it are dropped.
    writer_queue: int = 512 * _MIB
    #: Sessions that the worker works on at the same time; other requests wait in the log.
    max_waiting: int = 1024
    #: Worker crashes during one request, without progress in between, until it is given up.
    max_attempts: int = 3
    #: Time until an idle session's history leaves memory; its KV stays until evicted.
    history_idle_timeout_s: float = 300.0
    #: Time without an ack until NATS redelivers a request; workers notice an end earlier (`liveness`).
    ack_wait_s: float = 3.0
    #: Time and space for token chunks that can be read back; the oldest are removed first.
    token_ttl_s: float = 900.0
    token_max_bytes: int = 256 * _MIB
    #: Time between two metrics messages.
    metrics_interval_s: float = 5.0


CONSTANTS: Final = Constants()
