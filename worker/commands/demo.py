"""`turnkeep demo`: a conversation that survives `kill -9`, in about a minute.

Starts `turnkeep serve` as a user would, talks to the worker through the client, kills it during an answer and
between two turns, and shows what each turn cost. Needs only an installed Turnkeep.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from rich.console import Console
from rich.table import Table

from bench.local import LocalWorker
from worker.process.installed import program

if TYPE_CHECKING:
    from turnkeep_client.session import Session

KILL_AFTER_TOKENS: Final = 25
NOTES: Final = Path(__file__).with_name("lighthouse.txt")
HEAD: Final = ("turn", "KV from", "new", "cached", "prefilled", "1st token", "tokens/s")


class Demo:
    """The script of the demo."""

    def __init__(self, data_dir: Path, model: str | None) -> None:
        self._console = Console(highlight=False)
        self._is_first = not data_dir.exists()
        self._worker = LocalWorker(data_dir, *(() if model is None else ("--model", model)))
        self._table = Table(title="What each turn cost", box=None, title_justify="left")
        for name in HEAD:
            self._table.add_column(
                name, justify="left" if name == "turn" else "right", max_width=20, no_wrap=True
            )
        self._position = 0

    async def run(self) -> None:
        """Run the demo."""
        self._say(f"Starting [bold]{program()} serve[/], a worker with its own NATS server")
        if self._is_first:
            self._console.print("The first start converts the model and tests it: about 20 s")
        self._worker.start()
        try:
            # A new tenant, so that a second run finds nothing in the cache.
            with self._console.status("start"):
                client = await self._worker.ready(f"demo-{uuid4().hex[:12]}")
            async with client:
                await self._play(client.session("lighthouse"))
        finally:
            self._worker.stop()

    async def _play(self, session: Session) -> None:
        self._say("A system prompt of two pages, appended and prefilled ahead of the first question")
        with self._console.status("prefill"):
            notes = await session.append(messages=[{"role": "system", "content": NOTES.read_text("utf-8")}])
        rate = notes.prefilled_tokens / notes.seconds
        self._row("(the notes)", "-", notes.position, notes.cached_tokens, notes.prefilled_tokens, "-", "-")
        await self._ask(session, "When was the lighthouse built?", 60)
        await self._ask(session, "Who was the first keeper?", 60)
        await self._ask(session, "Write a short poem about the lighthouse.", 120, kill=True)
        self._say("Once more [bold red]kill -9[/], between two turns, and a restart")
        self._worker.kill()
        self._worker.start()
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
        self, session: Session, question: str, most: int, *, source: str = "memory", kill: bool = False
    ) -> tuple[int, int, float]:
        """Ask and print the answer; after a kill the same iterator continues."""
        self._console.print(f"\n[bold cyan]>[/] {question}")
        # Without the penalty so small a model repeats itself.
        said = [{"role": "user", "content": question}]
        generation = session.generate(messages=said, max_tokens=most, repetition_penalty=1.1)
        tokens = 0
        async for chunk in generation:
            self._console.file.write(chunk.text)
            self._console.file.flush()
            tokens += len(chunk.tokens)
            if kill and tokens >= KILL_AFTER_TOKENS:
                kill, source = False, "SSD"
                self._worker.kill()
                self._say(
                    "[bold red]kill -9[/] in the middle of the answer. Restarting; the same answer goes on:"
                )
                self._worker.start()
        self._console.print()
        usage, seconds = generation.result.usage, generation.result.seconds
        decode_s = seconds.total - seconds.first_token
        rate = f"{(usage.completion_tokens - 1) / decode_s:.1f}" if decode_s > 0 else "-"
        # By the position: an answer that a fast worker had sent whole before its kill ran no prompt again.
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
