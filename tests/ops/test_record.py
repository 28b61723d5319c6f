"""`turnkeep replay`: which requests it takes, and how it explains a difference from the log."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ops.log.differences import Difference, first_difference, first_unequal
from ops.log.record import Recording, fold, within
from tests.commands.command_runs import command, where
from tests.parts import CHAT_TEMPLATE, LocalWorker
from turnkeep_client.log import BUILD_HEADER, HISTORY_HEADER, MODEL_HEADER, Entry
from turnkeep_client.messages import encode
from turnkeep_client.session_log import paired
from turnkeep_client.subjects import SessionKey

KEY = SessionKey("default", "s")
HEADERS = {MODEL_HEADER: "m", HISTORY_HEADER: "d", BUILD_HEADER: ""}
APPEND = {"type": "append", "id": "a", "text": "x"}
GENERATE = {"type": "generate", "max_tokens": 2}
SIZES = {"tokens": 1, "cached_tokens": 0, "prefilled_tokens": 1, "kv_live_bytes": 1, "seconds": 0.1}
COUNTS = ("prompt_tokens", "cached_tokens", "prefilled_tokens", "completion_tokens")
SECONDS = dict.fromkeys(("queued", "prefill", "first_token", "total"), 0.1)
REFUSED = {"type": "failed", "id": "x", "code": "expired", "message": "", "retryable": True}


def entry(seq: int, kind: Any, body: dict[str, Any], at_s: float = 0, session: str = "s") -> Entry:
    stored = datetime(2026, 11, 20, tzinfo=UTC) + timedelta(seconds=at_s)
    return Entry(seq, SessionKey("default", session), kind, stored, encode(body), HEADERS)


def record_of(*entries: Entry) -> Recording:
    keys = dict.fromkeys(one.key for one in entries)
    return fold([paired(key, [one for one in entries if one.key == key]) for key in keys])


def appended(seq: int, **more: Any) -> dict[str, Any]:
    return {"type": "appended", "id": "x", "seq": seq, "position": 1, **SIZES, **more}


def test_the_command_replay_leaves_out_repeated_refused_and_unanswered_requests() -> None:
    record = record_of(
        entry(1, "in", APPEND, 10),
        entry(2, "in", {**APPEND, "id": "b", "expect_position": 3}, 11),
        entry(3, "out", appended(1), 12),
        entry(4, "out", appended(2), 13),
        entry(5, "in", APPEND, 14),
        entry(6, "out", appended(5, repeat_of=1), 15),
        entry(7, "in", {**APPEND, "id": "c"}, 16),
        entry(8, "out", {**REFUSED, "seq": 7}, 17),
        entry(9, "in", {**APPEND, "id": "d"}, 18),
        entry(10, "in", {"type": "no"}, 19),
        entry(11, "in", {**APPEND, "id": "e"}, 12.5, "t"),
        entry(12, "out", appended(11), 14, "t"),
    )
    assert record.left_out == {"repeated": 1, "refused": 1, "not valid, or not answered": 2}
    first, second = record.sessions.values()
    assert [(step.asked.seq, step.answered.seq, step.took_s) for step in first] == [(1, 3, 2), (2, 4, 2)]
    assert first[1].request.expect_position is None
    assert [(step.asked.seq, step.took_s) for step in second] == [(11, 1.5)]
    assert record.begin == first[0].asked.stored


def test_the_command_replay_leaves_out_an_empty_cancelled_answer_but_repeats_one_with_max_tokens_0() -> None:
    generated = {"type": "generated", "id": "x", "position": 1, "text": "", "tokens": [], "kv_live_bytes": 1}
    counts = {"usage": dict.fromkeys(COUNTS, 1), "seconds": SECONDS}
    said = generated | counts
    record = record_of(
        entry(1, "in", {**GENERATE, "id": "cancelled", "max_tokens": 0}),
        entry(2, "out", {**said, "seq": 1, "finish_reason": "cancelled"}),
        entry(3, "in", {**GENERATE, "id": "length", "max_tokens": 0}),
        entry(4, "out", {**said, "seq": 3, "finish_reason": "length"}),
    )
    assert record.left_out == {"cancelled before the first token": 1}
    (kept,) = record.sessions.values()
    assert [one.request.id for one in kept] == ["length"]


def test_the_command_replay_leaves_out_close_requests_with_forget_and_the_sessions_they_erased() -> None:
    close = {"type": "close", "forget": True}
    closed = {"type": "closed", "id": "x", "position": 1}
    record = record_of(
        entry(1, "in", {**close, "id": "c"}),
        entry(2, "out", {**closed, "seq": 1}),
        entry(3, "in", APPEND, 1, "t"),
        entry(4, "out", appended(3), 2, "t"),
        entry(5, "in", {**close, "id": "d"}, 3, "t"),
        entry(6, "out", {**closed, "seq": 5}, 4, "t"),
        entry(7, "in", {**APPEND, "id": "e"}, 5, "t"),
        entry(8, "out", appended(7), 6, "t"),
        entry(9, "in", {**close, "id": "f"}, 7, "t"),
        entry(10, "out", {**closed, "seq": 9}, 8, "t"),
    )
    assert record.left_out == {"of a forgotten session": 1}
    (kept,) = record.sessions.values()
    assert [getattr(one.request, "forget", None) for one in kept] == [None, False, None]


def test_the_time_range_of_a_replay_selects_sessions_begun_within_it_and_entries_before_its_end() -> None:
    log = paired(KEY, [entry(seq, "in", APPEND, at_s) for seq, at_s in ((1, 0), (2, 5), (3, 9))])
    first, second, third = (one.entry.stored for one in log.asked)
    assert [one.entry.seq for one in within(log, None, None).asked] == [1, 2, 3]
    assert [one.entry.seq for one in within(log, first, None).asked] == [1, 2, 3]
    assert [one.entry.seq for one in within(log, second, None).asked] == []
    assert [one.entry.seq for one in within(log, None, third).asked] == [1, 2]


BUILD = {"worker": "w", "version": "1", "dtype": "float32", "device": "cpu", "kv": "full"}


def difference(*, was: Any = None, now: Any = None, told: dict[str, Any] | None = None) -> Difference | None:
    """Compare a record of two answers, of the tokens 1 and 2 each, with a replay.

    The second answer has the headers `was` in the record, and the headers `now` and fields `told` in the
    replay.
    """
    sides = []
    for changed, headers in ((told or {}, now or {}), ({}, was or {})):
        entries = []
        for i in range(2):
            usage = dict.fromkeys(COUNTS, 1) | {"prompt_tokens": 9}
            body = {"type": "generated", "id": "x", "position": 1, "text": "ab", "usage": usage}
            body |= {"tokens": [1, 2], "seconds": SECONDS, "kv_live_bytes": 1, "finish_reason": "length"}
            body |= {"seq": 2 * i + 1} | (changed if i else {})
            entries.append(entry(2 * i + 1, "in", {**GENERATE, "id": f"{i}"}))
            named = {"model": "m", "history": "d", "build": BUILD, **(headers if i else {})}
            build = " ".join(f"{name}={value}" for name, value in named["build"].items())
            values = (named["model"], named["history"], build)
            out = entry(2 * i + 2, "out", body)
            entries.append(out._replace(headers=dict(zip(HEADERS, values, strict=True))))
        sides.append(paired(KEY, entries).exchanges)
    return first_difference("s", sides[1], {one.request.id: one for one in sides[0]}, {})


OTHER_TOKEN = {"tokens": [1, 3], "text": "ac"}


def test_the_first_difference_of_a_replay_is_reported_with_session_request_token_and_both_texts() -> None:
    assert difference() is None
    found = difference(told=OTHER_TOKEN)
    assert found is not None
    assert (found.session, found.number, found.id, found.token) == ("s", 2, "1", 1)
    assert (found.recorded, found.replayed) == ("ab", "ac")


@pytest.mark.parametrize(
    ("was", "now", "told", "cause"),
    [
        ({}, {"model": "n"}, OTHER_TOKEN, "another model: n, the record is of m"),
        (
            {},
            {"build": BUILD | {"dtype": "float16"}},
            OTHER_TOKEN,
            "another dtype: float16, the record is of flo",
        ),
        (
            {},
            {"build": BUILD | {"device": "metal"}},
            OTHER_TOKEN,
            "another device: metal, the record is of cpu",
        ),
        ({}, {"build": BUILD | {"kv": "8-bit"}}, OTHER_TOKEN, "another KV precision: 8-bit"),
        (
            {},
            {"build": BUILD | {"version": "2"}},
            OTHER_TOKEN,
            "another version: 2, the record is of 1; its defaults may differ (temperature, top_p, ",
        ),
        (
            {},
            {"build": BUILD | {"worker": "v"}},
            OTHER_TOKEN,
            "model, dtype, KV precision, device, version are",
        ),
        ({"build": {}}, {}, OTHER_TOKEN, "unknown: the record does not say its dtype and device"),
        (
            {},
            {},
            OTHER_TOKEN | {"cache": {"policy": "sink_window", "sink": 4, "window": 64}},
            "another cache policy: sink_window (the first 4 tokens and the last 64), the record is of full",
        ),
        ({}, {"history": "e"}, {}, "the prompt became other tokens under a model of the same name"),
        ({}, {}, {"usage": dict.fromkeys(COUNTS, 8)}, "the prompt became other tokens"),
        ({}, {}, {**REFUSED, "code": "internal", "message": "no"}, "the replaying worker: internal: no"),
    ],
)
def test_the_likely_cause_of_a_replay_difference_is_derived_from_the_recorded_and_the_new_result(
    was: Any, now: Any, told: Any, cause: str
) -> None:
    found = difference(was=was, now=now, told=told)
    assert found is not None
    assert found.cause.startswith(cause), found.cause


def test_a_replayed_request_without_a_result_is_reported_as_a_difference() -> None:
    (one,) = paired(KEY, [entry(1, "in", APPEND), entry(2, "out", appended(1))]).exchanges
    found = first_difference("s", [one], {}, {"a": "no result within 3 s"})
    assert found is not None
    assert found.cause == "the replaying worker: no result within 3 s"


def test_the_first_unequal_token_of_a_replayed_answer_is_found_even_if_one_answer_is_shorter() -> None:
    assert first_unequal((1, 2, 3), (1, 2, 3)) is None
    assert first_unequal((1, 2, 3), (1, 9, 3)) == 1
    assert first_unequal((1, 2, 3), (1, 2)) == 2


@pytest.mark.parametrize("end", ["cancelled", "expired", "model_changed", "given_up"])
def test_a_replayed_answer_whose_original_ended_early_is_limited_to_the_recorded_number_of_tokens(
    end: str,
) -> None:
    generated = {"type": "generated", "id": "x", "seq": 1, "position": 3, "text": "ab", "tokens": [1, 2]}
    counts = {"usage": dict.fromkeys(COUNTS, 1), "seconds": SECONDS, "kv_live_bytes": 1}
    asked = entry(1, "in", {**GENERATE, "id": "x", "max_tokens": 90})
    record = record_of(asked, entry(2, "out", {**generated, **counts, "finish_reason": end}))
    ((step,),) = record.sessions.values()
    assert step.request.max_tokens == 2


async def replay(worker: LocalWorker, *options: object) -> subprocess.CompletedProcess[str]:
    return await command("replay", *options, *where(worker))


async def converse(worker: LocalWorker) -> None:
    """Run two sessions: one with sampled answers, one with concurrent appends, a rewind and a close."""
    garden, house = worker.client.session("garden"), worker.client.session("house")
    say = [{"role": "user", "content": "What is red?"}]
    for _ in range(2):
        await garden.generate(messages=say, max_tokens=40, temperature=1.0)
    await asyncio.gather(*(house.append(messages=say, request_id=f"a{i}") for i in range(3)))
    await house.rewind(20)
    await house.generate(text="and", max_tokens=20)
    await house.close()


async def replayed(worker: LocalWorker) -> list[dict[str, int]]:
    """Return the numbers of entries of the sessions that replays have made, by kind."""
    log = await worker.client.stored.subjects()
    return [kinds for key, kinds in log.items() if key.tenant.startswith("replay-")]


async def test_a_replay_reproduces_the_recorded_answers_and_removes_its_sessions(worker: LocalWorker) -> None:
    await converse(worker)
    done = await replay(worker, "--speed", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("the same: 2 sessions, 7 requests, ")
    assert "turnaround, median" in done.stdout
    kept = await replay(worker, "garden", "--speed", "max", "--into-tenant", "again", "--keep", "--json")
    report = json.loads(kept.stdout)
    assert (kept.returncode, report["same"], report["sessions"], report["tenant"]) == (0, True, 1, "again")
    log = await worker.client.stored.subjects()
    assert [kinds for key, kinds in log.items() if key.tenant == "again"] == [{"in": 2, "out": 2}]
    async with asyncio.timeout(20):  # until only the closes that forget, and their results, are left
        while await replayed(worker) != [{"in": 1, "out": 1, "closed": 1}] * 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_replay_with_a_changed_chat_template_prints_the_first_difference_and_its_likely_cause(
    local_worker: Callable[..., Awaitable[LocalWorker]], tmp_path: Path, tiny_model: Path
) -> None:
    changed = tmp_path / "copy" / tiny_model.name
    shutil.copytree(tiny_model, changed)
    for file in changed.glob("chat_template*"):
        file.write_text("Hello. " + CHAT_TEMPLATE)
    worker = await local_worker()
    await converse(worker)
    second = await local_worker(prefix="others", data_dir=tmp_path / "other", model=str(changed))
    done = await replay(worker, "--speed", "max", "--into-prefix", second.settings.prefix)
    assert done.returncode == 1, done.stdout + done.stderr
    *_, different, first, recorded, replayed, cause = done.stdout.splitlines()
    assert different.startswith("different: ")
    assert first.startswith("first: session ")
    assert recorded != replayed
    told = "likely cause: the prompt became other tokens under a model of the same name"
    assert cause.strip().startswith(told)


async def test_the_command_replay_of_an_unknown_session_or_an_empty_time_range_fails_in_one_line(
    worker: LocalWorker,
) -> None:
    await converse(worker)
    for options, says in (
        (("nobody",), "turnkeep: there is no session nobody; see turnkeep sessions"),
        (("garden", "huose"), "turnkeep: there is no session huose; see turnkeep sessions"),
        (("garden", "gardn"), "turnkeep: there is no session gardn; did you mean garden?"),
        (("--since", "2100-01-01"), "turnkeep: there is nothing to replay: "),
        (("--into-prefix", "unserved"), "turnkeep: no worker serves unserved.replay-"),
    ):
        done = await replay(worker, *options)
        assert (done.returncode, done.stdout) == (1, ""), done.stdout
        (line,) = done.stderr.splitlines()
        assert line.startswith(says), line
    for options in (("--speed", "0"), ("--speed", "fast"), ("--until", "soon")):
        assert (await replay(worker, *options)).returncode == 2
