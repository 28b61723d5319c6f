"""Renders a model's chat template within limits, since a template is foreign code that may loop forever.

Every loop iteration and every macro call is a step. The limit counts steps, so the same messages pass or fail
on every machine, and every worker derives the same tokens from a session's log. A time limit is only the last
resort. Templates run in a sandboxed Jinja environment with the functions and settings that they have in
transformers. Importing transformers itself would take a second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sized
from datetime import datetime
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .model_files import ModelError, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jinja2.parser import Parser

#: This number of steps takes one or two seconds. A conversation of 10,000 messages takes about 50,000 steps.
_MAX_STEPS: Final = 5_000_000
_MAX_SECONDS: Final = 60.0
_MAX_CHARS: Final = 2**26
#: Limit of the bits of a whole number: with more, one operation may hold the interpreter for hours.
_MAX_BITS: Final = 2**16
_STEP: Final = "count_one_step"
#: What JSON in ASCII escapes; not the stand-ins of `control_tokens`, which are no characters of their own.
_ESCAPED: Final = re.compile("[^\x00-\x7e\ud800-\udbff]")
_DATE_FORMAT: Final = re.compile(r"""strftime_now\(\s*["']([^"']*)["']\s*\)""")


class UnboundedError(Exception):
    """The template takes too many steps, too long, or writes too much."""


class ChatTemplate:
    """One template, compiled. Thread-safe."""

    def __init__(self, source: str, constants: Mapping[str, Any]) -> None:
        """Compile `source`; `constants` are variables of all renderings, such as special tokens.

        Raises Jinja's errors for a template that Jinja cannot parse.
        """
        self._formats = frozenset(_DATE_FORMAT.findall(source))
        if self._formats:
            # With the current date, the same conversation would render differently tomorrow. A macro in the
            # source hides the library's function of that name, which cannot be replaced otherwise.
            macro = "{%- macro strftime_now(format) -%}{{ session_dates[format] }}{%- endmacro +%}"
            source = macro + source
        self._constants = dict(constants)
        self._template = _compile(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        started: datetime,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render a conversation; `started` is the date that the template gets as the current one.

        `variables` override the constants. Raises `UnboundedError`, and any error that
        the template raises.
        """
        pieces: list[str] = []
        num_chars = 0
        context = {
            **self._constants,
            "documents": None,
            **variables,
            "messages": list(messages),
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt,
            "session_dates": {date_format: started.strftime(date_format) for date_format in self._formats},
            _STEP: _Steps(),
        }
        for piece in self._template.generate(context):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > _MAX_CHARS:
                raise UnboundedError(
                    f"it writes more than {_MAX_CHARS} characters; send fewer or shorter messages"
                )
        return "".join(pieces)


class CodeTemplate:
    """A chat template that is a Python module of mlx-lm, which some models' files name. Thread-safe."""

    def __init__(self, source: str, apply: Callable[..., str]) -> None:
        self.source = source
        self._apply = apply

    @classmethod
    def of_folder(cls, folder: Path) -> CodeTemplate | None:
        """Load the template that a model's `chat_template_type` names; None if it names none.

        Loads the module's file alone: importing mlx-lm would import MLX. Raises `ModelError`.
        """
        config = folder / "tokenizer_config.json"
        name = read_json(config).get("chat_template_type") if config.exists() else None
        if not isinstance(name, str):
            return None
        package = find_spec("mlx_lm")
        path = Path((package.origin if package else None) or "").parent / "chat_templates" / f"{name}.py"
        if not name.isidentifier() or not path.is_file():
            raise ModelError(f"the model has the chat_template_type {name}, which mlx-lm does not know")
        spec = spec_from_file_location(f"turnkeep_template_{name}", path)
        if spec is None or spec.loader is None:
            raise ModelError(f"{path} cannot be imported")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        apply = getattr(module, "apply_chat_template", None)
        return None if apply is None else cls(path.read_text("utf-8"), apply)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        started: datetime,  # noqa: ARG002  # the same signature as other templates
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render a conversation with the module's `apply_chat_template`; raises any error that it raises.

        Takes the arguments of `ChatTemplate.render`, but ignores `started`, and limits neither time nor size.
        Without a system or developer message, tools are rendered in an empty system message.
        """
        told = [_with_text_arguments(one) for one in messages]
        if tools and not any(one["role"] in ("system", "developer") for one in told):
            told.insert(0, {"role": "system", "content": ""})  # the template puts the tools there
        more = {**variables, **({"tools": [*tools]} if tools else {})}
        return str(self._apply(told, add_generation_prompt=add_generation_prompt, **more))


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(message)
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
            for call in calls
        ]
    return found


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def template_of(given: Any) -> str | None:
    """Return a chat template's source, or one source that combines named templates; None without a default.

    As in transformers, `tool_use` renders conversations with tools, and `default` all others.
    """
    if isinstance(given, list):  # the form in tokenizer_config.json
        given = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
    if not isinstance(given, dict):
        return given if given is None else str(given)
    default, tool_use = given.get("default"), given.get("tool_use")
    if default is None or tool_use is None:
        return default
    # The plus signs prevent trimming: each template begins and ends as it would alone.
    return f"{{%+ if tools +%}}{_alone(tool_use)}{{%+ else +%}}{_alone(default)}{{%+ endif +%}}"


def _alone(source: str) -> str:
    """Remove the line break at a source's end, as Jinja does."""
    return source.removesuffix("\n")


