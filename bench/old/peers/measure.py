"""Runs the sides of `bench peers` against each other, and tells how they did."""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.table import Table

from bench import blas
from bench.faults import BenchError
from bench.old.report import Check
from bench.old.run import OWN_WORKER, Bench, Where
from turnkeep_client.errors import TurnkeepError

from .checks import checks
from .openai import Address, Server, parse
from .page import interval, page_of, size
from .parts import Parts
from .script import Script, chars_per_token
from .server import MODEL, NAME, MlxServer
from .sides import TURNKEEP, Peer, Turnkeep
from .summary import PeersReport, series, summarise

if TYPE_CHECKING:
    from rich.console import Console

    from bench.corpus import Corpus
    from bench.local import LocalWorker
    from bench.old.page import Page
    from bench.old.run import Facts, Run

    from .parts import Plan
    from .sides import Contender
    from .turns import Side

#: Weights as they are: what the peer does with the same folder.
KEEP: Final = ("--dtype", "keep")


class PeersBench(Bench[PeersReport]):
    """A worker of the bench's own against peers: `mlx_lm.server` by name, others as `NAME=URL`."""

    name = "peers"

    def __init__(self, plan: Plan, corpus: Corpus, peers: tuple[str, ...], model: str | None) -> None:
        """Raise `BenchError` for a peer that cannot be understood."""
        self._plan = plan
        self._corpus = corpus
        self._peers = [NAME if peer == NAME else parse(peer) for peer in peers]
        names = [TURNKEEP, *(NAME if isinstance(peer, str) else peer.name for peer in self._peers)]
        if len(set(names)) < len(names):
            raise BenchError(f"every side needs a name of its own, these are {', '.join(names)}")
        self._names = names
        self._model = model
        self._options = KEEP if model is not None and Path(model).expanduser().is_dir() else ()
        self._sides: list[Contender] = []
        self._described: list[Side] = []
        self._turnkeep: Turnkeep | None = None
        self._parts: Parts | None = None

    @property
    def measured(self) -> bool:
        """Say whether anything was measured."""
        parts = self._parts
        return parts is not None and bool(
            parts.measured.turns or parts.measured.rounds or parts.measured.restarts
        )

    async def measure(self, run: Run) -> None:
        """Start the sides and run the parts. Raises `BenchError` where one never answers."""
        async with AsyncExitStack() as stack:
            where = Where(model=self._model)
            worker, client = await stack.enter_async_context(run.worker(*self._options, where=where))
            self._turnkeep = Turnkeep(client, worker)
            self._sides = [self._turnkeep]
            for peer in self._peers:
                self._sides.append(await self._start(peer, worker, stack))
            for side in self._sides:
                await side.warm_up()
            self._described = [await side.describe() for side in self._sides]
            try:
                chars = await chars_per_token(client, self._corpus)
            except TurnkeepError as error:
                raise BenchError(f"the worker does not take the corpus: {error}") from None
            restartable = sum(side.restartable for side in self._sides)
            total = self._plan.num_steps(len(self._sides), restartable)
            done = 0
            with run.bar(total) as step:

                def count(what: str) -> None:
                    nonlocal done
                    done += 1
                    step(done, what)

                self._parts = Parts(self._plan, self._sides, Script(self._corpus, chars), count)
                await self._parts.run()

    async def _start(self, peer: str | Address, worker: LocalWorker, stack: AsyncExitStack) -> Peer:
        process = None
        if isinstance(peer, str):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnkeep-bench-peer-")))
            # The same arithmetic: what the worker has not loaded the peer does not get either.
            library = blas.preload_of(blas.mapped(worker.pid))
            environment = {"LD_PRELOAD": library} if library else {}
            process = MlxServer(worker.model_folder, folder, environment)
            stack.callback(process.stop)
            process.start()
            await process.ready()
            peer = Address(NAME, process.url, MODEL)
        server = await stack.enter_async_context(Server(peer))
        return Peer(server, peer.url if process is None else NAME, process)

    def report(self, facts: Facts) -> PeersReport:
        """Make the report of what was measured so far."""
        measured = self._parts.measured if self._parts else None
        turns, rounds, restarts = (
            (tuple(measured.turns), tuple(measured.rounds), tuple(measured.restarts))
            if measured
            else ((), (), ())
        )
        summary = summarise(self._names, turns, rounds, restarts)
        same = all(isinstance(peer, str) for peer in self._peers)
        return PeersReport(
            **facts,
            target=f"{OWN_WORKER} against {', '.join(self._names[1:])}",
            worker=self._turnkeep.metrics if self._turnkeep else None,
            settings={
                **self._plan.settings(),
                "peers": ", ".join(self._names[1:]),
                "corpus": self._corpus.source.name,
            },
            source=self._corpus.source,
            checks=(*checks(summary, same_weights=same), *self._same_blas()),
            series=series(turns, rounds, restarts),
            sides=tuple(self._described),
            summary=summary,
            messages={side.name: dict(side.messages) for side in self._sides if side.messages},
            turns=turns,
            rounds=rounds,
            restarts=restarts,
        )

    def _same_blas(self) -> tuple[Check, ...]:
        own = [side for side in self._described if side.own_process]
        if len(own) < 2:
            return ()
        libraries = {side.blas for side in own}
        return (
            Check(
                name="all processes multiply with the same library",
                passed=len(libraries) == 1,
                detail=", ".join(f"{side.name}: {side.blas}" for side in own),
                exact=True,
            ),
        )

    def page(self, report: PeersReport) -> Page:
        """Lay the report out."""
        return page_of(report)

    def show(self, report: PeersReport, console: Console) -> None:
        """Print the ratios, and what did not go well."""
        for name in report.summary.sides[1:]:
            table = Table(box=None, header_style="bold")
            table.add_column(f"against {name.side}", no_wrap=True)
            for head in ("worker", "peer", "ratio", "95% interval"):
                table.add_column(head, justify="right", no_wrap=True)
            for row in report.summary.against:
                if row.other == name.side:
                    values = (size(value, row.unit) for value in (row.first_p50, row.other_p50))
                    table.add_row(row.measure, *values, f"{row.ratio:.3f}", interval(row))
            console.print(table)
        for growth in report.summary.growth:
            console.print(
                f"{growth.side}: {growth.seconds * 1000:+.1f} ms to the first token for 1,000 more tokens"
                f" (95%: {growth.low * 1000:+.1f} to {growth.high * 1000:+.1f})"
            )
        for side, messages in report.messages.items():
            for kind, message in messages.items():
                console.print(f"{side}: {kind}: {message}", markup=False, soft_wrap=True)
