"""Lists, for each bench, faults of a worker and the checks that must detect them.

A bench's `Suite` makes honest runs (the turns and samples of a healthy worker), and has lies: each falsifies
such a run, and must fail the check that it names and no other.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from bench import device, load, peers, recall, restart, session
from bench.openai import OWN
from bench.spec import AnyBench
from bench.turns import Measure, Sample, TimedTurn

#: Seconds to prefill a token, in honest runs of long sessions.
PREFILL_S = 0.003


@dataclass(frozen=True)
class Lie:
    """A worker's fault: `name` says what it does, `check` is the beginning of the failing check's name.

    `bend` falsifies one turn or sample of an honest run.
    """

    name: str
    check: str
    bend: Callable[[Any], Any]


@dataclass(frozen=True)
class Suite:
    """A bench with its lies; `honest` makes a healthy worker's turns and samples from a seed."""

    bench: AnyBench
    plan: Any
    honest: Callable[[int], tuple[Sequence[TimedTurn], Sequence[Sample]]]
    lies: tuple[Lie, ...]


def answer(prompt: int, own: int, tokens: Sequence[int], **fields: Any) -> TimedTurn:
    """Make a healthy worker's turn, for which all prompt tokens but the last `own` ones were cached."""
    account = {"prompt_tokens": prompt, "cached_tokens": prompt - own, "prefilled_tokens": own}
    account |= {"position": prompt + len(tokens), "tokens": tuple(tokens), "joined": True}
    return TimedTurn(**(account | fields))


def turns(*cases: str, when: Callable[[TimedTurn], object] = bool, **changes: Any) -> Callable[[Any], Any]:
    """Return a `bend` that sets fields of turns, to values or functions of the turn; it merges `facts`."""

    def bend(one: Any) -> Any:
        if not isinstance(one, TimedTurn) or (cases and one.case not in cases) or not when(one):
            return one
        made = {name: value(one) if callable(value) else value for name, value in changes.items()}
        return replace(one, **made | {"facts": one.facts | made.get("facts", {})})

    return bend


def samples(
    measure: Measure, value: Callable[[Sample], float], *cases: str, when: Callable[[Sample], object] = bool
) -> Callable[[Any], Any]:
    """Return a `bend` that changes the samples of a measure, of all cases or some."""

    def bend(one: Any) -> Any:
        mine = (
            not isinstance(one, TimedTurn)
            and one.measure == measure.name
            and (not cases or one.case in cases)
        )
        return replace(one, value=value(one)) if mine and when(one) else one

    return bend


#: Changes after which a turn reports that it prefilled its whole prompt.
ALL = {"cached_tokens": 0, "prefilled_tokens": lambda turn: turn.prompt_tokens}
#: Makes a turn take as long as if it prefilled the whole session.
WAITS = turns(first_s=lambda turn: turn.first_s + PREFILL_S * turn.facts["held"])


Run = tuple[list[TimedTurn], list[Sample]]
MIB = 2**20

#: Faults that any worker may have.
COMMON = (
    Lie("leaves a turn unanswered", "every turn was", turns(when=lambda t: t.block == 1, error="internal")),
    Lie("loses a chunk", "the chunks of an answer", turns(joined=False)),
    Lie("tells other sums", "what was cached and", turns(prompt_tokens=lambda t: t.prompt_tokens + 1)),
)

DEVICE = device.Plan(corpus="built-in")


def honest_device(seed: int) -> Run:
    """Make samples: prompt pieces take less memory than estimated."""
    noise = random.Random(seed)
    return [], [
        Sample(device.SCRATCH.name, device.WORKER, piece, block, 0.8 * noise.lognormvariate(0, 0.02))
        for block in range(DEVICE.rounds)
        for piece in DEVICE.pieces
    ]


DEVICE_LIES = (
    Lie("takes more than it says", "a piece of a prompt", samples(device.SCRATCH, lambda one: 2 * one.value)),
)

LOAD = load.Plan(concurrency=(1, 4), sessions=8, corpus="built-in")


