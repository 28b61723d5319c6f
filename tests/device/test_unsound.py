"""Logits that are not finite end an answer with an error; a model that starts with them is refused."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import pytest
from tiny_models import GREEDY, alone, append, generate, prompt

from worker.batch.row_sampler import Draw, RowSampling
from worker.batch.rows import Embedding, UnsoundError
from worker.batch.sampling import draw_all
from worker.device.turn import FaultedTurn, FinishedTurn, SampledToken
from worker.models.model_files import ModelError

SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": RowSampling(temperature=0.8, seed=3),
    "top_p": RowSampling(temperature=0.8, top_p=0.9, seed=3),
    "penalised": RowSampling(repetition_penalty=1.2),
    "logprobs": RowSampling(top_logprobs=2),
}


@pytest.fixture
def model(build_model):
    return build_model("llama", tie_word_embeddings=False)


def spoil(model: Any, token: int, value: float = math.nan) -> None:
    """Set the embedding of one token to `value` (NaN or infinite), as in a damaged file."""
    model.model.embed_tokens.weight[token] = value
    mx.eval(model.parameters())  # on this thread, which has the stream of this change


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_an_answer_with_nan_or_infinite_logits_fails_and_one_beside_it_completes(
    make_rig, model, sampling: RowSampling, value: float
) -> None:
    """The failing answer ends at the token after which the logits are not finite."""
    rig = make_rig(model)
    right, _ = alone(model, prompt(19), 12, sampling)
    beside, _ = alone(model, prompt(9, salt=5), 12)
    spared = {0, *prompt(19), *prompt(9, salt=5), *beside}
    at = next(i for i, token in enumerate(right) if i and token not in {*right[:i], *spared})
    spoil(model, right[at], value)
    turn, other = generate(prompt(19), 12, sampling), generate(prompt(9, salt=5), 12, name="other")
    rig.run(turn, other)
    end = rig.end(turn)
    assert isinstance(end, FaultedTurn)
    assert isinstance(end.error, UnsoundError)
    assert turn.request.answer.tokens == right[: at + 1]
    assert isinstance(rig.end(other), FinishedTurn)
    assert other.request.answer.tokens == beside


def test_a_prompt_whose_first_logits_are_nan_fails_without_a_token(make_rig, model) -> None:
    rig = make_rig(model)
    spoil(model, prompt(19)[-1])
    turn = generate(prompt(19), 8)
    rig.run(turn)
    assert isinstance(rig.end(turn), FaultedTurn)
    assert turn.request.answer.tokens == []


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_a_prompt_whose_vector_is_nan_fails_alone(make_rig, build_model, kind) -> None:
    """An answer that runs and a prompt of the same step complete."""
    model = build_model(kind, tie_word_embeddings=False)
    rig = make_rig(model)
    said, _ = alone(model, prompt(9, salt=5), 40)
    first, _ = alone(model, prompt(6, salt=9), 4)
    spoiled = min({*range(1, 96)} - {*prompt(9, salt=5), *prompt(6, salt=9), *said, *first})
    spoil(model, spoiled)
    running = generate(prompt(9, salt=5), 40, name="running")
    rig.device.submit(running)
    rig.wait(lambda events: any(isinstance(one, SampledToken) for one in events))
    turn = append([spoiled] * 6, name="bad", embedding=Embedding())
    same = append(prompt(6, salt=9), name="same", embedding=Embedding())
    beside = generate(prompt(6, salt=9), 4, name="beside")
    rig.run(turn, same, beside)
    rig.finish(running)
    end = rig.end(turn)
    assert isinstance(end, FaultedTurn)
    assert isinstance(end.error, UnsoundError)
    assert all(isinstance(rig.end(one), FinishedTurn) for one in (same, beside, running))
    assert (running.request.answer.tokens, beside.request.answer.tokens) == (said, first)


def test_a_model_with_nan_logits_at_its_start_is_refused(make_rig, model) -> None:
    spoil(model, 0)
    with pytest.raises(ModelError, match=r"is broken: the model's logits are no finite numbers.*--dtype"):
        make_rig(model)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("at", [0, 50, 4999])
def test_a_nan_or_infinite_logit_is_reported_for_its_own_row_only(value: float, at: int) -> None:
    logits = mx.random.normal((len(SAMPLINGS) + 1, 5000), key=mx.random.key(1))
    draws = [Draw(sampling, 0) for sampling in (*SAMPLINGS.values(), GREEDY)]
    assert all(draw_all(logits, draws).are_sound.tolist())
    for row in range(1, len(draws)):
        broken = logits * 1
        broken[row, at] = value
        sound = [i != row for i in range(len(draws))]
        assert draw_all(broken, draws).are_sound.tolist() == sound or draws[row].takes_likeliest


def test_logits_of_minus_infinity_are_valid_unless_a_row_has_no_others() -> None:
    """Models set the logits of ids without a token to minus infinity."""
    logits = mx.full((2, 8), -math.inf)
    logits[0, 3] = 1.0
    assert draw_all(logits, [Draw(GREEDY, 0)] * 2).are_sound.tolist() == [True, False]
