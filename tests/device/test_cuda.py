"""Attention on CUDA: padding changes no result and leaves few shapes. These tests run on any device."""

from __future__ import annotations

import mlx.core as mx
import pytest

from worker.batch import cuda


@pytest.mark.parametrize(
    ("num", "length"),
    [(1, 300), (17, 17), (17, 300), (21, 340), (256, 256), (256, 700), (300, 300), (700, 900)],
)
def test_padded_attention_equals_attention_without_padding(num: int, length: int) -> None:
    keys, values = (mx.random.normal((1, 2, length, 16), key=mx.random.key(i)) for i in (1, 2))
    queries = mx.random.normal((1, 4, num, 16), key=mx.random.key(3))
    found = cuda.attention(queries, keys, values, 0.25)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask="causal")
    assert found.shape == expected.shape
    assert mx.abs(found - expected).max().item() < 1e-5


def test_padding_leaves_few_attention_shapes_so_that_cudnn_needs_few_plans() -> None:
    """A session of 200 turns of up to 100 tokens, and prompts of every length up to 1,024."""
    turns = ((17 + i % 84, 100 * i + 17 + i % 84) for i in range(1, 200))
    prompts = ((num, num) for num in range(1, 1025))
    for shapes, most in ((turns, 64), (prompts, 4)):
        padded = set()
        for num, length in shapes:
            before, after = cuda.padding(num, length)
            assert before >= 0
            assert 0 <= after <= max(256, length // 16)
            padded.add((before + num + after, length + after))
        assert len(padded) <= most
        assert all(num <= length for num, length in padded)
