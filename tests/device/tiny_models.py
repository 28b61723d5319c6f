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
from worker.batch.drafter import Lookup
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


def _all(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, value)


#: The fields of all architectures; each reads those that it knows.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **_all(32, "hidden_size", "expert_ffn_hidden_size", "shared_intermediate_size", "mamba_d_ssm"),
    **_all(64, "intermediate_size", "intermediate_size_mlp", "ffn_hidden_size"),
    **_all(16, "moe_intermediate_size", "shared_expert_intermediate_size"),
    **_all(2, "num_hidden_layers", "num_layers"),
    **_all(1e-5, "rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    **_all(False, "attention_bias", "use_bias", "mamba_proj_bias"),
    **_all(True, "use_conv_bias", "mamba_conv_bias", "use_qk_norm", "mla_scale_q_lora", "mla_scale_kv_lora"),
    **_all(1.0, "logits_scaling", "residual_multiplier", "routed_scaling_factor"),
    # Attention, plain, latent and linear
    **_all(4, "num_attention_heads", "linear_num_value_heads"),
    **_all(2, "num_key_value_heads", "linear_num_key_heads"),
    **_all(8, "head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "attention_chunk_size"),
    **_all(8, "linear_key_head_dim", "linear_value_head_dim"),
    **_all(3, "linear_conv_kernel_dim", "conv_kernel", "conv1d_width", "mamba_d_conv"),
    **_all(None, "rope_scaling", "q_lora_rank"),
    **_all(12, "attention_window_size"),
    "sliding_window_layers": [0, 2],
    "partial_rotary_factor": 0.5,
    "attention_multiplier": 0.35,
    "logits_soft_cap": 30.0,
    "attention_method": "MLA",
    "kv_lora_rank": 16,
    # Experts
    **_all(4, "num_experts", "num_local_experts", "n_routed_experts"),
    **_all(2, "num_experts_per_tok", "moe_topk", "interleave_moe_layer_step"),
    **_all(1, "n_shared_experts", "zero_expert_num", "first_k_dense_replace", "decoder_sparse_step"),
    "zero_expert_type": "identity",
    "mlp_only_layers": [],
    # Recurrent states
    **_all(8, "num_heads", "mamba_d_head", "mamba_d_state"),
    **_all(4, "n_groups", "mamba_n_heads"),
    **_all(16, "state_size", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"),
    "conv_window": 2,
    "time_step_rank": "auto",
    "block_types": ["recurrent", "recurrent", "attention"],
}
_ROTARY = {"rope_theta": 10000.0, "max_position_embeddings": 2048}
_LARGER = {"hidden_size": 64, "intermediate_size": 128}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "exaone4": {
        **_COMMON,
        **_ROTARY,
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
        "sliding_window": 8,
        "sliding_window_pattern": "LLGL",
    },
    "mamba2": {
        **_COMMON,
        **_LARGER,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "time_step_limit": (0.0, 100.0),
    },
    "rwkv7": {**_COMMON, **_LARGER, "head_dim": 32},
    "recurrent_gemma": {
        **_COMMON,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    },
    "baichuan_m1": {**_COMMON, "num_hidden_layers": 3, "rope_theta": 10000.0, "sliding_window": 12},
}


#: Models that no test of single sessions needs: attention of their own making, hybrids, chunks.
OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": _COMMON,
    "deepseek_v3": {**_COMMON, "num_hidden_layers": 3, "num_key_value_heads": 4},
    "qwen3_next": {**_COMMON, **_ROTARY, "num_hidden_layers": 4},
    "falcon_h1": {**_COMMON, "rope_theta": 10000.0},
    "gemma3_text": {**_COMMON, "num_hidden_layers": 4, "sliding_window": 12, "sliding_window_pattern": 3},
    "gpt_oss": {**_COMMON, "sliding_window": 12, "rope_theta": 10000},
    "llama4": {
        "text_config": {
            **_COMMON,
            **_ROTARY,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
        }
    },
    "granitemoehybrid": {
        **_COMMON,
        "num_hidden_layers": 3,
        "max_position_embeddings": 2048,
        "embedding_multiplier": 1.0,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
    },
    "longcat_flash": {
        **_COMMON,
        **_ROTARY,
        "kv_lora_rank": 32,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
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
