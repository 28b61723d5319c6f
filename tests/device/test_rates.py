"""Whether to read, fetch or prefill follows from measured speeds, and a slow disk is tried again."""

from __future__ import annotations

from itertools import count

from worker.device.rates import Rates

MIB = 2**20


def test_a_fetch_is_tried_again_after_refusals_whether_the_disk_or_the_tier_was_slow() -> None:
    for tier_s, disk_s in ((60.0, 1.0), (1.0, 60.0), (1.0, None)):
        rates = Rates()
        rates.prefilled(1000, seconds=1.0)
        rates.fetched(64 * MIB, tier_s)
        if disk_s is not None:
            rates.restored(64 * MIB, disk_s)
        refused = next(n for n in count() if rates.should_fetch(64 * MIB, 1000))
        assert refused <= 100
        assert (refused > 50) == (disk_s is not None)
