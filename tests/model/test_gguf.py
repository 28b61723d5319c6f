"""GGUF files of each family become model folders with equal weights and tokens, or raise a clear error."""

from __future__ import annotations

import json
import shutil
import struct
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from safetensors.numpy import load_file
from tiny_gguf import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, TinyLlama, weights

from worker.models import gguf_file, gguf_model, model
from worker.models.gguf_family import mlx_name, quantisation_of
from worker.models.model_files import ModelError, read_json
from worker.models.tokenizer import Tokenizer

KINDS = [
    Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0,
    Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS,
]  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def convert(path: Path, dtype: str = "float32") -> Path:
    return gguf_model.convert(path, path.parent / "models", dtype=dtype)


def nothing_is_left(path: Path) -> bool:
    return {entry.name for entry in (path.parent / "models").iterdir()} == {".lock"}


def loaded(path: Path) -> model.LoadedModel:
    return model.load(convert(path), dtype="float32")


def logits(found: model.LoadedModel, tokens: list[int]) -> np.ndarray:
    return np.array(found.model(mx.array([tokens]))[0])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_weights_converted_from_gguf_equal_those_that_the_gguf_package_reads(
    path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_file, "_ROWS_BYTES", 100_000)  # several pieces for each matrix
    TinyLlama(kind=kind).write(path)
    converted = load_file(convert(path) / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert len(converted) == len(tensors)
    for name, gguf_name in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.self_attn.k_proj.weight": "blk.1.attn_k.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    }.items():
        tensor = tensors[gguf_name]
        np.testing.assert_array_equal(converted[name], dequantize(tensor.data, tensor.tensor_type))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_converted_from_gguf_are_rounded_to_the_requested_dtype(path: Path, dtype: str) -> None:
    tiny = TinyLlama()
    tiny.write(path)
    arrays = mx.load(str(convert(path, dtype) / "model.safetensors"))
    array = arrays["model.embed_tokens.weight"]
    assert str(array.dtype) == f"mlx.core.{dtype}"
    expected = mx.array(tiny.weights["token_embd.weight"]).astype(array.dtype)
    assert mx.array_equal(array, expected)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.F32, "float32"), (Kind.BF16, "bfloat16"), (Kind.Q4_0, "float16")]
)
def test_a_gguf_file_converted_with_dtype_keep_gets_the_dtype_nearest_to_its_own(
    path: Path, kind: Kind, dtype: str
) -> None:
    TinyLlama(kind=kind).write(path)
    assert read_json(convert(path, "keep") / "config.json")["torch_dtype"] == dtype


def test_a_gguf_conversion_of_weights_beyond_the_range_of_float16_is_refused_and_leaves_no_files(
    path: Path,
) -> None:
    tiny = TinyLlama()
    tiny.weights["token_embd.weight"][0, 0] = 1e6
    tiny.write(path)
    with pytest.raises(ModelError, match=r"token_embd\.weight has values beyond float16"):
        convert(path, "float16")
    assert nothing_is_left(path)


