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

from bench import device, load, overhead, peers, pressure, quality, recall, restart, session, speculation
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

ON, OFF, BAD = overhead.ON, overhead.OFF, (overhead.SLOW, overhead.FAILING)
OVERHEAD = overhead.Plan(batch=(2,), rounds=8, turns=2)
NONE = {"written": 0, "lost": 0, "waiting": 0}
SOUND = {overhead.WORKER: NONE | {"written": 4}, OFF: NONE, ON: NONE | {"written": 4}}
SOUND |= {overhead.SLOW: NONE | {"waiting": 4}, overhead.FAILING: NONE | {"lost": 4}}
SAID = tuple(range(30))


def honest_overhead(seed: int) -> Run:
    """Make a run with equally fast cases; rounds scatter by 30%, and cases within a round by 1%."""
    noise, found, idle = random.Random(seed), [], []
    moods = [noise.lognormvariate(0, 0.3) for _ in range(OVERHEAD.rounds)]
    for block, case in itertools.product(range(OVERHEAD.rounds), overhead.CASES):
        idle.append(Sample(overhead.IDLE.name, case, None, block, noise.uniform(0.005, 0.015)))
        for number in range(OVERHEAD.turns):
            context = 140 * number + 110
            facts = {"turn": number, "sent": context, "block_tokens": OVERHEAD.block_tokens}
            facts |= SOUND.get(case, {})
            pace_s = 0.03 * moods[block] * noise.lognormvariate(0, 0.01)
            more = {"first_s": 0.1 * moods[block], "total_s": 2.0, "own_tokens": 110, "facts": facts}
            if case == overhead.IN_PROCESS:
                more |= {"prompt_tokens": 0, "joined": None}
            for i in range(2):
                gaps_s = tuple(pace_s * noise.lognormvariate(0, 0.03) for _ in SAID[1:])
                more |= {"case": case, "x": 2, "block": block, "session": f"s{i}", "gaps_s": gaps_s}
                found.append(answer(context, 111 if number else 110, SAID, **more))
    return found, idle


def held_up(turn: Turn) -> tuple[float, ...]:
    """Return a turn's gaps, 250 ms longer after a completed block and shorter by as much in the others."""
    drawn = 128 - ((turn.position or 0) - 30) % 128
    return tuple(gap_s + (0.25 if i == drawn else -0.25 / 28) for i, gap_s in enumerate(turn.gaps_s))


