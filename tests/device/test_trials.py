"""Trials find out how a model's rows can run together; the results of passed ones are stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from worker.batch.trials import SHIPPED, Trials

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


def test_the_file_of_trial_results_has_at_most_sixteen_models_among_them_the_latest(path: Path) -> None:
    for i in range(40):
        Trials(path, f"model {i}").way("merge", lambda: 0, 2)
    assert len(json.loads(path.read_text())) == 16
    assert Trials(path, "model 39").way("merge", never, 2) == 0


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
def test_the_shipped_trial_results_match_the_packaged_models_trials(
    packaged_folder: Path, path: Path
) -> None:
    """If it fails after an update of MLX or mlx-lm, or for another packaged model, change `SHIPPED`.

    The trials run in a new process, as in a worker: their key depends on the imported modules of mlx-lm.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "protocol")))}
    command = [sys.executable, "-P", "-c", TRY, str(packaged_folder), str(path)]
    subprocess.run(command, env=environment, check=True)
    assert json.loads(path.read_text()) == SHIPPED
