"""Lists, for each bench, faults of a worker and the checks that must detect them.

A bench's `Suite` makes honest runs (the turns and samples of a healthy worker), and has lies: each falsifies
such a run, and must fail the check that it names and no other. A lie with a `serve` can also be planted in a
real worker: `python -m lies BENCH NAME serve ...` runs `turnkeep serve` with this fault.
"""

from __future__ import annotations

import itertools
import random
import sys
from importlib import import_module
from typing import Any

import saboteurs as by
from saboteurs import ALL, PREFILL_S, WAITS, Lie, Suite, answer, samples, turns

from bench import device, load, peers, recall, restart, session
from bench.openai import OWN
from bench.turns import Sample, Turn

Run = tuple[list[Turn], list[Sample]]
MIB = 2**20

#: Faults that any worker may have.
COMMON = (
    Lie("leaves a turn unanswered", "every turn was", turns(when=lambda t: t.block == 1, error="internal")),
    Lie("loses a chunk", "the chunks of an answer", turns(joined=False)),
    Lie("tells other sums", "what was cached and", turns(prompt_tokens=lambda t: t.prompt_tokens + 1)),
)

DEVICE = device.Plan(corpus="built-in")


def honest_device(seed: int) -> Run:
    """Make samples: prompt pieces take less memory than estimated, and restores change no array."""
    noise, found = random.Random(seed), []
    for block in range(DEVICE.rounds):
        found.append(Sample(device.CHANGED.name, "", None, block, 0))
        for piece in DEVICE.pieces:
            share = 0.8 * noise.lognormvariate(0, 0.02)
            found.append(Sample(device.SCRATCH.name, device.WORKER, piece, block, share))
    return [], found


DEVICE_LIES = (
    Lie("restores badly from SSD", "what is restored", samples(device.CHANGED, lambda _: 1), by.change_read),
    Lie("takes more than it says", "a piece of a prompt", samples(device.SCRATCH, lambda one: 2 * one.value)),
)

LOAD = load.Plan(concurrency=(1, 4), sessions=8, long_prompt=4000, crowd=30, corpus="built-in")
ASKED = 60


