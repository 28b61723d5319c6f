"""Markdown in answers: the parsed tree, what stays plain text, and answers that still grow."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.console import markdown
from ops.console.markdown import GrowingText, highlighted, rendered

PIECES = (
    *(
        "# ",
        "- ",
        "1. ",
        "2",
        ".",
        "3) ",
        "> ",
        "```",
        "```py\n",
        "~~~\n",
        "    ",
        "\n",
        "\n\n",
        "---",
        "===",
        "\r\n",
    ),
    *(
        "|",
        "|-|-|\n",
        "| a | b |\n",
        "**",
        "*",
        "_",
        "`",
        "~~",
        "[a](https://b.c)",
        "![a](b)",
        "<b>",
        "&amp;",
    ),
    *("$", "$$", "\\[", "\\]", "\\(", "\\)", "x^2", "[ ] ", "[x] ", "http://a.b", "_"),
    *("\\", " ", "word", "def f(): return 1  # x", "<script>", "é", "\t", "\0"),
)


def plain(node: Any) -> str:
    return node if isinstance(node, str) else "".join(map(plain, node[2:]))


def test_markdown_is_rendered_as_a_tree_of_html_elements() -> None:
    text = """# Title
**bold** *thin* ~~gone~~ `a<b` [out](https://a.example/?b) <https://c.example>

3. three
   - in it
4. four

| left | right |
|---|--:|
| 1 | 2 |

```python
x = "s"  # why
```
> said
"""
    out = {"href": "https://a.example/?b"}
    assert json.loads(json.dumps(rendered(text))) == [
        ["h3", {}, "Title"],
        [
            *("p", {}, ["strong", {}, "bold"], " ", ["em", {}, "thin"], " ", ["s", {}, "gone"], " "),
            *(["code", {}, "a<b"], " ", ["a", out, "out"], " "),
            ["a", {"href": "https://c.example"}, "https://c.example"],
        ],
        ["ol", {"start": "3"}, ["li", {}, "three", ["ul", {}, ["li", {}, "in it"]]], ["li", {}, "four"]],
        [
            "table",
            {},
            ["thead", {}, ["tr", {}, ["th", {}, "left"], ["th", {"class": "right"}, "right"]]],
            ["tbody", {}, ["tr", {}, ["td", {}, "1"], ["td", {"class": "right"}, "2"]]],
        ],
        [
            *("pre", {"language": "python"}, "x = ", ["span", {"class": "code-s"}, '"s"  ']),
            ["span", {"class": "code-c"}, "# why\n"],
        ],
        ["blockquote", {}, ["p", {}, "said"]],
    ]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("- [ ] a **b**", [["ul", {}, ["li", {"class": "task"}, "☐ a ", ["strong", {}, "b"]]]]),
        (
            "1. [x] c\n\n   [ ] d",
            [["ol", {}, ["li", {"class": "task"}, ["p", {}, "☑ c"], ["p", {}, "[ ] d"]]]],
        ),
        ("- [x](http://a.b)", [["ul", {}, ["li", {}, ["a", {"href": "http://a.b"}, "x"]]]]),
        ("[ ] a", [["p", {}, "[ ] a"]]),
    ],
)
def test_items_of_a_list_of_tasks_begin_with_boxes(text: str, blocks: Any) -> None:
    assert list(rendered(text)) == blocks


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("See https://a.example/x_(y)?q=1&b=2.", ["https://a.example/x_(y)?q=1&b=2"]),
        ("(http://a.b) or **http://c.d/**,", ["http://a.b", "http://c.d/"]),
        ("`http://a.b` [http://c.d](http://e.f)", ["http://e.f"]),
        ("javascript://a.b, xhttp://c.d, http://", []),
    ],
)
def test_bare_links_to_web_pages_lead_there(text: str, links: list[str]) -> None:
    assert re.findall(r'"a", {"href": "([^"]*)"}', json.dumps(rendered(text))) == links
    assert plain(["", {}, *rendered(text)]) == re.sub(r"[`*]|\[|\]\(.*\)", "", text)


def elements(nodes: Any) -> str:
    """Write nodes in the way of XML, without attributes."""
    if isinstance(nodes, str):
        return nodes
    return f"<{nodes[0]}>{''.join(map(elements, nodes[2:]))}</{nodes[0]}>"


ROW = "<math><mrow>{}</mrow></math>"
X = ROW.format("<mi>x</mi>")
MINUS_X = ROW.format("<mo>\N{MINUS SIGN}</mo><mi>x</mi>")
HALF = ROW.format("<mfrac><mrow><mn>1</mn></mrow><mrow><mn>2</mn></mrow></mfrac>")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("$x$ and $5 or $6", f"<p>{X} and $5 or $6</p>"),
        (r"\(x\), $ x$, \$x$, $HOME/$USER, `$x$`", f"<p>{X}, $ x$, $x$, $HOME/$USER, <code>$x$</code></p>"),
        ("a\n$$\n- x\n$$\nb", f"<p>a</p>{MINUS_X}<p>b</p>"),
        (r"\[x\]", X),
        ("> $$\n> x\n> $$", f"<blockquote>{X}</blockquote>"),
        ("- $$x$$", f"<ul><li>{X}</li></ul>"),
        ("$$x$$ so", f"<p>{X} so</p>"),
        ("$$ x\n\ny", "<p>$$ x</p><p>y</p>"),
        (
            "| a |\n|---|\n| $x$ |",
            f"<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>{X}</td></tr></tbody></table>",
        ),
        (
            r"$\frac{1}{2}$",
            f"<p>{HALF}</p>",
        ),
        ("$^$", "<p><code>^</code></p>"),
        (r"$\newcommand{\a}{x}\a$", r"<p><code>\newcommand{\a}{x}\a</code></p>"),
        (f"${'{' * 1500}{'}' * 1500}$", f"<p><code>{'{' * 1500}{'}' * 1500}</code></p>"),
        (f"${'x' * 4001}$", f"<p><code>{'x' * 4001}</code></p>"),
    ],
)
def test_formulas_become_mathml_and_others_stay_text(text: str, shown: str) -> None:
    assert "".join(map(elements, rendered(text))) == shown


def test_the_lines_of_aligned_equations_are_rows_and_a_boxed_answer_has_a_box() -> None:
    (table,) = rendered("$$\n\\begin{aligned} a &= b \\\\ c &= d \\end{aligned}\n$$")
    assert elements(table).count("<mtr>") == 2
    assert "&" not in elements(table)
    assert '"mtd", {"class": "right"}' in json.dumps(table)
    assert '["mrow", {"class": "boxed"}' in json.dumps(rendered(r"$\boxed{42}$"))


@pytest.mark.parametrize(
    "name", [r"\href{javascript:alert(1)}", r"\style{color:red}", r"\class{top}", r"\text"]
)
def test_a_formula_has_no_links_styles_or_markup(name: str) -> None:
    shown = rendered(f"${name}{{<script>alert(1)</script>&lt;img&gt;}}$")
    assert set(re.findall(r'"(\w+)": "', json.dumps(shown))) <= {"display", "stretchy", "fence", "form"}
    assert not {"script", "img", "a"} & set(_tags(shown))


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[a](javascript:alert(1))",
        "[a](JavaScript&colon;alert(1))",
        "[a](data:text/html,x)",
        "[a](//evil.example)",
        "[a](/api/sessions/b/forget)",
        "![a](/icon.svg)",
        "<javascript:alert(1)>",
        "| a |\n|---|\n| <b onclick=x> |",
        "- <svg/onload=x>",
    ],
)
def test_html_tags_and_unsafe_links_in_markdown_are_not_rendered(text: str) -> None:
    shown = json.dumps(rendered(text))
    assert '"a", {' not in shown
    assert not {"script", "img", "svg", "b"} & set(_tags(rendered(text)))
    assert plain(["", {}, *rendered(text)]).strip()


def _tags(nodes: Any) -> list[str]:
    return [tag for one in nodes if not isinstance(one, str) for tag in (one[0], *_tags(one[2:]))]


@given(st.lists(st.sampled_from(PIECES), max_size=60), st.integers(1, 9))
def test_markdown_parsed_piece_by_piece_equals_markdown_parsed_at_once(pieces: list[str], each: int) -> None:
    text, growing, blocks = "".join(pieces), GrowingText(), list[Any]()
    for at in range(0, len(text), each):
        growing.add(text[at : at + each])
        first, changed = growing.take()
        assert first <= len(blocks)
        blocks[first:] = changed
    assert blocks == list(rendered(text))
    assert _tags(blocks) == _tags(rendered(text))


def test_a_growing_answer_sends_only_the_blocks_that_changed() -> None:
    growing = GrowingText()
    growing.add("a\n\nb\n\n```py\nx = 1\n")
    assert growing.take()[0] == 0
    growing.add("y = 2\n")
    first, changed = growing.take()
    assert (first, plain(["", {}, *changed])) == (2, "x = 1\ny = 2\n")


def test_text_or_code_over_the_size_limit_is_shown_without_formatting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(markdown, "_MAX_TEXT", 20)
    monkeypatch.setattr(markdown, "_MAX_CODE", 3)
    assert rendered("**a**" * 5) == (["pre", {}, "**a**" * 5],)
    growing = GrowingText()
    growing.add("**a**" * 5)
    assert growing.take() == (0, [["pre", {}, "**a**" * 5]])
    assert highlighted("x = 1", "python") == ("x = 1",)


@pytest.mark.parametrize("language", ["", "nothing", "brainfuck", "PYTHON"])
def test_highlighting_loses_no_code_and_colours_only_supported_languages(language: str) -> None:
    code = "def f():\n\treturn 'a'\n\n\n"
    assert "".join(map(plain, highlighted(code, language))) == code
    assert (len(highlighted(code, language)) > 1) == (language == "PYTHON")
