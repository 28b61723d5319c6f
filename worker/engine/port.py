"""The interface between sessions and the device, which `worker.engine.engine` implements.

Sessions know nothing else of the device; the simulation implements this port with a device of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from cache.names.errors import InterruptionError
from cache.names.policy import FULL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cache.names.policy import Policy
    from cache.names.tokens import Tokens
    from cache.store import ErasureResult
    from turnkeep_client.messages import Chunk, Progress
    from turnkeep_client.subjects import SessionKey
    from worker.device.request import TurnRequest
    from worker.observe.traces import Phase

    Publish: TypeAlias = Callable[[Chunk], Awaitable[bool]]


class DeviceFaultError(Exception):
    """The forward pass failed; the session's tokens have not changed."""


class StoppingError(InterruptionError):
    """The worker stops: the turn was ended early, and its request stays unanswered."""


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The cost of a turn."""

    #: False if the turn was cancelled before its whole context had KV.
    complete: bool
    #: How many prompt tokens had KV already, and how many were prefilled.
    num_cached: int
    num_prefilled: int
    #: The bytes of the session's KV on the device.
    live_bytes: int
    prefill_s: float
    #: By the monotonic clock. `started_s` is later by the time that the turn waited for a place in the batch.
    started_s: float
    first_token_s: float


class EnginePort(Protocol):
    """Runs turns, at most one of each session at a time. Event loop only."""

    @property
    def max_bytes(self) -> int:
        """The bytes of device memory that all KV may take."""

    async def run(
        self,
        request: TurnRequest,
        cancelled: Callable[[], bool],
        publish: Publish | None = None,
        phases: list[Phase] | None = None,
    ) -> TurnResult | None:
        """Load or prefill the KV of a context, then sample the answer after it, if there is one.

        The policy must be one for which `refusal` returns None. The engine awaits `publish(chunk)` for new
        tokens, which returns whether the token stream has them; a chunk has several if `publish` is slower
        than the device. Returns None if `cancelled()` was true before the turn reached the device; after
        that, `cancel` ends the turn and its tokens stay. Appends the phases of the turn's time to `phases`,
        even if the turn fails. Raises `DeviceFaultError`; `NoMemoryError`; and `StoppingError` if the worker
        stops before the end.
        """

    async def embed(
        self, key: SessionKey, tokens: Tokens, *, priority: int = 0, logits_of: tuple[int, ...] = ()
    ) -> bytes:
        """Return a prompt's vector or, if `logits_of` has token ids, their logits after it; see `Embedding`.

        All calls must pass the same `logits_of`. No session may have this key, as the prompt's KV is dropped
        from the device afterwards. Raises what `run` raises.
        """

    def cancel(self, key: SessionKey) -> None:
        """End the session's turn after the running step.

        If the turn has not reached the device yet, the `cancelled` passed to `run` must already return true.
        """

    def progress(self, key: SessionKey) -> Progress | None:
        """Return the progress of a session's running turn; None if there is none."""

    def refusal(self, policy: Policy) -> str | None:
        """Return why this worker cannot serve a session under a policy; None if it can."""

    def size_bytes(self, num_tokens: int, policy: Policy = FULL) -> int:
        """Return the bytes of device memory that the KV of `num_tokens` takes."""

    def live_bytes(self, key: SessionKey, tokens: Tokens, policy: Policy = FULL) -> int:
        """Return the bytes of KV on the device that a session with these tokens can reuse."""

    def most_tokens(self, most: int, policy: Policy = FULL) -> int:
        """Return the largest number of tokens, at most `most`, with which a session fits into KV memory."""

    def forget(self, key: SessionKey) -> None:
        """Drop a session's KV from the device. Its snapshots stay on SSD."""

    def let_go(self, is_meant: Callable[[SessionKey], bool]) -> set[SessionKey]:
        """Drop the KV on the device of all sessions for which `is_meant` is true.

        Returns those of them whose turn is under way; they keep their KV.
        """

    async def erase(self, key: SessionKey, tokens: Tokens, shared: int) -> ErasureResult:
        """Drop a session's KV from the device and its snapshots from SSD. Takes 2 s at most.

        The snapshots of the first `shared` tokens stay. The rest is dropped before the first await.
        """
