"""Estimates the device memory of weights, KV and a step's temporary arrays, in bytes. Pure.

Admission and the steps use the same estimate. Weights and KV are known to the byte. The rest is estimated
from the model's shape; the metrics compare the estimate with what MLX measures (`estimated_scratch_bytes` and
`measured_scratch_bytes`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from cache.names.policy import FULL, PART
from worker.models.model_files import text_config

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from cache.kv.size import KvSize
    from cache.names.policy import Policy

#: The KV limit leaves memory for attention over contexts up to this; longer ones are checked at each step.
_PLANNED_CONTEXT: Final = 65_536
#: Caches grow by this many tokens at a time.
GROWTH_TOKENS: Final = 256
#: Bytes of a number in temporary arrays: models in 16 bits also compute the softmax in 32 bits.
_FLOAT_BYTES: Final = 4
#: The most bytes of token ids, positions, masks and the like; they matter only for tiny models.
_SMALL_BYTES: Final = 64 * 2**10
_NAMES: Final = {
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_hidden_size", "moe_intermediate_size"),
    "vocabulary": ("vocab_size", "n_vocab"),
    "head_dim": ("head_dim",),
    "value_dim": ("v_head_dim",),
    "latent": ("kv_lora_rank",),
    "plain_dim": ("qk_nope_head_dim",),
    "rotary_dim": ("qk_rope_head_dim",),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model that determine the memory of its passes."""

    num_heads: int
    #: The size of a head's keys.
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    #: The size of a head's values if it differs, else 0.
    value_dim: int = 0

    def fuses(self, head_dims: Collection[int]) -> bool:
        """Say whether attention stores no scores, thanks to a fused kernel; one exists for `head_dims`."""
        return not self.value_dim and self.head_dim in head_dims


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Read a model's shape from its configuration, which may be nested or use older names.

    A missing size gets a usual value: `intermediate`, for example, four times the hidden size.
    """
    merged = text_config(config)

    def size(name: str, default: int) -> int:
        found = (merged.get(key) for key in _NAMES[name])
        return next((int(value) for value in found if isinstance(value, int) and value > 0), default)

    num_heads, hidden = size("num_heads", 1), size("hidden", 1)
    head_dim = size("head_dim", hidden // num_heads)
    value_dim = size("value_dim", 0)
    if latent := size(
        "latent", 0
    ):  # MLA: heads attend to latent vectors; `head_dim` may be the rotary part's size
        rotary = size("rotary_dim", 0)
        head_dim, value_dim = max(latent, size("plain_dim", 0)) + rotary, latent
    return Shape(
        num_heads=num_heads,
        head_dim=head_dim,
        value_dim=0 if value_dim == head_dim else value_dim,
        hidden=hidden,
        intermediate=size("intermediate", 4 * hidden),
        vocabulary=size("vocabulary", 1),
    )


def attention_bytes(shape: Shape, num_new: int, num_context: int, *, fused: bool) -> int:
    """Estimate the bytes for attention of the last `num_new` tokens of a context of `num_context` tokens.

    Counts the output, and the scores unless a `fused` kernel never stores them. The formula is from oMLX's
    prefill guard.
    """
    outputs = shape.num_heads * num_new * shape.head_dim * _FLOAT_BYTES
    if fused:
        return outputs
    return outputs + shape.num_heads * num_new * num_context * _FLOAT_BYTES


def num_scores(policy: Policy, num_cached: int, num_tokens: int) -> int:
    """Count the attention scores that each token of a prompt's piece of `num_tokens` tokens has.

    The piece ends at token `num_cached`. A ring cache computes scores by runs of tokens and concatenates
    them, so they count twice. Under a policy with `recall`, scores are computed in parts.
    """
    if policy.window is None:
        return num_cached
    return 2 * (max(PART, num_tokens) if policy.recall else policy.num_held(num_cached))


def capacity(num_tokens: int) -> int:
    """Return for how many tokens a cache of `num_tokens` tokens allocates memory: a multiple of 256."""
    return -(-num_tokens // GROWTH_TOKENS) * GROWTH_TOKENS


@dataclass(frozen=True, slots=True)
class Estimator:
    """Estimates the memory of sessions and steps of one model on one device."""

    shape: Shape
    #: Limits all memory that MLX holds.
    limit_bytes: int
    weight_bytes: int
    kv: KvSize
    num_layers: int
    #: Whether attention stores no scores.
    fused: bool
    #: Bytes of each token while attention dequantises a layer's KV.
    unpacked_bytes: int = 0
    #: Bytes of each token while queries are compared with sketches (2-bit copies of keys).
    asked_bytes: int = 0
    #: The number of layers whose temporary arrays are in memory at once.
    kept_layers: int = 1

    def under(self, policy: Policy) -> Estimator:
        """Return this estimator for sessions under a cache policy."""
        return replace(self, kv=self.kv.under(policy))

    def scratch_bytes(self, num_rows: int, pieces: Sequence[tuple[int, int]], num_cached: int = 0) -> int:
        """Estimate the bytes of a step's temporary arrays.

        `pieces` has, for each prompt, the number of its tokens in the step, and the number of scores of each
        of these tokens (see `num_scores`). Each of the `num_rows` rows runs one token; all rows together have
        KV of `num_cached` tokens.
        """
        num_tokens = num_rows + sum(num for num, _ in pieces)
        shape = self.shape
        # Scores of one layer, and their softmax while it is computed: measured 1.1 to 1.3 times the scores.
        attention = sum(attention_bytes(shape, num, kv, fused=self.fused) for num, kv in pieces)
        mixing = num_tokens * (3 * shape.intermediate + 8 * shape.hidden) * _FLOAT_BYTES
        logits = 2 * (num_rows + len(pieces)) * shape.vocabulary * _FLOAT_BYTES
        # Dequantised KV of one layer; twice for rows, which may already begin with the next layer.
        unpacked = (2 * num_cached + sum(kv for _, kv in pieces)) * self.unpacked_bytes
        in_layer = attention * 3 // 2 + mixing + unpacked
        return in_layer * min(self.kept_layers, self.num_layers) + logits + _SMALL_BYTES

    def recall_bytes(self, policy: Policy, num_tokens: int) -> int:
        """Estimate the further bytes of a prompt's piece that reads `num_tokens` tokens' KV from SSD.

        Counts parts of a layer's KV (two being read, one dequantised), the comparison of queries with all
        sketches (2-bit copies of keys), and all sketches once more: a layer's are copied when they grow.
        """
        if not policy.recall:
            return 0
        parts = 3 * PART * self.kv.bytes_per_token // self.num_layers
        return parts + (self.asked_bytes + self.kv.sketch_bytes) * num_tokens

    def growth_bytes(self, lengths: Sequence[int], most_new: int = 1) -> int:
        """Count the bytes that caches of these lengths allocate to grow: for new tokens, and a layer's copy.

        To grow, a cache is trimmed to its length and concatenated with room for `most_new` tokens at most.
        """
        copied = 2 * self.kv.held(max(lengths, default=0)) // self.num_layers
        room = self.kv.held(capacity(most_new), ahead=most_new) - self.kv.fixed_bytes
        return len(lengths) * room + copied

    def restore_bytes(self, num_tokens: int, block: int) -> int:
        """Estimate the bytes of a restore of `num_tokens`.

        Counts the KV of these tokens and of one more block, and a second copy of one layer.
        """
        return self.kv.held(num_tokens + block, ahead=block) + self.kv.held(num_tokens) // self.num_layers

    def kv_limit(self, max_rows: int, chunk: int, num_context: int, policy: Policy = FULL) -> int:
        """Return the bytes of KV that fit beside weights, the largest step, and the growth of caches.

        Assumes that no session has more than `num_context` tokens, or `_PLANNED_CONTEXT`, or more than fit
        into the returned bytes; steps over shorter sessions need less memory. Under a policy with a window, a
        step reads only the KV on the device, however long the session is.
        """
        left, kv = self.limit_bytes - self.weight_bytes, self.kv.under(policy)
        chunk *= policy.scale

        def exceeds(size_bytes: int) -> bool:
            longest = max(kv.most_tokens(size_bytes, min(num_context, _PLANNED_CONTEXT)), chunk)
            num_held = policy.num_held(longest)
            num_cached = min(max_rows * num_held, size_bytes * num_held // max(kv.held(longest), 1))
            step = self.scratch_bytes(max_rows, [(chunk, num_scores(policy, longest, chunk))], num_cached)
            step += self.recall_bytes(policy, longest)
            growth = replace(self, kv=kv).growth_bytes([longest] * max_rows)
            return size_bytes + step + growth > left

        return bisect_left(range(1, max(left, 0) + 1), True, key=exceeds)