class _Steps:
    """Counts the steps of one rendering, and raises `UnboundedError` at a limit.

    The template tests this object's truth value, which counts one step and is always true. A plain call would
    be slower: the sandbox checks every call.
    """

    def __init__(self) -> None:
        self._num_left = _MAX_STEPS
        self._end_s = monotonic() + _MAX_SECONDS

    def __bool__(self) -> bool:
        self._num_left -= 1
        if self._num_left < 0:
            raise UnboundedError(
                f"it takes more than {_MAX_STEPS} steps; send fewer messages, or use another template"
            )
        if monotonic() > self._end_s:
            raise UnboundedError(
                f"it takes more than {_MAX_SECONDS:g} s; send fewer messages, or use another template"
            )
        return True


class _Generation(Extension):
    """The template block `generation`, which marks text for training; renders only the block's content."""

    tags = {"generation"}  # noqa: RUF012  # as in the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """The function `dict` for templates, without the other attributes of Python's type."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        return dict.fromkeys(*given)


class _Namespace(Namespace):
    """The function `namespace` for templates; refuses attributes that begin with an underscore."""

    def __init__(*given: Any, **named: Any) -> None:  # a template may use `self` as a name
        self, *given_ = given
        Namespace.__init__(self, {_allowed(name): value for name, value in dict(*given_, **named).items()})

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(_allowed(name), value)


def _allowed(name: str) -> str:
    if name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}; names must not begin with an underscore")
    return name


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # templates may pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON; Jinja's own filter would escape HTML."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPED.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)  # noqa: DTZ005  # the local date


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox; refuses products and powers that are too large.

    Of a loop's and a namespace's attributes it finds the same, in half of the time: most templates ask for
    some with each message, such as `loop.first`.
    """

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiply, or raise to a power; raise `UnboundedError` before that takes too long."""
        size, most = 0, _MAX_BITS
        match left, right:
            case int(), int():
                bits = left.bit_length()
                size = bits * abs(right) if operator == "**" else bits + right.bit_length()
            case (Sized() as several, int() as times) | (int() as times, Sized() as several):
                size, most = len(several) * times, _MAX_CHARS
        if size > most:
            raise UnboundedError(f"it computes a value of more than {most} bits or characters")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, LoopContext | Namespace):
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    del environment.globals["lipsum"]  # it writes any number of words, and counts no steps
    return environment


def _compile(source: str) -> Any:
    """Compile a template, with a step count inserted into every loop and macro."""
    environment: Any = _environment()
    tree = environment.parse(source)
    for loop in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        step = nodes.Name(_STEP, "load")
        if isinstance(loop, nodes.For) and loop.test is not None:
            loop.test = nodes.And(step, loop.test)  # also counts iterations that the filter skips
        else:
            loop.body.insert(0, nodes.ExprStmt(nodes.Not(step)))
    for node in tree.find_all(nodes.Node):
        node.set_lineno(node.lineno or 1)
        node.set_environment(environment)
    code = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))
