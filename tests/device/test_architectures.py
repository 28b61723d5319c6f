"""Each architecture uses the rotary settings of its config.json, or is refused; their table is right."""

from __future__ import annotations

import csv
from typing import Any

import mlx.core as mx
import pytest
from architectures import FAMILIES, TABLE, build, configuration, run, table
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import prompt

from worker.models import positions
from worker.models.model_files import ModelError

#: Architectures that have no rotary positions.
UNROTATED = {"gpt2", "gpt_bigcode", "mamba2", "rwkv7"}
#: mlx-lm rotates `FIXED` by a fixed base; for `NEED_NEWER` it reads only the field `rope_parameters`.
FIXED = {"plamo2", "recurrent_gemma"}
NEED_NEWER = {"qwen3_5", "qwen3_5_moe"}
#: Of each way to read the settings; the others change with the packages alone.
USUAL = {"gemma3_text", "gpt2", "llama", "llama4", "mistral3", "phi3", "plamo2", "qwen3_5"}
THETA = 500_000.0
LENGTH = {"original_max_position_embeddings": 16}
#: Each changes the logits of the prompt in `said`.
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **LENGTH,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, **LENGTH},
    "longrope": {
        "rope_type": "longrope",
        **dict.fromkeys(("short_factor", "long_factor"), 3.0),
        **dict.fromkeys(("short_mscale", "long_mscale"), 1.5),
        **LENGTH,
    },
}


def said(family: str, **fields: Any) -> mx.array | None:
    """Return the logits of a model whose config.json has only these rotary fields; None if it is refused.

    It is refused by a `ModelError`, or by an error of mlx-lm, which `load` turns into a `ModelError`.
    """
    config = configuration(family)
    inner = family in {"mistral3", "llama4"}
    if not inner:
        del config["text_config"]
    text = config["text_config"] if inner else config
    for name in ("rope_theta", "rope_scaling", "rope_parameters"):
        text.pop(name, None)
    text |= {"rope_scaling": None} | fields  # some architectures take no folder without the field
    config |= positions.translate(config)
    try:
        model = build(family, config)
        positions.check(model, config)
    except (ModelError, ValueError, KeyError, TypeError):
        return None
    return run(model, make_prompt_cache(model), prompt(24))


def same(one: mx.array | None, other: mx.array | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(mx.allclose(one, other, atol=1e-6))


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=() if one in USUAL else pytest.mark.packaging) for one in FAMILIES],
)
def test_a_config_with_rope_parameters_gives_the_same_logits_as_one_with_the_older_rope_theta(
    family: str,
) -> None:
    usual = said(family, rope_theta=10_000.0)
    newer = said(family, rope_parameters={"rope_type": "default", "rope_theta": THETA})
    older = said(family, rope_theta=THETA)
    if family in UNROTATED:
        assert same(newer, usual)
        return
    assert usual is not None or family in NEED_NEWER
    assert newer is None or not same(newer, usual)
    assert same(newer, older) or (older is None and family in NEED_NEWER)
    assert newer is not None or family in FIXED


@pytest.mark.packaging
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in UNROTATED])
def test_a_rope_scaling_of_a_model_config_gives_the_same_logits_under_the_older_and_newer_field_names(
    family: str, scaling: dict[str, Any]
) -> None:
    parameters = {"rope_type": "default", "rope_theta": THETA}
    plain = said(family, rope_parameters=parameters)
    newer = said(family, rope_parameters=parameters | scaling)
    assert newer is None or not same(newer, plain)
    if family not in NEED_NEWER:
        older = said(family, rope_theta=THETA, rope_scaling=scaling)
        assert same(newer, older)
        oldest = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
        assert same(older, said(family, rope_theta=THETA, rope_scaling=oldest))


@pytest.mark.packaging
def test_the_architecture_table_of_the_documentation_matches_the_batching_self_test_results() -> None:
    """If this fails, write the table again: python tests/device/architectures.py."""
    assert table() == [*csv.reader(TABLE.read_text().splitlines())]
