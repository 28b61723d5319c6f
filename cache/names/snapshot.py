"""The parts of a snapshot (the KV of one block or piece): name, tensors, layout. Knows nothing of files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from .blocks import Span, link
from .errors import DoubtfulSnapshotError
from .marks import MARK_BYTES
from .policy import FULL, Policy
from .tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

#: Bytes per element of the types that KV and states come in, by their names in safetensors.
ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2, "BOOL": 1, "U8": 1, "I32": 4, "U32": 4, "I64": 8}

#: The most bytes of packed tokens in a snapshot: a block has at most 8,192 tokens.
MOST_TOKEN_BYTES: Final = TOKEN_BYTES << 14
#: Prefix of the names of a state's tensors. All other tensors have a token axis, axis 2.
STATE: Final = "state."
#: Prefix of the names of a carrier's tensors for sketches, which cover earlier tokens too: see `carried`.
CARRIED: Final = "carried."
#: One block in this many is a carrier.
CARRIER: Final = 16


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as plain bytes."""

    name: str
    #: A key of `ITEM_BYTES`.
    dtype: str
    #: (1, heads, tokens, head_dim); a state's tensor may have any shape.
    shape: tuple[int, ...]
    data: memoryview
    #: Which tokens of a session the tensor's layer sees.
    reach: Policy = FULL

    @property
    def of_state(self) -> bool:
        """Whether the tensor belongs to a state, which is valid at the snapshot's end only."""
        return self.name.startswith(STATE)

    @property
    def is_carried(self) -> bool:
        """Whether the tensor also has the sketches of the blocks before its own block."""
        return self.name.startswith(CARRIED)


def carried(span: Span, block: int) -> Span | None:
    """Return the earlier tokens whose sketches (2-bit keys) the file of `span` contains too; None for most.

    One file in sixteen has the sketches of all sixteen blocks, so a restore opens few files to read all
    sketches.
    """
    size = CARRIER * block
    return Span(span.end - size, span.end) if span.num_tokens == block and not span.end % size else None


def section(name: str, reach: Policy) -> tuple[Policy, str]:
    """Return the key of a tensor's section in a file: its reach, and its layer if layers are read singly."""
    return reach, layer_path(name) if reach.recall else ""


def layer_path(name: str) -> str:
    """Return the path of the layer in a tensor's name: `3` for `3.keys.codes`."""
    return name.partition(".keys")[0].partition(".values")[0]