def honest_load(seed: int) -> Run:
    """Make a run whose times scatter by 15%; token counts do not depend on the seed."""
    noise, found = random.Random(seed), []

    def add(case: str, block: int, held: int, own: int, num: int, x: int | None = None, **facts: Any) -> None:
        first, each, *gaps = (noise.lognormvariate(0, 0.15) for _ in range(num + 1))
        first_s = (0.05 + PREFILL_S * own + 1e-4 * held) * first
        times = {"at_s": facts.pop("at_s", 0.0), "first_s": first_s, "total_s": first_s + 0.1 * num * each}
        times |= {"gaps_s": tuple(0.1 * gap for gap in gaps), "facts": {"held": held} | facts}
        found.append(answer(held + own, own, (1,) * num, case=case, x=x, block=block, **times))

    for x in LOAD.closed:
        for number in range(LOAD.sessions):
            add(load.OPENING, 0, 0, 60 + 20 * number, 4, x, number=number)
        for i in range(LOAD.sessions * LOAD.turns):
            turn, number = divmod(i, LOAD.sessions)
            held, at_s = 64 + 20 * number + 80 * turn, 2.0 * (i // x)
            add("", i // x, held, 50 + i % 7, 8, x, number=number, late_s=0.0, at_s=at_s)
    for i in range(4 * LOAD.rounds):
        begin_s = 100.0 * (i // 4)
        window = {"alone_s": begin_s + 1, "sent_s": begin_s + 2, "over_s": begin_s + 12}
        add(load.ANSWER, i // 4, 0, 20, 64, at_s=begin_s, **window)
    for number in range(LOAD.crowd):
        add(load.BEGINNING, 0, 0, 80, 4, number=number)
    for i in range(ASKED):
        case, held = load.SSD if i % 4 else load.MEMORY, 84 + 30 * (i % 5)
        add(case, 10 * i // ASKED, held, 40, 16, number=i % LOAD.crowd, told=held, at_s=60.0 * i)
    sizes = [Sample(load.KV.name, "", float(i), 0, 0.9) for i in range(100)]
    sizes += [Sample(load.PROCESS.name, "", 60.0 * i, 0, 700 * MIB + noise.gauss(0, MIB)) for i in range(80)]
    return found, sizes


STARVES = turns(when=lambda t: t.facts.get("number") in {0, 5}, total_s=lambda t: 10 * t.total_s)
STANDS = turns(load.ANSWER, gaps_s=lambda t: (*t.gaps_s[:30], 9.0, *t.gaps_s[30:]))
FORGETS = turns(when=lambda t: t.facts.get("told") == 114, position=56)
OUTGROWS = samples(load.KV, lambda _: 1.01, when=lambda one: one.x == 50)
GROWS = samples(load.PROCESS, lambda one: one.value + 12 * MIB * one.x / 3600)
LOAD_LIES = (
    Lie("prefills all and reports it as cached", "a token that a session holds", WAITS),
    Lie("starves two sessions", "the slowest of those served", STARVES),
    Lie("holds running answers up", "running answers stand still", STANDS),
    Lie("forgets a session", "no session was forgotten", FORGETS, by.forget_sessions),
    Lie("outgrows its memory", "KV on the device", OUTGROWS, by.hold_half_more),
    Lie("leaks", "the process without its KV", GROWS),
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
            facts = {"part": part, "text": "a", "tokens": 64, "others_busy": noise.expovariate(100)}
            found.append(answer(context, 200, (), facts=facts, **more))
    return found, []


#: A server whose context is full drops the beginning of the conversation.
FEWER = {
    "prompt_tokens": lambda turn: turn.prompt_tokens - turn.prompt_tokens // 20,
    "cached_tokens": lambda turn: turn.cached_tokens - turn.prompt_tokens // 20,
}
DROPS = turns(OWN, when=lambda turn: (turn.x or 0) >= 5, **FEWER)
PEERS_LIES = (
    Lie("forgets what was said first", "all sides held the same conversation", DROPS),
    Lie("works while it should be idle", "a side is idle", turns(OWN, facts={"others_busy": 0.5})),
)

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
    Lie("reports no KV", "a part on the device", turns(KEPT, kv_live_bytes=0), by.report_no_kv),
    Lie("prefills all for a question", "a question is all", turns(KEPT, **ALL), by.prefill_anew),
    Lie("forgets what a prompt should see", "under paged", FORGETS_FACTS),
)

RESTART = restart.Plan(tokens=(256, 1024), rounds=5, corpus="built-in")
FIRST_S = {restart.WARM: 0.1, restart.SPILLED: 0.12, restart.RESTART: 0.11, restart.KILL: 0.2}
RESIDENT = {restart.WARM: {"resident": "yes"}, restart.SPILLED: {"resident": "no"}}


def honest_restart(seed: int) -> Run:
    """Make a run whose times scatter by 15%, as on a busy machine."""
    noise, found = random.Random(seed), []
    for block, length, case in itertools.product(range(RESTART.rounds), RESTART.tokens, restart.CASES):
        context = length + 32 * block
        own = {restart.COLD: context, restart.KILL: 40}.get(case, 17)
        first_s = FIRST_S.get(case, 0.004 * length) * noise.lognormvariate(0, 0.15)
        more = {"case": case, "x": length, "block": block, "facts": RESIDENT.get(case, {})}
        found.append(answer(context, own, (1, 2, block), first_s=first_s, total_s=first_s + 0.2, **more))
    return found, []


SHORTER = {name: lambda t, name=name: getattr(t, name) - 1 for name in ("prompt_tokens", "cached_tokens")}
FINDS_MORE = {"cached_tokens": 128, "prefilled_tokens": lambda turn: turn.prompt_tokens - 128}
SECRET = turns(*restart.RESTORED, first_s=lambda turn: 0.004 * turn.x)  # as if all were prefilled
NINE, NO_SPILL = {"tokens": (9,)}, turns(restart.SPILLED, facts={"resident": "yes"})
RESTART_ALL = turns(restart.RESTART, **ALL)
RESTART_LIES = (
    Lie("spills no session", "sessions were in memory", NO_SPILL),
    Lie("loses a token in a restart", "every case had the same", turns(restart.RESTART, **SHORTER)),
    Lie("prefills all after a restart", "only a turn's own", RESTART_ALL, by.never_restore),
    Lie("finds another tenant's KV", "cold sessions found nothing", turns(restart.COLD, **FINDS_MORE)),
    Lie("restores badly", "what was restored in", turns(restart.RESTART, **NINE), by.restore_badly),
    Lie("answers otherwise after a prefill", "at least 90% of other", turns(restart.COLD, **NINE)),
    Lie("prefills in secret", "what is reported as", SECRET),
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
    Lie("reports no KV", "KV is not empty", turns(kv_live_bytes=0), by.report_no_kv),
    Lie("keeps more KV in one turn", "KV is not empty", ONE_MORE),
    Lie("prefills all each turn", "only a turn's own tokens", turns(**ALL), by.prefill_anew),
    Lie("prefills all and reports it as cached", "a token that a session holds", WAITS),
    Lie("becomes slower by the turn", "turns at the end take", SLOWS),
    Lie("leaks", "the process without its KV", LEAKS),
    Lie("stores more than it may", "snapshots on SSD stay", OVERFLOWS),
)


SUITES = (
    Suite(device.BENCH, DEVICE, honest_device, DEVICE_LIES, program="bench.programs.device"),
    Suite(load.BENCH, LOAD, honest_load, LOAD_LIES),
    Suite(peers.BENCH, PEERS, honest_peers, PEERS_LIES),
    Suite(recall.BENCH, RECALL, honest_recall, RECALL_LIES, model="wide_model"),
    Suite(restart.BENCH, RESTART, honest_restart, RESTART_LIES),
    Suite(session.BENCH, SESSION, honest_session, SESSION_LIES),
)


def main() -> None:
    """Plant the fault that the arguments name, and run the bench's program with it."""
    bench, name = sys.argv[1:3]
    del sys.argv[1:3]
    (suite,) = (suite for suite in SUITES if suite.bench.name == bench)
    lies = {lie.name: lie.serve for lie in suite.lies if lie.serve is not None}
    lies[name]()
    import_module(suite.program).main()


if __name__ == "__main__":
    main()
