"""Configurations of tiny models, and plain reference loops that tests compare the device with."""

from __future__ import annotations

import importlib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from cache.names.tokens import as_tokens
from turnkeep_client.subjects import SessionKey
from worker.batch.batch_kinds import batch_for
from worker.batch.lookup import Lookup
from worker.batch.row_sampler import Draw, RowSampler, RowSampling
from worker.batch.rows import PrefillPiece, Row
from worker.batch.sampling import draw_all
from worker.batch.trials import Trials
from worker.device.request import TurnRequest
from worker.device.turn import DeviceTurn, TurnPlan
from worker.models.model import LoadedModel, cache_sizes
from worker.text.answer import Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

BLOCK = 8
VOCABULARY = 96
GREEDY = RowSampling()


def draw(logits: mx.array, sampling: RowSampling, index: int, seen: Iterable[int]) -> mx.array:
    """Draw one token from `logits`, (vocabulary,); return an unevaluated scalar."""
    return draw_all(logits[None], [Draw(sampling, index, [*dict.fromkeys(seen)])]).tokens[0]


_PLAIN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_PLAIN, "num_hidden_layers": 2},
    "exaone4": {
        **_PLAIN,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "sliding_window": 8,
        "sliding_window_pattern": "LLGL",
    },
    "mamba2": {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "conv_kernel": 3,
        "n_groups": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": "auto",
    },
    "rwkv7": {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "norm_eps": 1e-5,
        "head_dim": 32,
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    },
    "recurrent_gemma": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "attention_bias": False,
        "conv1d_width": 3,
        "logits_soft_cap": 30.0,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_window_size": 12,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "baichuan_m1": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "sliding_window": 12,
        "sliding_window_layers": [0, 2],
        "conv_window": 2,
        "rms_norm_eps": 1e-5,
    },
}


#: Models that no test of single sessions needs: attention of their own making, hybrids, chunks.
OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": {**_PLAIN, "num_hidden_layers": 2, "head_dim": 8},
    "deepseek_v3": {
        **_PLAIN,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "qwen3_next": {
        **_PLAIN,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 3,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [],
        "moe_intermediate_size": 16,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 2048,
    },
    "falcon_h1": {
        **_PLAIN,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "mamba_d_conv": 3,
        "mamba_d_head": 8,
        "mamba_d_ssm": 32,
        "mamba_d_state": 8,
        "mamba_n_heads": 4,
        "rope_theta": 10000.0,
    },
    "gemma3_text": {
        **_PLAIN,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "sliding_window": 12,
        "sliding_window_pattern": 3,
    },
    "gpt_oss": {
        **_PLAIN,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
        "rope_theta": 10000,
    },
    "llama4": {
        "text_config": {
            **_PLAIN,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "head_dim": 8,
            "attention_bias": False,
            "attention_chunk_size": 8,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 64,
            "max_position_embeddings": 2048,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "use_qk_norm": True,
        }
    },
    "granitemoehybrid": {
        **_PLAIN,
        "num_hidden_layers": 3,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.35,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 3,
        "mamba_n_groups": 2,
        "mamba_conv_bias": True,
    },
    "longcat_flash": {
        "vocab_size": VOCABULARY,
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 1,
        "num_layers": 2,
        "max_position_embeddings": 2048,
        "num_attention_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "attention_bias": False,
    },
}


#: Chunks of two blocks and more, whose tokens are stored like any other's.
OTHERS["llama4_chunks"] = {
    "model_type": "llama4",
    "text_config": {
        **OTHERS["llama4"]["text_config"],
        "attention_chunk_size": 4 * BLOCK,
        "hidden_size": 128,
        "head_dim": 32,
    },
}

#: Changes a model so that its KV can be quantised.
WIDE: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}


def build(kind: str, **changes: Any) -> Any:
    """Build a small random model of an architecture, with changed fields of its configuration."""
    config = {"model_type": kind, **(CONFIGS | OTHERS)[kind], **changes}
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(11)
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    # Livelier than the initial weights, so that every token depends on those before it.
    model.update(tree_map(lambda w: w + mx.random.normal(w.shape) * 0.2, model.parameters()))
    mx.eval(model.parameters())
    return model


class Endless:
    """A text stream without stop strings, for tests that check only tokens."""

    stop = None

    def push(self, token: int) -> str:
        return f"<{token}>"

    def spell(self, token: int) -> bytes:
        return f"<{token}>".encode()

    def finish(self) -> str:
        return ""


def loaded(model: Any) -> LoadedModel:
    return LoadedModel(
        model=model,
        tokenizer=None,  # type: ignore[arg-type]  # the device has no use for it
        config=vars(getattr(model, "args", model)),
        name="tiny",
        folder=Path(),
        kv=cache_sizes(model),
        context_tokens=2048,
        vocab_size=VOCABULARY,
        eos_ids=frozenset(),
        weight_bytes=0,
        sampling={},
    )


def answer(max_tokens: int, *forced: int) -> Answer:
    made = Answer(Endless(), max_tokens=max_tokens, max_bytes=2**30, end_tokens=frozenset())
    for token in forced:
        made.push(token)
    return made


def key(name: str = "s") -> SessionKey:
    return SessionKey("default", name)


