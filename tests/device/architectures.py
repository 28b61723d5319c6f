"""Builds tiny random models of mlx-lm's architectures, and a table of how a worker serves each of them.

    python tests/device/architectures.py    # writes docs/architectures.csv

Nearly all get the same configuration, with the fields of all architectures; each reads those that it knows.
"""

from __future__ import annotations

import copy
import csv
import importlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import structlog
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import CONFIGS, OTHERS, VOCABULARY, loaded, prompt

from cache.kv import layers
from cache.kv.arrays import TYPES
from cache.names.policy import Policy
from worker.batch.forward import Forward
from worker.batch.merged import MergedRows
from worker.device.runner import Runner
from worker.device.served_model import DeviceOptions

#: Fields of all kinds of configuration, for models of a few hundred kilobytes.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 128),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 2048),
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon"), 1e-5
    ),
    "head_dim": 32,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 0.5,
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "bias", "qkv_bias", "conv_bias"), False),
    **dict.fromkeys(("tie_word_embeddings", "tie_embeddings", "use_qk_norm", "use_conv_bias"), True),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "first_k_dense_replace", "n_group"), 1),
    **dict.fromkeys(("topk_group", "moe_layer_freq", "decoder_sparse_step"), 1),
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "sliding_window": 16,
    "sliding_window_pattern": 4,
    "use_sliding_window": False,
    "max_window_layers": 4,
    **dict.fromkeys(("logits_scaling", "residual_multiplier", "embedding_multiplier", "logit_scale"), 1.0),
    **dict.fromkeys(("routed_scaling_factor", "scale_depth", "scale_emb"), 1.0),
    "attention_multiplier": 0.35,
    "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "dim_model_base": 32,
    **dict.fromkeys(("hidden_act", "activation"), "silu"),
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "conv_L_cache": 3,
    "full_attn_idxs": [1, 3],
    "block_dim": 128,
    "block_ff_dim": 64,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: Made with the configuration above, or with their own of `tiny_models`.
FAMILIES = """
Klear bailing_moe cohere cohere2 deepseek deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe
exaone4 falcon_h1 gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_oss
granite granitemoe granitemoehybrid helium hunyuan_v1_dense internlm2 internlm3 lfm2 llama llama4
longcat_flash mamba2 mimo minicpm mistral3 mixtral nanochat nemotron olmo2 olmo3 olmoe phi phi3
phimoe plamo2 qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next recurrent_gemma rwkv7
seed_oss smollm3 solar_open starcoder2 telechat3
""".split()  # noqa: SIM905  # a list of so many lines tells less
#: Families with a configuration of `tiny_models`: their fields mean something else in other architectures.
THEIR_OWN = {"falcon_h1", "granitemoehybrid", "llama4", "longcat_flash", "mamba2", "recurrent_gemma", "rwkv7"}
CHANGES = {"exaone4": {"sliding_window_pattern": "LLGL"}}
BLOCK = 32
TABLE = Path(__file__).parents[2] / "docs" / "architectures.csv"
HEAD = ["architecture", "caches", "answers", "sink_window", "paged", "restored", "16 bits"]


@dataclass(frozen=True)
class Served:
    """How one architecture is served in one precision; `fault` says why it was not tried."""

    caches: str = ""
    together: str = ""
    window: bool = False
    paged: bool = False
    restored: bool = False
    fault: str = ""


def configuration(family: str) -> dict[str, Any]:
    config = {**((CONFIGS | OTHERS)[family] if family in THEIR_OWN else COMMON), **CHANGES.get(family, {})}
    config["model_type"] = family
    config.setdefault("text_config", {**config, "model_type": "llama"})
    return copy.deepcopy(config)


def build(family: str, config: dict[str, Any] | None = None) -> Any:
    architecture = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(11)
    model = architecture.Model(architecture.ModelArgs.from_dict(config or configuration(family)))
    # Livelier than the initial weights, so that every token depends on those before it.
    model.update(tree_map(_livelier, model.parameters()))
    mx.eval(model.parameters())
    return model


def _livelier(weights: mx.array) -> mx.array:
    return weights + mx.random.normal(weights.shape) * 0.2 if weights.dtype == mx.float32 else weights


def serve(model: Any) -> Served:
    """Find out how a worker would serve a model, and whether a restored session continues bit for bit."""
    try:
        run(model, make_prompt_cache(model), prompt(3))
    except RuntimeError as error:
        return Served(fault=str(error).partition("]")[0].strip("["))
    runner = Runner(
        loaded(model), lambda _: None, DeviceOptions(block_tokens=BLOCK, max_batch=4, stall_s=0.25)
    )
    batch = runner._batch
    shares, merges = isinstance(batch._run, Forward), isinstance(batch._keeping, MergedRows)
    together = "one pass" if shares else "merged" if merges else "one by one"
    together += ", windows merged" if shares and merges else ""
    return Served(
        caches=layers.describe(make_prompt_cache(model)),
        together=together,
        window=runner.served.refusal(Policy(4, 1024), has_disk=True) is None,
        paged=runner.served.refusal(Policy.paged(1024, sink=4), has_disk=True) is None,
        restored=runner.served.unsupported_cache is None and _is_restored(model),
    )


def run(model: Any, caches: list[Any], tokens: list[int]) -> mx.array:
    logits: mx.array = model(mx.array([tokens]), cache=caches)[0, -1]
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def _is_restored(model: Any) -> bool:
    """Say whether a session restored from KV that ends within a block continues with the same bits."""
    caches, tokens = make_prompt_cache(model), prompt(2 * BLOCK + 9)
    for start in range(0, len(tokens), BLOCK):
        run(model, caches, tokens[start : start + BLOCK])
    arrays = {
        cut.name: mx.array(np.frombuffer(cut.data, TYPES[cut.dtype][1]))
        .view(TYPES[cut.dtype][0])
        .reshape(cut.shape)
        for cut in layers.cut(caches, 0, len(tokens), at_end=True) or ()
    }
    mx.eval(arrays)
    other = layers.rebuild(arrays, make_prompt_cache(model), len(tokens))
    return all(
        bool(mx.array_equal(run(model, caches, more), run(model, other, more)))
        for more in ([1], [5], [7, 8, 9], *([token] for token in prompt(20, salt=5)))
    )


def table() -> list[list[str]]:
    """Return the table: the head, then a row for each architecture."""
    rows = [HEAD]
    for family in FAMILIES:
        model = build(family)
        wide = serve(model)
        model.set_dtype(mx.bfloat16)
        narrow = serve(model)
        same = replace(narrow, caches=wide.caches) == wide
        note = f"untested ({narrow.fault})" if narrow.fault else "" if same else str(narrow)
        marks = ("yes" if one else "no" for one in (wide.window, wide.paged, wide.restored))
        rows.append([family, wide.caches, wide.together, *marks, note or "as in 32"])
    return rows


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(table())
