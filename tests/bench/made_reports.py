"""Whole reports for what reads and writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from made_turns import make_turns

from bench import environment
from bench.old.report import schema_of
from bench.old.session.checks import checks
from bench.old.session.summary import SessionReport, series, summarise

if TYPE_CHECKING:
    from bench.old.session.turns import Turn

ENVIRONMENT = environment.look()


def make_report(turns: list[Turn] | None = None, **changes: Any) -> SessionReport:
    turns = make_turns(12) if turns is None else turns
    summary = summarise(turns)
    fields: dict[str, Any] = {
        "schema": schema_of("session"),
        "started_at": "2026-11-20T08:00:00+00:00",
        "elapsed_s": 360.0,
        "complete": True,
        "ending": "done",
        "target": "a worker of its own",
        "environment": ENVIRONMENT,
        "worker": None,
        "settings": {"turns": len(turns), "max_tokens": 64, "corpus": "built-in"},
        "source": None,
        "checks": checks(summary),
        "series": series(turns),
        "summary": summary,
        "rewinds": (),
        "messages": {},
        "turns": tuple(turns),
    }
    return SessionReport(**(fields | changes))
