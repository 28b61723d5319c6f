"""Answers in the console: their Markdown, images, and other answers to the same question."""

import io
import json
import re
import zipfile
from base64 import b64encode
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.console import markdown
from ops.console.markdown import GrowingText, highlighted, rendered
from ops.console.variants import VARIANT, variants
from ops.log.sessions import SessionRow
from tests.device import tiny_seeing
from tests.ops.test_console import Page, opened
from tests.parts import LocalWorker, png
from turnkeep_client import image
from turnkeep_client.messages import Parent

PIECES = (
    *("# ", "- ", "1. ", "2", ".", "3) ", "> ", "```", "```py\n", "~~~\n", "    ", "\n", "\n\n"),
    *("---", "===", "\r\n", "|", "|-|-|\n", "| a | b |\n", "**", "*", "_", "`", "~~", "<b>", "&amp;"),
    *("[a](https://b.c)", "![a](b)", "$", "$$", "\\[", "\\]", "\\(", "\\)", "x^2", "[ ] ", "[x] "),
    *("http://a.b", "\\", " ", "word", "def f(): return 1  # x", "<script>", "é", "\t", "\0"),
)


def plain(node: Any) -> str:
    return node if isinstance(node, str) else "".join(map(plain, node[2:]))


def test_the_console_renders_markdown_as_a_tree_of_html_elements() -> None:
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
def test_the_console_renders_items_of_a_markdown_task_list_with_checkboxes(text: str, blocks: Any) -> None:
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
def test_the_console_turns_bare_web_addresses_in_an_answer_into_links(text: str, links: list[str]) -> None:
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
def test_the_console_renders_supported_latex_formulas_as_mathml_and_leaves_others_as_text(
    text: str, shown: str
) -> None:
    assert "".join(map(elements, rendered(text))) == shown


def test_the_console_renders_aligned_equations_as_rows_and_a_boxed_formula_with_a_box() -> None:
    (table,) = rendered("$$\n\\begin{aligned} a &= b \\\\ c &= d \\end{aligned}\n$$")
    assert elements(table).count("<mtr>") == 2
    assert "&" not in elements(table)
    assert '"mtd", {"class": "right"}' in json.dumps(table)
    assert '["mrow", {"class": "boxed"}' in json.dumps(rendered(r"$\boxed{42}$"))


@pytest.mark.parametrize(
    "name", [r"\href{javascript:alert(1)}", r"\style{color:red}", r"\class{top}", r"\text"]
)
def test_a_latex_formula_in_an_answer_cannot_put_links_styles_or_markup_into_the_console_page(
    name: str,
) -> None:
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
def test_the_console_does_not_render_html_tags_and_unsafe_links_in_markdown(text: str) -> None:
    shown = json.dumps(rendered(text))
    assert '"a", {' not in shown
    assert not {"script", "img", "svg", "b"} & set(_tags(rendered(text)))
    assert plain(["", {}, *rendered(text)]).strip()


def _tags(nodes: Any) -> list[str]:
    return [tag for one in nodes if not isinstance(one, str) for tag in (one[0], *_tags(one[2:]))]


@pytest.mark.parametrize("levels", [8, 15, 400])
@pytest.mark.parametrize("mark", ["- ", "1. ", "> "])
def test_the_console_renders_deeply_nested_markdown_without_loss_of_text(mark: str, levels: int) -> None:
    lines = [f"{' ' * len(mark) * at if mark != '> ' else mark * at}{mark}word{at}" for at in range(levels)]
    text = "\n".join(lines)
    growing = GrowingText()
    growing.add(text)
    for blocks in (rendered(text), growing.take()[1]):
        assert re.findall(r"word\d+", json.dumps(blocks)) == [f"word{at}" for at in range(levels)]
        assert (blocks[0][0] == "pre") == (levels > 8 and (mark, levels) != ("> ", 15))


@given(st.lists(st.sampled_from(PIECES), max_size=60), st.integers(1, 9))
def test_the_console_parses_streamed_markdown_into_the_same_blocks_as_the_whole_text(
    pieces: list[str], each: int
) -> None:
    text, growing, blocks = "".join(pieces), GrowingText(), list[Any]()
    for at in range(0, len(text), each):
        growing.add(text[at : at + each])
        first, changed = growing.take()
        assert first <= len(blocks)
        blocks[first:] = changed
    assert blocks == list(rendered(text))
    assert _tags(blocks) == _tags(rendered(text))


