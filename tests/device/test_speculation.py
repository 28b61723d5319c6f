"""Speculation gives the same tokens as without, with lookups and draft models, and drafts where that pays."""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import mlx.core as mx
import pytest
from hypothesis import given
from mlx.utils import tree_map
from test_logprobs import PENALISED
from tiny_models import GREEDY, VOCABULARY, alone, begin, drafting, loaded, prompt, tried

from cache.kv import layers
from worker.batch import draft_model as models
from worker.batch.batch_kinds import draft_model_for
from worker.batch.draft_model import DraftModel
from worker.batch.drafter import MOST_SEEN, NGRAM, Lookup, lookup_draft
from worker.batch.gains import StepTimes
from worker.batch.row_sampler import DrawnToken, RowSampler, RowSampling
from worker.batch.rows import PrefillPiece, Row
from worker.batch.speculation import Speculation
from worker.batch.trials import Trials
from worker.device.drafting import check
from worker.device.drafting import draft_model as draft_model_of
from worker.device.served_model import DeviceOptions, ServedModel
from worker.models.model_files import ModelError

SAMPLED = RowSampling(0.8, seed=3, top_p=0.9)


@pytest.fixture(scope="module")
def draft_model(build_model) -> Callable[..., DraftModel]:
    """Return a function that makes a draft model for a tiny model: a copy with noise `off` in its weights."""

    @functools.cache
    def copied(kind: str, off: float) -> Any:
        model = build_model(kind)
        mx.random.seed(5)
        model.update(tree_map(lambda w: w + mx.random.normal(w.shape) * off, model.parameters()))
        mx.eval(model.parameters())
        return model

    def made(
        kind: str = "llama", off: float = 0.003, vocabularies: tuple[int, int] | None = None
    ) -> DraftModel:
        model = copied(kind, off)
        return draft_model_for(model, 0.0001, vocabularies or (VOCABULARY, VOCABULARY), tried(model))

    return made


def ask(batch: Any, model: Any, tokens: list[int], sampling: RowSampling = GREEDY) -> Row:
    """Start an answer as a worker does, with ring caches for the model's own sliding windows."""
    caches = layers.make(model, rings=batch.windows_are_rings)
    row = Row(caches, array("I", tokens), RowSampler(sampling, prompt=tokens), len(tokens), 1000)
    batch.step([PrefillPiece(caches, 0, tokens, row)])
    return row


def plain(model: Any, tokens: list[int], sampling: RowSampling, num: int) -> list[int]:
    batch = drafting(model, 0)
    row = ask(batch, model, tokens, sampling)
    go_on(batch, num)
    return row.known[len(tokens) :].tolist()[:num]


