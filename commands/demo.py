"""`turnkeep demo`: a conversation that survives `kill -9`, in about a minute.

Starts `turnkeep serve` as a user would, talks to the worker through the client, kills it during an answer and
between two turns (it is started again by itself), and shows what each turn cost. With two workers, the second
one continues the answer of the killed one. Needs only an installed Turnkeep.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import click
from rich.console import Console
from rich.table import Table

from bench.local import LocalWorker
from worker.process.formatting import size
from worker.process.installed import program

from .nats_connection import interrupted_by_signals

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from turnkeep_client.client import Client
    from turnkeep_client.session import Session

KILL_AFTER_TOKENS: Final = 25
NOTES: Final = Path(__file__).with_name("lighthouse.txt")
HEAD: Final = ("turn", "KV from", "new", "cached", "prefilled", "1st token", "tokens/s")


class Demo:
    """The demo with one worker: a conversation, with kills and restarts of the worker."""

    def __init__(self, data_dir: Path, model: str | None, *options: str) -> None:
        self._console = Console(highlight=False)
        self._is_first = not data_dir.exists()
        self._data_dir = data_dir
        self._options = () if model is None else ("--model", model)
        self._worker = LocalWorker(data_dir, "--worker", "one", *self._options, *options)
        self._table = Table(title="What each turn cost", box=None, title_justify="left")
        for name in HEAD:
            self._table.add_column(
                name, justify="left" if name == "turn" else "right", max_width=20, no_wrap=True
            )
        self._position = 0
        self._gap_s = 0.0  # the longest pause between two chunks of the last answer

    async def run(self) -> None:
        """Start the worker, hold the conversation with its kills, and stop the worker."""
        self._say(f"Starting [bold]{program()} serve[/], a worker with its own NATS server")
        if self._is_first:
            self._console.print("The first start converts the model and tests it: about 20 s")
        self._worker.start()
        try:
            # A new tenant, so that a second run finds nothing in the cache.
            client = await self._worker.ready(f"demo-{uuid4().hex[:12]}")
            async with client:
                await self._play(client)
        finally:
            self._stop()
        kept = size(sum(one.stat().st_size for one in self._data_dir.rglob("*") if one.is_file()))
        self._console.print(f"\nIts files stay for the next run: rm -r {self._data_dir} frees {kept}")

    def _stop(self) -> None:
        self._worker.stop()

    async def _begin(self, session: Session) -> float:
        """Append `lighthouse.txt`, and ask a first question; return the prefill rate in tokens per second."""
        self._say("A system prompt of two pages, appended and prefilled ahead of the first question")
        with self._console.status("prefill"):
            notes = await session.append(messages=[{"role": "system", "content": NOTES.read_text("utf-8")}])
        self._row("(the notes)", "-", notes.position, notes.cached_tokens, notes.prefilled_tokens, "-", "-")
        await self._ask(session, "When was the lighthouse built?", 60)
        return notes.prefilled_tokens / notes.seconds

    async def _restart(self) -> str:
        await self._worker.kill_worker()
        self._say("[bold red]kill -9[/] in the middle of the answer. A new worker goes on with it:")
        return "SSD"

    async def _play(self, client: Client) -> None:
        session = client.session("lighthouse")
        rate = await self._begin(session)
        await self._ask(session, "Who was the first keeper?", 60)
        await self._ask(session, "Write a short poem about the lighthouse.", 120, kill=self._restart)
        self._say("Once more [bold red]kill -9[/], between two turns")
        await self._worker.kill_worker()
        tokens, prefilled, first_s = await self._ask(session, "Who was Agnes Holloway?", 40, source="SSD")
        self._console.print("\n", self._table)
        self._console.print(
            f"\nAfter the last restart {prefilled} of {tokens} tokens were prefilled, and the first token"
            f" came {first_s:.2f} s after the worker took the question up. Without the snapshots on SSD it"
            f" would have read the whole conversation again: about {tokens / rate:.1f} s at the {rate:.0f}"
            " tokens/s of the first turn, and more with every turn.\n\nYour turn, in two terminals:\n"
            f"  [bold]{program()} serve --gateway[/]\n  [bold]{program()} chat[/], or a coding agent:"
            f" [bold]{program()} launch pi[/]"
        )

    async def _ask(
        self,
        session: Session,
        question: str,
        most: int,
        *,
        source: str = "memory",
        kill: Callable[[], Awaitable[str]] | None = None,
    ) -> tuple[int, int, float]:
        """Ask and print the answer. Return its prompt tokens, those prefilled, and the first token's delay.

        `kill` is called after some tokens, and returns where the next worker finds the KV. `source` is where
        the KV is before.
        """
        self._console.print(f"\n[bold cyan]>[/] {question}")
        # Without the penalty, such a small model repeats itself.
        said = [{"role": "user", "content": question}]
        generation = session.generate(messages=said, max_tokens=most, repetition_penalty=1.1)
        tokens, self._gap_s, heard_s = 0, 0.0, 0.0
        async for chunk in generation:
            now_s = time.monotonic()
            self._gap_s, heard_s = max(self._gap_s, now_s - (heard_s or now_s)), now_s
            self._console.file.write(chunk.text)
            self._console.file.flush()
            tokens += len(chunk.tokens)
            if kill and tokens >= KILL_AFTER_TOKENS:
                source, kill = await kill(), None
        self._console.print()
        usage, seconds = generation.result.usage, generation.result.seconds
        decode_s = seconds.total - seconds.first_token
        rate = f"{(usage.completion_tokens - 1) / decode_s:.1f}" if decode_s > 0 else "-"
        # Not from usage: if a fast worker had sent the whole answer before the kill, no prompt was prefilled.
        context = generation.result.position - usage.completion_tokens
        costs = (context, usage.cached_tokens, usage.prefilled_tokens)
        self._row(question, source, *costs, f"{seconds.first_token:.2f} s", rate)
        return context, usage.prefilled_tokens, seconds.first_token

    def _row(self, what: str, source: str, context: int, cached: int, prefilled: int, *times: str) -> None:
        counts = map(str, (context - self._position, cached, prefilled))
        self._table.add_row(what, source, *counts, *times)
        self._position = context

    def _say(self, text: str) -> None:
        self._console.print(f"\n[bold green]==[/] {text}")


class ClusterDemo(Demo):
    """The demo with two workers on one NATS server: one is killed, and the other continues its answer."""

    def __init__(self, data_dir: Path, model: str | None) -> None:
        tier = ("--remote-tier", str(data_dir / "shared-kv"))
        super().__init__(data_dir, model, *tier)
        self._other = LocalWorker(data_dir / "two", "--worker", "two", *tier, beside=self._worker)

    def _stop(self) -> None:
        self._other.stop()
        super()._stop()

    async def _play(self, client: Client) -> None:
        self._say("Starting a second worker, on the NATS server of the first")
        self._other.start("--model", str(self._worker.model_folder))
        await self._other.until(lambda: asyncio.wait_for(anext(client.metrics("two")), 1))
        number, owner = 0, ""
        while owner != "two":  # with the first one its NATS server would end, too
            number += 1
            session = client.session(f"lighthouse-{number}")
            await session.open()
            owner = (await session.info(limit=0)).worker.worker
        await self._begin(session)
        async for metrics in client.metrics("two"):
            # A model that is faster than the disk would be killed before there is KV to share.
            if metrics.snapshots.durable and not metrics.snapshots.in_flight:
                break

        async def kill() -> str:
            self._other.kill()
            self._say("[bold red]kill -9[/] of worker two, which answers. Worker one goes on:")
            return "-"

        _, prefilled, _ = await self._ask(session, "Write a short poem about the lighthouse.", 120, kill=kill)
        gap_s = self._gap_s
        _, then, first_s = await self._ask(session, "Who was Agnes Holloway?", 40)
        self._console.print("\n", self._table)
        self._console.print(
            f"\nWorker two was killed in mid-answer; after {gap_s:.1f} s worker one went on with it.\n"
            "It took the KV of the conversation from the folder that both share, and\n"
            f"prefilled {prefilled} tokens; for the next question {then}, and the first token came\n"
            f"{first_s:.2f} s after the worker took it up. The client has only waited.\n\n"
            "Several workers of your own: docs/cluster.md"
        )


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=".demo",
    show_default=True,
    help="Where its worker keeps its files.",
)
@click.option("--model", metavar="[PATH|ID]", help="Its model. [default: the packaged one]")
@click.option("--cluster", is_flag=True, help="With two workers: the other one continues the answer.")
def demo(data_dir: Path, model: str | None, *, cluster: bool) -> None:
    """Hold a conversation, and kill the worker in mid-answer."""
    with interrupted_by_signals():
        asyncio.run((ClusterDemo if cluster else Demo)(data_dir, model).run())
