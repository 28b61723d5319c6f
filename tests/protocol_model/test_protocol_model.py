"""The protocol's model keeps its invariants, finds faults put into it, and follows real histories."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.protocol_model.checker import Exploration, ViolationError
from tests.protocol_model.model import Rules
from tests.protocol_model.replay import Event, NotAStepError, Replay
from tests.simulation.jetstream import Message

ROOT = Path(__file__).parents[2]
CALM = Rules(num_workers=2, num_faults=0, num_losses=0, num_drains=0, num_ends=0)
CRASH = CALM._replace(num_faults=1)
AT_ONCE = CRASH._replace(reads_at_once=True)
POWER_CUT = CALM._replace(num_losses=1)


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from looking at all states again and again; there are no cycles."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("program", "rules"),
    [
        ("G", CRASH._replace(num_losses=1)),
        pytest.param("G", CRASH._replace(num_faults=2, num_losses=1), marks=pytest.mark.soak),
        ("G", CRASH._replace(num_drains=1, num_ends=1)),
        ("AA", CRASH),
        pytest.param("AA", CRASH._replace(num_drains=1), marks=pytest.mark.soak),
        ("GF", POWER_CUT),
        ("GR", CRASH._replace(num_workers=3, reads_at_once=True)),
        ("AF", POWER_CUT._replace(queue_first=False)),
    ],
)
def test_all_interleavings_of_workers_faults_and_one_session_keep_the_protocol_models_invariants(
    program: str, rules: Rules
) -> None:
    Exploration(rules, [program]).explore()


def test_exploring_two_sessions_together_in_the_protocol_model_reaches_the_same_states_as_each_alone() -> (
    None
):
    """So it is enough to explore each session with the steps of workers and server."""
    rules = CRASH._replace(reads_at_once=True)
    both = Exploration(rules, ["A", "A"])
    both.explore()
    alone = Exploration(rules, ["A"])
    alone.explore()
    states = {(alone.shared[shared], alone.sessions[one]) for shared, one in alone.states}
    for at in (1, 2):
        assert {(both.shared[one[0]], both.sessions[one[at]]) for one in both.states} == states


def test_leaving_out_stale_workers_gives_the_protocol_model_fewer_states_and_hides_no_violation() -> None:
    rules = CRASH._replace(num_losses=1)
    short, whole = (
        Exploration(one, ["A"]) for one in (rules, rules._replace(without=frozenset({"no rule"})))
    )
    short.explore()
    whole.explore()
    assert len(short.states) < len(whole.states)


@pytest.mark.parametrize(
    ("without", "program", "rules", "wrong"),
    [
        ("results are fenced", "GG", CRASH, "has two results"),
        ("chunks are fenced", "G", CRASH, "and published"),
        ("chunks are read back", "G", CRASH, "and published"),
        ("an end without tokens is sealed", "G", CRASH._replace(num_ends=1), "and published"),
        ("a restart of the server is noticed", "AA", POWER_CUT, "was never asked"),
        ("undelivered requests are found", "A", POWER_CUT, "has no result"),
        (
            "a worker that was paused notices ends",
            "A",
            AT_ONCE._replace(num_faults=2, num_losses=1),
            "has no result",
        ),
        (
            "a worker that leaves a session wakes its owner",
            "AA",
            AT_ONCE._replace(num_losses=1),
            "has no result",
        ),
        ("a removed request has a safe result", "A", POWER_CUT, "neither queue nor results"),
        (
            "a restart makes no result safe",
            "A",
            POWER_CUT._replace(num_losses=2),
            "neither queue nor results",
        ),
        ("a forget waits for absent workers", "AF", CRASH, "KV of a forgotten session"),
        ("a first chunk is taken back after a forget", "GF", AT_ONCE, "chunks of a forgotten session"),
        ("a reading checks that the request is there", "AF", CRASH, "is of a forgotten session"),
        ("requests are removed before results", "AF", CRASH, "is of a forgotten session"),
        ("a session moves between two requests", "GG", CALM._replace(num_drains=1), "two workers"),
        ("a known id is not carried out again", "GR", CALM, "not the first of its id"),
    ],
)
def test_removing_any_rule_from_the_protocol_model_leads_to_a_violated_invariant(
    without: str, program: str, rules: Rules, wrong: str
) -> None:
    with pytest.raises(ViolationError, match=wrong) as found:
        Exploration(rules._replace(without=frozenset({without})), [program]).explore(deep_first=True)
    assert found.value.trace


@pytest.mark.timeout(600)
def test_each_step_of_a_simulated_history_is_an_allowed_step_of_the_protocol_model() -> None:
    """In a process of its own, as histories end with coroutines that are closed unfinished."""
    command = [sys.executable, "-P", "-m", "tests.protocol_model", "--replay", "0", "--histories", "15"]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "protocol")])}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | paths | {"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("in", "out", "tok", "closed", "remove in", "remove out", "restarts of the server"):
        assert f" {kind}" in done.stdout, done.stdout


@dataclass
class Told:
    """Builds the events of a session with one worker."""

    num: int = 0

    def __call__(self, kind: str, body: str, headers: dict[str, str] | None = None, worker: int = 0) -> Event:
        self.num += 1
        message = Message(self.num, f"turnkeep.t.s.{kind}", body.encode(), headers or {}, float(self.num))
        return Event("stored", message, "" if kind == "in" else f"worker {worker}")


def _appended(seq: int) -> str:
    return (
        f'{{"type":"appended","id":"a{seq}","seq":{seq},"position":1,"tokens":1,"cached_tokens":0,'
        '"prefilled_tokens":1,"kv_live_bytes":0,"seconds":0.1}'
    )


def _asked(number: int) -> str:
    return f'{{"type":"append","id":"a{number}","text":"x"}}'


FENCE = "Nats-Expected-Last-Subject-Sequence"


@pytest.mark.parametrize(
    "fault",
    ["", "fence", "twice", "too early", "removed", "lost"],
    ids=[
        "no forbidden step",
        "a result with an old fence",
        "two results of one request",
        "a result before its turn",
        "an unanswered request removed",
        "a restart that loses the result of a removed request",
    ],
)
def test_the_protocol_model_rejects_a_history_with_one_forbidden_step(fault: str) -> None:
    told = Told()
    events: list[Any] = [told("in", _asked(1)), told("in", _asked(2))]
    if fault == "removed":
        events.append(Event("removed", events[0].message))
    first = 2 if fault == "too early" else 1
    events.append(told("out", _appended(first), {FENCE: "0"}))
    second = 1 if fault == "twice" else 3 - first
    events.append(told("out", _appended(second), {FENCE: "0" if fault == "fence" else "3"}, worker=1))
    if fault == "lost":
        events.append(Event("removed", events[0].message))
        events.append(Event("restarted", kept=(("turnkeep_log", 2), ("turnkeep_tok", 0))))
    replay = Replay(events)
    if not fault:
        replay.run()
        assert replay.counts == {"in": 2, "out": 2}
    else:
        with pytest.raises(NotAStepError):
            replay.run()