def test_the_console_sends_only_the_changed_markdown_blocks_of_a_growing_answer() -> None:
    growing = GrowingText()
    growing.add("a\n\nb\n\n```py\nx = 1\n")
    assert growing.take()[0] == 0
    growing.add("y = 2\n")
    first, changed = growing.take()
    assert (first, plain(["", {}, *changed])) == (2, "x = 1\ny = 2\n")


def test_the_console_shows_text_or_code_over_the_size_limit_without_formatting(
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
def test_the_consoles_syntax_highlighting_loses_no_code_and_colours_only_supported_languages(
    language: str,
) -> None:
    code = "def f():\n\treturn 'a'\n\n\n"
    assert "".join(map(plain, highlighted(code, language))) == code
    assert (len(highlighted(code, language)) > 1) == (language == "PYTHON")


PNG = png(1)
DIGEST = sha256(PNG).hexdigest()


async def test_the_console_api_returns_a_question_with_the_digests_under_which_its_images_are_served(
    worker: LocalWorker, page: Page
) -> None:
    data = b64encode(PNG).decode()
    await page.post("a/ask", {"id": "one", "text": "Which colour?", "images": [data, data]})
    await page.post("a/ask", {"id": "two", "text": "", "images": [data]})
    await worker.client.session("a").generate(max_tokens=1)
    asked = [turn["said"][0] for turn in (await page.get("sessions/a"))["turns"][:2]]
    assert [(one.get("text", ""), one["images"]) for one in asked] == [
        ("Which colour?", [DIGEST, DIGEST]),
        ("", [DIGEST]),
    ]
    file = await page.http.get(f"/api/sessions/a/images/{DIGEST}")
    assert (file.status_code, file.content) == (200, PNG)
    assert file.headers["content-type"] == "image/png"
    assert file.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in file.headers["content-security-policy"]
    for name in ("0" * 64, "x", "*"):
        assert (await page.http.get(f"/api/sessions/a/images/{name}")).status_code == 400
    listed = (await page.get("sessions"))["rows"]
    assert [one["begins"] for one in listed] == ["Which colour?"]


async def test_the_console_shows_in_a_fork_the_images_of_the_turns_inherited_from_the_parent(
    worker: LocalWorker, page: Page
) -> None:
    await page.post("a/ask", {"id": "one", "text": "?", "images": [b64encode(PNG).decode()]})
    await worker.client.session("a").generate(max_tokens=1)
    await page.post("a/fork", {"name": "b"})
    await worker.client.session("b").generate(max_tokens=1)
    (inherited, *_) = (await page.get("sessions/b"))["turns"]
    assert inherited["said"][0]["images"] == [DIGEST]
    assert (await page.http.get(f"/api/sessions/b/images/{DIGEST}")).content == PNG


async def test_the_console_refuses_a_question_whose_image_cannot_be_decoded_and_stores_nothing(
    worker: LocalWorker, page: Page
) -> None:
    for wrong in ("", "not base64!", b64encode(b"a text").decode()):
        said = await page.post("a/ask", {"id": "one", "text": "See.", "images": [wrong]}, 400)
        assert "image" in said["error"]
    assert not await worker.client.log("a")


async def test_a_console_export_has_image_files_beside_its_markdown_and_image_urls_in_its_json(
    worker: LocalWorker, page: Page
) -> None:
    content = [image(PNG), {"type": "text", "text": "Which colour?"}]
    await worker.client.session("a").generate(messages=[{"role": "user", "content": content}], max_tokens=1)
    answer = await page.http.get("/api/sessions/a/export?form=md")
    assert answer.headers["content-disposition"] == 'attachment; filename="a.zip"'
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        name = f"a-images/{DIGEST[:16]}.png"
        assert archive.namelist() == ["a.md", name]
        assert archive.read(name) == PNG
        assert f"## You\n\n![]({name})\n\nWhich colour?\n" in archive.read("a.md").decode()
    (asked, _) = (await page.http.get("/api/sessions/a/export?form=json")).json()
    url = {"url": f"data:image/png;base64,{b64encode(PNG).decode()}"}
    assert asked["content"] == [{"type": "image_url", "image_url": url}, content[1]]


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        (b"\xff\xd8\xff\xe0 <script>", "image/jpeg"),
        (b"GIF89a <script>", "image/gif"),
        (b"RIFF\0\0\0\0WEBP<script>", "image/webp"),
    ],
)
async def test_the_console_serves_an_image_file_that_contains_html_with_an_image_content_type(
    worker: LocalWorker, page: Page, file: bytes, kind: str
) -> None:
    await worker.client.session("a").append(messages=[{"role": "user", "content": [image(file)]}])
    answer = await page.http.get(f"/api/sessions/a/images/{sha256(file).hexdigest()}")
    assert (answer.headers["content-type"], answer.content) == (kind, file)


