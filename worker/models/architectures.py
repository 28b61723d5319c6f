"""Lists the cache policies that work with each mlx-lm architecture (results: docs/architectures.csv)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from turnkeep_client.messages import POLICIES

if TYPE_CHECKING:
    from collections.abc import Mapping

_FULL_ALONE: Final = """
cohere2 deepseek_v3 deepseek_v32 gemma2 glm4_moe_lite gpt2 gpt_bigcode hunyuan_v1_dense llama4
longcat_flash mamba2 nanochat plamo2 recurrent_gemma rwkv7
""".split()  # noqa: SIM905  # one name per line would be harder to read
_WITHOUT_RECALL: Final = ("falcon_h1", "granitemoehybrid", "lfm2", "qwen3_5", "qwen3_5_moe", "qwen3_next")
_WITH_ALL: Final = """
Klear bailing_moe cohere deepseek dots1 ernie4_5 ernie4_5_moe exaone4 gemma gemma3_text glm glm4 glm4_moe
gpt_oss granite granitemoe helium internlm2 internlm3 llama mimo minicpm mistral3 mixtral nemotron olmo2 olmo3
olmoe phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 telechat3
""".split()  # noqa: SIM905
_WITH_WINDOWS: Final = ("cohere2", "exaone4", "gemma3_text", "gpt_oss", "olmo3", "recurrent_gemma")
#: Architectures for which mlx-lm uses the code of another architecture.
_SAME: Final = {"mistral": "llama"}


def policies(architecture: str) -> tuple[str, ...] | None:
    """Return the cache policies that work with an architecture; None if it was never tested."""
    architecture = _SAME.get(architecture, architecture)
    if architecture in _FULL_ALONE:
        return ("full",)
    if architecture in _WITHOUT_RECALL:
        return ("full", "sink_window")
    return tuple(POLICIES) if architecture in _WITH_ALL else None


def window(config: Mapping[str, Any]) -> int | None:
    """Return the size in tokens of the layers' sliding windows; None if no layer has one."""
    found = config.get("sliding_window") or config.get("attention_window_size")
    return found if config.get("model_type") in _WITH_WINDOWS and isinstance(found, int) else None