def hf_layout(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows of q or k weights from GGUF's layout, in pairs, to the Hugging Face layout."""
    pairs = values.reshape(heads, HEAD_DIM // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(values.shape)


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_converted_from_gguf_has_the_same_logits_as_its_weights_in_the_hugging_face_layout(
    path: Path, tied: bool
) -> None:
    """Covers grouped queries, rotary positions, tied and untied embeddings, and the norms' epsilon."""
    from mlx_lm.models import llama

    tiny = TinyLlama(weights(tied=tied))
    tiny.write(path)
    found = loaded(path)
    config = {**found.config, "rope_traditional": False}
    twin = llama.Model(llama.ModelArgs.from_dict(config))
    arrays = load_file(convert(path) / "model.safetensors")
    for name in arrays:
        if "q_proj" in name or "k_proj" in name:
            arrays[name] = hf_layout(arrays[name], HEADS if "q_proj" in name else KV_HEADS)
    twin.load_weights([(name, mx.array(array)) for name, array in arrays.items()])
    tokens = list(range(5, 25))
    np.testing.assert_allclose(logits(found, tokens), np.array(twin(mx.array([tokens]))[0]), atol=1e-4)
    assert found.config["tie_word_embeddings"] == tied
    assert found.config["rms_norm_eps"] == pytest.approx(1e-6)
    assert found.config["rope_theta"] == 50_000


def llama3_factors(factor: float) -> np.ndarray:
    """Compute each frequency's divisor as the converters do, case by case."""
    factors = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * np.pi * 50_000 ** (i / HEAD_DIM)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_the_llama_3_rope_factors_of_a_gguf_file_are_converted_to_rope_scaling_settings(path: Path) -> None:
    tiny = TinyLlama()
    TinyLlama({**tiny.weights, "rope_freqs.weight": llama3_factors(32)}).write(path)
    found = loaded(path)
    assert found.config["rope_scaling"]["rope_type"] == "llama3"
    frequencies = np.array(found.model.layers[0].self_attn.rope._freqs)
    expected = 50_000 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM) * llama3_factors(32)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        ({"type": "none"}, None),
    ],
    ids=["linear", "yarn", "none"],
)
def test_the_rope_scaling_of_a_gguf_file_is_the_same_in_the_converted_config(
    path: Path, fields: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    TinyLlama(fields={f"llama.rope.scaling.{name}": value for name, value in fields.items()}).write(path)
    found = loaded(path)
    assert found.config["rope_scaling"] == expected
    assert np.isfinite(logits(found, [1, 2, 3])).all()


def test_attention_biases_of_a_gguf_file_are_loaded_with_their_values(path: Path) -> None:
    tiny = TinyLlama()
    shapes = {"attn_q": HEADS * HEAD_DIM, "attn_k": KV_HEADS * HEAD_DIM, "attn_v": KV_HEADS * HEAD_DIM}
    biases = {
        f"blk.{i}.{part}.bias": np.arange(size, dtype=np.float32) + i
        for i in range(2)
        for part, size in {**shapes, "attn_output": HIDDEN}.items()
    }
    TinyLlama({**tiny.weights, **biases}).write(path)
    found = loaded(path)
    assert found.config["attention_bias"] is True
    for i, layer in enumerate(found.model.layers):
        for part, name in {"attn_q": "q_proj", "attn_v": "v_proj", "attn_output": "o_proj"}.items():
            assert np.array_equal(layer.self_attn[name].bias, biases[f"blk.{i}.{part}.bias"])


def test_the_folder_of_an_interrupted_gguf_conversion_is_removed_and_not_reused(path: Path) -> None:
    TinyLlama().write(path)
    folder = convert(path)
    unfinished = folder.with_name(".unfinished-" + folder.name)
    folder.rename(unfinished)
    assert convert(path) == folder
    assert not unfinished.exists()


def test_a_failed_gguf_conversion_leaves_no_files(path: Path) -> None:
    TinyLlama().write(path)

    def fail(_done: int, _of: int, what: str) -> None:
        if what == "converting weights":
            raise OSError("disk on fire")

    with pytest.raises(ModelError, match=r"cannot be converted into .*: disk on fire"):
        gguf_model.convert(path, path.parent / "models", dtype="float32", progress=fail)
    assert nothing_is_left(path)


def test_a_gguf_conversion_that_does_not_fit_on_the_disk_is_refused_with_the_needed_and_free_size(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TinyLlama().write(path)
    usage = shutil.disk_usage(path.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ModelError, match=r"needs [\d.]+ MiB in .*; it has 1000 B"):
        convert(path)


def forged_length() -> bytes:
    """Return a file whose only array claims to have 2**60 numbers."""
    field = struct.pack("<Q1sIIQ", 1, b"a", 9, 4, 2**60)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty; it must be a GGUF file with a model's weights$"),
        (b"GG", "truncated or not a GGUF"),
        (b"PK\x03\x04 a zip file, say", "does not start with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not one of"),
        (forged_length(), "ends at byte .*, inside a value"),
    ],
    ids=["empty", "short", "zip", "version", "forged"],
)
def test_a_gguf_file_that_is_empty_truncated_or_in_another_format_is_refused_with_the_reason(
    path: Path, content: bytes, complaint: str
) -> None:
    path.write_bytes(content)
    with pytest.raises(ModelError, match=complaint):
        convert(path)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5, 0.999])
def test_a_truncated_gguf_file_is_refused_in_one_line(path: Path, share: float) -> None:
    TinyLlama().write(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match="truncated") as caught:
        convert(path)
    assert "\n" not in str(caught.value)


