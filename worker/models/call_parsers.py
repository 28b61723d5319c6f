"""Parses the tool calls that models write, with a parser for each format. Pure.

A parser takes the whole text between a call's markers, and raises `ValueError` unless it can parse all of it;
mlx-lm's parsers skip parts that they do not understand. `worker.text.arguments` then checks that the tool
was offered and that the arguments fit its schema.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    Parser: TypeAlias = "Callable[[str], list[Written]]"


class Written(NamedTuple):
    """One call as the model wrote it. With `is_text`, all values are text, as the format has no other types.

    `id` is the model's own id of the call, mostly None.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None
    is_text: bool = False


class ParsedCall(NamedTuple):
    """One tool call of an answer. `arguments` is JSON as text."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """The syntax of calls between the markers `opens` and `closes`.

    If `closes` is empty, a call ends where its JSON value ends; the regex `value` matches the text before
    that value. If `closes` is None, a call ends where the answer ends. If the regex `begins` does not match
    after `opens`, the text only mentions the marker. `quotes` begin and end strings, in which markers have no
    effect. With `is_framed`, a complete call counts even if the answer was truncated before its end marker.
    Only text that the regex `whole` matches is parsed, which takes `cost` times as long as for JSON.
    """

    opens: str
    closes: str | None
    parse: Parser
    begins: re.Pattern[str]
    quotes: tuple[str, str] = ('"', '"')
    value: re.Pattern[str] | None = None
    is_framed: bool = True
    whole: re.Pattern[str] | None = None
    cost: int = 1

    @property
    def is_tagged(self) -> bool:
        """Whether the strings in a call are raw text between two different tags, without escapes."""
        return self.quotes[0] not in ('"', self.quotes[1])

    def is_in_string(self, text: str) -> bool:
        """Return whether a call's text ends within a string, so that a marker there does not end the call."""
        begin, end = self.quotes
        if begin == '"':
            return not _CLOSED.fullmatch(text) or (
                self._holds_another(text) and text.count(self.opens) > text.count(self.closes or "")
            )
        if begin == end:
            return text.count(begin) % 2 == 1
        return text.rfind(begin) > text.rfind(end) or text.count(begin) > text.count(end)

    def _holds_another(self, text: str) -> bool:
        """Return whether the next `opens` in `text` is inside a string that is still open there."""
        head, opens, _ = text.partition(self.opens)
        return bool(opens) and (self.closes or "") not in head and not _CLOSED.fullmatch(head)

    def num_own(self, text: str) -> int:
        """Return how many characters of `text`, after an invalid call's marker, precede the next call."""
        if not self.is_tagged:
            return len(text) if self._holds_another(text) else 0
        depth, last = 0, ""
        for found in re.finditer("|".join(map(re.escape, (*self.quotes, self.opens))), text):
            if found[0] == self.opens and depth <= 0 and last != self.quotes[0]:
                return found.start()
            if found[0] != self.opens:
                last = found[0]
                depth += 1 if last == self.quotes[0] else -1
        return len(text)


# A model can write any text, and a search holds the interpreter. So in the regular expressions of calls two
# repetitions that match the same text never meet: their time would grow with the text's square or cube.
#: Text in which all strings have ended.
_CLOSED: Final = re.compile(r'(?:[^"]++|"(?:[^"\\]++|\\.)*+")*', re.DOTALL)
_SPACE: Final = re.compile(r"\s*")


