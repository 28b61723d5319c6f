"""`bench overhead`: what a block adds to the steps beside it, and the side that runs mlx-lm alone."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from bench.baseline.messages import Forget, Say
from bench.baseline.process import BaselineError, running
from bench.overhead import beside_blocks, decoding
from bench.samples import Turn


def test_a_block_is_held_against_the_steps_around_it() -> None:
    """10 ms a step, from 20 ms on in the middle: two blocks, of which the second held up a step by 7 ms."""
    steps_s = [0.01] * 30 + [0.02] * 40
    steps_s[44] += 0.007  # the step behind the token that completes the second block
    turn = Turn(total_s=2.0, position=91, tokens=tuple(range(71)), gaps_s=tuple(steps_s))
    assert beside_blocks(turn, 32) == pytest.approx([0.0, 0.007])  # behind 20 tokens: the tokens 12 and 44
    assert beside_blocks(turn, 128) == []
    in_twos = (*[0.02] * 14, 0.03, *[0.04] * 7, 0.047, *[0.04] * 11)
    pairs = Turn(total_s=2.0, position=90, tokens=tuple(range(70)), gaps_s=in_twos, counts=(2,) * 35)
    assert beside_blocks(pairs, 32)[1] == pytest.approx(0.007)


def test_decoding_counts_from_when_all_answers_have_begun() -> None:
    early = Turn(total_s=4, first_s=1, gaps_s=(0.5, 1, 1, 0.5), tokens=(1,) * 5)
    late = Turn(total_s=4, first_s=2, gaps_s=(1, 1), counts=(1, 2, 1), tokens=(1,) * 4)
    assert decoding([early, late]) == 6 / 2  # after 2.5, 3.5 and 4 s, and after 3, 3 and 4 s
    assert decoding([early, Turn(total_s=4, first_s=3.9, tokens=(1,))]) is None


@pytest.mark.process
async def test_one_by_one_or_batched_the_tokens_are_the_same_turn_after_turn(tiny_model) -> None:
    """Caches are kept: a second turn sees the first, however that was run."""
    async with running(tiny_model, preload=None) as baseline:
        for own in (tuple(range(40, 60)), tuple(range(50, 90))):
            (alone,) = await baseline.ask(Say(("alone",), (own,), 12), 30)
            together = await baseline.ask(Say(("a", "b"), (own, own[:7]), 12), 30)
            assert together[0].tokens == alone.tokens
            for row in (alone, *together):
                assert 1 <= len(row.tokens) == len(row.times_s) <= 12
                assert list(row.times_s) == sorted(row.times_s)
        (fresh,) = await baseline.ask(Say(("fresh",), (own,), 12), 30)
        assert fresh.tokens != alone.tokens
        assert await baseline.ask(Forget(), 30) == ()
        assert (await baseline.ask(Say(("alone",), (own,), 12), 30))[0].tokens == fresh.tokens
        os.kill(baseline.pid, signal.SIGKILL)
        with pytest.raises(BaselineError, match="the baseline process ended with exit code -9"):
            await baseline.ask(Forget(), 30)


@pytest.mark.process
async def test_a_model_that_is_none_is_one_line_and_a_process_that_hangs_is_gone(
    tiny_model, tmp_path
) -> None:
    with pytest.raises(BaselineError, match=r"refused: .* cannot be loaded: [^\n]+$"):
        async with running(tmp_path, preload=None):
            raise AssertionError("it has no model")

    async def hang() -> None:
        async with running(tiny_model, preload=None) as baseline:
            process = psutil.Process(baseline.pid)
            process.suspend()
            found.append(process)
            await baseline.ask(Forget(), 0.3)

    found: list[psutil.Process] = []
    with pytest.raises(BaselineError, match=r"did not answer within 0\.3 s"):
        await asyncio.create_task(hang())
    assert psutil.wait_procs(found, timeout=5)[1] == []
