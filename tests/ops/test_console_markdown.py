"""Markdown in answers: the parsed tree, what stays plain text, and answers that still grow."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.console import markdown
from ops.console.markdown import Growing, highlighted, rendered

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
    text, growing, blocks = "".join(pieces), Growing(), list[Any]()
    for at in range(0, len(text), each):
        growing.add(text[at : at + each])
        first, changed = growing.take()
        assert first <= len(blocks)
        blocks[first:] = changed
    assert blocks == list(rendered(text))
    assert _tags(blocks) == _tags(rendered(text))


def test_a_growing_answer_sends_only_the_blocks_that_changed() -> None:
    growing = Growing()
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
    growing = Growing()
    growing.add("**a**" * 5)
    assert growing.take() == (0, [["pre", {}, "**a**" * 5]])
    assert highlighted("x = 1", "python") == ("x = 1",)


@pytest.mark.parametrize("language", ["", "nothing", "brainfuck", "PYTHON"])
def test_highlighting_loses_no_code_and_colours_only_supported_languages(language: str) -> None:
    code = "def f():\n\treturn 'a'\n\n\n"
    assert "".join(map(plain, highlighted(code, language))) == code
    assert (len(highlighted(code, language)) > 1) == (language == "PYTHON")