def honest_load(seed: int) -> Run:
    """Make a run whose times scatter by 15%; token counts do not depend on the seed."""
    noise, found = random.Random(seed), []

    def add(case: str, block: int, held: int, own: int, num: int, x: int, at_s: float, number: int) -> None:
        first, each, *gaps = (noise.lognormvariate(0, 0.15) for _ in range(num + 1))
        first_s = (0.05 + PREFILL_S * own + 1e-4 * held) * first
        times = {"at_s": at_s, "first_s": first_s, "total_s": first_s + 0.1 * num * each}
        times |= {"gaps_s": tuple(0.1 * gap for gap in gaps), "facts": {"held": held, "number": number}}
        found.append(answer(held + own, own, (1,) * num, case=case, x=x, block=block, **times))

    for x in LOAD.concurrency:
        for number in range(LOAD.sessions):
            add(load.OPENING, 0, 0, 60 + 20 * number, 4, x, 0.0, number)
        for i in range(LOAD.sessions * LOAD.turns):
            turn, number = divmod(i, LOAD.sessions)
            add("", i // x, 64 + 20 * number + 80 * turn, 50 + i % 7, 8, x, 2.0 * (i // x), number)
    return found, [Sample(load.KV.name, "", float(i), 0, 0.9) for i in range(100)]


STARVES = turns(when=lambda t: t.facts.get("number") in {0, 5}, total_s=lambda t: 10 * t.total_s)
OUTGROWS = samples(load.KV, lambda _: 1.01, when=lambda one: one.x == 50)
LOAD_LIES = (
    Lie("prefills all and reports it as cached", "a token that a session holds", WAITS),
    Lie("starves two sessions", "the slowest of those served", STARVES),
    Lie("outgrows its memory", "KV on the device", OUTGROWS),
)

PEERS = peers.Plan(corpus="built-in")


def honest_peers(seed: int) -> Run:
    """Make chats, parallel streams and restarts; the worker is 2.5 times as fast as mlx_lm.server."""
    noise, found = random.Random(seed), []
    parts = [(peers.CHAT, x, block) for block in range(PEERS.chats) for x in range(1, PEERS.turns + 1)]
    parts += [(peers.CONCURRENT, 1, block) for block in range(PEERS.rounds)]
    parts += [(one, 1000, block) for block in range(PEERS.restarts) for one in (peers.WARM, peers.KILL)]
    for part, x, block in parts:
        context = 250 * x if part == peers.CHAT else 1000
        for case, slower in ((peers.TURNKEEP, 1.0), (OWN, 2.5)):
            first_s = slower * (0.5 + 1e-4 * context) * noise.lognormvariate(0, 0.2)
            more = {"first_s": first_s, "total_s": first_s + slower, "case": case, "x": x, "block": block}
            more |= {"joined": None} if case == OWN else {}
            facts = {"part": part, "text": "a", "tokens": 64}
            found.append(answer(context, 200, (), facts=facts, **more))
    return found, []


#: A server whose context is full drops the beginning of the conversation.
FEWER = {
    "prompt_tokens": lambda turn: turn.prompt_tokens - turn.prompt_tokens // 20,
    "cached_tokens": lambda turn: turn.cached_tokens - turn.prompt_tokens // 20,
}
DROPS = turns(OWN, when=lambda turn: (turn.x or 0) >= 5, **FEWER)
PEERS_LIES = (Lie("forgets what was said first", "all sides held the same conversation", DROPS),)

RECALL = recall.Plan(corpus="built-in", resident=(1024,), texts=8)
KEPT = "paged, 1,024"
KNOWS_ALL = (recall.FULL, KEPT)


def honest_recall(seed: int) -> Run:
    """Make a run with 20% wrong answers; only full and paged caches know facts that left the window."""
    noise, found = random.Random(seed), []
    for block, depth in itertools.product(range(RECALL.texts), RECALL.depths):
        able = noise.random() < 0.8
        for case, policy in RECALL.policies.items():
            right = able and (case in KNOWS_ALL or depth == 90)
            facts = {"held": RECALL.tokens, "right": float(right)}
            size = 46_080 * (RECALL.tokens if policy.policy == recall.FULL else 1300)
            more = {"case": case, "x": depth, "block": block, "facts": facts, "kv_live_bytes": size}
            times = {"first_s": noise.lognormvariate(-2, 0.15), "total_s": 1.0}
            found.append(answer(RECALL.tokens + 30, 31, range(12), **more, **times))
    return found, []


FORGETS_FACTS = turns(KEPT, facts={"right": 0.0})
RECALL_LIES = (
    Lie("keeps all on the device", "a part on the device", turns(KEPT, kv_live_bytes=46_080 * 4108)),
    Lie("reports no KV", "a part on the device", turns(KEPT, kv_live_bytes=0)),
    Lie("prefills all for a question", "a question is all", turns(KEPT, **ALL)),
    Lie("forgets what a prompt should see", "paged sessions lose", FORGETS_FACTS),
)

RESTART = restart.Plan(tokens=(256, 1024), rounds=5, corpus="built-in")
FIRST_S = {restart.WARM: 0.1, restart.RESTART: 0.11, restart.KILL: 0.2}


def honest_restart(seed: int) -> Run:
    """Make a run whose times scatter by 15%, as on a busy machine."""
    noise, found = random.Random(seed), []
    for block, length, case in itertools.product(range(RESTART.rounds), RESTART.tokens, restart.CASES):
        context = length + 32 * block
        own = {restart.COLD: context, restart.KILL: 40}.get(case, 17)
        first_s = FIRST_S.get(case, 0.004 * length) * noise.lognormvariate(0, 0.15)
        more = {"case": case, "x": length, "block": block}
        found.append(answer(context, own, (1, 2, block), first_s=first_s, total_s=first_s + 0.2, **more))
    return found, []


SHORTER = {name: lambda t, name=name: getattr(t, name) - 1 for name in ("prompt_tokens", "cached_tokens")}
FINDS_MORE = {"cached_tokens": 128, "prefilled_tokens": lambda turn: turn.prompt_tokens - 128}
NINE = {"tokens": (9,)}
RESTART_ALL = turns(restart.RESTART, **ALL)
RESTART_LIES = (
    Lie("loses a token in a restart", "every case had the same", turns(restart.RESTART, **SHORTER)),
    Lie("prefills all after a restart", "only a turn's own", RESTART_ALL),
    Lie("finds another tenant's KV", "cold sessions found nothing", turns(restart.COLD, **FINDS_MORE)),
    Lie("restores badly", "what was restored in", turns(restart.RESTART, **NINE)),
)

SESSION = session.Plan(duration=14_400, every=120, corpus="built-in")


def honest_session(seed: int) -> Run:
    """Make a run of four hours whose times scatter by 15%; a new session begins after every 40 turns."""
    noise, found, held = random.Random(seed), [], 0
    for number in range(120):
        held = held if number % 40 else 0
        own = noise.randint(40, 80)
        context, at_s, ran = held + own, number * SESSION.every, own + (1 if held else 0)
        first_s = (0.05 + PREFILL_S * ran + 1e-4 * held) * noise.lognormvariate(0, 0.15)
        times = {"at_s": at_s, "first_s": first_s, "total_s": first_s + 2.0 * noise.lognormvariate(0, 0.15)}
        size = 700 * MIB + round(noise.gauss(0, MIB))
        facts = {"held": held, "beside_bytes": size, "written_bytes": 5 * MIB * number}
        facts |= {"stored_bytes": 4 * MIB * number, "capacity_bytes": 500 * MIB}
        more = {"x": at_s, "block": SESSION.stretch(number, at_s), "kv_live_bytes": 46_080 * (context + 63)}
        found.append(answer(context, ran, range(64), facts=facts, **more, **times))
        held = context + 64
    return found, []


ONE_MORE = turns(when=lambda turn: turn.at_s == 240, kv_live_bytes=lambda turn: turn.kv_live_bytes + 1)
SLOWS = turns(total_s=lambda turn: turn.total_s * (1 + turn.at_s / SESSION.duration))
LEAKS = turns(facts=lambda t: {"beside_bytes": t.facts["beside_bytes"] + 12 * MIB * t.at_s / 3600})
OVERFLOWS = turns(when=lambda turn: turn.at_s == 240, facts=lambda _: {"stored_bytes": 501 * MIB})
SESSION_LIES = (
    Lie("reports no KV", "KV is not empty", turns(kv_live_bytes=0)),
    Lie("keeps more KV in one turn", "KV is not empty", ONE_MORE),
    Lie("prefills all each turn", "only a turn's own tokens", turns(**ALL)),
    Lie("prefills all and reports it as cached", "a token that a session holds", WAITS),
    Lie("becomes slower by the turn", "turns at the end take", SLOWS),
    Lie("leaks", "the process without its KV", LEAKS),
    Lie("stores more than it may", "snapshots on SSD stay", OVERFLOWS),
)


SUITES = (
    Suite(device.BENCH, DEVICE, honest_device, DEVICE_LIES),
    Suite(load.BENCH, LOAD, honest_load, LOAD_LIES),
    Suite(peers.BENCH, PEERS, honest_peers, PEERS_LIES),
    Suite(recall.BENCH, RECALL, honest_recall, RECALL_LIES),
    Suite(restart.BENCH, RESTART, honest_restart, RESTART_LIES),
    Suite(session.BENCH, SESSION, honest_session, SESSION_LIES),
)
