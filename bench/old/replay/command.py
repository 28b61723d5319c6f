"""The command `turnkeep bench replay`."""

from __future__ import annotations

import shlex
from pathlib import Path  # noqa: TC003  # click shows no annotation, but readers want one

import click

from bench.old.options import COUNT, NOT_NEGATIVE, conduct, corpus_of, reporting, saying, turn_timeout
from turnkeep_client.subjects import DEFAULT_PREFIX, DEFAULT_TENANT

SESSIONS = 8
TURNS = 6
MAX_TOKENS = 64


@click.command()
@reporting
@click.option(
    "--nats", "url", metavar="URL", help="Replay what the worker there has recorded. [default: made for it]"
)
@click.option(
    "--prefix", default=DEFAULT_PREFIX, show_default=True, help="First part of that worker's subjects."
)
@click.option("--tenant", default=DEFAULT_TENANT, show_default=True, help="Whose sessions they are.")
@click.option(
    "--session", "sessions", multiple=True, metavar="NAME", help="Only this one. [default: all of them]"
)
@click.option("--target-nats", metavar="URL", help="Replay at the worker there. [default: one made for it]")
@click.option("--target-prefix", default=DEFAULT_PREFIX, show_default=True, help="Prefix of the target.")
@click.option("--target-tenant", default="bench", show_default=True, help="Tenant of the replayed sessions.")
@click.option("--serve", metavar="OPTIONS", default="", help="Settings of the bench's own target, in quotes.")
@click.option(
    "--pace",
    type=NOT_NEGATIVE,
    default=1.0,
    show_default=True,
    help="1 as recorded, 2 twice as fast, 0 as fast as answers come.",
)
@click.option("--force", is_flag=True, help="Go on from the recorded answer wherever one differs.")
@turn_timeout("A request that takes longer counts as failed.")
@click.option("--record-sessions", type=COUNT, help=f"Sessions of a record of its own. [default: {SESSIONS}]")
@click.option("--record-turns", type=COUNT, help=f"Turns of each of them. [default: {TURNS}]")
@saying("What is said in them.")
def replay(
    out: Path | None,
    smoke: bool,
    checkpoint: float,
    model: str | None,
    url: str | None,
    prefix: str,
    tenant: str,
    sessions: tuple[str, ...],
    target_nats: str | None,
    target_prefix: str,
    target_tenant: str,
    serve: str,
    pace: float,
    force: bool,
    turn_timeout: float,
    record_sessions: int | None,
    record_turns: int | None,
    corpus: str | None,
) -> None:
    """Recorded sessions, played again at another worker: the same answers, and as fast?

    Requests keep their ids, order and spacing, under new session names; a generate without a seed gets the
    one that was derived for it. Answers are compared token by token. Behind one that differs the context is
    another: later answers of that session are timed and not compared, unless --force puts the recorded
    answer in its place.
    """
    from bench.old.run import Where

    from .measure import Log, Made, ReplayBench
    from .player import How

    if target_nats is not None and (model is not None or serve):
        raise click.UsageError("--model and --serve are for the bench's own worker, not for --target-nats")
    if url is None and sessions:
        raise click.UsageError("--session names what the worker at --nats has recorded")
    if url is not None and (record_sessions or record_turns or corpus):
        raise click.UsageError("the record is the one at --nats, so that --record-* and --corpus say nothing")
    source: Log | Made
    if url is not None:
        source = Log(url, prefix, tenant, sessions)
    else:
        source = Made(
            corpus_of(corpus, smoke=smoke),
            record_sessions or (3 if smoke else SESSIONS),
            record_turns or (2 if smoke else TURNS),
            8 if smoke else MAX_TOKENS,
        )
    where = Where(target_nats, target_prefix, target_tenant, model)
    bench = ReplayBench(source, How(pace, force, turn_timeout), where, tuple(shlex.split(serve)))
    conduct(bench, out=out, checkpoint_s=checkpoint)
