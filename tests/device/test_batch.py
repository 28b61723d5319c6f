"""Rows (running answers) that join and leave a batch decode as if each were alone; which trials allow it."""

from __future__ import annotations

import json
import math
import os
import platform
import random
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import BLOCK, GREEDY, WIDE, alone, batched, begin, drafting, kv, loaded, prompt

from tests.matrices import thinned
from worker.batch import batch_kinds, matching, pools, slots
from worker.batch.batch import Batch
from worker.batch.batch_kinds import batch_for
from worker.batch.forward import Forward
from worker.batch.merged import MergedRows
from worker.batch.own_pass import OwnPass
from worker.batch.pools import Pools
from worker.batch.row_sampler import RowSampler, RowSampling
from worker.batch.rows import CommonKv, PrefillPiece, Row
from worker.batch.trials import SHIPPED, Trials
from worker.device.served_model import trial_key

SAMPLINGS = [
    GREEDY,
    RowSampling(0.8, seed=1),
    RowSampling(1.2, top_k=20, seed=2),
    RowSampling(0.0, repetition_penalty=1.4),
]


def run(
    batch: Batch, pieces: list[PrefillPiece], num_steps: int, *, run_ahead: bool = True
) -> list[list[int]]:
    """Run steps, of which the first runs `pieces` and starts their rows; return the tokens of each row."""
    rows = [piece.row for piece in pieces if piece.row is not None]
    drawn: list[list[int]] = [[] for _ in rows]
    for _ in range(num_steps):
        batch.step(pieces, run_ahead=run_ahead)
        pieces = []
        for row, tokens in zip(rows, drawn, strict=True):
            tokens.extend(one.token for one in row.drawn)
    return drawn


def test_a_bfloat16_model_passes_its_batching_self_test_despite_rounding(build_model) -> None:
    """In 12 layers bfloat16 changes logits by 0.06 to 0.11 of the largest, as much as a wrong mask does."""
    model = build_model("llama", num_hidden_layers=12, **WIDE)
    model.set_dtype(mx.bfloat16)
    batch = batch_for(model)
    assert type(batch._run) is Forward
    assert batch.has_rings
    assert model.model.embed_tokens(mx.array([1])).dtype == mx.bfloat16, "as it was before"


@pytest.mark.parametrize(
    ("kind", "kv_bits", "way", "keeping"),
    [
        ("llama", None, Forward, Pools),
        ("llama", 8, Forward, CommonKv),
        ("exaone4", None, Forward, Pools),
        ("exaone4", 8, Forward, CommonKv),
        ("gemma2", None, OwnPass, MergedRows),
        ("qwen3_next", None, OwnPass, MergedRows),
        ("qwen3_next", 8, OwnPass, CommonKv),
        ("llama4", None, OwnPass, CommonKv),
    ],
)
def test_each_kind_of_model_is_batched_by_the_method_listed_for_it_with_and_without_kv_bits(
    make_model, kind, kv_bits, way, keeping
) -> None:
    batch = batch_for(make_model(kind, kv_bits))
    assert (type(batch._run), type(batch._keeping)) == (way, keeping)


@pytest.mark.parametrize(("seed", "ahead", "smallest"), thinned(range(4), [0.0, 0.8], [4, 256], strength=2))
def test_answers_that_join_and_leave_a_batch_get_the_same_tokens_and_kv_as_alone(
    make_model, monkeypatch, seed, smallest, ahead
) -> None:
    """Joins, leaves and lengths are random. Rows stay in one pool or move to larger ones; steps run ahead."""
    monkeypatch.setattr(slots, "SMALLEST", smallest)
    monkeypatch.setattr(pools, "_ROOM", 2)
    model, dice = make_model("llama"), random.Random(seed)
    waiting = deque(
        (prompt(dice.randint(2, 40), salt=salt), SAMPLINGS[salt % len(SAMPLINGS)]) for salt in range(12)
    )
    batch = batched(model)
    running: dict[Row, tuple[list[int], RowSampling, list[int]]] = {}
    left: dict[Row, tuple[list[int], RowSampling, list[int], list[Any]]] = {}
    while waiting or running:
        pieces = []
        for _ in range(dice.randint(0, 3)):
            if waiting and len(running) < 6 and not batch.is_ahead:
                tokens, sampling = waiting.popleft()
                pieces.append(begin(model, tokens, sampling))
                running[pieces[-1].row] = (tokens, sampling, [])
        batch.step(pieces, run_ahead=dice.random() < ahead)
        for row, (_, _, drawn) in list(running.items()):
            drawn.extend(one.token for one in row.drawn)
            if len(drawn) >= 3 and dice.random() < 0.2:
                left[row] = (*running.pop(row), batch.remove(row))
    assert len(left) == 12
    for row, (tokens, sampling, drawn, caches) in left.items():
        expected, reference = alone(model, tokens, len(drawn), sampling)
        assert drawn == expected
        num_cached = len(tokens) - 1 + len(drawn)
        assert row.num_cached == num_cached == caches[0].offset
        np.testing.assert_allclose(kv(caches, num_cached), kv(reference, num_cached), atol=1e-4)


