"""The types of the TypeScript client are those of the AsyncAPI document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import turnkeep_client
from turnkeep_client import typescript

WRITTEN = Path(__file__).parents[2] / "protocol" / "typescript" / "src" / "messages.ts"


def test_the_typescript_types_match_the_asyncapi_document() -> None:
    assert typescript.main(["--check", str(WRITTEN)]) == 0


def test_the_typescript_package_has_the_python_clients_version_and_pins_its_dependencies() -> None:
    package = json.loads((WRITTEN.parents[1] / "package.json").read_text())
    assert package["version"] == turnkeep_client.__version__
    versions = {**package["dependencies"], **package["devDependencies"]}.values()
    assert all(version[0].isdigit() for version in versions), "there is no lock file"


def test_outdated_typescript_types_fail_the_check_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "messages.ts"
    old.write_text(WRITTEN.read_text().replace("tool_calls?:", "calls?:"))
    assert typescript.main(["--check", str(old)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert typescript.main([]) == 0
    assert capsys.readouterr().out == WRITTEN.read_text()