SLOWER = {"gaps_s": lambda turn: tuple(1.1 * gap_s for gap_s in turn.gaps_s)}
FINDS = {"cached_tokens": 16, "prefilled_tokens": lambda turn: turn.prompt_tokens - 16}
FINDS_OTHER = turns(ON, when=lambda turn: turn.facts["turn"] == 0, **FINDS)
BUSY = samples(overhead.IDLE, lambda one: one.value + 0.1)
ANEW = turns(overhead.WORKER, **ALL)
OVERHEAD_LIES = (
    Lie("loses a token of a session", "a worker ran the very tokens", turns(ON, position=1)),
    Lie("finds another session's KV", "no session began with", FINDS_OTHER),
    Lie("prefills a session anew", "later turns prefilled", ANEW, by.prefill_anew),
    Lie("writes nothing", "with snapshots on, some", turns(ON, facts={"written": 0})),
    Lie("loses a snapshot", "with snapshots on, none", turns(ON, facts={"lost": 1})),
    Lie("writes with snapshots off", "without snapshots", turns(OFF, facts={"written": 1})),
    Lie("has a disk that is quick", "the slow disk kept", turns(overhead.SLOW, facts={"waiting": 0})),
    Lie("has a disk that is sound", "the failing disk lost", turns(overhead.FAILING, facts={"lost": 0})),
    Lie("computes while it waits", "the sides that waited", BUSY),
    Lie("answers otherwise", "at least 90% of the tokens", turns(ON, tokens=(9,) * 30)),
    Lie("decodes slower with snapshots", "with snapshots on answers decode", turns(ON, **SLOWER)),
    Lie("decodes slower on a bad disk", "on a bad disk answers decode", turns(*BAD, **SLOWER)),
    Lie("holds a step up for a block", "with snapshots on the steps beside", turns(ON, gaps_s=held_up)),
    Lie("holds a step up on a bad disk", "on a bad disk the steps beside", turns(*BAD, gaps_s=held_up)),
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

PRESSURE = pressure.Plan(room=256)
KV_LIMIT, DEVICE_LIMIT, IDLE = 10 * MIB, 60 * MIB, 40 * MIB
LIMITS = {"max_memory": KV_LIMIT, "device_memory": DEVICE_LIMIT, "without sessions": IDLE}
SAME = {"verb": "generate", "held": 0, "cancelled": None, "same": "yes"}


def honest_pressure(seed: int) -> Run:
    """Make a run of requests drawn as the bench does, answered correctly; memory stays below its limits."""
    dice, found, sizes, held = random.Random(seed), [], [], 0
    for i in range(100):
        verb, request, cancel_after_s = pressure.draw(dice, PRESSURE.room, held)
        if "tokens" in request:
            own, asked = len(request["tokens"]), request.get("max_tokens", 0)
            case = pressure.kind_of(held + own + min(asked, 1), PRESSURE.room)
            facts = {"verb": verb, "held": held, "cancelled": "yes" if cancel_after_s else None}
            more = {"total_s": dice.lognormvariate(0, 0.5), "own_tokens": own, "facts": facts}
            more |= {"case": case, "block": i // 20}
            if case == pressure.NEVER:
                found.append(Turn(error=pressure.REFUSED, **more))
            else:
                tokens = (1,) * min(asked, PRESSURE.room - held - own)
                found.append(answer(held + own, own, tokens, **more))
                held += own + len(tokens)
        held = 0 if held > 0.6 * PRESSURE.room else held
        used = (1 - (i % 10) / 10) * KV_LIMIT
        device = {pressure.ALLOCATED: IDLE + used, pressure.PEAK: 0.9 * DEVICE_LIMIT}
        sizes += [Sample(pressure.DEVICE.name, case, i, i // 20, size) for case, size in device.items()]
        sizes.append(Sample(pressure.KV.name, "", i, i // 20, used))
        sizes.append(Sample(pressure.PROCESS.name, "", i, i // 20, 100 * MIB + i * MIB / 5))
        sizes.append(Sample(pressure.RESULTS.name, "", None, i, 1))
    again = {"case": pressure.AGAIN, "total_s": 1, "facts": SAME}
    return [*found, *(answer(9, 9, (1,), block=i, **again) for i in range(9))], sizes


LATE = {"when": lambda one: (one.x or one.block) >= 50}
ALLOCATES = samples(pressure.DEVICE, lambda _: DEVICE_LIMIT + 1, pressure.PEAK, **LATE)
HOLDS = samples(pressure.KV, lambda _: KV_LIMIT + 1, **LATE)
REFUSES = turns(pressure.SHORT, when=lambda turn: turn.block == 2, error=pressure.REFUSED, tokens=())
TAKES = turns(pressure.NEVER, error=None, facts=SAME)
OTHER = turns(pressure.AGAIN, facts={"same": "no"})
LOSES_ONE = turns(pressure.SHORT, position=lambda turn: turn.position - 1)
LOSES_MEMORY = samples(pressure.PROCESS, lambda one: one.value + 400 * MIB, **LATE)
PRESSURE_LIES = (
    Lie("allocates beyond its limit", "what MLX allocates", ALLOCATES),
    Lie("holds KV beyond its limit", "KV stays within", HOLDS, by.hold_half_more),
    Lie("refuses what fits", "no request that fits", REFUSES, by.refuse_what_fits),
    Lie("takes what never fits", "no request was carried out", TAKES),
    Lie("answers twice", "every request has one", samples(pressure.RESULTS, lambda _: 2, **LATE)),
    Lie("leaves one unanswered", "every request has one", samples(pressure.RESULTS, lambda _: 0, **LATE)),
    Lie("loses a token", "no answer ran over another", LOSES_ONE),
    Lie("restores another KV", "answers are those of the same sessions", OTHER, by.restore_badly),
    Lie("has more room than it says", "the load came near", samples(pressure.KV, lambda one: one.value / 2)),
    Lie("loses memory", "the process grows", LOSES_MEMORY),
)

QUALITY = quality.Plan(corpus="built-in")
FULL, EIGHT, FOUR = quality.CASES
BYTES = {FULL: 46_080, EIGHT: 12_960, FOUR: 7_200}
WORSE = {FULL: 1.0, EIGHT: 1.0007, FOUR: 1.11}


def honest_quality(seed: int) -> Run:
    """Make a run: perplexity varies much by text, and little by precision; 80% of answers stay equal."""
    noise, found = random.Random(seed), []
    windows = [20 * noise.lognormvariate(0, 0.4) for _ in range(QUALITY.windows)]
    for case in quality.CASES:
        sizes = (quality.MEMORY, quality.DISK)
        found += [Sample(one.name, case, None, 0, BYTES[case]) for one in sizes]
        for i, window in enumerate(windows):
            value = window * WORSE[case] * noise.lognormvariate(0, 0 if case == FULL else 0.02)
            found.append(Sample(quality.PERPLEXITY.name, case, i, i, value))
        for i in range(QUALITY.answers if case == EIGHT else 0):
            share = 1.0 if noise.random() < 0.8 else noise.random()
            found.append(Sample(quality.EQUAL.name, case, i, i, share))
    return [], found


SAVES_NOTHING = samples(quality.DISK, lambda _: 46_080)
LOSES_8 = samples(quality.PERPLEXITY, lambda one: 1.05 * one.value, EIGHT)
DIFFERS = samples(quality.EQUAL, lambda one: 0.3 * one.value, EIGHT)
LOSES_4 = samples(quality.PERPLEXITY, lambda one: 1.25 * one.value, FOUR)
QUALITY_LIES = (
    Lie("saves nothing", "fewer bits take less", SAVES_NOTHING, by.keep_in_full),
    Lie("loses with 8 bits", "8 bits have", LOSES_8),
    Lie("loses with 4 bits", "4 bits have", LOSES_4),
    Lie("answers otherwise", "8 bits answer alike", DIFFERS),
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


SPECULATION = speculation.Plan(corpus="built-in", rows=(1, 2))
DRAFTING = speculation.SIDES[1:]


def honest_speculation(seed: int) -> Run:
    """Make a run: rounds scatter by 30%, sides within one by 1%; drafts gain 5%, and change no answer."""
    noise, found = random.Random(seed), []
    for block, num, (kind, rate) in itertools.product(
        range(SPECULATION.rounds), SPECULATION.rows, speculation.RATES.items()
    ):
        mood = num * noise.lognormvariate(3, 0.3)
        for side in speculation.SIDES:
            gain = (1.05 if side in DRAFTING else 1.0) * noise.lognormvariate(0, 0.01)
            found.append(Sample(rate.name, side, num, block, mood * gain))
            if side in DRAFTING:
                found.append(Sample(speculation.SAME.name, side, None, block, 1.0))
                if kind == "code":
                    found.append(Sample(speculation.RIGHT.name, side, num, block, noise.uniform(0.5, 0.9)))
    return [], found


SPECULATION_LIES = (
    Lie(
        "says something else with drafts",
        "answers have",
        samples(speculation.SAME, lambda one: one.value * 0.5, "lookup"),
    ),
    Lie(
        "is slower with drafts",
        "drafts leave",
        samples(speculation.RATES["chat"], lambda one: one.value * 0.8, "draft model"),
    ),
)


SUITES = (
    Suite(device.BENCH, DEVICE, honest_device, DEVICE_LIES, program="bench.programs.device"),
    Suite(load.BENCH, LOAD, honest_load, LOAD_LIES),
    Suite(overhead.BENCH, OVERHEAD, honest_overhead, OVERHEAD_LIES),
    Suite(peers.BENCH, PEERS, honest_peers, PEERS_LIES),
    Suite(pressure.BENCH, PRESSURE, honest_pressure, PRESSURE_LIES, facts=LIMITS),
    Suite(
        quality.BENCH,
        QUALITY,
        honest_quality,
        QUALITY_LIES,
        model="wide_model",
        program="bench.programs.quality",
    ),
    Suite(recall.BENCH, RECALL, honest_recall, RECALL_LIES, model="wide_model"),
    Suite(restart.BENCH, RESTART, honest_restart, RESTART_LIES),
    Suite(session.BENCH, SESSION, honest_session, SESSION_LIES),
    Suite(
        speculation.BENCH,
        SPECULATION,
        honest_speculation,
        SPECULATION_LIES,
        program="bench.programs.speculation",
    ),
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
