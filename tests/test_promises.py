"""Checks that a test watches each promise of the pages: `promises.toml` names them.

Promises are the sentences and rows of tables of README's "What it does" and of the features page, and those
of the protocol page with a word of `RULES`.
"""

import ast
import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/features.md", "docs/protocol.md")
RULES = re.compile(r"\b(must|never|always|exactly|cannot|refuses?|refused|fails?)\b")
#: For each page and for the first words of each sentence the tests that watch it, or why no test can.
ROWS: dict[str, dict[str, list[str] | str]] = tomllib.loads((ROOT / "tests" / "promises.toml").read_text())


def sentences(text: str) -> list[str]:
    """Return the sentences and the rows of tables of a page, without headings, blocks of code and marks."""
    text = re.sub(r"^```[^`]*^```$|^\|.*\n\|[-| ]+$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n|\n(?=- |\||#)", text)]
    found: list[str] = []
    for block in blocks:
        if block.startswith("|"):
            found.append(block.removeprefix("| "))
        elif block and not block.startswith("#"):
            found += re.split(r"(?<=[.!?]) (?=[`*A-Z])", block.removeprefix("- "))
    return [one.replace("**", "") for one in found]


def sentences_that_promise(page: str) -> list[str]:
    text = (ROOT / page).read_text()
    if page == "README.md":
        text = text.partition("## What it does\n")[2].partition("\n## ")[0]
    return [one for one in sentences(text) if page != "docs/protocol.md" or RULES.search(one)]


@cache
def functions_of(file: str) -> set[str]:
    """Return the names of a file's test functions; none if there is no such file."""
    path = ROOT / file
    nodes = ast.walk(ast.parse(path.read_text())) if path.is_file() else ()
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("page", PAGES)
def test_each_promise_in_a_documentation_page_has_one_row_in_promises_toml_and_each_row_one_promise(
    page: str,
) -> None:
    found = sentences_that_promise(page)
    assert len(found) > 10, "the page has other headings or marks than `sentences` knows"
    begun = {key: [one for one in found if one.startswith(key)] for key in ROWS[page]}
    assert {key: ones for key, ones in begun.items() if len(ones) != 1} == {}, "a key begins one sentence"
    times = Counter(one for ones in begun.values() for one in ones)
    assert [one for one in found if times[one] != 1] == []


@pytest.mark.parametrize("page", PAGES)
def test_each_promise_in_a_documentation_page_names_an_existing_test_or_a_reason_for_having_none(
    page: str,
) -> None:
    rows = ROWS[page]
    assert [key for key, tests in rows.items() if not tests] == []
    named = [test.split("::") for tests in rows.values() if isinstance(tests, list) for test in tests]
    assert [(file, name) for file, name in named if name not in functions_of(file)] == []


def test_promises_toml_has_rows_for_exactly_the_checked_documentation_pages() -> None:
    assert ROWS.keys() == {*PAGES}


def test_each_figure_in_the_comparison_table_of_the_readme_is_also_on_the_benchmarks_page() -> None:
    table = (ROOT / "README.md").read_text().partition("| mlx_lm.server |\n")[2].partition("\n\n")[0]
    figures = re.findall(r"\| ([\d.]+)(?: m?s)?(?= \|)", table)
    measured = (ROOT / "docs/benchmarks.md").read_text().partition("## Beside `mlx_lm.server`\n")[2]
    assert len(figures) == 8
    assert set(figures) <= set(re.findall(r"[\d.]+", measured.partition("\n## ")[0]))
