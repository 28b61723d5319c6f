"""Draw `docs/sinks.svg`: perplexity over a book, with all KV, with a window, and with sinks and a window.

    apt-get install jargon-text
    .venv/bin/python docs/draw_sinks.py /usr/share/doc/jargon-text/jargon.txt.gz sinks.jsonl

As figure 3 of arXiv 2309.17453, with the worker's own caches and attention, of the packaged model or
`TURNKEEP_MODEL`. Of the text only paragraphs of 100 characters and more are taken, half of them letters (no
headings, no tables), each as one line. A record that exists is drawn as it is.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import math
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from figures import INK, axes
from figures import LINES as COLOURS

from worker.models import blas

blas.preload()  # before anything imports MLX

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from cache.kv import layers  # noqa: E402
from cache.names.policy import FULL, Policy  # noqa: E402
from worker.batch.forward import Forward  # noqa: E402
from worker.batch.parts import OwnPart  # noqa: E402
from worker.device import machine  # noqa: E402
from worker.models import model as models  # noqa: E402
from worker.process import setting_sources  # noqa: E402

TOKENS: Final = 50_000
PIECE, POINT = 128, 1024  # tokens of a pass, and of a point of the picture
ROWS = (0, 1024, 2048, 4096, 8192, 10_240, 12_288, 16_384, 32_768, TOKENS)
#: Of each line its policy, and the tokens that it gets.
LINES: Final[dict[str, tuple[Policy, int]]] = {
    "4 sinks and a window of 1,020": (Policy(4, 1020), TOKENS),
    "full attention": (FULL, 12_288),  # its memory and time grow
    "window of 1,024": (Policy(0, 1024), TOKENS),
}


def measure(text: str, record: Path) -> None:
    """Run the text under each policy; record sums of -log p as JSON lines."""
    chosen, dtype = setting_sources.load({}, os.environ), models.default_dtype()
    machine.prepare()
    loaded = models.load(models.resolve(chosen.model, chosen.data_dir, dtype=dtype), dtype=dtype)
    paragraphs = (" ".join(found.split()) for found in re.split(r"\n\s*\n", text))
    long = (found for found in paragraphs if len(found) >= 100)
    prose = "\n".join(found for found in long if len(re.findall("[a-z]", found)) > len(found) / 2)
    tokens = loaded.tokenizer.encode(prose, at_start=True)
    if len(tokens) <= TOKENS:
        raise SystemExit(f"the text has {len(tokens)} tokens; more than {TOKENS} are needed")
    forward = Forward(loaded.model)
    with record.open("w", encoding="utf-8") as file:
        print(json.dumps({"model": loaded.name, "context": loaded.context_tokens}), file=file)
        for name, (policy, most) in LINES.items():
            caches = layers.make(loaded.model, policy)
            for at in range(0, most, PIECE):
                piece = tokens[at : min(at + PIECE, most)]
                logits = np.array(forward([OwnPart(caches, at, len(piece))], piece).astype(mx.float32))
                logits -= logits.max(axis=-1, keepdims=True)
                right = logits[np.arange(len(piece)), tokens[at + 1 : at + 1 + len(piece)]]
                losses = np.log(np.exp(logits, out=logits).sum(axis=-1)) - right
                found = {"line": name, "at": at, "tokens": len(piece), "loss": float(losses.sum())}
                print(json.dumps(found), file=file, flush=True)


def perplexity(pieces: list[dict[str, Any]], start: int, end: int) -> float:
    """Return the perplexity of the tokens `[start, end)`, as far as they were measured; else nan."""
    some = [piece for piece in pieces if start <= piece["at"] < end] or [{"loss": math.nan, "tokens": 1}]
    return math.exp(sum(piece["loss"] for piece in some) / sum(piece["tokens"] for piece in some))


def draw(record: Path, picture: Path) -> None:
    """Draw a record, and print its table."""
    head, *pieces = map(json.loads, record.read_text("utf-8").splitlines())
    labels = {"xlabel": "position (tokens)", "ylabel": f"perplexity of {POINT:,} tokens"}
    with axes(picture, yscale="log", xlim=(0, TOKENS), **labels) as made:
        for name, (colour, _) in zip(LINES, COLOURS, strict=True):
            own = [piece for piece in pieces if piece["line"] == name]
            points = {at + POINT / 2: perplexity(own, at, at + POINT) for at in range(0, TOKENS, POINT)}
            made.plot([*points], [*points.values()], color=colour, label=name)
            rows = [f"{a:,}-{b:,}: {perplexity(own, a, b):,.1f}" for a, b in pairwise(ROWS)]
            print(name, *rows, sep="\n  ")  # noqa: T201  # the program's output
        made.axvline(head["context"], color=INK[0], linewidth=0.8, linestyle=":")
        made.text(head["context"], 0.03, " the model's context", transform=made.get_xaxis_transform())
        made.yaxis.set_minor_formatter("{x:,.0f}")


def main() -> None:
    """Measure, unless there is a record, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("text", type=Path, help="the book: UTF-8, or gzipped UTF-8 (.gz)")
    parser.add_argument("record", type=Path, help="what is measured, as JSON lines")
    given = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("matplotlib is not installed; pip install 'turnkeep[bench]'")
    if not given.record.exists():
        if not given.text.is_file():
            raise SystemExit(f"there is no {given.text}; apt-get install jargon-text, or name another text")
        written = given.text.read_bytes()
        measure((gzip.decompress(written) if given.text.suffix == ".gz" else written).decode(), given.record)
    draw(given.record, Path(__file__).with_name("sinks.svg"))
    mx.clear_streams()


if __name__ == "__main__":
    main()
