r"""Finds formulas in Markdown, and converts their LaTeX to trees of MathML elements. Pure.

`markdown` calls it. Formulas are written as `$x$`, `$$x$$`, `\(x\)` or `\[x\]`. A formula that cannot be
converted is shown as its source.
"""

from __future__ import annotations

import re
from functools import lru_cache
from html import unescape
from typing import TYPE_CHECKING, Any, Final

from latex2mathml.converter import Converter

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_inline import StateInline

#: Longer formulas stay source: the time to convert them grows with their length.
_MAX_LATEX: Final = 4000
#: A definition could make a short formula expand without bound.
_DEFINES: Final = re.compile(r"\\(newcommand|DeclareMathOperator)")
#: Environments that the library does not know, and one that it shows in the same way.
_ROWS: Final = re.compile(r"\\(begin|end)\{(aligned|gathered|gather\*?)\}")
#: The elements and attributes that may reach the page; `href`, `style` and `class` may not.
_TAGS: Final = frozenset(
    """math mfrac mi mn mo mover mpadded mphantom mroot mrow mspace msqrt mstyle msub msubsup msup mtable mtd
    mtext mtr munder munderover""".split()  # noqa: SIM905
)
_ATTRIBUTES: Final = frozenset(
    """accent display displaystyle fence form height linethickness lspace mathvariant maxsize minsize
    movablelimits rspace scriptlevel stretchy voffset width""".split()  # noqa: SIM905
)
_ALIGNED: Final = frozenset({"left", "right"})
_CLOSING: Final = {"$$": "$$", r"\[": r"\]", r"\(": r"\)"}
#: Nearly as pandoc has it: `$5 or $6` is no formula, and neither are `$HOME/$USER` and `5$ or 6$`.
_SINGLE: Final = re.compile(
    r"(?<![0-9A-Za-z])\$(?=[^\s$])((?:\\.|[^$\\])*?)(?<!\s)\$(?![0-9A-Za-z$])", re.DOTALL
)


def with_formulas(parser: MarkdownIt) -> MarkdownIt:
    """Add the rules for formulas to a parser; they make tokens of the type `formula`."""
    parser.inline.ruler.before("escape", "formula", _inline)
    interrupts = ["paragraph", "reference", "blockquote", "list"]
    parser.block.ruler.before("fence", "formula", _block, {"alt": interrupts})
    return parser


def _inline(state: StateInline, silent: bool) -> bool:
    opening = state.src[state.pos : state.pos + 2]
    if opening in _CLOSING:
        end = state.src.find(_CLOSING[opening], state.pos + 2)
        latex, end = state.src[state.pos + 2 : end], end + 2
        is_formula = end > 1
    else:
        found = _SINGLE.match(state.src, state.pos)
        latex, end = (found[1], found.end()) if found else ("", 0)
        is_formula = found is not None
    if not is_formula or not latex.strip():
        return False
    if not silent:
        token = state.push("formula", "", 0)
        token.content, token.markup = latex, opening
    state.pos = end
    return True


def _block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Take lines from an opening mark to the line that ends with the closing one, or to an empty line.

    Without a closing mark they are a paragraph, so that no line after them changes how they are divided: a
    text that grows is parsed from its last blocks on.
    """
    opening = state.src[state.bMarks[start] + state.tShift[start] :][:2]
    if opening not in {"$$", r"\["} or state.is_code_block(start):
        return False
    lines, is_closed = list[str](), False
    while start + len(lines) < end and not is_closed:
        number = start + len(lines)
        if state.isEmpty(number) or (lines and state.sCount[number] < state.blkIndent):
            break
        lines.append(state.getLines(number, number + 1, state.blkIndent, False).strip())
        rest = lines[-1][2:] if number == start else lines[-1]
        before, closing, after = rest.partition(_CLOSING[opening])
        if after or (closing and not before and number == start):
            return False
        is_closed = bool(closing)
    if silent:
        return True
    content = "\n".join(lines)
    state.line = start + len(lines)
    if is_closed and content[2:-2].strip():
        token = state.push("formula", "", 0)
        token.content, token.markup = content[2:-2], opening
        token.map = [start, state.line]
    else:
        state.push("paragraph_open", "p", 1).map = [start, state.line]
        inline = state.push("inline", "", 0)
        inline.content, inline.map, inline.children = content, [start, state.line], []
        state.push("paragraph_close", "p", -1)
    return True


def formula(latex: str, marks: str) -> Any:
    """Return a formula as a node of MathML, or of code with its source; `marks` is what opens it."""
    return _converted(latex.strip(), "block" if marks in {"$$", r"\["} else "inline")


@lru_cache(maxsize=256)
def _converted(latex: str, display: str) -> Any:
    source = ["code", {}, latex]
    if len(latex) > _MAX_LATEX or _DEFINES.search(latex):
        return source
    try:
        return _node(Converter(display=display).convert_to_element(_ROWS.sub(r"\\\1{split}", latex)))
    except Exception:  # noqa: BLE001  # a model wrote it, and the library raises all kinds of errors
        return source


def _node(element: Element) -> Any:
    attributes = {name: value for name, value in element.attrib.items() if name in _ATTRIBUTES}
    if element.get("columnalign") in _ALIGNED:
        attributes["class"] = element.get("columnalign", "")
    if element.get("notation") == "box":
        attributes["class"] = "boxed"
    tag = element.tag if element.tag in _TAGS else "mrow"
    text = [unescape(element.text)] if element.text else []
    return [tag, attributes, *text, *map(_node, element)]
