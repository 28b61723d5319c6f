"""What a session had lived through before a turn, and what that turn cost."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

#: Its KV is on the device.
WARM: Final = "warm"
#: Its KV has left the device for others.
SPILLED: Final = "spilled"
#: The worker was told to end, and started again.
RESTART: Final = "restart"
#: The worker was killed right after an answer, and started again.
KILL: Final = "kill -9"
#: Nothing of it is known anywhere: all is prefilled.
COLD: Final = "cold"

KINDS: Final = (WARM, SPILLED, RESTART, KILL, COLD)
#: Sessions that live through all rounds; a cold one is new each time.
LASTING: Final = (WARM, SPILLED, RESTART, KILL)
RESTORED: Final = (SPILLED, RESTART, KILL)
RESTARTED: Final = (RESTART, KILL)


class Limit(Struct, frozen=True, kw_only=True):
    """The session's snapshot files read by MLX alone, in another process."""

    size_bytes: int
    seconds: float


class Measured(Struct, frozen=True, kw_only=True):
    """One turn. Times are the client's, in seconds; counts are the worker's account.

    `length` is the session's size at the beginning of the run, `own_tokens` what the turn added.
    `first_s` counts from sending the turn to a worker that is ready; `felt_s` from the end of the worker
    before, `down_s` of which it took to end and `start_s` to be ready again. `resident` is what the worker
    said before the turn, None where it was not asked. `answer` are the tokens.
    """

    round: int
    length: int
    kind: str
    prompt_tokens: int
    own_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    first_s: float
    answer: tuple[int, ...]
    restored_bytes: int
    resident: bool | None = None
    felt_s: float | None = None
    down_s: float | None = None
    start_s: float | None = None
    limit: Limit | None = None

    @property
    def prefilled_share(self) -> float:
        """The share of the context that was run."""
        return self.prefilled_tokens / self.prompt_tokens

    @property
    def place(self) -> tuple[int, int]:
        """What the same turn of another kind has too."""
        return self.round, self.length