async def test_the_console_includes_the_tokens_of_images_in_the_costs_of_a_turn(
    local_worker: Callable[..., Awaitable[LocalWorker]], tmp_path: Path
) -> None:
    tiny_seeing.write("smolvlm", tmp_path / "model")
    template = (
        "{% for one in messages %}{% if one.content is string %}{{ one.content }}{% else %}<image>{% endif %}"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(template + "{% endfor %}")
    worker = await local_worker(model=str(tmp_path / "model"))
    said = [{"role": "user", "content": [image(tiny_seeing.picture(1))]}]
    made = await worker.client.session("a").generate(messages=said, max_tokens=2)
    await worker.client.session("a").generate(messages=[{"role": "user", "content": "So?"}], max_tokens=2)
    async with opened(worker.client) as page:
        first, second = (turn["spent"] for turn in (await page.get("sessions/a"))["turns"])
    assert 0 < first["images"] <= first["prefilled"] == made.usage.prompt_tokens
    assert "images" not in second


#: Sessions, the last used one last: parent, position, and whether it is a variant.
Forks = dict[str, tuple[str, int, bool] | None]


def rows(forks: Forks) -> list[SessionRow]:
    """Return the rows of sessions, the last used one first."""
    found = [
        SessionRow(
            tenant="default",
            session=name,
            state="idle",
            waiting=0,
            position=9,
            last=datetime.fromtimestamp(number, UTC),
            entries=1,
            dead=0,
            model=None,
            worker=None,
            begins=f"words of {name}",
            parent=Parent(session=fork[0], position=fork[1]) if fork else None,
            tags=(VARIANT,) if fork and fork[2] else (),
        )
        for number, (name, fork) in enumerate(forks.items())
    ]
    return found[::-1]


@pytest.mark.parametrize(
    ("forks", "name", "at"),
    [
        ({"a": None}, "a", {}),
        ({"a": None, "a--v2": ("a", 0, True)}, "a", {0: ("a", "a--v2")}),
        ({"a": None, "a--v2": ("a", 0, True)}, "a--v2", {0: ("a", "a--v2")}),
        # a fork of a fork at the place where that one begins is a third variant
        (
            {"a": None, "a--v2": ("a", 7, True), "a--v3": ("a--v2", 7, True)},
            "a",
            {7: ("a", "a--v2", "a--v3")},
        ),
        (
            {"a": None, "a--v2": ("a", 7, True), "a--v10": ("a", 7, True)},
            "a--v2",
            {7: ("a", "a--v2", "a--v10")},
        ),
        # later in a variant: the switch at 7 leads to where it was last
        ({"a": None, "a--v2": ("a", 7, True), "a--v3": ("a--v2", 9, True)}, "a", {7: ("a", "a--v3")}),
        (
            {"a": None, "a--v2": ("a", 7, True), "a--v3": ("a--v2", 9, True)},
            "a--v3",
            {7: ("a", "a--v3"), 9: ("a--v2", "a--v3")},
        ),
        # before the place where a variant begins
        (
            {"a": None, "a--v2": ("a", 7, True), "a--v3": ("a--v2", 3, True)},
            "a--v2",
            {3: ("a--v2", "a--v3"), 7: ("a", "a--v2")},
        ),
        # a fork that somebody has named is a conversation of its own, and so are its variants
        ({"a": None, "b": ("a", 7, False), "b--v2": ("b", 8, True)}, "a", {}),
        ({"a": None, "b": ("a", 7, False), "b--v2": ("b", 8, True)}, "b", {8: ("b", "b--v2")}),
        # the first one is gone
        ({"a--v2": ("a", 7, True), "a--v3": ("a", 7, True)}, "a--v2", {7: ("a--v2", "a--v3")}),
        # names that lead in a circle
        ({"a": ("b", 7, True), "b": ("a", 7, True)}, "a", {}),
    ],
    ids=[
        "alone",
        "the first of two",
        "the second of two",
        "the first of three",
        "v2 of v2 and v10",
        "the first, changed later",
        "the last, changed later",
        "changed earlier",
        "parent of a named fork",
        "a named fork",
        "without the first",
        "a circle of names",
    ],
)
def test_the_console_shows_a_switch_at_each_message_where_variants_of_a_conversation_differ(
    forks: Forks, name: str, at: dict[int, tuple[str, ...]]
) -> None:
    assert variants(name, rows(forks), ()).at == at
