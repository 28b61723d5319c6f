"""The command `turnkeep bench quality`."""

from __future__ import annotations

from pathlib import Path

import click

from bench.old.options import COUNT, conduct, corpus_of, recording, saying

SMOKE_TEXT = Path(__file__).parents[2] / "lighthouse.txt"
SMOKE_WINDOW = 64
SMOKE_WINDOWS = 2
SMOKE_ANSWER = 6
SMOKE_ANSWERS = 1


@click.command()
@recording
@click.option("--model", metavar="NAME", help="The model. [default: packaged]")
@saying("The text: what its users say.", "mt-bench; a file of ours with --smoke")
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A file of text, in the place of a corpus.",
)
@click.option(
    "--window",
    type=click.IntRange(min=16),
    default=512,
    show_default=True,
    help="Tokens that are run together; the second half of them counts.",
)
@click.option("--windows", type=COUNT, default=16, show_default=True, help="How many of them, at the most.")
@click.option("--answer", type=COUNT, default=64, show_default=True, help="Tokens of an answer.")
@click.option("--answers", type=COUNT, default=16, show_default=True, help="How many of them, at the most.")
def quality(
    out: Path | None,
    smoke: bool,
    checkpoint: float,
    model: str | None,
    corpus: str | None,
    text: Path | None,
    window: int,
    windows: int,
    answer: int,
    answers: int,
) -> None:
    """KV in 8 and 4 bits beside full precision: perplexity, likeliest tokens, answers, and bytes.

    The model is run as a worker runs it, on a text that is cut into windows. An answer follows on the first
    half of a window, by the likeliest tokens; it counts up to the first token that differs.
    """
    from .measure import Plan, QualityBench, text_of

    if text is not None and corpus is not None:
        raise click.UsageError("--text takes the place of --corpus")
    if smoke:
        window, windows = min(window, SMOKE_WINDOW), min(windows, SMOKE_WINDOWS)
        answer, answers = min(answer, SMOKE_ANSWER), min(answers, SMOKE_ANSWERS)
        text = text or (SMOKE_TEXT if corpus is None else None)
    found = None if text is not None else corpus_of(corpus, smoke=False)
    name = text.name if found is None and text is not None else corpus or "mt-bench"
    plan = Plan(model, name, window, windows, answer, answers)
    conduct(QualityBench(plan, text_of(found, text), found), out=out, checkpoint_s=checkpoint)