TINY = TinyLlama()
ODD = {
    "architecture": (
        TinyLlama(architecture="phi3"),
        "architecture 'phi3'; GGUF files of the families gemma3, .* usually named mlx-community/tiny-4bit",
    ),
    "tokenizer": (TINY.but(tokenizer__ggml__model="t5"), "a 't5' tokenizer; gpt2 and llama"),
    "pre": (TINY.but(tokenizer__ggml__pre="gpt-9"), "pre-tokenizer 'gpt-9' is unknown"),
    "merges": (TINY.but(tokenizer__ggml__merges=["no such"]), "merges do not fit its tokens"),
    "eos": (TINY.but(tokenizer__ggml__eos_token_id=999), "eos token id is 999; it must be below 320"),
    "heads": (TINY.but(llama__attention__head_count=None), r"no single value for llama\.attention\.head_c"),
    "kv": (TINY.but(llama__attention__head_count_kv=[2, 4]), r"for llama\.attention\.head_count_kv"),
    "type": (TINY.but(llama__context_length="long"), r"llama\.context_length = 'long'; it must be"),
    "rope": (TINY.but(llama__rope__dimension_count=16), "rotates 16 of 32 dimensions"),
    "scaling": (
        TINY.but(llama__rope__scaling__type="longrope", llama__rope__scaling__factor=2.0),
        "scales rope by 'longrope'",
    ),
    "missing": (
        TinyLlama({name: array for name, array in TINY.weights.items() if "blk.1.ffn_up" not in name}),
        r"lacks the tensor for model\.layers\.1\.mlp\.up_proj\.weight \(1 missing",
    ),
    "layers": (TINY.but(llama__block_count=2**31), "lacks the tensor for model.layers.2"),
    "experts": (
        TinyLlama({**TINY.weights, "blk.0.ffn_gate_inp.weight": np.ones((4, HIDDEN), np.float32)}),
        r"a tensor blk\.0\.ffn_gate_inp\.weight, which a dense llama",
    ),
    "factors": (
        TinyLlama({**TINY.weights, "rope_freqs.weight": np.linspace(1, 2, 16, dtype=np.float32)}),
        "rope factors that are not Llama 3's",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_gguf_file_with_an_unsupported_architecture_or_missing_tensor_is_refused_in_one_line(
    path: Path, name: str
) -> None:
    tiny, complaint = ODD[name]
    tiny.write(path)
    with pytest.raises(ModelError, match=complaint) as caught:
        convert(path)
    assert "\n" not in str(caught.value)


def test_a_gguf_file_whose_special_token_ids_name_no_token_is_converted_without_those_special_tokens(
    path: Path,
) -> None:
    none = 2**32 - 1
    TINY.but(tokenizer__ggml__padding_token_id=320, tokenizer__ggml__unknown_token_id=none).write(path)
    config = json.loads((convert(path) / "tokenizer_config.json").read_text())
    assert "eos_token" in config
    assert config.keys().isdisjoint({"unk_token", "pad_token"})


@pytest.fixture(scope="module")
def sound_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY.write(tmp_path_factory.mktemp("fuzz") / "tiny.gguf")


@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_gguf_file_with_a_changed_byte_is_converted_or_refused_without_a_crash(
    sound_file: Path, where: float, flip: int
) -> None:
    """The header is accepted or refused with a `ModelError`; nothing else is raised and nothing hangs."""
    content = bytearray(sound_file.read_bytes())
    start = content.index(b"blk.1.ffn_down.weight")  # the header of the last tensor: values follow it
    content[int(where * start)] ^= flip
    broken = sound_file.with_name("broken.gguf")
    broken.write_bytes(content)
    try:
        gguf_model._prepare(broken, "float32")
    except ModelError as error:
        complaint = str(error)
        assert "\n" not in complaint


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", " x", "!", "\n\n"]),
        ("gpt-2", ["It", "'s", " 1234", " x", "!", "\n\n"]),
        (None, ["It", "'s", " 1234", " x", "!", "\n\n"]),
        ("llama-bpe", ["It", "'s", " ", "123", "4", " x", "!\n\n"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", " x", "!\n\n"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", " x", "!\n\n"]),
    ],
)
def test_text_is_split_by_the_pre_tokenizer_that_the_gguf_file_names(
    path: Path, pre: str | None, pieces: list[str]
) -> None:
    TINY.but(tokenizer__ggml__pre=pre).write(path)
    rust = Tokenizer.from_folder(convert(path))._rust
    found = [piece for piece, _ in rust.pre_tokenizer.pre_tokenize_str("It's 1234 x!\n\n")]
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece in found] == pieces


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("smollm", False)])
def test_a_bos_token_is_added_only_if_the_pre_tokenizer_of_the_gguf_file_requires_it(
    path: Path, pre: str, adds: bool
) -> None:
    TINY.but(tokenizer__ggml__pre=pre).write(path)
    tokenizer = Tokenizer.from_folder(convert(path))
    assert (tokenizer.encode("The", at_start=True)[0] == 317) == adds
    assert tokenizer.encode("The", at_start=False)[0] != 317
    assert tokenizer.encode("<s>The", at_start=True).count(317) == 1


COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rope_theta": 50_000.0,
}
#: For each family: mlx-lm's model and configuration, and the GGUF fields with the same values.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2", {"num_hidden_layers": 2, "tie_word_embeddings": False}, {}),
    "qwen3": (
        "qwen3",
        {"num_hidden_layers": 2, "tie_word_embeddings": True, "head_dim": 64},
        {"attention.key_length": 64},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 16,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "block_count": 7,
            "attention.key_length": 64,
            "attention.sliding_window": 16,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
}


