"""`bench overhead`: what a block adds to the steps beside it, and the side that runs mlx-lm alone."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from bench.faults import BenchError
from bench.local import Program
from bench.overhead import beside_blocks, decoding
from bench.spec import Turn


def test_a_block_is_held_against_the_steps_around_it() -> None:
    """10 ms a step, from 20 ms on in the middle: two blocks, of which the second held up a step by 7 ms."""
    steps_s = [0.01] * 30 + [0.02] * 40
    steps_s[44] += 0.007  # the step behind the token that completes the second block
    turn = Turn(total_s=2.0, position=91, tokens=tuple(range(71)), gaps_s=tuple(steps_s), facts=BLOCKS)
    assert beside_blocks(turn) == pytest.approx([0.0, 0.007])  # behind 20 tokens: the tokens 12 and 44
    assert beside_blocks(replace(turn, facts={"block_tokens": 128})) == []
    in_twos = (*[0.02] * 14, 0.03, *[0.04] * 7, 0.047, *[0.04] * 11)
    pairs = replace(turn, position=90, tokens=tuple(range(70)), gaps_s=in_twos, counts=(2,) * 35)
    assert beside_blocks(pairs)[1] == pytest.approx(0.007)


def test_decoding_counts_from_when_all_answers_have_begun() -> None:
    early = Turn(total_s=4, first_s=1, gaps_s=(0.5, 1, 1, 0.5), tokens=(1,) * 5)
    late = Turn(total_s=4, first_s=2, gaps_s=(1, 1), counts=(1, 2, 1), tokens=(1,) * 4)
    assert decoding([early, late]) == 6 / 2  # after 2.5, 3.5 and 4 s, and after 3, 3 and 4 s
    assert decoding([early, Turn(total_s=4, first_s=3.9, tokens=(1,))]) is None


if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCKS = {"block_tokens": 32}


@contextlib.contextmanager
def running(model: Path) -> Iterator[Program]:
    program = Program("bench.in_process", model)
    program.start()
    try:
        yield program
    finally:
        program.stop()


async def hold(program: Program, *prompts: list[range]) -> list[list[tuple[int, ...]]]:
    asked = msgspec.json.encode(([list(map(list, asked)) for asked in prompts], 12))
    answers = msgspec.json.decode(await program.exchange(asked + b"\n", 30), type=list[list[Turn]])
    for turn in (turn for turns in answers for turn in turns):
        assert turn.first_s + sum(turn.gaps_s) == pytest.approx(turn.total_s)
        assert 1 <= len(turn.tokens) == len(turn.gaps_s) + 1 <= 12
    return [[turn.tokens for turn in turns] for turns in answers]


@pytest.mark.process
async def test_in_process_one_by_one_or_batched_the_tokens_are_the_same_turn_after_turn(tiny_model) -> None:
    """A second turn sees the first, however that was run; new sessions see nothing."""
    first, second = range(40, 60), range(50, 90)
    with running(tiny_model) as program:
        assert await program.exchange(timeout_s=30) == b"[]\n"
        alone = await hold(program, [first], [second])
        batched = await hold(program, [first, first[:7]], [second, second[:7]])
        assert [turns[:1] for turns in batched] == alone
        assert await hold(program, [second]) != alone[1:]
        os.kill(program.pid, signal.SIGKILL)
        with pytest.raises(BenchError, match=r"^the measuring process ended with exit code -9$"):
            await hold(program, [first])


@pytest.mark.process
async def test_a_program_that_fails_is_one_line_and_one_that_hangs_is_gone(tiny_model, tmp_path) -> None:
    fails = pytest.raises(BenchError, match=r"^the measuring process ended with exit code 1: [^\n]+$")
    with running(tmp_path) as program, fails:
        await program.exchange(timeout_s=30)
    with running(tiny_model) as program:
        process = psutil.Process(program.pid)
        with pytest.raises(BenchError, match=r"did not answer within 0\.01 s"):
            await program.exchange(timeout_s=0.01)
    assert not process.is_running()