def _without_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _refused(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


#: Not strict: models write raw line breaks into strings, which can mean nothing else.
_DECODER: Final = json.JSONDecoder(object_pairs_hook=_without_twice, parse_constant=_refused, strict=False)


def read_json(text: str) -> Any:
    """Parse a JSON value; refuses repeated keys and NaN. Raises `ValueError` or `RecursionError`."""
    return _DECODER.decode(text)


def is_utf8(text: str) -> bool:
    """Return whether a text can be encoded; text from JSON's escapes may have half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _call(value: Any, id_: str | None = None) -> Written:
    """Read a call from a JSON object; raises `ValueError` for missing, wrong or additional fields."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):  # as in OpenAI's API
        if value.keys() - {"type", "id", "index", "function"}:
            raise ValueError("a call has more than a function")
        value, id_ = value["function"], value.get("id")
    if not isinstance(value, dict) or value.keys() - {"name", "arguments", "parameters", "id", "type"}:
        raise ValueError("a call has a name and arguments, and nothing else")
    if "arguments" in value and "parameters" in value:
        raise ValueError("a call has its arguments once")
    name, id_ = value.get("name"), value.get("id", id_)
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = read_json(arguments) if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has a name, and an object as its arguments")  # noqa: TRY004
    return Written(name, arguments, id_ if isinstance(id_, str) and id_ and is_utf8(id_) else None)


def parse_json(text: str) -> list[Written]:
    """Parse one JSON call, or a JSON list of calls."""
    value = read_json(text)
    return [_call(one) for one in (value if isinstance(value, list) else [value])]


def parse_several(text: str) -> list[Written]:
    """Parse successive JSON calls, with or without semicolons between them."""
    calls, at, text = list[Written](), 0, text.strip()
    while at < len(text) or not calls:
        value, at = _DECODER.raw_decode(text, at)
        calls.append(_call(value))
        at = _SEPARATORS.match(text, at).end()  # type: ignore[union-attr]  # it also matches the empty text
    return calls


def parse_bare(text: str) -> list[Written]:
    """Parse an answer that consists of one JSON call with arguments, perhaps in a code block."""
    fenced = _FENCED.fullmatch(text)
    value = read_json(fenced[1] if fenced else text.strip())
    if not isinstance(value, dict) or not {"arguments", "parameters", "function"} & value.keys():
        raise ValueError("it has no arguments")
    return [_call(value)]


def parse_bare_several(text: str) -> list[Written]:
    """Parse an answer that consists of JSON calls with arguments, as Llama's models write it."""
    fenced = _FENCED.fullmatch(text)
    calls = parse_several(fenced[1] if fenced else text)
    if '"arguments"' not in text and '"parameters"' not in text:
        raise ValueError("they have no arguments")
    return calls


_SEPARATORS: Final = re.compile(r"[;\s]*")
_FENCED: Final = re.compile(r"\s*```(?:json)?\s(.*?)(?:```\s*)?", re.DOTALL)


def either(*parsers: Parser) -> Parser:
    """Return a parser that gives the result of the first of `parsers` that raises no `ValueError`."""

    def parse(text: str) -> list[Written]:
        for one in parsers[:-1]:
            try:
                return one(text)
            except ValueError:
                continue
        return parsers[-1](text)

    return parse


def _each(begins: re.Pattern[str], read: Callable[[re.Match[str]], tuple[Written, int]]) -> Parser:
    """Return a parser of successive calls; `read` turns a match of `begins` into a call and its end index."""

    def parse(text: str) -> list[Written]:
        calls, at = list[Written](), 0
        while at < len(text) or not calls:
            begin = begins.match(text, at)
            if begin is None:
                raise ValueError("no call begins here")
            call, at = read(begin)
            calls.append(call)
        return calls

    return parse


def framed(head: str, tail: str) -> Parser:
    """Return a parser of calls with JSON arguments between texts that match the regexes `head` and `tail`.

    `head` has a group `name`, or several whose names begin with it, and perhaps a group `id`.
    """
    begins, ends = re.compile(head, re.DOTALL), re.compile(tail)

    def read(begin: re.Match[str]) -> tuple[Written, int]:
        arguments, at = _DECODER.raw_decode(begin.string, begin.end())
        end = ends.match(begin.string, at)
        if end is None or not isinstance(arguments, dict):
            raise ValueError("the call does not end behind its arguments")
        found = begin.groupdict()
        name = next(one for key, one in found.items() if key.startswith("name") and one is not None)
        return Written(name.strip(), arguments, found.get("id") or None), end.end()

    return _each(begins, read)


def tagged(head: str, key: str, close: str, tail: str, *, trims: bool = False) -> Parser:
    """Return a parser of calls whose arguments are text between tags.

    Three parameters are regexes: `head` with the group `name`; `key`, a value's start tag, with the group
    `key`, and `type` if the format marks JSON values; and `tail`, the end of a call. White space around names
    and keys is not part of them. A value ends at the first end tag `close` that is followed by a `key` or
    `tail`, once all values nested in it have ended. With `trims`, one line break at each end is not part of
    the value.
    """
    begins, opens, ends = re.compile(head), re.compile(key), re.compile(tail)

    def end_of_value(text: str, at: int, begun: Sequence[int]) -> tuple[int, int]:
        num_ended = bisect_left(begun, at)  # values that began before this one
        while (found := text.find(close, at)) >= 0:
            at = _SPACE.match(text, found + len(close)).end()  # type: ignore[union-attr]
            if (opens.match(text, at) or ends.match(text, at)) and bisect_left(begun, found) <= num_ended:
                return found, at
            at, num_ended = found + len(close), num_ended + 1
        raise ValueError("a value does not end")

    def read(begun: Sequence[int], begin: re.Match[str]) -> tuple[Written, int]:
        text = begin.string
        at, arguments, is_text = begin.end(), dict[str, Any](), True
        while (opened := opens.match(text, at)) is not None:
            end, at = end_of_value(text, opened.end(), begun)
            value = text[opened.end() : end]
            name = opened["key"].strip()
            if name in arguments:
                raise ValueError("an argument is there twice")
            if trims:
                value = value.removeprefix("\n").removesuffix("\n")
            kind = opened.groupdict().get("type")
            is_text = kind is None
            is_string = is_text or kind in ("string", "true")
            arguments[name] = value if is_string else read_json(value)
        ended = ends.match(text, at)
        if ended is None:
            raise ValueError("the call does not end behind its arguments")
        return Written(begin["name"].strip(), arguments, is_text=is_text), ended.end()

    def parse(text: str) -> list[Written]:
        begun = [one.start() for one in opens.finditer(text)]  # once for all calls
        return _each(begins, partial(read, begun))(text)

    return parse


def parse_cdata(text: str) -> list[Written]:
    """Parse a call in MiniCPM's format, whose values may be CDATA sections."""
    return [
        one._replace(arguments={name: _CDATA.sub(r"\1", value) for name, value in one.arguments.items()})
        for one in _MINICPM(text)
    ]


_MINICPM: Final = tagged(
    r'\s*"(?P<name>[^"<>]+)"\s*>\s*', r'<param\s+name\s*=\s*"(?P<key>[^"<>]+)"\s*>', "</param>", r"\Z"
)
_CDATA: Final = re.compile(r"\A\s*<!\[CDATA\[(.*)\]\]>\s*\Z", re.DOTALL)


def parse_python(text: str) -> list[Written]:
    """Parse calls in Python's syntax: a list of calls, or one call per line, perhaps in a code block."""
    if fence := _PYTHON.match(text):
        text = text[fence.end() :].rstrip().removesuffix("```")
    if not CODE.fullmatch(text):
        raise ValueError("a string does not end, or is formatted")
    nodes: list[ast.expr] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are about unknown escapes
        parsed = ast.parse(text.strip())
    for statement in parsed.body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("it is no call")  # noqa: TRY004
        nodes += statement.value.elts if isinstance(statement.value, ast.List) else [statement.value]
    return [_of_python(node) for node in nodes]


def parse_bare_python(text: str) -> list[Written]:
    """Parse an answer that consists of a list of calls in Python's syntax."""
    if not text.lstrip().startswith("["):
        raise ValueError("it is no list")
    return parse_python(text)


#: Code in which all strings have ended and none is an f-string. Python parses an f-string in a time that
#: grows with the square of its length, for no call: its value is no constant.
CODE: Final = re.compile(
    r"""(?:[^'"#]++|\#[^\n\r]*+|(?<![fFtT])(?<![fFtT][rR])(?:
        '''(?:[^'\\]++|\\.|'(?!''))*+'''|\"\"\"(?:[^"\\]++|\\.|"(?!""))*+\"\"\"
        |'(?!'')(?:[^'\\\n\r]++|\\(?:\r\n|.))*+'|"(?!"")(?:[^"\\\n\r]++|\\(?:\r\n|.))*+"))*+""",
    re.DOTALL | re.VERBOSE,
)
_PYTHON: Final = re.compile(r"\s*```(?:python)?[^\S\n]*\n")


def _of_python(node: ast.expr) -> Written:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("a call has only arguments with names")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("a call has only arguments with different names")
        arguments[keyword.arg] = ast.literal_eval(_JsonWords().visit(keyword.value))
    return Written(ast.unparse(node.func), arguments)


class _JsonWords(ast.NodeTransformer):
    """Replaces the names true, false and null in calls in Python's syntax by Python's constants.

    Models write them because templates show them values in JSON.
    """

    def visit_Name(self, node: ast.Name) -> ast.expr:  # `ast.NodeTransformer` requires this name
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def gemma(quote: str) -> Parser:
    """Return a parser of calls `call:NAME{key:value}`, in which `quote` begins and ends strings."""

    def read(begin: re.Match[str]) -> tuple[Written, int]:
        arguments, at = _gemma_object(begin.string, begin.end(), quote)
        end = _SPACE.match(begin.string, at).end()  # type: ignore[union-attr]
        return Written(begin["name"], arguments), end

    return _each(_GEMMA, read)


_GEMMA: Final = re.compile(r"\s*call:(?P<name>[^\s{}]+)\s*\{")
_GEMMA_KEY: Final = re.compile(r"\s*([^\s:,{}\[\]<>\"]+)\s*:")
_CLOSES: Final = {"}": re.compile(r"\s*\}"), "]": re.compile(r"\s*\]")}
_PLAIN: Final = re.compile(r"[^\s,{}\[\]]+")


def _gemma_object(text: str, at: int, quote: str) -> tuple[dict[str, Any], int]:
    """Parse an object after its opening brace; return the object and the index of its end."""
    pairs: list[tuple[str, Any]] = []
    while not (end := _CLOSES["}"].match(text, at)):
        if pairs:
            at = _comma(text, at)
        if text.startswith(quote, at):
            key, at = _gemma_value(text, at, quote)
            if not text.startswith(":", at):
                raise ValueError("a key has no value")
            at += 1
        elif found := _GEMMA_KEY.match(text, at):
            key, at = found[1], found.end()
        else:
            raise ValueError("an object has no key here")
        value, at = _gemma_value(text, at, quote)
        pairs.append((key, value))
    return _without_twice(pairs), end.end()


def _gemma_value(text: str, at: int, quote: str) -> tuple[Any, int]:
    at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        return text[at + len(quote) : end], end + len(quote)
    if text.startswith("{", at):
        return _gemma_object(text, at + 1, quote)
    if text.startswith("[", at):
        values: list[Any] = []
        at += 1
        while not (ended := _CLOSES["]"].match(text, at)):
            value, at = _gemma_value(text, _comma(text, at) if values else at, quote)
            values.append(value)
        return values, ended.end()
    if text.startswith('"', at):
        string, at = _DECODER.raw_decode(text, at)
        return string, at
    plain = _PLAIN.match(text, at)
    if plain is None:
        raise ValueError("a value is missing")
    return read_json(plain[0]), plain.end()


def _comma(text: str, at: int) -> int:
    at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
    if not text.startswith(",", at):
        raise ValueError("a comma is missing")
    return _SPACE.match(text, at + 1).end()  # type: ignore[union-attr]