def twin(kind: str, config: dict[str, Any]) -> tuple[Any, dict[str, mx.array]]:
    """Make mlx-lm's model with random weights; return the model, and the weights by their names."""
    module = import_module(f"mlx_lm.models.{kind}")
    made = module.Model(module.ModelArgs.from_dict({"model_type": kind, **COMMON, **config}))
    mx.random.seed(3)
    tied = config.get("tie_word_embeddings", True)
    drawn = {
        name: mx.random.normal(array.shape) * 0.1
        for name, array in tree_flatten(made.parameters())
        if not (tied and name.startswith("lm_head"))
    }
    made.load_weights([*made.sanitize(dict(drawn)).items()])
    return made, drawn


@pytest.mark.parametrize("family", CASES)
def test_a_converted_gguf_model_computes_the_same_logits_as_mlx_lm_with_the_same_weights(
    tmp_path: Path, family: str
) -> None:
    kind, config, fields = CASES[family]
    original, drawn = twin(kind, config)
    names = get_tensor_name_map(MODEL_ARCH[family.upper()], 7)  # the table of the usual converters
    weights = {str(names.get_name(name, (".weight", ".bias"))): np.array(drawn[name]) for name in drawn}
    if family == "gemma3":  # the usual converter adds 1
        weights |= {name: array + 1 for name, array in weights.items() if name.endswith("norm.weight")}
    written = {f"{family}.{name}": value for name, value in fields.items()}
    path = TinyLlama(weights, architecture=family, fields=written).write(tmp_path / "tiny.gguf")
    found = model.load(gguf_model.convert(path, tmp_path / "models", dtype="float32"), dtype="float32")
    tokens = mx.array([[*range(5, 45)]])  # more than the window
    np.testing.assert_allclose(np.array(found.model(tokens)), np.array(original(tokens)), atol=2e-4)
    assert found.context_tokens == 512


def test_gemma_3_with_62_layers_scales_queries_by_its_hidden_size_per_head(tmp_path: Path) -> None:
    fields = {
        "general.architecture": "gemma3",
        "gemma3.block_count": 62,
        "gemma3.attention.sliding_window": 8,
    }
    file = gguf_file.GgufFile(tmp_path, fields, {})
    assert gguf_model._gemma3(file, 5376 // 32, 128)["query_pre_attn_scalar"] == 168


def test_a_run_of_spaces_becomes_one_token_if_the_gemma_vocabulary_of_the_gguf_file_has_that_token(
    tmp_path: Path,
) -> None:
    """Gemma's tokenizer matches such tokens before it merges, after it has replaced the spaces."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *bytes_, "\u2581", "a", "b", "ab", "\u2581ab"]
    tokens += ["\u2581" * 2, "\u2581" * 3, "\n\n", "<turn>"]
    kinds = [3, 3, 3, 2, *[6] * 256, *[1] * 5, *[4] * 3, 3]
    kinds += [1] * (320 - len(tokens))
    tokens += [f"<more{i}>" for i in range(320 - len(tokens))]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [-float(i) for i in range(320)],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }
    path = TinyLlama(fields=fields).write(tmp_path / "tiny.gguf")
    tokenizer = Tokenizer.from_folder(gguf_model.convert(path, tmp_path / "models", dtype="float32"))
    text = "ab ab   b\n\na<turn>"
    ids = tokenizer.encode(text, at_start=True)
    assert [tokens[i] for i in ids] == [
        *("<bos>", "ab", "\u2581ab", "\u2581" * 3, "b", "\n\n", "a", "<turn>"),
    ]
    assert tokenizer.decode(ids[1:]) == text


@pytest.mark.parametrize(
    ("file", "quantisation", "name"),
    [
        ("Qwen3-4B-Instruct-2507-Q4_K_M", "Q4_K_M", "mlx-community/Qwen3-4B-Instruct-2507-4bit"),
        ("phi-4.q8_0", "Q8_0", "mlx-community/phi-4-8bit"),
        ("gpt-oss-20b-UD-Q6_K_XL", "Q6_K_XL", "mlx-community/gpt-oss-20b-6bit"),
        ("olmo-2-1b-bf16", "BF16", "mlx-community/olmo-2-1b-bf16"),
        ("plain", "plain", "mlx-community/plain-4bit"),
    ],
)
def test_a_gguf_file_name_gives_the_quantisation_and_the_usual_mlx_model_name(
    file: str, quantisation: str, name: str
) -> None:
    assert quantisation_of(file) == quantisation
    assert mlx_name(f"org/{file}.gguf") == name
