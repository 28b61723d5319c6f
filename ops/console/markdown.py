"""Parses the Markdown of answers into trees, from which the page builds its elements. Pure.

The page gets no HTML: a node is a text, or a tag with attributes and child nodes. HTML in an answer stays
text, and links lead only to web pages and mail. `streams` parses growing answers, `turns` complete ones.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from markdown_it import MarkdownIt
from pygments.lexers import get_lexer_by_name
from pygments.token import STANDARD_TYPES
from pygments.util import ClassNotFound

from .formulas import formula, with_formulas

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from markdown_it.token import Token
    from pygments.token import _TokenType

#: A text, or `[tag, attributes, node, ...]`.
Node = Any

_PARSER: Final = with_formulas(MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]))
#: The parser leaves out what is nested deeper: a list is two levels deeper than the list around it.
_MAX_LEVEL: Final = _PARSER.options.maxNesting
#: Longer texts are not parsed, and longer code is not highlighted: the time may grow faster than the length.
_MAX_TEXT: Final = 200_000
_MAX_CODE: Final = 50_000
#: Languages to highlight. Few: each is imported, and its regular expressions run on a model's text.
_LANGUAGES: Final = frozenset(
    """bash c c# cmake console cpp csharp css diff docker dockerfile go html http ini java javascript js json
    jsx kotlin lua make makefile php powershell py python r rb ruby rs rust scala sh shell sql swift toml ts
    tsx typescript xml yaml yml zsh""".split()  # noqa: SIM905
)
#: The style sheet's colour classes, by the first letters of pygments' short token names.
_COLOURS: Final = {"c": "c", "k": "k", "s": "s", "m": "m", "nf": "f", "nc": "f", "nb": "b", "nt": "k"} | {
    "gd": "d",
    "gi": "s",
    "gh": "k",
    "gu": "k",
}
_ALIGNED: Final = re.compile(r"text-align:(center|right)")
_WEB: Final = ("https://", "http://", "mailto:")
#: A bare link ends before punctuation that belongs to the sentence.
_BARE: Final = re.compile(r"""\bhttps?://[^\s<>"]*[^\s<>"?!.,:;*_~'\]]""", re.IGNORECASE)
#: The mark of an item in a list of tasks.
_TASK: Final = re.compile(r"\[([ xX])\] (?=\S)")
_LINE_END: Final = re.compile(r"\r\n?")


@lru_cache(maxsize=256)
def rendered(text: str) -> tuple[Node, ...]:
    """Parse a complete text; return its Markdown blocks."""
    tokens = _parsed(text)
    return (_plain(text),) if tokens is None else tuple(_blocks(tokens))


class GrowingText:
    """The blocks of a growing Markdown text. Only the last two are parsed again, since others cannot change.

    The last but one can: the next character may turn a paragraph into an item of the list before it.
    """

    def __init__(self) -> None:
        self._rest = self._half = ""
        self._num_final = 0
        self._last: list[Node] = []

    def add(self, text: str) -> None:
        """Append text to the end."""
        text = self._half + text
        self._half = "\r" if text.endswith("\r") else ""  # may be half of a line end
        self._rest += _LINE_END.sub("\n", text.removesuffix("\r"))

    def take(self) -> tuple[int, list[Node]]:
        """Return how many leading blocks have not changed since the last call, and all blocks after these."""
        rest = self._rest
        tokens = _parsed(rest)
        blocks = [_plain(rest)] if tokens is None else list(_blocks(tokens))
        same = next(
            (i for i, (one, then) in enumerate(zip(self._last, blocks, strict=False)) if one != then),
            min(len(self._last), len(blocks)),
        )
        first, changed = self._num_final + same, blocks[same:]
        begins = [
            token.map[0] for token in tokens or () if token.level == 0 and token.nesting >= 0 and token.map
        ]
        if begins[:-2]:
            self._rest = "\n".join(rest.split("\n")[begins[-2] :])
            self._num_final += len(blocks) - 2
            blocks = blocks[-2:]
        self._last = blocks
        return first, changed


def _parsed(text: str) -> list[Token] | None:
    """Return the tokens of a text; None if it is too long, or a part of it nests too deeply."""
    tokens = _PARSER.parse(text) if len(text) <= _MAX_TEXT else None
    return None if tokens and max(token.level for token in tokens) >= _MAX_LEVEL - 1 else tokens


def _plain(text: str) -> Node:
    return ["pre", {}, text]


