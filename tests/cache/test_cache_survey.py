"""The index is looked at beside a worker that has it for itself, and changes it all the time."""

from __future__ import annotations

import threading

from cache import survey
from cache.catalog import Catalog
from cache.folder import Folder
from cache.pins import Pin

PINS = 300


def test_what_is_looked_at_while_it_changes_is_what_was_there_at_some_moment(tmp_path) -> None:
    """Pins come and go all together: whoever saw some of them would have copied half of a change."""
    folder = Folder(tmp_path)
    catalog = Catalog(folder)
    over = threading.Event()
    pins = [Pin(bytes([i % 256] * 16), bytes([i // 256] * 400)) for i in range(PINS)]

    def change() -> None:
        while not over.is_set():
            catalog.pin(pins)
            catalog.unpin(pins)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        seen = {len(survey.look(tmp_path).pins) for _ in range(150)}
    finally:
        over.set()
        changing.join()
    catalog.close()
    folder.close()
    assert seen == {0, PINS}
