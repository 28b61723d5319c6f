"""The log probabilities of a prompt's tokens equal the model's own, in every kind of batch."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import append, batched, generate, key, prefill, prompt

from worker.batch.rows import PrefillPiece, Scores
from worker.device.turn import Finished

KINDS = ["llama", "exaone4", "gemma2", "qwen3_next", "mamba2", "llama4", "deepseek_v3"]


def check(model: Any, tokens: list[int], scores: Scores) -> None:
    """Compare scores with one call of the model over all tokens."""
    caches = make_prompt_cache(model)
    logits = np.array(model(mx.array([tokens]), cache=caches)[0], np.float64)[scores.start - 1 : -1]
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    assert [one.token for one in scores.drawn] == tokens[scores.start :]
    for one, row in zip(scores.drawn, expected, strict=True):
        assert one.logprob == pytest.approx(row[one.token], abs=2e-3)
        assert [value for _, value in one.top] == pytest.approx(
            np.sort(row)[::-1][: scores.num_top], abs=2e-3
        )
        assert [row[token] for token, _ in one.top] == pytest.approx(
            [value for _, value in one.top], abs=2e-3
        )


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_tokens_get_the_models_log_probabilities_alone_and_beside_answers(
    make_rig, make_model, kind
) -> None:
    """Scoring begins at the session's start, at the end of its KV, or before the end of its KV."""
    model, tokens = make_model(kind), prompt(43)
    rig = make_rig(model)
    turn = append(tokens, scores=Scores(1, 2))
    rig.run(turn)
    check(model, tokens, turn.scores)
    rig.run(append(tokens[:20], name="t"))
    others = [generate(prompt(9 + 2 * n, salt=n), 12, name=f"o{n}") for n in range(4)]
    behind = append(tokens, name="t", num_kept=19, scores=Scores(20, 3))
    beyond = append(tokens, name="s", num_kept=42, scores=Scores(30))
    rig.run(*others, behind, beyond)
    assert (behind.num_reused, behind.num_prefilled) == (19, 23)
    assert beyond.num_reused in {0, 29}, "what cannot be cut there is run anew"
    for one in (behind, beyond):
        assert isinstance(rig.end(one), Finished)
        check(model, tokens, one.scores)
    for n, other in enumerate(others):
        again = generate(prompt(9 + 2 * n, salt=n), 12, name=f"a{n}")
        rig.run(again)
        assert rig.tokens(again) == rig.tokens(other)


def test_a_scored_prompt_copies_shared_kv_only_up_to_its_first_scored_token(make_rig, make_model) -> None:
    model, tokens = make_model("llama"), prompt(60)
    rig = make_rig(model)
    leader = append(tokens, name="leader")
    scored = append(tokens, name="scored", source=key("leader"), scores=Scores(40))
    rig.run(leader, scored)
    assert (scored.num_reused, scored.num_prefilled) == (39, 20)
    check(model, tokens, scored.scores)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mamba2"])
def test_a_prompt_is_scored_in_small_pieces_so_that_few_logits_exist_at_once(make_model, kind) -> None:
    model, tokens = make_model(kind), prompt(21)
    batch, caches, scores, sizes = batched(model), make_prompt_cache(model), Scores(9, 1), []
    prefill(model, caches, tokens[:4])
    run = batch._run

    def counted(parts: Any, drawn: Any, pieces: Any) -> Any:
        logits = run(parts, drawn, pieces)
        sizes.append((sum(len(piece.tokens) for piece in pieces), sum(piece.num_logits for piece in pieces)))
        assert logits.shape[0] == sizes[-1][1] or not sizes[-1][1]
        return logits

    batch._run = counted
    piece = PrefillPiece(caches, 4, tokens[4:20], following=tokens[9:21], scores=scores)
    batch.score(piece, 5)
    assert sizes == [(4, 0), (5, 5), (5, 5), (2, 2)]
    check(model, tokens, scores)


def test_a_restarted_prompt_does_not_score_its_tokens_again(make_model) -> None:
    """Tokens whose scores are known are prefilled without logits."""
    model, tokens = make_model("llama"), prompt(21)
    scores = Scores(5)
    turn = append(tokens, scores=scores)
    assert len(turn.reusable) == 4
    batch = batched(model)
    batch.score(
        PrefillPiece(make_prompt_cache(model), 0, tokens[:8], following=tokens[5:9], scores=scores), 512
    )
    assert (scores.end, len(turn.reusable)) == (9, 8)
