"""`turnkeep chat`: a conversation in a terminal, or one question per line from a pipe."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import click

from ops.log import conversation_files
from turnkeep_client.errors import InvalidMessageError, RequestFailedError, TurnkeepError
from turnkeep_client.messages import OPTIONS, Generate
from turnkeep_client.session import build

from .ask import decoded
from .branches import rewind_last
from .control import print_info
from .exchanges import last_exchanges
from .flags import session_option, tenant_option, with_answer_options
from .nats_connection import with_client
from .pictures import content_of, dragged, parts_of
from .rendering import MarkdownScreen
from .sampling import cut, preferred, whole
from .screen import printable, wrapped
from .stream import stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.key_binding.key_processor import KeyPressEvent

    from turnkeep_client.client import Client
    from turnkeep_client.generation import Generation
    from turnkeep_client.messages import SessionInfo

    from .exchanges import ShownExchange
    from .flags import AnswerOptions

_KEYS: Final = (
    "Enter sends; Alt-Enter, or \\ and Enter, begins a new line.\n"
    "Ctrl-C stops an answer, or clears the line; Ctrl-C again leaves. /help lists more."
)
_HELP: Final = """\
/system TEXT      add a system message, valid from here on
/set              show the sampling options
/set NAME VALUE   change an option; without VALUE reset it to its default
/rewind [N]       remove the last exchange, or the last N
/retry            ask the last question again, in place of its answer
/new [NAME]       leave this session for a new one, or for another one
/save FILE        write the conversation to a file
/info             position, KV, queue, and the worker's metrics
/bye              leave and keep the session (like Ctrl-D)"""
#: The options of /set, with what parses their values.
_OPTIONS: Final[dict[str, Callable[[str], Any]]] = {
    **{name: one.kind for name, one in OPTIONS.items() if one.kind in (int, float)},
    "stop": lambda text: [text],
}
#: How long a command waits for the worker.
_PATIENCE_S: Final = 30.0
#: How long to look for the result of the last question.
_LOOK_S: Final = 1.0
#: Maximum characters of the last question and answer to show at the start.
_SHOWN: Final = 2000
_LINE, _QUOTED = "\n", "\n> "


@click.command()
@session_option("Session to continue.", default="chat", show_default=True)
@tenant_option
@with_answer_options
@with_client
async def chat(client: Client, name: str, options: AnswerOptions) -> None:
    """Talk with the model of a running worker. A later chat with the same session continues the conversation.

    Lines that begin with a slash are commands; /help lists them. If standard input is not a terminal, each of
    its lines is a question.
    """
    await converse(client, name, options)


async def converse(client: Client, name: str, options: AnswerOptions) -> None:
    """Read lines and stream answers until input ends. Raises `TurnkeepError` if the session cannot start."""
    build(Generate, **options.sampling)  # report a wrong option before the first question
    await _Chat(client, name, options).run()


class _Chat:
    def __init__(self, client: Client, name: str, options: AnswerOptions) -> None:
        self._client = client
        self._options = options
        self._session = client.session(name, cache=options.cache)
        self._name = name
        #: The last question of this chat in the session, its images, and its answer.
        self._last: tuple[str, list[dict[str, Any]], Generation] | None = None
        #: The images that go with the next question.
        self._images = parts_of(options.images)
        self._defaults: dict[str, Any] = {}
        self._sampling = self._defaults
        self._commands: dict[str, Callable[[str], Awaitable[None]]] = {
            "/help": self._help,
            "/system": self._system,
            "/set": self._set,
            "/rewind": self._rewind,
            "/retry": self._retry,
            "/new": self._new,
            "/save": self._save,
            "/info": self._info,
        }

    async def run(self) -> None:
        past = await self._enter()
        async for line in _lines([one.question for one in past]):
            word, _, rest = line.partition(" ")
            if word in {"/bye", "/exit", "/quit"}:
                return
            try:
                if word in self._commands:
                    await self._commands[word](rest.strip())
                elif word.startswith("/") and word[1:].isalpha():
                    _say(f"There is no command {word}; /help lists them. To send it, begin with a space.")
                elif files := dragged(line):
                    self._images += parts_of(files)
                    _say(f"Images for the next question: {len(self._images)}")
                else:
                    images, self._images = self._images, []
                    await self._answer(line, images)
            except click.UsageError as error:
                _say(f"turnkeep: {error.message}")
            except TurnkeepError as error:
                _say(f"turnkeep: {error}")

    async def _enter(self) -> list[ShownExchange]:
        """Start or continue the session, and print its position or a greeting; return its last exchanges."""
        info = await self._begin()
        if not self._defaults:
            self._sampling = self._defaults = preferred(info.worker.sampling, self._options.sampling)
        past = await last_exchanges(self._client, self._name) if info.position else []
        if sys.stdin.isatty():
            self._greet(info, past)
        elif info.position:
            _say(f"Continuing session {self._name!r} at position {info.position}.")
        if self._options.system and info.position:
            _say("The session keeps its system message; /system adds another from here on.")
        elif self._options.system:
            await self._system(self._options.system)
        return past

    async def _begin(self) -> SessionInfo:
        try:
            return await self._session.info()
        except RequestFailedError as error:
            if error.code != "unknown_session":
                raise
        await self._session.open()  # needed to use the name of a closed session again
        return await self._session.info()

    def _greet(self, info: SessionInfo, past: Sequence[ShownExchange]) -> None:
        where = f"session {self._name!r}, {info.position or 'no'} tokens"
        _say(f"{info.model} on {info.worker.device}, {where}.\n{_KEYS}\n")
        if past:
            _say(f"> {_end_of(past[-1].question)}\n{_end_of(past[-1].answer)}\n")
        if waiting := len(info.waiting) + (info.active is not None):
            _say(f"Unanswered requests of the session: {waiting}. Your question waits for them.\n")

    async def _answer(self, question: str, images: list[dict[str, Any]]) -> None:
        options = whole(self._sampling)
        message = {"role": "user", "content": content_of(question, images)}
        generation = self._session.generate(messages=[message], **options)
        self._last = question, images, generation
        screen = None if click.get_current_context().color is False else MarkdownScreen()
        answered = await stream(
            self._client, self._session, generation, reasoning=self._options.reasoning, screen=screen
        )
        why = cut(generation.result, options["max_tokens"]) if answered else ""
        if sys.stdin.isatty():
            _say(f"{why.capitalize()}\n" if why else "")
        elif why:
            _say(why.capitalize())

    async def _help(self, _: str) -> None:
        _say(_HELP)

    async def _system(self, text: str) -> None:
        if not text:
            _say("/system needs a text, such as: /system Answer in one sentence.")
            return
        await self._session.append(messages=[{"role": "system", "content": text}], timeout_s=_PATIENCE_S)
        _say("The system message is added.")

    async def _set(self, words: str) -> None:
        name, _, value = words.partition(" ")
        if not name:
            for option in _OPTIONS:
                _say(f"{option:<18} {self._sampling.get(option, 'none')}")
            return
        if name not in _OPTIONS:
            raise InvalidMessageError(f"there is no option {name!r}; there are {', '.join(_OPTIONS)}")
        changed = {option: kept for option, kept in self._sampling.items() if option != name}
        try:
            if value.strip():
                changed[name] = _OPTIONS[name](value.strip())
            elif name in self._defaults:
                changed[name] = self._defaults[name]
        except ValueError:
            raise InvalidMessageError(f"{value.strip()!r} is not valid; {name} is a number") from None
        build(Generate, **changed)
        self._sampling = changed

    async def _rewind(self, words: str) -> None:
        count = int(words or 1) if len(words) < 10 and (words.isdecimal() or not words) else 0
        if count < 1:
            raise InvalidMessageError(f"{words!r} is not valid; it must be a number of exchanges")
        _say(f"Removed: {_end_of((await self._remove(count))[0])}")

    async def _remove(self, count: int) -> tuple[str, list[dict[str, Any]]]:
        """Rewind the session by `count` exchanges; return the first removed question and its images."""
        _, removed = await rewind_last(self._client, self._name, count, _PATIENCE_S)
        self._last = None
        return removed.question, [{"type": "image", "digest": one} for one in removed.images]

    async def _retry(self, _: str) -> None:
        asked = await self._unanswered()
        if asked is None:
            if not await last_exchanges(self._client, self._name):
                raise InvalidMessageError("there is no question to ask again")
            asked = await self._remove(1)
            if not self._sampling.get("temperature"):
                _say("At temperature 0 the answer is the same; /set temperature 0.7 varies it.")
        _say(f"> {_end_of(asked[0])}")
        await self._answer(*asked)

    async def _unanswered(self) -> tuple[str, list[dict[str, Any]]] | None:
        """Return the last question and its images if nothing answers it.

        Raises `InvalidMessageError` if it still waits.
        """
        if self._last is None:
            return None
        question, images, generation = self._last
        if generation.seq is None:
            return question, images  # the log may not have it
        try:
            async with asyncio.timeout(_LOOK_S):
                return None if (await generation).tokens else (question, images)
        except RequestFailedError:
            return question, images
        except TimeoutError:
            raise InvalidMessageError(
                "the last question still waits for its answer; /retry can replace the answer once it is there"
            ) from None

    async def _new(self, name: str) -> None:
        name = name or f"chat-{uuid4().hex[:8]}"
        self._session = self._client.session(name, cache=self._options.cache)
        _say(f"The session {self._name!r} is kept; /new {self._name} goes back to it.")
        self._name, self._last = name, None
        await self._enter()

    async def _save(self, name: str) -> None:
        if not name:
            raise InvalidMessageError("/save needs the name of a file")
        past = await last_exchanges(self._client, self._name, sys.maxsize)
        images = {digest: await self._session.image(digest) for one in past for digest in one.images}
        _write(Path(name), past, images)
        _say(f"Saved in {name}, exchanges: {len(past)}")

    async def _info(self, _: str) -> None:
        await print_info(self._client, self._name)


async def _lines(past: Sequence[str]) -> AsyncIterator[str]:
    """Yield the non-empty lines that the user types or pipes in. The prompt's history begins with `past`."""
    if not sys.stdin.isatty():
        async for body in _piped():
            if text := decoded(body).rstrip():
                yield text
        return
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.output import create_output

    prompt: PromptSession[str] = PromptSession(
        multiline=True,
        key_bindings=_keys(),
        history=InMemoryHistory([text for text in past if text]),
        output=create_output(always_prefer_tty=True),  # also when standard output is a pipe
    )
    is_leaving = False
    while True:
        try:
            line = await prompt.prompt_async("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            if is_leaving and not prompt.default_buffer.text:
                return
            is_leaving = True
            _say("Ctrl-C again leaves.")
            continue
        is_leaving = False
        if line.strip():
            yield line.rstrip()


async def _piped() -> AsyncIterator[bytes]:
    """Yield the lines of standard input, each read by a daemon thread.

    A thread of `asyncio.to_thread` that waits for a line would keep the process from ending. A thread that
    holds the lock of `sys.stdin` would crash it at its end, so this one has a file of its own.
    """
    own = open(sys.stdin.fileno(), "rb", closefd=False)  # noqa: ASYNC230, SIM115  # a thread may be using it

    def read(line: Future[bytes]) -> None:
        line.set_running_or_notify_cancel()
        try:
            line.set_result(own.readline())
        except OSError as error:
            line.set_exception(error)

    while True:
        line = Future[bytes]()
        threading.Thread(target=read, args=(line,), daemon=True).start()
        if not (body := await asyncio.wrap_future(line)):
            return
        yield body


def _keys() -> KeyBindings:
    """Return key bindings: Enter sends; Alt-Enter, or Enter after a backslash, begins a new line."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _write(path: Path, past: Sequence[ShownExchange], images: Mapping[str, bytes]) -> None:
    """Write exchanges to a new Markdown file, questions as quotations, and its images to a folder beside it.

    Raises `InvalidMessageError`.
    """
    path = Path(os.path.expanduser(path))  # noqa: PTH111  # `Path.expanduser` raises for an unknown user
    files = conversation_files.image_files(f"{path.stem}-images", images)
    text = ""
    for one in past:
        shown = "".join(f"![]({files[digest]})\n\n" for digest in one.images)
        text += f"{shown}> {one.question.replace(_LINE, _QUOTED)}\n\n{one.answer}\n\n"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
        for digest, name in files.items():
            (path.parent / name).parent.mkdir(exist_ok=True)
            (path.parent / name).write_bytes(images[digest])
    except FileExistsError:
        raise InvalidMessageError(f"{path} exists; give another name") from None
    except OSError as error:
        raise InvalidMessageError(f"{path} cannot be written: {error.strerror}") from None


def _say(text: str) -> None:
    """Print a text that is not part of an answer: on standard error, dimmed on a terminal."""
    if sys.stderr.isatty():
        click.secho(wrapped(printable(text)), dim=True, err=True)
    else:
        click.echo(printable(text), err=True)


def _end_of(text: str) -> str:
    return text if len(text) <= _SHOWN else f"[...] {text[-_SHOWN:]}"
