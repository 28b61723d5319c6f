"""The types of the TypeScript client are those of the AsyncAPI document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import turnkeep_client
from turnkeep_client import typescript

WRITTEN = Path(__file__).parents[2] / "protocol" / "typescript" / "src" / "messages.ts"


def test_the_written_types_are_current() -> None:
    assert typescript.main(["--check", str(WRITTEN)]) == 0


def test_the_package_has_the_version_of_the_client_beside_it() -> None:
    package = json.loads((WRITTEN.parents[1] / "package.json").read_text())
    assert package["version"] == turnkeep_client.__version__
    versions = {**package["dependencies"], **package["devDependencies"]}.values()
    assert all(version[0].isdigit() for version in versions), "there is no lock file"


def test_old_types_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "messages.ts"
    old.write_text(WRITTEN.read_text().replace("tool_calls?:", "calls?:"))
    assert typescript.main(["--check", str(old)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert typescript.main([]) == 0
    assert capsys.readouterr().out == WRITTEN.read_text()
