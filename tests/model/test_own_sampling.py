"""The sampling options in generation_config.json of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from worker.models.own_sampling import own_sampling


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ({"eos_token_id": 2}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": None}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 40}, {"temperature": 0.0, "top_k": 40}),
        ({"temperature": -1, "top_p": "x", "top_k": 1.5, "min_p": [], "repetition_penalty": 0}, {}),
    ],
)
def test_sampling_options_of_a_model_folder_are_read_and_invalid_ones_left_out(
    tmp_path: Path, config: dict[str, object], own: dict[str, float]
) -> None:
    assert own_sampling(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert own_sampling(tmp_path) == own
