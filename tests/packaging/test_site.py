"""The documentation site: a complete reference, no dead links or hosts; the pages name files that exist."""

import re
import runpy
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from commands.cli import main
from turnkeep_client.asyncapi import CONTROL_REPLIES, CONTROLS, REQUESTS, RESULTS
from turnkeep_client.errors import ERROR_CODES
from turnkeep_client.messages import TenantFigures
from worker.process.settings import Settings

ROOT = Path(__file__).parents[2]
MKDOCS = ROOT / ".venv" / "docs" / "bin" / "mkdocs"
PAGES: dict[str, Callable[[], str]] = runpy.run_path(str(ROOT / "docs" / "reference.py"))["PAGES"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the site's sources and its generated reference pages."""
    if not MKDOCS.exists():
        pytest.skip("mkdocs is not installed; make site")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "docs" / "reference").mkdir(exist_ok=True)
    for page, write in PAGES.items():
        (tmp_path / "docs" / "reference" / page).write_text(write())
    return tmp_path


def build(project: Path) -> subprocess.CompletedProcess[str]:
    command = [MKDOCS, "build", "--strict", "--site-dir", project / "site"]
    return subprocess.run(command, cwd=project, check=False, capture_output=True, text=True)


@pytest.mark.packaging
def test_the_generated_reference_lists_every_command_setting_message_field_and_error_code() -> None:
    commands, settings, messages, errors = (
        PAGES[f"{name}.md"]() for name in ("commands", "settings", "messages", "errors")
    )
    shown = set(re.findall(r"^## turnkeep (.*)$", commands, re.MULTILINE))
    assert set(main.list_commands(None)) | {"cache verify", "bench load", "dead retry"} <= shown  # type: ignore[arg-type]
    assert re.findall(r"^\| `(\w+)` ", settings, re.MULTILINE) == [one.name for one in fields(Settings)]
    for kind in (*REQUESTS, *RESULTS, *CONTROLS, *CONTROL_REPLIES, TenantFigures):
        (part,) = re.findall(rf"^### {kind.__name__}\n(.*?)(?=^##|\Z)", messages, re.MULTILINE | re.DOTALL)
        assert set(kind.__struct_encode_fields__) <= set(re.findall(r"^\| `(\w+)` ", part, re.MULTILINE))
    assert re.findall(r"^\| `([a-z_]+)` ", errors, re.MULTILINE) == list(ERROR_CODES)


@pytest.mark.packaging
def test_the_documentation_site_builds_without_warnings_and_loads_nothing_from_another_host(
    project: Path,
) -> None:
    done = build(project)
    assert done.returncode == 0, done.stderr
    pages = list((project / "site").rglob("*.html"))
    assert len(pages) > 25
    loads = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    assert [found for page in pages for found in loads.findall(page.read_text())] == []
    styles = "".join(page.read_text() for page in (project / "site").rglob("*.css"))
    assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", styles) == []


@pytest.mark.packaging
@pytest.mark.parametrize("link", ["[x](nowhere.md)", "[x](protocol.md#nowhere)", "[x](../README.md)"])
def test_a_dead_link_makes_the_build_of_the_documentation_site_fail(project: Path, link: str) -> None:
    page = project / "docs" / "index.md"
    page.write_text(f"{page.read_text()}\n{link}\n")
    assert build(project).returncode == 1


PAGE = (ROOT / "docs" / "security.md").read_text()


def test_each_defence_on_the_security_page_names_test_files_that_exist() -> None:
    defended = PAGE.partition("## Defended\n")[2].partition("## Not defended")[0]
    rows = [row for row in defended.splitlines() if row.startswith("| ")][2:]
    assert len(rows) > 10
    for row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)`", row.split("|")[3])
        assert tests, row
        assert [test for test in tests if not (ROOT / test).is_file()] == [], row