class PassClock:
    """A simulated clock: each pass of a batch takes a second, plus `token_s` per draft token."""

    def __init__(self, token_s: float = 0.01) -> None:
        self.now_s = 0.0
        self._token_s = token_s

    def __call__(self) -> float:
        return self.now_s

    def count(self, batch: Any) -> Any:
        """Make the passes of a batch advance this clock; return the batch."""
        run = batch._run

        def timed(parts: Any, tokens: Any, pieces: Any = (), **more: Any) -> Any:
            self.now_s += 1.0 + self._token_s * (len(tokens) - len(parts))
            return run(parts, tokens, pieces, **more)

        batch._run = timed
        return batch


class Oracle(Lookup):
    """Drafts the tokens that will be drawn, as changed by the function `errs`."""

    def __init__(self, answers: Sequence[list[int]], errs: Callable[[list[int]], list[int]]) -> None:
        self._answers = answers
        self._errs = errs

    def num_missing(self, row: Row) -> int:
        return 0

    def propose(self, wanted: Mapping[Row, int]) -> dict[Row, list[int]]:
        drafts = {}
        for row, most in wanted.items():
            at = row.sampler.num_drawn
            answer = next(one for one in self._answers if one[:at] == list(row.known[-at:]))
            drafts[row] = self._errs(answer[at : at + most])
        return drafts


class Remembered(Trials):
    """The results of one model's trials, in memory."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, int] = {}
        self._shipped = self._found

    def _keep(self, name: str, way: int) -> None:
        self._found[name] = way


_remembered: dict[tuple[int, str], tuple[Any, Remembered]] = {}


def tried(model: Any, where: str = "") -> Trials:
    """Return a model's trials, each of which runs once in this process for each `where`.

    Give another `where` if the trials themselves are changed.
    """
    _, trials = _remembered.setdefault((id(model), where), (model, Remembered()))
    return trials


def batched(model: Any, *room: Callable[[int], bool], where: str = "", **options: Any) -> Any:
    """Make a batch; the model's trials run only for its first batch (see `tried`)."""
    return batch_for(model, *room, trials=tried(model, where), **options)


def drafting(model: Any, most: int, *, token_s: float = 0.01, **options: Any) -> Any:
    """Make a batch that drafts up to `most` tokens, with a simulated clock by which drafts pay."""
    clock = PassClock(token_s)
    return clock.count(batched(model, max_draft=most, clock=clock, **options))


def prompt(num_tokens: int, salt: int = 3) -> list[int]:
    return [(i * i * 7 + i * salt + salt) % VOCABULARY for i in range(num_tokens)]


def append(context: Sequence[int], *, name: str = "s", tenant: str = "default", **more: Any) -> DeviceTurn:
    """Return an append's turn; `more` are fields of its request, of its plan, or of the turn."""
    planned = {field.name: more.pop(field.name) for field in fields(TurnPlan) if field.name in more}
    handed = {name: more.pop(name) for name in ("restored", "num_granted") if name in more}
    request = TurnRequest(SessionKey(tenant, name), as_tokens(context), **more)
    return DeviceTurn(request, TurnPlan(**planned), **handed)


def generate(
    context: Sequence[int],
    num_tokens: int,
    sampling: RowSampling = GREEDY,
    **more: Any,
) -> DeviceTurn:
    """Return a generate's turn; `more` is what `append` takes."""
    return append(context, answer=answer(num_tokens), sampling=sampling, **more)


def alone(
    model: Any,
    context: Sequence[int],
    num_tokens: int,
    sampling: RowSampling = GREEDY,
    *,
    block: int = BLOCK,
) -> tuple[list[int], list[Any]]:
    """Answer with a plain loop over the model, prefill in blocks; return the tokens and the caches."""
    caches = make_prompt_cache(model)
    prefill(model, caches, context[:-1], block=block)
    seen, last, tokens = set(context), context[-1], []
    for index in range(num_tokens):
        logits = model(mx.array([[last]]), cache=caches)[0, -1]
        last = int(draw(logits, sampling, index, seen).item())
        tokens.append(last)
        seen.add(last)
    return tokens, caches


def prefill(model: Any, caches: list[Any], tokens: Sequence[int], *, block: int = BLOCK) -> None:
    for start in range(0, len(tokens), block):
        model(mx.array([list(tokens[start : start + block])]), cache=caches)
        mx.eval([cache.state for cache in caches])


def begin(model: Any, tokens: list[int], sampling: RowSampling = GREEDY) -> PrefillPiece:
    """Prefill all but the last token; return a piece that runs the last one and starts the answer's row."""
    caches = make_prompt_cache(model)
    prefill(model, caches, tokens[:-1])
    row = Row(caches, tokens.copy(), RowSampler(sampling, prompt=tokens), len(tokens), 1000)
    return PrefillPiece(caches, len(tokens) - 1, tokens[-1:], row)


def kv(caches: list[Any], num_tokens: int) -> np.ndarray:
    """Return keys and values of the first tokens of plain caches as one array."""
    return np.stack(
        [np.array(part[0, :, :num_tokens]) for cache in caches for part in (cache.keys, cache.values)]
    )
