"""Trials find out how a model's rows can run together; the results of passed ones are stored."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from tiny_models import loaded

from worker.batch import batch_kinds, matching
from worker.batch.trials import SHIPPED, Trials
from worker.device.served_model import trial_key

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trials.json"


def never() -> int:
    raise AssertionError("it was tried again")


def test_the_result_of_a_passed_model_trial_is_stored_and_the_trial_not_repeated(path: Path) -> None:
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
def test_only_a_gpu_that_multiplies_with_few_bits_may_deviate_much_in_a_trial(
    a_gpu, monkeypatch, make_model, told, tf32, is_coarse
) -> None:
    """Otherwise a wrong mask could pass."""
    model = make_model("llama")
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)
    if tf32 is not None:
        monkeypatch.setenv("MLX_ENABLE_TF32", tf32)
    a_gpu(told)
    assert batch_kinds._tolerance(model) == (batch_kinds._COARSE if is_coarse else batch_kinds._TOLERANCE)


def test_a_model_that_deviates_by_more_than_rounding_fails_its_trial(make_model) -> None:
    model = make_model("llama")
    most = batch_kinds._tolerance(model)
    passed = [one for one in (most / 2, most, math.nan) if batch_kinds._fits(model, "share", lambda: one)]  # noqa: B023
    assert passed == [most / 2]


def test_stored_trials_are_valid_on_the_same_gpu_and_system_only(a_gpu, monkeypatch, make_model) -> None:
    """Another chip has other kernels, and so may have another macOS."""
    model, keys = loaded(make_model("llama")), set()
    for told in (M1, M4, M5, {**M5, "device_name": "Apple M5 Pro"}, H200):
        a_gpu(told)
        keys |= {trial_key(model, ""), trial_key(model, "")}
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.2", ("", "", ""), "arm64"))
    keys.add(trial_key(model, ""))
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert len(keys | {trial_key(model, "")}) == 7


def test_a_failed_model_trial_is_repeated(path: Path) -> None:
    assert Trials(path, "model").way("merge", lambda: None, 2) is None
    assert Trials(path, "model").way("merge", lambda: 1, 2) == 1


@pytest.mark.parametrize("content", ["", "[]", "{not json", '{"model": 3}', "[" * 100_000])
def test_a_broken_file_of_trial_results_counts_as_empty_and_is_replaced(path: Path, content: str) -> None:
    path.write_text(content)
    assert Trials(path, "model").way("merge", lambda: 1, 2) == 1
    assert Trials(path, "model").way("merge", never, 2) == 1


@pytest.mark.parametrize("way", [2, -1, True, "1", None, 1.0])
def test_a_model_trial_with_an_invalid_stored_result_runs_again(path: Path, way: object) -> None:
    path.write_text(json.dumps({"model": {"merge": way}}))
    assert Trials(path, "model").way("merge", lambda: 0, 2) == 0


@pytest.mark.parametrize("trial", ["share", "sketches"])
def test_a_trial_in_which_the_gpu_fails_says_nothing_of_the_model(
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


def test_the_file_of_trial_results_has_at_most_sixteen_models_among_them_the_latest(path: Path) -> None:
    for i in range(40):
        Trials(path, f"model {i}").way("merge", lambda: 0, 2)
    assert len(json.loads(path.read_text())) == 16
    assert Trials(path, "model 39").way("merge", never, 2) == 0


def test_the_model_tried_longest_ago_is_dropped_from_the_file_of_trial_results(path: Path) -> None:
    for i, name in [*((i, "merge") for i in range(16)), (0, "share"), (16, "merge")]:
        Trials(path, f"model {i}").way(name, lambda: 0, 2)
    assert [*json.loads(path.read_text())] == [f"model {i}" for i in (*range(2, 16), 0, 16)]


def test_a_model_trial_returns_its_result_although_it_cannot_be_stored(tmp_path: Path) -> None:
    assert Trials(tmp_path / "missing" / "trials.json", "model").way("merge", lambda: 1, 2) == 1


def test_a_trial_whose_result_is_shipped_with_turnkeep_does_not_run(path: Path) -> None:
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
def test_the_shipped_results_of_batching_trials_equal_those_of_new_ones_on_the_packaged_model(
    packaged_folder: Path, path: Path
) -> None:
    """If it fails after an update of MLX or mlx-lm, or for another packaged model, change `SHIPPED`.

    The trials run in a new process, as in a worker: their key depends on the imported modules of mlx-lm.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "protocol")))}
    command = [sys.executable, "-P", "-c", TRY, str(packaged_folder), str(path)]
    subprocess.run(command, env=environment, check=True)
    assert json.loads(path.read_text()) == SHIPPED