def sections(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Group tensors into a file's sections, in order: KV, then sketches of earlier blocks, then the state."""
    for _, run in groupby(
        tensors, key=lambda one: (one.of_state, one.is_carried, section(one.name, one.reach))
    ):
        yield tuple(run)


#: Name, type and shape (without the token axis) of every tensor that has a token axis: equal in all
#: snapshots of a chain.
Layout = tuple[tuple[str, str, tuple[int, ...]], ...]

#: Name, type and whole shape of every tensor of a state.
States = tuple[tuple[str, str, tuple[int, ...]], ...]


def seen(reach: Policy, num_tokens: int) -> tuple[Span, ...]:
    """List the spans that the layers of this reach see in a session of `num_tokens` tokens."""
    return tuple(Span(start, end) for start, end in reach.seen(num_tokens))


class KvPart(NamedTuple):
    """A part of a session's KV: the tokens in `spans`, of all layers with this reach, or of one `layer`."""

    reach: Policy
    spans: tuple[Span, ...]
    layer: str | None = None


#: The axis along which a window's or a chunk's keys and values grow, up to the tokens that were run.
GROWING: Final = 2


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The tensors that every snapshot of a model has; a file with other tensors is not used."""

    #: The tensors that have a token axis, grouped by reach (the tokens that a layer sees).
    kv: Layout
    #: The tensors of a state; -1 along `GROWING` means any length.
    states: States = ()
    #: `prove(tensors, num_tokens)` raises `ValueError` if no cache can be filled with the tensors of a state,
    #: for example if its numbers are impossible. Safe on any thread.
    prove: Callable[..., None] | None = None
    #: The reach of each tensor of `kv`, by default all tokens.
    reaches: tuple[Policy, ...] = ()
    #: Further tensors of every snapshot under a policy with `recall`: sketches, 2-bit copies of keys.
    sketches: Layout = ()
    #: Further tensors of carriers, files that have the sketches of earlier blocks too.
    carried: Layout = ()
    _distinct: tuple[Policy, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.reaches:
            object.__setattr__(self, "reaches", (FULL,) * len(self.kv))
        object.__setattr__(self, "_distinct", tuple(dict.fromkeys(self.reaches)))

    @property
    def is_limited(self) -> bool:
        """Whether some layer does not see all tokens."""
        return any(reach != FULL for reach in self._distinct)

    @property
    def sees_all(self) -> bool:
        """Whether some layer sees all tokens, or may recall any."""
        return not all(reach.is_endless for reach in self._distinct) or not self._distinct

    def under(self, policy: Policy) -> ModelLayout:
        """Return the layout of snapshots under `policy`: layers without a window get the policy's window."""
        if policy == FULL:
            return self
        reaches = tuple(policy if reach == FULL else reach for reach in self.reaches)
        more = self.sketches if policy.recall else ()
        carried = tuple((f"{CARRIED}{name}", dtype, shape) for name, dtype, shape in more)
        reaches += (FULL,) * len(more)
        return replace(self, kv=self.kv + more, reaches=reaches, carried=carried)

    def name(self, policy: Policy) -> str:
        """Return a policy's name in an identity, which includes the layers that have sketches under it."""
        paths = dict.fromkeys(name.partition(".sketch.")[0] for name, _, _ in self.sketches)
        return f"{policy} by {','.join(paths)} in {CARRIER}" if policy.recall else str(policy)

    def seen(self, num_tokens: int, num_carried: int = 0) -> tuple[Span, ...]:
        """List the spans that any layer sees in a session of `num_tokens` tokens; the spans may overlap.

        If every token has a sketch, the first `num_carried` tokens are left out: their sketches are read from
        carriers, files that also contain the sketches of earlier blocks.
        """
        found = {span: None for reach in self._distinct if reach != FULL for span in seen(reach, num_tokens)}
        if FULL in self._distinct and num_carried < num_tokens:
            found[Span(num_carried, num_tokens)] = None
        return tuple(found)

    def ordered(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Sort a snapshot's tensors into the layout's order, the state last.

        Raises `ValueError` if one with a token axis is not the layout's, or has another reach than there.
        """
        kv = {tensor.name: tensor for tensor in tensors if not (tensor.of_state or tensor.is_carried)}
        reaches = {name: reach for (name, _, _), reach in zip(self.kv, self.reaches, strict=True)}
        if any(reaches.get(name) != tensor.reach for name, tensor in kv.items()):
            raise ValueError("these tensors are of other layers or of another policy than the chain")
        carried = {tensor.name: tensor for tensor in tensors if tensor.is_carried}
        return (
            *(kv[name] for name in reaches if name in kv),
            *(carried[name] for name, _, _ in self.carried if name in carried),
            *(one for one in tensors if one.of_state),
        )

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
    """The tokens of a snapshot, which name it, and what the index must know of it."""

    #: The name of the prefix before the snapshot: of the snapshot that it continues, or a root.
    parent: bytes
    #: The position of its first token.
    start: int
    #: Its tokens, packed.
    tokens: bytes
    #: Whether a session can resume at its end. Otherwise it lacks the state of some layers, and can only be
    #: the middle of a chain.
    resumable: bool = True
    #: A digest of all tokens up to its end, by which an erasure finds it: see `marks`.
    mark: bytes = bytes(MARK_BYTES)

    @property
    def digest(self) -> bytes:
        """The digest that names the snapshot and its file."""
        return link(self.parent, self.tokens)

    def is_of(self, packed: bytes) -> bool:
        """Whether these packed tokens contain the snapshot's tokens at the snapshot's position."""
        return packed.startswith(self.tokens, self.start * TOKEN_BYTES)

    @property
    def num_tokens(self) -> int:
        """The number of the snapshot's tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def span(self) -> Span:
        """The positions of the snapshot's tokens in the session."""
        return Span(self.start, self.start + self.num_tokens)


@dataclass(frozen=True, slots=True)
class TensorBuffers:
    """A tensor's memory, as the buffers to which a file is read."""

    #: One buffer for each head, with `token_bytes` bytes per token.
    rows: tuple[memoryview, ...]
    token_bytes: int
    #: The tensor's section in a file, as the function `section` returns it.
    section: tuple[Policy, str]
    #: The tokens that each buffer has, in order.
    spans: tuple[Span, ...]

    def split(self, at: int) -> tuple[TensorBuffers, TensorBuffers]:
        """Split these buffers in two: for the tokens before position `at`, and for those from `at` on."""
        before = tuple(Span(own.start, min(own.end, at)) for own in self.spans if own.start < at)
        after = tuple(Span(max(own.start, at), own.end) for own in self.spans if own.end > at)
        skipped = sum(own.num_tokens for own in before) * self.token_bytes
        return replace(self, spans=before), replace(
            self, rows=tuple(row[skipped:] for row in self.rows), spans=after
        )

    def segments(self, span: Span) -> Iterator[tuple[int | None, int]]:
        """Split a span into runs of (index in the buffer or None if not in the buffer, number of tokens)."""
        done, at = span.start, 0
        for own in self.spans:
            start, end = max(own.start, span.start), min(own.end, span.end)
            if start < end:
                if done < start:
                    yield None, start - done
                yield at + start - own.start, end - start
                done = end
            at += own.num_tokens
        if done < span.end:
            yield None, span.end - done
