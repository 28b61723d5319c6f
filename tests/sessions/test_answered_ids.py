"""`AnsweredIds`, a compact index of the request ids that a session has answered, against plain lists."""

from __future__ import annotations

import random

import pytest

from worker.sessions import answered_ids
from worker.sessions.answered_ids import AnsweredAt, AnsweredIds


@pytest.mark.parametrize("seed", range(4))
def test_looking_up_an_id_finds_the_first_of_its_results_that_were_not_dropped(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(answered_ids, "_FEW", 5)
    dice, ids, left = random.Random(seed), AnsweredIds(), {f"r{n}": list[AnsweredAt]() for n in range(12)}
    for number in range(1, 300):
        name = dice.choice([*left])
        if left[name] and dice.random() < 0.5:
            ids.drop(name)
            del left[name][0]
        else:
            left[name].append(AnsweredAt(number, number + 1))
            for _ in range(2 if len(left[name]) == 1 else 1):  # the log may be read again
                ids.add(name, left[name][-1])
        if dice.random() < 0.1:
            ids.load(ids.pack())
        assert {name: ids.find(name) for name in left} == {name: (*of, None)[0] for name, of in left.items()}
        assert len(ids) == sum(map(len, left.values()))
