"""Renders a model's chat template, within bounds: a template is foreign code, and may loop for ever.

Every round of a loop and every call of a macro is a step, and steps are counted: the same messages pass or
fail on every machine, so a session's log folds alike everywhere. The time is a last resort for steps that
take long. Sandboxed by transformers, whose environment this is.
"""

from __future__ import annotations

import re
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from jinja2 import nodes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

#: A second or two of Python. A conversation of 10,000 messages takes some 50,000.
_MAX_STEPS: Final = 5_000_000
_MAX_SECONDS: Final = 60.0
_MAX_CHARS: Final = 2**26
_STEP: Final = "count_one_step"
_DATE_FORMAT: Final = re.compile(r"""strftime_now\(\s*["']([^"']*)["']\s*\)""")


class UnboundedError(Exception):
    """The template takes too many steps, too long, or writes too much."""


class ChatTemplate:
    """One template, compiled. Thread-safe."""

    def __init__(self, source: str, constants: Mapping[str, Any]) -> None:
        """`constants` are what every rendering may use, the names of special tokens among them.

        Raises what Jinja raises for a template that it cannot read.
        """
        self._formats = frozenset(_DATE_FORMAT.findall(source))
        if self._formats:
            # The clock would render the same conversation differently tomorrow. A template is passed no
            # functions, but a macro of its own hides the library's.
            macro = "{%- macro strftime_now(format) -%}{{ session_dates[format] }}{%- endmacro +%}"
            source = macro + source
        self._constants = dict(constants)
        self._template = _compile(source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, started: datetime
    ) -> str:
        """Give the text of a conversation that began on the day `started`.

        Raises `UnboundedError`, and whatever the template raises.
        """
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.generate(
            **self._constants,
            messages=list(messages),
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            session_dates={date_format: started.strftime(date_format) for date_format in self._formats},
            **{_STEP: _Steps()},
        ):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > _MAX_CHARS:
                raise UnboundedError(
                    f"it writes more than {_MAX_CHARS} characters; send fewer or shorter messages"
                )
        return "".join(pieces)


class _Steps:
    """Counts the steps of one rendering: one each time that it is asked whether it is true, which it is.

    A call would be the plainer way, but the sandbox looks at each.
    """

    def __init__(self) -> None:
        self._num_left = _MAX_STEPS
        self._end_s = monotonic() + _MAX_SECONDS

    def __bool__(self) -> bool:
        self._num_left -= 1
        if self._num_left < 0:
            raise UnboundedError(
                f"it takes more than {_MAX_STEPS} steps; send fewer messages, or take another template"
            )
        if monotonic() > self._end_s:
            raise UnboundedError(
                f"it takes more than {_MAX_SECONDS:g} s; send fewer messages, or take another template"
            )
        return True


def _compile(source: str) -> Any:
    """Compile a template with the count of its steps built in."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(source).environment
    tree = environment.parse(source)
    for loop in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        step = nodes.Name(_STEP, "load")
        if isinstance(loop, nodes.For) and loop.test is not None:
            loop.test = nodes.And(step, loop.test)  # also where it leaves out every round
        else:
            loop.body.insert(0, nodes.ExprStmt(nodes.Not(step)))
    for node in tree.find_all(nodes.Node):
        node.set_lineno(node.lineno or 1)
        node.set_environment(environment)
    code = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))