def go_on(batch: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        batch.step([], run_ahead=True)


#: With each way of sampling one row and two, plain layers and windows.
DRAFTED = [
    ("llama", 1, "sampled"),
    ("llama", 2, "penalised"),
    ("exaone4", 1, "greedy"),
    ("gemma3_text", 2, "sampled"),
]


@pytest.mark.parametrize(
    ("kind", "num_rows", "way"),
    [
        pytest.param(*rows, way, marks=() if (*rows, way) in DRAFTED else pytest.mark.soak)
        for rows in (("llama", 1), ("llama", 2), ("exaone4", 1), ("gemma3_text", 2))
        for way in ("greedy", "sampled", "penalised")
    ],
)
def test_a_draft_model_changes_no_token_of_an_answer_and_lowers_the_number_of_steps(
    make_model, draft_model, kind, num_rows, way
) -> None:
    """The models have plain layers, or windows that wrap."""
    model, sampling = make_model(kind), {"greedy": GREEDY, "sampled": SAMPLED, "penalised": PENALISED}[way]
    contexts = [prompt(20 + 7 * i, salt=i) for i in range(num_rows)]
    undrafted, drafted = (drafting(model, 6, drafters=drafters) for drafters in ((), (draft_model(kind),)))
    answers = []
    for batch in (undrafted, drafted):
        rows = [ask(batch, model, tokens, sampling) for tokens in contexts]
        go_on(batch, 60)
        answers.append([row.known[len(tokens) :] for row, tokens in zip(rows, contexts, strict=True)])
    for short, long in zip(*answers, strict=True):
        assert long[: len(short)] == short
        assert len(long) > 1.5 * len(short)
    found = drafted.speculation
    assert 0.3 * found.num_drafted < found.num_accepted < found.num_drafted
    assert found.saved_s > 0


def test_batch_rows_in_a_shared_kv_array_draft_together_and_get_the_same_tokens_as_without_drafts(
    make_model, draft_model
) -> None:
    """Drafts have any length. A row leaves, the pool gets full, and answers reach their limits."""
    model, samplings = make_model("llama"), [GREEDY, SAMPLED, GREEDY, PENALISED, SAMPLED]
    contexts = [prompt(110 + 7 * i, salt=i) for i in range(len(samplings))]
    batch = drafting(model, 4, drafters=(Lookup(), draft_model()))
    rows = [ask(batch, model, *one) for one in zip(contexts, samplings, strict=True)]
    for row in rows:
        row.num_left = 120
    go_on(batch, 12)
    assert all(row.caches is None for row in rows)
    batch.remove(rows[1])
    while any(row.num_left > 0 for row in batch.rows):
        batch.step([], run_ahead=True)
        for row in tuple(batch.rows):
            if row.num_left <= 0:
                batch.remove(row)
    for row, tokens, sampling in zip(rows, contexts, samplings, strict=True):
        answer = row.known[len(tokens) :].tolist()
        assert answer == plain(model, tokens, sampling, len(answer))
        assert row is rows[1] or row.num_left == 0
    assert batch.speculation.num_accepted > 0.3 * batch.speculation.num_drafted > 30


def test_the_next_answer_of_a_session_reuses_the_kv_of_the_draft_model(
    make_model, draft_model, monkeypatch
) -> None:
    """The draft model runs only new tokens, and trims KV of tokens that differ."""
    model, drafter, runs = make_model("llama"), draft_model(), []
    run = drafter._run
    monkeypatch.setattr(
        drafter,
        "_run",
        lambda a, b, pieces: (runs.append(sum(len(p.tokens) for p in pieces)), run(a, b, pieces))[1],
    )
    batch = drafting(model, 4, drafters=(drafter,))
    for tokens, most in ((prompt(300), 320), ([*prompt(300), 1, 2, 3], 50), ([*prompt(150), 7, 8, 9], 50)):
        runs.clear()
        piece = begin(model, tokens)
        piece.row.session = "s"
        batch.step([piece])
        go_on(batch, 8)
        answer = piece.row.known[len(tokens) :]
        assert answer == alone(model, tokens, len(answer))[0]
        batch.remove(piece.row)
        assert 0 < sum(runs) < most
    assert [*drafter._shadows] == ["s"]
    batch.speculation.forget("s")
    assert not drafter._shadows


def test_batch_rows_beyond_the_limit_of_sessions_with_draft_model_kv_decode_without_drafts(
    make_model, draft_model, monkeypatch
) -> None:
    monkeypatch.setattr(models, "MOST_SHADOWS", 1)
    model, drafter = make_model("llama"), draft_model()
    batch = drafting(model, 4, drafters=(drafter,))
    pieces = [begin(model, prompt(n)) for n in (20, 31)]
    batch.step(pieces)
    go_on(batch, 20)
    lengths = sorted(len(piece.row.known) - n for piece, n in zip(pieces, (20, 31), strict=True))
    assert lengths[0] == 21 < lengths[1]
    first = pieces[0].row
    batch.remove(first)
    go_on(batch, 20)
    assert len(drafter._shadows) == 1


def test_the_draft_models_kv_of_a_long_answer_is_rebuilt_from_recent_tokens_to_stay_short(
    make_model, draft_model, monkeypatch
) -> None:
    monkeypatch.setattr(models, "MOST_HELD", 96)
    monkeypatch.setattr(models, "BEGUN", 32)
    model, drafter = make_model("llama"), draft_model(off=0.0)
    batch = drafting(model, 4, drafters=(drafter,))
    piece = begin(model, prompt(200))
    batch.step([piece])
    go_on(batch, 100)
    answer = piece.row.known[200:]
    assert answer == alone(model, prompt(200), len(answer))[0]
    (shadow,) = drafter._shadows.values()
    assert shadow.start > 200
    assert shadow.caches[0].offset == len(shadow.tokens) <= 100


@pytest.mark.parametrize("vocabularies", [(VOCABULARY, VOCABULARY + 32), (VOCABULARY, VOCABULARY - 16)])
def test_a_draft_model_with_another_number_of_logits_than_the_target_model_changes_no_token(
    make_model, build_model, vocabularies
) -> None:
    model = make_model("llama")
    drafter = draft_model_for(
        build_model("llama", vocab_size=vocabularies[1]), 0.0001, vocabularies, Trials()
    )
    batch = drafting(model, 4, drafters=(drafter,))
    piece = begin(model, prompt(30), SAMPLED)
    batch.step([piece])
    go_on(batch, 20)
    answer = piece.row.known[30:]
    assert answer == alone(model, prompt(30), len(answer), SAMPLED)[0]
    assert batch.speculation.num_drafted > 0


@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next", "recurrent_gemma"])
def test_a_draft_model_whose_caches_cannot_be_trimmed_is_refused(make_model, kind) -> None:
    with pytest.raises(ValueError, match=r"its layers of ArraysCache.* cannot undo a draft"):
        draft_model_for(make_model(kind), 0.3, (VOCABULARY, VOCABULARY), Trials())


class SameTokens:
    def has_tokens_of(self, other: Any) -> bool:
        return True


def test_a_draft_model_is_refused_for_a_target_model_whose_caches_cannot_be_trimmed(
    make_model, tmp_path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    model, draft = (
        replace(loaded(make_model(kind)), tokenizer=SameTokens(), folder=tmp_path)  # type: ignore[arg-type]
        for kind in ("mamba2", "llama")
    )
    with pytest.raises(ModelError, match="tiny cannot undo a draft; leave draft_model out"):
        check(model, draft)
    options = DeviceOptions(
        block_tokens=8, max_batch=1, stall_s=0.25, limit_bytes=2**30, max_draft=None, load_draft=lambda: draft
    )
    with pytest.raises(ModelError, match="tiny cannot undo a draft; leave draft_model out"):
        ServedModel(model, lambda _: True, options)
    with pytest.raises(ModelError, match=r"draft_model tiny cannot draft: its layers of ArraysCache"):
        draft_model_of(draft, model, Trials())


def test_an_answer_whose_draft_model_fails_has_the_same_tokens_as_without_drafts(
    make_model, draft_model, monkeypatch
) -> None:
    model, drafter = make_model("llama"), draft_model()
    batch = drafting(model, 4, drafters=(drafter,))
    piece = begin(model, prompt(30))
    batch.step([piece])
    go_on(batch, 10)

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(drafter, "_run", fail)
    go_on(batch, 10)
    answer = piece.row.known[30:]
    assert answer == alone(model, prompt(30), len(answer))[0]
    assert not batch.speculation.has_drafters


def test_the_measured_cost_of_drafting_is_forgotten_after_many_steps_without_drafts() -> None:
    times = StepTimes()
    for _ in range(3):
        times.note_plain(2, 1.0, ahead=False, could=False)
    for _ in range(3):
        times.note_drafted(2, 4, 9.0)
    assert times.checked(2, 4) == 9.0
    for patience in (64, 128, 256):  # and less often, the more often it was in vain
        for _ in range(patience - 1):
            assert not times.note_plain(2, 1.0, ahead=False, could=False)
        assert times.checked(2, 4) == 9.0
        assert times.note_plain(2, 1.0, ahead=False, could=False)
        assert times.checked(2, 4) < 1.5
        for _ in range(3):
            times.note_drafted(2, 4, 9.0)


def draft(tokens: list[int], most: int) -> list[int]:
    return lookup_draft(array("I", tokens), most)


def test_prompt_lookup_drafts_the_tokens_that_followed_an_earlier_occurrence_of_the_last_tokens() -> None:
    assert draft([1, 2, 3, 4, 5, 9, 1, 2, 3], 3) == [4, 5, 9]
    assert draft([1, 2, 3, 4, 5, 9, 1, 2, 3], 2) == [4, 5]


def test_prompt_lookup_searches_only_the_last_part_of_a_long_session() -> None:
    """So the time to draft does not grow with the session."""
    early, late = [5, 6, 7, 8], [1, 2, 3, 4]
    tokens = [*early, *late, *[9] * (MOST_SEEN - 8), 5, 6, 7]
    assert draft(tokens, 1) == [], "three tokens too far back"
    assert draft([*tokens, *late[:3]], 1) == [], "and these by now"
    assert draft([*early, *late, *[9] * (MOST_SEEN - 11), 5, 6, 7], 1) == [8], "the first of the last tokens"


def test_prompt_lookup_drafts_further_repetitions_if_the_session_ends_in_a_repetition() -> None:
    assert draft([1, 2, 3] * 9, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


@given(st.lists(st.integers(0, 3), min_size=NGRAM, max_size=60))
def test_prompt_lookup_finds_the_latest_earlier_occurrence_of_the_last_tokens_at_any_position(
    tokens: list[int],
) -> None:
    places = [at for at in range(NGRAM, len(tokens)) if tokens[at - NGRAM : at] == tokens[-NGRAM:]]
    assert draft(tokens, 1) == ([tokens[places[-1]]] if places else [])


@given(st.lists(st.integers(0, 3), max_size=60))
def test_prompt_lookup_rules_out_a_draft_only_if_no_next_token_would_allow_a_draft(tokens: list[int]) -> None:
    for token in range(4):
        row = Row([], array("I", tokens), RowSampler(RowSampling()), len(tokens) - 1, 10)
        may = Lookup().num_missing(row) == 0
        row.known.append(token)
        assert may or not Lookup().propose({row: 4})


PLAIN_S = 0.05


class Drafts(Lookup):
    """A drafter whose tokens are right with probability `right`; a pass takes `pass_share` of a step."""

    def __init__(self, world: World, right: float, pass_share: float) -> None:
        self.right, self.pass_share = right, pass_share
        self.hope = 0.7 if pass_share else 0.5
        self._world = world
        self._prepared: dict[Row, int] = {}
        self._found: dict[tuple[Row, int], int | None] = {}

    def num_missing(self, row: Row) -> int | None:
        if self.pass_share:
            return max(200 - self._prepared.get(row, 0), 0)
        return self._found.setdefault((row, len(row.known)), 0 if self._world.dice.random() < 0.5 else None)

    def prepare(self, row: Row, num_tokens: int) -> None:
        self._prepared[row] = self._prepared.get(row, 0) + num_tokens
        self._world.now_s += num_tokens * self.pass_share * PLAIN_S / 10

    def propose(self, wanted: Mapping[Row, int]) -> dict[Row, list[int]]:
        self._world.now_s += max(wanted.values()) * self.pass_share * PLAIN_S
        some = [row for row in wanted if self.pass_share or self._world.dice.random() < 0.8]
        return {row: [1] * wanted[row] for row in some}


class World:
    """Simulates answers, `num_rows` at a time, with the real `Speculation` but no model."""

    def __init__(
        self,
        num_rows: int,
        late: float,
        checked: float,
        drafts: tuple[tuple[float, float], ...],
        seed: int = 4,
        answer: int = 200,
    ) -> None:
        """A step not launched ahead takes `late` times as long; a draft token adds the share `checked`."""
        self.dice, self.now_s = random.Random(seed), 0.0
        self._num_rows, self._late, self._checked, self._answer = num_rows, late, checked, answer
        self._speculation = Speculation([Drafts(self, *one) for one in drafts], 8, lambda: self.now_s)

    def rate(self, num_answers: int) -> float:
        for _ in range(num_answers):
            samplers = [RowSampler(RowSampling()) for _ in range(self._num_rows)]
            rows = [Row([], array("I", [1]), sampler, 1, self._answer) for sampler in samplers]
            is_ahead = could = False
            while rows:
                is_ahead = self._step(rows, is_ahead, could)
                could = True
        return num_answers * self._num_rows * self._answer / self.now_s

    def _step(self, rows: list[Row], is_ahead: bool, could: bool) -> bool:
        num_rows, began_s = len(rows), self.now_s
        asked = [] if is_ahead else rows
        drafted = self._speculation.draft(asked, num_rows, ahead=could, beside=False)
        num = sum(map(len, drafted.drafts.values()))
        waits = 3.0 if self.dice.random() < 0.02 else self.dice.lognormvariate(0, 0.05)
        self.now_s += PLAIN_S * waits * (1.0 if is_ahead else self._late) * (1 + self._checked * num)
        right = {}
        for row, draft in drafted.drafts.items():
            share = drafted.sources[row].drafter.right
            right[row] = next((i for i in range(len(draft)) if self.dice.random() >= share), len(draft))
        for row in rows:
            row.append([DrawnToken(1)] * (1 + right.get(row, 0)))
        self._speculation.learn(drafted, right, num_rows, self.now_s - began_s, (is_ahead, could))
        for row in [row for row in rows if row.num_left <= 0]:
            rows.remove(row)
            self._speculation.leave(row)
        return bool(rows) and not drafted.drafts and not self._speculation.may_draft(rows, num_rows)


@pytest.mark.parametrize(
    ("late", "checked", "right", "pass_share", "least"),
    [
        (1.0, 0.01, 0.0, 0.35, 0.97),
        (1.0, 0.1, 0.3, 0.15, 0.97),
        (1.0, 0.2, 0.6, 0.9, 0.97),
        (1.3, 0.01, 0.0, 0.15, 0.97),
        (1.3, 0.1, 0.6, 0.35, 0.97),
        (1.0, 0.05, 0.8, 0.35, 1.25),
        (1.3, 0.01, 0.9, 0.15, 1.4),
    ],
    ids=[
        "useless draft",
        "rare drafts",
        "costly drafts",
        "useless draft, late",
        "fair draft, late",
        "good draft",
        "best draft, late",
    ],
)
@pytest.mark.parametrize("num_rows", [1, 4], ids=["one row", "four rows"])
def test_speculative_decoding_slows_answers_by_at_most_3_percent_and_accepted_drafts_speed_them_up(
    num_rows: int, late: float, checked: float, right: float, pass_share: float, least: float
) -> None:
    """The drafters are a draft model, and prompt lookup that is right half as often."""
    plain = World(num_rows, late, checked, ()).rate(20)
    drafting = World(num_rows, late, checked, ((right / 2, 0.0), (right, pass_share))).rate(20)
    assert drafting > (least if num_rows == 1 else 0.97) * plain