def test_prompts_sharing_a_forward_pass_with_answers_and_other_prompts_get_the_same_tokens_as_alone(
    make_model,
) -> None:
    """One pass runs pieces of three prompts and two answers; each gets the tokens that it gets alone."""
    model = make_model("llama")
    batch = batched(model)
    early = [begin(model, prompt(n, salt=n)) for n in (9, 14)]
    answers = run(batch, early, 3, run_ahead=False)
    late = [prompt(n, salt=n) for n in (30, 12, 21)]
    caches = [make_prompt_cache(model) for _ in late]
    for start in (0, 10, 20):
        pieces = []
        for tokens, own in zip(late, caches, strict=True):
            some = tokens[start : start + 10]
            if some:
                ends = start + len(some) == len(tokens)
                row = Row(own, tokens.copy(), RowSampler(GREEDY), len(tokens), 1000) if ends else None
                pieces.append(PrefillPiece(own, start, some, row))
        batch.step(pieces)
        for piece, drawn in zip(early, answers, strict=True):
            drawn.extend(one.token for one in piece.row.drawn)
    assert answers == [alone(model, prompt(n, salt=n), 6)[0] for n in (9, 14)]
    firsts = {row.num_cached: row for row in batch.rows[2:]}
    batch.step([])
    for tokens in late:
        row = next(
            row for row in firsts.values() if row.num_cached - row.sampler.num_drawn + 1 == len(tokens)
        )
        assert row.known[len(tokens) :] == alone(model, tokens, row.sampler.num_drawn)[0]


@pytest.mark.parametrize("kind", ["llama", "qwen3_next", "falcon_h1", "llama4"])
def test_a_batch_lists_the_rows_whose_kv_cache_may_need_more_memory_in_the_next_step(
    make_model, kind
) -> None:
    """Whether the caches of hybrids and of chunked attention will grow is unknown."""
    model = make_model(kind)
    batch = batched(model, lambda _: False)
    batch.step([begin(model, prompt(255 - BLOCK))])
    assert batch.growing == ([] if kind == "llama" else [255 - BLOCK])
    for _ in range(BLOCK):
        batch.step([])
    assert batch.growing == [255]


