"""The page docs/security.md names test files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def test_each_defence_on_the_security_page_names_test_files_that_exist() -> None:
    defended = PAGE.partition("## Defended\n")[2].partition("## Not defended")[0]
    rows = [row for row in defended.splitlines() if row.startswith("| ")][2:]
    assert len(rows) > 10
    for row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)`", row.split("|")[3])
        assert tests, row
        assert [test for test in tests if not (ROOT / test).is_file()] == [], row
