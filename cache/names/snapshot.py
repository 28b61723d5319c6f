"""What a snapshot is: its name and its tensors. Knows nothing of files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .blocks import TOKEN_BYTES, Span, link
from .errors import DoubtfulSnapshotError

if TYPE_CHECKING:
    from collections.abc import Callable

#: Bytes per element of the types that KV and states come in, by their names in safetensors.
ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2, "BOOL": 1, "U8": 1, "I32": 4, "U32": 4, "I64": 8}

#: Prefix of the names of a state's tensors. All other tensors are cut by tokens, along axis 2.
STATE: Final = "state."


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as plain bytes. `dtype` is a key of `ITEM_BYTES`.

    `shape` is (1, heads, tokens, head_dim); a state's tensor may have any shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def of_state(self) -> bool:
        """Whether the tensor belongs to a state, which is valid at the snapshot's end only."""
        return self.name.startswith(STATE)


#: Name, type and shape (the token axis left out) of every tensor that is cut by tokens: equal in all
#: snapshots of a chain.
Layout = tuple[tuple[str, str, tuple[int, ...]], ...]

#: Name, type and whole shape of every tensor of a state.
States = tuple[tuple[str, str, tuple[int, ...]], ...]

#: The axis along which a window's or a chunk's keys and values grow, up to the tokens that were run.
GROWING: Final = 2


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """What a model's snapshots hold, as its own caches have it; a file that differs is not used.

    `kv` are the tensors that are cut by tokens, `states` those of a state; -1 along `GROWING` means any
    length. `prove(tensors, num_tokens)` raises `ValueError` if the caches cannot be rebuilt from the tensors,
    as when the numbers in a state make no sense.
    """

    kv: Layout
    states: States = ()
    prove: Callable[[dict[str, Any], int], None] | None = None

    def check_states(self, states: States, num_tokens: int) -> None:
        """Raise `DoubtfulSnapshotError` unless these are the tensors of a state after `num_tokens` tokens."""
        if len(states) != len(self.states):
            raise DoubtfulSnapshotError("states unlike the model's")
        for (name, dtype, shape), (own_name, own_dtype, own_shape) in zip(states, self.states, strict=True):
            grown = shape
            if -1 in own_shape and len(shape) > GROWING and shape[GROWING] <= num_tokens:
                grown = (*shape[:GROWING], -1, *shape[GROWING + 1 :])
            if (name, dtype, grown) != (own_name, own_dtype, own_shape):
                raise DoubtfulSnapshotError(f"{name} unlike the model's")


class Name(NamedTuple):
    """Which KV a snapshot holds: that of the packed `tokens` from `start`, after the prefix `parent`.

    A session can resume at the end of a `resumable` snapshot. Any other snapshot lacks the state of some
    layers and can only be the middle of a chain.
    """

    parent: bytes
    start: int
    tokens: bytes
    resumable: bool = True

    @property
    def digest(self) -> bytes:
        """The digest that names the snapshot and its file."""
        return link(self.parent, self.tokens)

    @property
    def num_tokens(self) -> int:
        """Count the tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def span(self) -> Span:
        """The positions of the tokens."""
        return Span(self.start, self.start + self.num_tokens)


@dataclass(frozen=True, slots=True)
class Place:
    """The memory of one tensor: one buffer for each head, of tokens of `token_bytes` bytes each."""

    rows: tuple[memoryview, ...]
    token_bytes: int