def _blocks(tokens: Iterable[Token]) -> Iterator[Node]:
    top: list[Any] = []
    open_: list[list[Any]] = [top]
    is_in_link = False
    for token in tokens:
        if token.type in {"link_open", "link_close"}:
            is_in_link = token.nesting > 0
        if token.type == "inline":
            open_[-1].extend(_inline(token, open_[1:]))
        elif token.type == "text" and not is_in_link:
            open_[-1].extend(_with_links(token.content))
        elif token.nesting < 0:
            open_.pop()
        elif token.nesting == 0:
            open_[-1].extend(_leaf(token))
        elif token.hidden:  # the paragraph of an item in a list without empty lines
            open_.append(open_[-1])
        else:
            open_[-1].append([_tag(token), _attributes(token)])
            open_.append(open_[-1][-1])
    return iter(top)


def _inline(token: Token, parents: Sequence[list[Any]]) -> list[Node]:
    """Return the nodes of a line; at the beginning of a list's item `[ ]` and `[x]` become boxes."""
    nodes = list(_blocks(token.children or ()))
    match parents, nodes:
        case (([*_, ["li", _] as item] | [*_, ["li", _, ["p", _]] as item, ["p", _]]), [str() as text, *_]):
            if task := _TASK.match(text):
                item[1]["class"] = "task"
                nodes[0] = ("☐ " if task[1] == " " else "☑ ") + text[task.end() :]
    return nodes


def _with_links(text: str) -> list[Node]:
    """Split a text at bare links to web pages; a closing bracket belongs to a link if it opens there."""
    nodes: list[Node] = []
    rest = 0
    for found in _BARE.finditer(text):
        address = found[0]
        while address.endswith(")") and address.count(")") > address.count("("):
            address = address[:-1].rstrip("?!.,:;*_~'")
        nodes += [text[rest : found.start()], ["a", {"href": address}, address]]
        rest = found.start() + len(address)
    return [one for one in (*nodes, text[rest:]) if one]


def _leaf(token: Token) -> list[Node]:
    match token.type:
        case "softbreak":
            return ["\n"]
        case "hardbreak" | "hr":
            return [[token.tag, {}]]
        case "formula":
            return [formula(token.content, token.markup)]
        case "code_inline":
            return [["code", {}, token.content]]
        case "fence" | "code_block":
            language = "".join(token.info.split()[:1])
            return [["pre", {"language": language}, *highlighted(token.content, language)]]
        case "image":  # a link, since the page loads no images
            address = str(token.attrs.get("src", ""))
            return [_link(address, token.content or address)]
    return [token.content] if token.content else []


def _tag(token: Token) -> str:
    if token.type == "heading_open":  # below the page's own headings
        return f"h{min(6, int(token.tag[1]) + 2)}"
    if token.type == "link_open" and not _leads_out(str(token.attrs.get("href", ""))):
        return "span"
    return token.tag


def _attributes(token: Token) -> dict[str, str]:
    if token.type == "link_open":
        address = str(token.attrs.get("href", ""))
        return {"href": address} if _leads_out(address) else {}
    if token.type == "ordered_list_open" and "start" in token.attrs:
        return {"start": str(token.attrs["start"])}
    aligned = _ALIGNED.search(str(token.attrs.get("style", "")))
    return {"class": aligned[1]} if aligned else {}


def _link(address: str, text: str) -> Node:
    return ["a", {"href": address}, text] if _leads_out(address) else text


def _leads_out(address: str) -> bool:
    return address.lower().startswith(_WEB)


@lru_cache(maxsize=256)
def highlighted(code: str, language: str) -> tuple[Node, ...]:
    """Split code into texts without colour, and `span` nodes with the CSS class of their colour."""
    name = language.lower()
    if name not in _LANGUAGES or len(code) > _MAX_CODE:
        return (code,)
    try:
        lexer = get_lexer_by_name(name, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return (code,)
    joined: list[tuple[str, str]] = []
    for kind, text in lexer.get_tokens(code):
        colour = _colour(kind)
        if joined and (joined[-1][0] == colour or text.isspace()):
            joined[-1] = (joined[-1][0], joined[-1][1] + text)
        else:
            joined.append((colour, text))
    return tuple(["span", {"class": f"code-{colour}"}, text] if colour else text for colour, text in joined)


def _colour(kind: _TokenType) -> str:
    short = STANDARD_TYPES.get(kind) or STANDARD_TYPES.get(kind.parent, "")
    return _COLOURS.get(short[:2], _COLOURS.get(short[:1], ""))
