"""Parses the tool calls that models write, with a parser for each format. Pure.

A parser takes the text between a call's markers, and raises `ValueError` unless it begins with calls that
it understands to the last character; mlx-lm's parsers skip parts that they do not understand. `parse_calls`
reads names and arguments in JSON, in Python's syntax or in Gemma's, `tagged` arguments between tags. Both
excuse slips of form, since `worker.text.arguments` then checks that the tool was offered and that the
arguments fit its schema.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from .written_values import read_json, read_keywords, read_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    #: Returns the calls that a text begins with, and the index where they end. The second argument says
    #: whether the model has ended the calls, so that an end within them may be missing.
    Parser: TypeAlias = "Callable[[str, bool], tuple[list[WrittenCall], int]]"


class WrittenCall(NamedTuple):
    """One call as the model wrote it."""

    name: str
    arguments: Mapping[str, Any]
    #: The model's own id of the call, mostly None.
    id: str | None = None
    #: Whether all values are text, since the format has no other types.
    is_text: bool = False
    #: Whether a tag was missing: then each argument must be one that the tool's schema names.
    is_mended: bool = False


class ParsedCall(NamedTuple):
    """One tool call of an answer. `arguments` is JSON as text."""

    name: str
    arguments: str
    id: str | None = None


#: What may follow the marker that opens a call; after other text the marker is only mentioned.
_BEGINS: Final = re.compile(r"""\s*(?:["\[{(<`#]|[^\s<>{}()\[\]"'`,;]+\s*(?:\Z|[\n({<>\["`]))""")
#: Limit of the text before a call's arguments, which is its name and id; it is searched at each push.
MOST_NAMED: Final = 1_024


#: Text in which all strings have ended, in JSON and in Python's syntax.
_CLOSED: Final = re.compile(r'(?:[^"]++|"(?:[^"\\]++|\\.)*+")*', re.DOTALL)
#: A group with a lookahead is not possessive: Python 3.11.2 would not match it.
CLOSED_CODE: Final = re.compile(
    r"""(?:[^'"#]++|\#[^\n\r]*+|'''(?:[^'\\]++|\\.|'(?!''))*'''|\"\"\"(?:[^"\\]++|\\.|"(?!""))*\"\"\"
        |'(?!'')(?:[^'\\]++|\\.)*+'|"(?!"")(?:[^"\\]++|\\.)*+")*""",
    re.DOTALL | re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The syntax of tool calls between the markers `opens` and `closes`."""

    opens: str
    #: Empty if a call ends with its JSON value, None if it ends with the answer.
    closes: str | None
    parse: Parser
    #: What begins and what ends a string, in which markers have no effect.
    quotes: tuple[str, str] = ('"', '"')
    #: If `closes` is empty: matches what stands before the JSON value.
    value: re.Pattern[str] | None = None
    #: If the quotes are `"`: matches text that does not end inside a string.
    closed: re.Pattern[str] = _CLOSED
    #: Whether a complete call counts even if the answer was truncated before its end marker.
    is_framed: bool = True
    #: How many times longer than JSON the call takes to parse.
    cost: int = 1

    def may_begin(self, text: str) -> bool:
        """Return whether a call may have begun with `opens` and then `text`, which may still grow."""
        head = text[:MOST_NAMED]
        return not head or head.isspace() or _BEGINS.match(head) is not None

    def may_end(self, text: str) -> bool:
        """Return whether a call's text may end here, so that it is worth parsing."""
        return self.quotes[0] != '"' or self.closed.fullmatch(text) is not None

    @property
    def is_tagged(self) -> bool:
        """Whether the strings in a call are raw text between two different tags, without escapes."""
        return self.quotes[0] not in ('"', self.quotes[1])

    def is_in_string(self, text: str) -> bool:
        """Return whether a call's text ends within a string, so that a marker there does not end the call."""
        begin, end = self.quotes
        if begin == '"':
            return not self.closed.fullmatch(text) or (
                self._holds_another(text) and text.count(self.opens) > text.count(self.closes or "")
            )
        if begin == end:
            return text.count(begin) % 2 == 1
        return text.rfind(begin) > text.rfind(end) or text.count(begin) > text.count(end)

    def _holds_another(self, text: str) -> bool:
        """Return whether the next `opens` in `text` is inside a string that is still open there."""
        head, opens, _ = text.partition(self.opens)
        return bool(opens) and (self.closes or "") not in head and not self.closed.fullmatch(head)

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


_SPACE: Final = re.compile(r"\s*")


def is_utf8(text: str) -> bool:
    """Return whether a text can be encoded; text from JSON's escapes may have half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _call(value: Any) -> WrittenCall:
    """Read a call from a JSON object; raises `ValueError` for missing, wrong or additional fields."""
    id_ = None
    if isinstance(value, dict) and isinstance(value.get("function"), dict):  # as in OpenAI's API
        if value.keys() - {"type", "id", "index", "function"}:
            raise ValueError("a call has more than a function")
        value, id_ = value["function"], value.get("id")
    if isinstance(value, dict) and len(value) == 1 and value.keys().isdisjoint(_NAMES):
        ((name, arguments),) = value.items()  # as Apertus writes calls
        value = {"name": name, "arguments": arguments}
    if not isinstance(value, dict) or value.keys() - {*_NAMES, *_ARGUMENTS, "id", "type"}:
        raise ValueError("a call has a name and arguments, and nothing else")
    names, given = ([value[key] for key in keys if key in value] for keys in (_NAMES, _ARGUMENTS))
    if len(names) != 1 or len(given) > 1:
        raise ValueError("a call has one name, and its arguments once")
    (name,), arguments, id_ = names, given[0] if given else {}, value.get("id", id_)
    if isinstance(arguments, str):
        arguments = read_json(arguments) if arguments.strip() else {}
    arguments = arguments or {}  # null or an empty list
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call has a name, and an object as its arguments")  # noqa: TRY004
    return WrittenCall(name, arguments, id_ if isinstance(id_, str) and id_ and is_utf8(id_) else None)


_NAMES: Final = ("name", "function")
_ARGUMENTS: Final = ("arguments", "parameters")
#: Marks within the calls of all families, which may stand between calls, names and arguments.
_MARK: Final = (
    r"</?tool_call>|<\|tool_call_[a-z_]++\|>|<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>"
    r"|<\uff5ctool\u2581(?:call\u2581(?:begin|end)|sep)\uff5c>"
    r"|\[CALL_ID\]\s*+(?P<id>[^\s\[\]{}]*+)|\[ARGS\]"
)
_FENCE: Final = "```[a-z]*+"
_BETWEEN: Final = re.compile(rf"(?:{_MARK}|{_FENCE}|[\s,;\[\]}})]++|#[^\n\r]*+)*+")
_BEHIND_NAME: Final = re.compile(rf"\s*+(?:{_FENCE})?\s*+(?P<marks>(?:(?:{_MARK})\s*+)*+)(?:{_FENCE})?\s*+")
_ENDED: Final = re.compile(r"(?:end[|\uff5c]|/tool_call)>\s*\Z")
_NAME: Final = re.compile(r"""(?:call:)?(?P<id>(?:functions\.)?(?P<name>[^\s<>{}()\[\]"'`,;=]++))""")
#: The end of a string and of a value: behind a call it shows that the call's string ended too early.
_DOUBT: Final = re.compile(r"""(?:["'`]|<\|"\|>|<escape>)\s*+[}\])]""")


def parse_calls(text: str, is_ended: bool) -> tuple[list[WrittenCall], int]:
    """Parse calls that are objects, or names with arguments as an object or in Python's syntax.

    Marks, brackets, commas and code fences may stand between these parts. Returns the calls with which the
    text begins, and the index where they end. If the text `is_ended`, it may be a name alone. Raises
    `ValueError` if it does not begin with a call.
    """
    calls, at = list[WrittenCall](), _BETWEEN.match(text).end()  # type: ignore[union-attr]  # as all patterns below
    while at < len(text):
        try:
            call, end = _call_at(text, at, may_be_name=is_ended and not calls)
        except ValueError:
            if not calls:
                raise
            break
        calls.append(call)
        at = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
    if not calls or _DOUBT.search(text, at):
        raise ValueError("it is no call")
    return calls, _without_space(text, at)


def _call_at(text: str, at: int, *, may_be_name: bool) -> tuple[WrittenCall, int]:
    if text.startswith("{", at):
        value, end = read_value(text, at)
        return _call(value), end
    found = _NAME.match(text, at)
    if found is None:
        raise ValueError("no call begins here")
    behind = cast("re.Match[str]", _BEHIND_NAME.match(text, found.end()))
    name, colon, counter = found["name"].rpartition(":")
    has_counter = bool(colon) and counter.isdigit()
    written = WrittenCall(
        name if has_counter else found["name"], {}, found["id"] if has_counter else behind["id"] or None
    )
    at = behind.end()
    if text.startswith("{", at):
        arguments, at = read_value(text, at)
    elif text.startswith("(", at):
        arguments, at = read_keywords(text, at + 1)
    elif _ENDED.search(behind["marks"]) or (may_be_name and text[at : at + 1] in ("", "]")):
        arguments = {}
    else:
        raise ValueError("a name has no arguments")
    return written._replace(arguments=arguments), at


def _without_space(text: str, at: int) -> int:
    """Return the index `at` in a text, or that of the white space before it; the end if nothing follows."""
    return len(text[:at].rstrip()) if at < len(text) else at


def parse_bare(text: str, is_ended: bool) -> tuple[list[WrittenCall], int]:
    """Parse an answer that consists of JSON calls with arguments, perhaps in a code block or between tags.

    Raises `ValueError` for any other answer. The returned index is the end of the text without such tags.
    """
    text = _TAGS_AROUND.sub("", text)
    calls, end = parse_calls(text, is_ended)
    if end < len(text) or len(_GIVEN.findall(text)) < len(calls):
        raise ValueError("it is no call, or has no arguments")
    return calls, end


#: Tags that Qwen 2.5's coders make up around calls.
CALL_TAG: Final = "(?!tool_resp)[a-z_-]{0,9}(?:tool|function)[a-z_-]{0,9}"
_TAGS_AROUND: Final = re.compile(rf"\A\s*(?:```[a-z]*\s*)?<{CALL_TAG}>|</{CALL_TAG}>?\s*(?:```\s*)?\Z")
_GIVEN: Final = re.compile(r"""(?:arguments|parameters|function)["']?\s*+:""")


def parse_bare_python(text: str, is_ended: bool) -> tuple[list[WrittenCall], int]:
    """Parse an answer that consists of a list of calls in Python's syntax, or raise `ValueError`."""
    calls, end = parse_calls(text, is_ended)
    if end < len(text) or not text.lstrip().startswith("["):
        raise ValueError("it is no list")
    return calls, end


def either(*parsers: Parser) -> Parser:
    """Return a parser that tries `parsers` in order, for models that write calls in several formats.

    It returns what the first one returns that raises no `ValueError`; if all raise, it raises the last error.
    """

    def parse(text: str, is_ended: bool) -> tuple[list[WrittenCall], int]:
        for one in parsers[:-1]:
            try:
                return one(text, is_ended)
            except ValueError:
                continue
        return parsers[-1](text, is_ended)

    return parse


def tagged(
    head: str, key: str, close: str, tail: str | None = None, plain: Callable[[str], str] = str
) -> Parser:
    """Return a parser of calls whose arguments are text between tags, or one JSON object.

    Three parameters are regexes: `head` with the group `name`; `key`, a value's start tag, with the group
    `key`, and `type` if the format marks JSON values; and `tail`, the end of a call, which may be missing at
    the text's end. A value ends at the first end tag `close` that is followed by a `key` or `tail`, once all
    values nested in it have ended; without such an end tag it ends before the next `key` or `tail`, and the
    call is mended. `plain` returns an argument from the text between its tags.
    """
    ends = re.compile(rf"(?:{tail})\s*" if tail else r"\Z")
    stops = re.compile(f"{key}|{tail}" if tail else key)
    return _Tags(re.compile(head), re.compile(key), close, ends, stops, plain).parse


@dataclass(frozen=True, slots=True)
class _Tags:
    """The tags of one format: see `tagged`. `stops` matches what ends a value without an end tag."""

    begins: re.Pattern[str]
    opens: re.Pattern[str]
    close: str
    ends: re.Pattern[str]
    stops: re.Pattern[str]
    plain: Callable[[str], str]

    def parse(self, text: str, is_ended: bool) -> tuple[list[WrittenCall], int]:
        """Parse the calls that a text begins with; see `Parser`."""
        begun = [one.start() for one in self.opens.finditer(text)]  # once for all calls
        calls, at, num_mended = list[WrittenCall](), 0, 0
        while begin := self.begins.match(text, at):
            call, at = self._call(begun, begin, is_ended)
            calls.append(call)
            num_mended += call.is_mended
            if num_mended == _MOST_MENDED:
                raise ValueError("too many calls without end tags")
            if at == len(text):
                break
        if not calls or text.find(self.close, at) >= 0:
            raise ValueError("it is no call")
        return calls, _without_space(text, at)

    def _call(self, begun: Sequence[int], begin: re.Match[str], is_ended: bool) -> tuple[WrittenCall, int]:
        text, at = begin.string, begin.end()
        arguments, is_text, num_mended = dict[str, Any](), True, 0
        if text.startswith("{", at):
            (arguments, at), is_text = read_value(text, at), False
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        while (opened := self.opens.match(text, at)) is not None:
            name, found = opened["key"].strip(), self._end_of_value(text, opened.end(), begun, is_ended)
            num_mended += found is None
            if num_mended > _MOST_MENDED:
                raise ValueError("too many values without end tags")
            end, at = found or self._stop_of_value(text, opened.end())
            value = text[opened.end() : end]
            if found is None and (bare := value.rstrip()).endswith(f"</{name}>"):
                value = bare.removesuffix(f"</{name}>")  # an end tag of the argument's name
            if name in arguments:
                raise ValueError("an argument is there twice")
            kind = opened.groupdict().get("type")
            is_text = kind is None
            value = self.plain(value)
            arguments[name] = value if kind in (None, "string", "true") else read_json(value)
        if not self._is_end(text, at, is_ended):
            raise ValueError("the call does not end behind its arguments")
        if ended := self.ends.match(text, at):
            at = ended.end()
        return WrittenCall(begin["name"].strip(), arguments, None, is_text, num_mended > 0), at

    def _is_end(self, text: str, at: int, is_ended: bool) -> bool:
        return self.ends.match(text, at) is not None or (is_ended and at == len(text))

    def _end_of_value(
        self, text: str, at: int, begun: Sequence[int], is_ended: bool
    ) -> tuple[int, int] | None:
        """Return where a value ends, and where its end tag does; None without an end tag."""
        num_ended = bisect_left(begun, at)  # values that began before this one
        while (found := text.find(self.close, at)) >= 0:
            at = _SPACE.match(text, found + len(self.close)).end()  # type: ignore[union-attr]
            is_last = self.opens.match(text, at) or self._is_end(text, at, is_ended)
            if is_last and bisect_left(begun, found) <= num_ended:
                return found, at
            at, num_ended = found + len(self.close), num_ended + 1
        return None

    def _stop_of_value(self, text: str, at: int) -> tuple[int, int]:
        stop = self.stops.search(text, at)
        if stop is None:
            raise ValueError("a value does not end")
        return stop.start(), stop.start()


#: How many end tags of arguments may be missing in a call, and how many calls lack some; each costs a search.
_MOST_MENDED: Final = 8


def trimmed(value: str) -> str:
    """Return a value without one line break at each end."""
    return value.removeprefix("\n").removesuffix("\n")


def without_cdata(value: str) -> str:
    """Return what is in a value's CDATA section, which MiniCPM may write; else the value."""
    return _CDATA.sub(r"\1", value)


_CDATA: Final = re.compile(r"\A\s*<!\[CDATA\[(.*)\]\]>\s*\Z", re.DOTALL)
