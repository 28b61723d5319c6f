"""`make demo`: a conversation that survives `kill -9`, in about a minute.

Starts `turnkeep serve` as a user would, talks to it through the client, kills it in the middle of an answer
and between two turns, and shows what each turn cost. Needs nothing but an installed Turnkeep.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from turnkeep_client.errors import TurnkeepError

from .local import LocalWorker

if TYPE_CHECKING:
    from turnkeep_client.generation import Generation
    from turnkeep_client.messages import Generated
    from turnkeep_client.session import Session

DATA_DIR: Final = Path(".demo")
KILL_AFTER_TOKENS: Final = 25

NOTES: Final = Path(__file__).with_name("lighthouse.txt")
QUESTIONS: Final = ("When was the lighthouse built?", "Who was the first keeper?")
LONG_QUESTION: Final = "Write a short poem about the lighthouse."
LAST_QUESTION: Final = "Who was Agnes Holloway?"


@dataclass(frozen=True)
class Row:
    """One line of the table: what a turn cost."""

    what: str
    kv_from: str
    num_new: int
    num_cached: int
    num_prefilled: int
    first_token_s: float | None
    tokens_per_s: float | None


class Demo:
    """The script of the demo."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._worker = LocalWorker(DATA_DIR)
        self._rows: list[Row] = []
        self._prefill_rate = 0.0
        # A tenant of its own: a second run then finds nothing that the first one left in the cache.
        self._tenant = f"demo-{uuid4().hex[:12]}"

    async def run(self) -> None:
        """Play it."""
        self._say("Starting [bold]turnkeep serve[/] with its own NATS server and the packaged model")
        try:
            self._worker.start()
            client = await self._worker.ready(self._tenant)
            session = client.session("lighthouse")
            await self._read_notes(session)
            for question in QUESTIONS:
                await self._ask(session, question, max_tokens=60, kv_from="memory")
            await self._interrupted(session)
            self._say("Once more [bold red]kill -9[/], between two turns, and a restart")
            self._worker.kill()
            self._worker.start()
            await self._ask(session, LAST_QUESTION, max_tokens=40, kv_from="SSD")
            await client.close()
        finally:
            self._worker.stop()
        self._summary()

    async def _read_notes(self, session: Session) -> None:
        self._say("A system prompt of two pages, appended and prefilled ahead of the first question")
        append = asyncio.create_task(
            session.append(messages=[{"role": "system", "content": NOTES.read_text("utf-8")}])
        )
        await self._prefill_bar(session, append)
        appended = await append
        self._prefill_rate = appended.prefilled_tokens / appended.seconds
        costs = (appended.position, appended.cached_tokens, appended.prefilled_tokens)
        self._rows.append(Row("(the notes)", "-", *costs, first_token_s=None, tokens_per_s=None))

    async def _ask(self, session: Session, question: str, *, max_tokens: int, kv_from: str) -> None:
        generation = self._generate(session, question, max_tokens)
        async for chunk in generation:
            self._print(chunk.text)
        self._print("\n")
        self._count(question, generation.result, kv_from)

    async def _interrupted(self, session: Session) -> None:
        """Kill the worker in the middle of an answer; the same iterator goes on after the restart."""
        generation = self._generate(session, LONG_QUESTION, 120)
        num_tokens = 0
        alive = True
        async for chunk in generation:
            self._print(chunk.text)
            num_tokens += len(chunk.tokens)
            if num_tokens >= KILL_AFTER_TOKENS and alive:
                alive = False
                self._worker.kill()
                self._print("\n")
                self._say(
                    "[bold red]kill -9[/] in the middle of the answer. Restarting; the same answer goes on:"
                )
                self._worker.start()
        self._print("\n")
        self._count(LONG_QUESTION, generation.result, "SSD")

    def _generate(self, session: Session, question: str, max_tokens: int) -> Generation:
        self._console.print(f"\n[bold cyan]>[/] {question}")
        # The penalty keeps a model of this size from going round in circles.
        messages = [{"role": "user", "content": question}]
        return session.generate(messages=messages, max_tokens=max_tokens, repetition_penalty=1.1)

    def _count(self, question: str, result: Generated, kv_from: str) -> None:
        usage, seconds = result.usage, result.seconds
        before = self._rows[-1].num_cached + self._rows[-1].num_prefilled if self._rows else 0
        decode_s = seconds.total - seconds.first_token
        self._rows.append(
            Row(
                question,
                kv_from,
                usage.prompt_tokens - before,
                usage.cached_tokens,
                usage.prefilled_tokens,
                seconds.first_token,
                (usage.completion_tokens - 1) / decode_s if decode_s > 0 else None,
            )
        )

    async def _prefill_bar(self, session: Session, work: asyncio.Task[object]) -> None:
        columns = (TextColumn("prefill"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
        with Progress(*columns, console=self._console, transient=True) as bars:
            bar = bars.add_task("prefill", total=None)
            while not work.done():
                with contextlib.suppress(TurnkeepError):
                    progress = (await session.info()).progress
                    if progress is not None:
                        bars.update(bar, total=progress.context_tokens, completed=progress.cached_tokens)
                await asyncio.wait([work], timeout=0.2)

    def _summary(self) -> None:
        table = Table(title="What each turn cost", box=None, header_style="bold", title_justify="left")
        table.add_column("turn", no_wrap=True, max_width=20)
        for name in ("KV from", "new", "cached", "prefilled", "1st token", "tokens/s"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(
                row.what,
                row.kv_from,
                f"{row.num_new}",
                f"{row.num_cached}",
                f"{row.num_prefilled}",
                f"{row.first_token_s:.2f} s" if row.first_token_s else "-",
                f"{row.tokens_per_s:.1f}" if row.tokens_per_s else "-",
            )
        last = self._rows[-1]
        num_tokens = last.num_cached + last.num_prefilled
        self._console.print()
        self._console.print(table)
        self._console.print(
            f"\nAfter the last restart {last.num_prefilled} of {num_tokens} tokens were prefilled, and the "
            f"first token came {last.first_token_s:.2f} s after the worker took the question up. Without the "
            f"snapshots on SSD it would have read the whole conversation again: about "
            f"{num_tokens / self._prefill_rate:.1f} s at the {self._prefill_rate:.0f} tokens/s of the first "
            "turn, and more with every turn."
        )
        self._console.print(
            "\nYour turn: [bold].venv/bin/turnkeep serve[/], and [bold].venv/bin/turnkeep chat[/] beside it."
        )

    def _say(self, text: str) -> None:
        self._console.print(f"\n[bold green]==[/] {text}")

    def _print(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


def main() -> int:
    """Run the demo; one line and 1 if it cannot."""
    try:
        asyncio.run(Demo().run())
    except TurnkeepError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