def test_batch_rows_decode_with_separate_kv_caches_after_memory_for_a_shared_kv_array_ran_out(
    make_model, monkeypatch
) -> None:
    """Not even the first row joined the pool, and later there is no room for one."""
    model, rooms = make_model("llama"), iter([True])
    batch = batched(model, lambda _: next(rooms, False))
    batch.step(pieces := [begin(model, prompt(7, salt)) for salt in (1, 2, 3)])

    def fail(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(slots.Pool, "join", fail)
        with pytest.raises(MemoryError):
            batch.step([])
    assert batch.roll_back()
    for _ in range(4):
        batch.step([])
    for piece, salt in zip(pieces, (1, 2, 3), strict=True):
        assert [*piece.row.known[7:]] == alone(model, prompt(7, salt), 5)[0]


def test_a_model_whose_caches_cannot_be_trimmed_decodes_without_drafts(make_model) -> None:
    model = make_model("qwen3_next")
    batch = drafting(model, 8)
    drawn = run(batch, [begin(model, prompt(9))], 30)[0]
    assert batch.speculation.num_drafted == 0
    assert drawn == alone(model, prompt(9), 30)[0]


ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trials.json"


def never() -> int:
    raise AssertionError("it was tried again")


def test_the_result_of_a_passed_batching_self_test_is_stored_and_the_test_not_run_again(path: Path) -> None:
    assert Trials(path, "model").way("merge", lambda: 1, 2) == 1
    assert Trials(path, "model").way("merge", never, 2) == 1
    assert Trials(path, "model").way("share", lambda: 0, 1) == 0
    assert Trials(path, "another").way("merge", lambda: 0, 2) == 0
    assert Trials(path, "model").way("merge", never, 2) == 1


M1 = {"architecture": "applegpu_g13s", "device_name": "Apple M1 Max"}
M4 = {"architecture": "applegpu_g16g", "device_name": "Apple M4"}
M5 = {"architecture": "applegpu_g17g", "device_name": "Apple M5"}
H200 = {"architecture": "sm_90", "device_name": "NVIDIA H200"}


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Return a function that makes MLX report this GPU."""

    def pretend(told: dict[str, str]) -> None:
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        monkeypatch.setattr(mx, "device_info", lambda: told)

    return pretend


@pytest.mark.parametrize(
    ("told", "tf32", "is_coarse"),
    [
        (M1, None, False),
        (M4, None, False),
        (M5, None, True),
        (M5, "0", False),
        (H200, None, True),
        ({}, None, True),
    ],
    ids=["M1", "M4", "M5", "M5 in float32", "H200", "unknown"],
)
def test_a_batching_self_test_allows_large_deviations_only_on_a_gpu_of_reduced_precision(
    a_gpu, monkeypatch, make_model, told, tf32, is_coarse
) -> None:
    """Otherwise a wrong mask could pass."""
    model = make_model("llama")
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    if tf32 is not None:
        monkeypatch.setenv("MLX_ENABLE_TF32", tf32)
    a_gpu(told)
    assert batch_kinds._tolerance(model) == (batch_kinds._COARSE if is_coarse else batch_kinds._TOLERANCE)


def test_a_model_whose_batched_logits_deviate_by_more_than_rounding_fails_its_batching_self_test(
    make_model,
) -> None:
    model = make_model("llama")
    most = batch_kinds._tolerance(model)
    passed = [one for one in (most / 2, most, math.nan) if batch_kinds._fits(model, "share", lambda: one)]  # noqa: B023
    assert passed == [most / 2]


def test_a_stored_batching_self_test_result_is_used_only_on_the_same_gpu_and_system(
    a_gpu, monkeypatch, make_model
) -> None:
    """Another chip has other kernels, and so may have another macOS."""
    model, keys = loaded(make_model("llama")), set()
    for told in (M1, M4, M5, {**M5, "device_name": "Apple M5 Pro"}, H200):
        a_gpu(told)
        keys |= {trial_key(model, ""), trial_key(model, "")}
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.2", ("", "", ""), "arm64"))
    keys.add(trial_key(model, ""))
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert len(keys | {trial_key(model, "")}) == 7


@pytest.mark.parametrize("content", ["", "[]", "{not json", '{"model": 3}', "[" * 100_000])
def test_an_unreadable_file_of_batching_self_test_results_is_treated_as_empty_and_replaced(
    path: Path, content: str
) -> None:
    path.write_text(content)
    assert Trials(path, "model").way("merge", lambda: 1, 2) == 1
    assert Trials(path, "model").way("merge", never, 2) == 1


@pytest.mark.parametrize("way", [2, -1, True, "1", None, 1.0])
def test_a_batching_self_test_whose_stored_result_is_no_valid_number_runs_again(
    path: Path, way: object
) -> None:
    path.write_text(json.dumps({"model": {"merge": way}}))
    assert Trials(path, "model").way("merge", lambda: 0, 2) == 0


@pytest.mark.parametrize("trial", ["share", "sketches"])
def test_a_batching_self_test_in_which_the_gpu_fails_raises_the_error_and_gives_no_verdict(
    make_model, monkeypatch, trial: str
) -> None:
    """Otherwise a sound model would be served slowly, or without a policy, until the next start."""
    error = "[METAL] Command buffer execution failed: Impacting Interactivity (0000000e:)"

    def fail(*_: object) -> float:
        raise RuntimeError(error)

    owner, name = {"share": (batch_kinds, "_deviation_shared"), "sketches": (matching, "find")}[trial]
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(RuntimeError, match="Impacting"):
        batch_kinds.batch_for(make_model("llama"))


def test_a_full_file_of_batching_self_test_results_drops_the_model_tested_longest_ago(path: Path) -> None:
    for i, name in [*((i, "merge") for i in range(16)), (0, "share"), (16, "merge")]:
        Trials(path, f"model {i}").way(name, lambda: 0, 2)
    assert [*json.loads(path.read_text())] == [f"model {i}" for i in (*range(2, 16), 0, 16)]


def test_a_batching_self_test_returns_its_result_even_if_the_result_cannot_be_stored(tmp_path: Path) -> None:
    assert Trials(tmp_path / "missing" / "trials.json", "model").way("merge", lambda: 1, 2) == 1


def test_a_batching_self_test_whose_result_is_shipped_with_turnkeep_does_not_run(path: Path) -> None:
    trials = Trials(path, "model", {"share": 0})
    assert trials.way("share", never, 1) == 0
    assert trials.way("merge", lambda: 1, 2) == 1
    assert json.loads(path.read_text()) == {"model": {"merge": 1}}


TRY = """
import json, sys
from pathlib import Path
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from cache.kv import layers
from worker.batch.batch_kinds import batch_for
from worker.batch.trials import Trials
from worker.device.served_model import trial_key
from worker.models import model

folder, path = map(Path, sys.argv[1:])
loaded = model.load(folder, dtype="float32")
own = make_prompt_cache(loaded.model)
loaded.model(mx.array([[0]]), cache=own)
batch_for(loaded.model, trials=Trials(path, trial_key(loaded, layers.describe(own))))
"""


@pytest.mark.model
@pytest.mark.packaging  # 30 s, for what changes with the packages alone
@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="shipped for a CPU only")
def test_the_shipped_batching_self_test_results_equal_those_of_new_tests_of_the_packaged_model(
    packaged_folder: Path, path: Path
) -> None:
    """If it fails after an update of MLX or mlx-lm, or for another packaged model, change `SHIPPED`.

    The trials run in a new process, as in a worker: their key depends on the imported modules of mlx-lm.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "protocol")))}
    command = [sys.executable, "-P", "-c", TRY, str(packaged_folder), str(path)]
    subprocess.run(command, env=environment, check=True)
    assert json.loads(path.read_text()) == SHIPPED
