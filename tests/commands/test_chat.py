"""`turnkeep chat` on a terminal of its own, with a real worker; the last exchanges of a session."""

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_runs import Terminal, environment, where

from commands.branches import rewind_last
from commands.exchanges import last_exchanges
from tests.parts import LocalWorker
from turnkeep_client.client import Client
from turnkeep_client.errors import InvalidMessageError, RequestFailedError
from turnkeep_client.messages import (
    Append,
    Generate,
    Generated,
    Request,
    Rewind,
    decode_request,
    decode_result,
)

PROMPT = r">\x08? ?$"
END = r"\n\s*>\x08? ?$"
BEGUN = r"first\r*\n(?:\r(?:waiting|prefill)[^\r\n]*+)*\r?(?!waiting|prefill)[^>\r\n]"


async def on_terminal(
    script: Callable[[Terminal], None], worker: LocalWorker, *options: object, fresh: bool = False
) -> str:
    """Run `script` on a chat's terminal, and check the chat's exit code; return the printed text."""

    def run() -> str:
        arguments = ("chat", "--session", "s", "--max-tokens", 5, *where(worker), *options)
        with Terminal(*arguments, columns=100, fresh=fresh) as terminal:
            script(terminal)
            assert terminal.end() == 0
            return terminal.transcript

    return await asyncio.to_thread(run)


def dialogue(terminal: Terminal, *lines: tuple[str, str]) -> None:
    """Type each line at the prompt, and wait for what is said to it; `PROMPT` is for any answer."""
    for line, says in lines:
        terminal.wait_for(PROMPT)
        terminal.type(line + "\r")
        terminal.wait_for(re.escape(line))
        if says != PROMPT:
            terminal.wait_for(says)
    terminal.wait_for(PROMPT)


async def requests(client: Client) -> list[Request]:
    return [decode_request(entry.body) for entry in await client.log("s") if entry.kind == "in"]


async def answers(client: Client) -> list[Generated]:
    results = [decode_result(entry.body) for entry in await client.log("s") if entry.kind == "out"]
    return [result for result in results if isinstance(result, Generated)]


def said(all_requests: list[Request]) -> list[tuple[str, str | None]]:
    return [
        (message.role, message.content)
        for request in all_requests
        if isinstance(request, Append | Generate)
        for message in request.messages or ()
    ]


async def test_a_chat_begins_with_the_model_the_session_the_keyboard_shortcuts_and_the_last_exchange(
    worker: LocalWorker,
) -> None:
    def begin(terminal: Terminal) -> None:
        terminal.wait_for(r"tiny on \w+, session 's', no tokens\.")
        terminal.wait_for("Ctrl-C stops an answer")
        terminal.wait_for(PROMPT)
        terminal.type("first question\r")
        terminal.wait_for(END)
        terminal.type("second question\r")
        terminal.wait_for(END)
        terminal.type("/bye\r")

    await on_terminal(begin, worker)

    def go_on(terminal: Terminal) -> None:
        terminal.wait_for(rf"session 's', {position} tokens")
        terminal.wait_for("> second question")
        terminal.wait_for(PROMPT)
        terminal.type("\x1b[A")  # the last question is the last line of the history
        terminal.wait_for("second question")
        terminal.type("\x15\x04")

    position = (await worker.client.session("s").info()).position
    transcript = await on_terminal(go_on, worker)
    assert "first question" not in transcript


@pytest.mark.parametrize("more", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
async def test_turnkeep_chat_and_turnkeep_show_print_no_escape_codes_with_no_color_or_on_a_dumb_terminal(
    worker: LocalWorker, more: dict[str, str]
) -> None:
    await worker.client.session("s").append(text="hello")

    def run() -> str:
        with Terminal("show", "s", *where(worker), **more) as terminal:
            assert terminal.end() == 0
            return terminal.raw

    assert "\x1b" not in await asyncio.to_thread(run)

    def chat() -> str:
        options = ("--session", "s", "--max-tokens", 4, *where(worker))
        with Terminal("chat", *options, command='echo hello | "$0" "$@"', **more) as terminal:
            assert terminal.end() == 0
            return terminal.raw

    assert "\x1b" not in await asyncio.to_thread(chat)


async def test_a_chat_executes_slash_commands_explains_unknown_ones_and_sends_multi_line_questions(
    worker: LocalWorker,
) -> None:
    def script(terminal: Terminal) -> None:
        terminal.wait_for(r"Alt-Enter, or \\ and Enter, begins a new line")
        dialogue(
            terminal,
            ("/help", "/rewind"),
            ("/system Be brief.", "The system message is added"),
            ("/system", "needs a text"),
            ("/set", "max_tokens +5"),
            ("/set max_tokens 3", PROMPT),
            ("/set max_tokens -1", "max_tokens must be a whole number, at least 0 and at most 2147483647"),
            ("/set temperature hot", "'hot' is not valid"),
            ("/set colour red", "there is no option 'colour'"),
            ("/set stop END", PROMPT),
            ("/nothing", "There is no command /nothing"),
            ("/etc/hosts is what?", PROMPT),
            ("/set stop", PROMPT),
            ("/set max_tokens", PROMPT),
            ("once more", PROMPT),
            ("/info", "requests answered"),
            ("/rewind", "Removed: once more"),
            ("/rewind 2", "the session has 1 exchanges, not 2"),
            ("/rewind no", "must be a number of exchanges"),
        )
        terminal.type("one\\\r")  # a backslash, then Enter
        terminal.type("two\x1b\r")  # Alt-Enter
        terminal.type("  three\r")
        terminal.wait_for("three")
        terminal.wait_for(END)
        terminal.type("/bye\r")

    await on_terminal(script, worker)
    sent = await requests(worker.client)
    asked = ("/etc/hosts is what?", "once more", "one\ntwo\n  three")
    assert said(sent) == [("system", "Be brief."), *(("user", one) for one in asked)]
    first, second, _ = (request for request in sent if isinstance(request, Generate))
    assert (first.max_tokens, first.stop, second.max_tokens, second.stop) == (3, ("END",), 5, ())
    assert [one.position for one in sent if isinstance(one, Rewind)] == [
        (await answers(worker.client))[0].position
    ]


async def test_a_chat_can_retry_a_question_save_the_conversation_and_switch_sessions(
    worker: LocalWorker, tmp_path: Path
) -> None:
    file = tmp_path / "said.md"

    def script(terminal: Terminal) -> None:
        dialogue(
            terminal,
            ("/retry", "there is no question to ask again"),
            ("/save", "needs the name of a file"),
            ("/set temperature 0", PROMPT),
            ("first question", PROMPT),
            ("second question", PROMPT),
            ("/retry", "At temperature 0 the answer is the same"),
            ("/set temperature 1", PROMPT),
            ("/retry", "> second question"),
            (f"/save {file}", r"Saved in \S+,\s+exchanges:\s+2"),
            (f"/save {file}", r"exists;\s+give\s+another\s+name"),
            ("/save /nowhere/file", "cannot be written: No such file"),
            ("/save ~nobody-here/file", "cannot be written: No such file"),
            ("/new", "'s' is kept; /new s goes back"),
            ("/new", r"session 'chat-\w{8}', no tokens"),
            ("third question", PROMPT),
            ("/new s", "session 's', [0-9]+ tokens"),
            ("/new no name", "session 'no name' is not valid"),
        )
        terminal.type("fourth question\r")
        terminal.wait_for(END)
        terminal.type("\x04")

    await on_terminal(script, worker, "--system", "Be brief.")
    asked = ["first question", "second question", "second question", "second question", "fourth question"]
    assert said(await requests(worker.client)) == [("system", "Be brief."), *(("user", one) for one in asked)]
    first, second, same, again, _ = (answer.text for answer in await answers(worker.client))
    assert second == same
    assert file.read_text() == f"> first question\n\n{first}\n\n> second question\n\n{again}\n\n"
    others = [one for one in await worker.client.log() if one.kind == "in" and one.key.session != "s"]
    sent = said([decode_request(one.body) for one in others])
    assert sent == [("system", "Be brief."), ("system", "Be brief."), ("user", "third question")]


async def test_in_a_chat_the_first_ctrl_c_clears_the_typed_line_and_the_second_one_ends_the_chat(
    worker: LocalWorker,
) -> None:
    def script(terminal: Terminal) -> None:
        terminal.wait_for(PROMPT)
        for typed in ("never sent", "nor this"):  # what is typed is cleared each time
            terminal.type(typed)
            terminal.wait_for(typed)
            terminal.type("\x03")
            terminal.wait_for("Ctrl-C again leaves")
            terminal.wait_for(PROMPT)
        terminal.type("\x03")

    await on_terminal(script, worker, fresh=True)
    assert said(await requests(worker.client)) == []


@pytest.mark.serves("endless_model", max_batch=1)
async def test_a_chat_shows_that_a_prefilled_question_without_a_place_in_the_batch_waits_for_its_turn(
    worker: LocalWorker,
) -> None:
    other = worker.client.session("other").generate(text="eee", max_tokens=50_000)
    chunks = aiter(other)
    await anext(chunks)

    def run() -> None:
        with Terminal("chat", "--session", "s", *where(worker)) as terminal:
            terminal.wait_for(PROMPT)
            terminal.type("first\r")
            time.sleep(1.5)  # it waited before it was prefilled, too
            terminal.wait_for("waiting for its turn$")

    await asyncio.to_thread(run)
    info = await worker.client.session("s").info()
    assert info.progress is not None, "it is prefilled"
    await other.cancel()


@pytest.mark.serves("endless_model")
async def test_ctrl_c_stops_a_streaming_answer_and_the_chat_takes_the_next_question(
    worker: LocalWorker,
) -> None:
    def script(terminal: Terminal) -> None:
        terminal.wait_for(PROMPT)
        terminal.type("first\r")
        terminal.wait_for(BEGUN)
        assert not terminal.echoes
        terminal.type("\x03")
        terminal.wait_for(PROMPT)
        terminal.type("/set max_tokens 2\r")
        terminal.wait_for(END)
        terminal.type("second\r")
        terminal.wait_for(END)
        terminal.type("\x04")

    await on_terminal(script, worker, "--max-tokens", 50_000)
    first, second = await answers(worker.client)
    assert (first.finish_reason, second.finish_reason) == ("cancelled", "length")


@pytest.mark.serves("endless_model")
async def test_text_typed_in_a_chat_during_an_answer_appears_at_the_next_prompt(worker: LocalWorker) -> None:
    def script(terminal: Terminal) -> None:
        terminal.wait_for(PROMPT)
        terminal.type("first\r")
        terminal.wait_for(BEGUN)
        terminal.type("TYPED MEANWHILE")
        terminal.wait_for("Ended at max_tokens")
        assert "TYPED" not in terminal.transcript.partition("Ended at max_tokens")[0]
        terminal.wait_for("TYPED MEANWHILE")
        terminal.type("\r")
        terminal.wait_for("Ended at max_tokens")
        terminal.wait_for(PROMPT)
        terminal.type("\x04")

    await on_terminal(script, worker, "--max-tokens", 600)
    assert said(await requests(worker.client)) == [("user", "first"), ("user", "TYPED MEANWHILE")]


async def test_sigterm_ends_a_chat_with_exit_code_143_while_it_waits_for_a_line_from_a_pipe(
    worker: LocalWorker,
) -> None:
    words = [sys.executable, "-m", "commands", "chat", "--session", "s", "--max-tokens", "5"]

    def run() -> tuple[int, str]:
        pipe = subprocess.PIPE
        command = [*words, *map(str, where(worker))]
        with subprocess.Popen(command, stdin=pipe, stderr=pipe, env=environment()) as process:
            assert process.stdin is not None
            assert process.stderr is not None
            process.stdin.write(b"first question\n")
            process.stdin.flush()
            said = process.stderr.readline().decode()
            process.terminate()
            try:
                return process.wait(10), said + process.stderr.read().decode()
            finally:
                process.kill()

    left, said = await asyncio.to_thread(run)
    assert (left, said.rstrip()) == (143, "Ended at max_tokens (5): the answer is cut")


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 3}


async def test_the_last_exchanges_of_a_session_omit_failed_and_rewound_questions_and_repeats_of_a_request(
    worker: LocalWorker,
) -> None:
    session = worker.client.session("s")

    async def seen() -> list[tuple[str, int | None]]:
        return [(one.question, one.start) for one in await last_exchanges(worker.client, "s", 99)]

    assert await seen() == []
    first = await session.generate(**user("one"), request_id="one")
    told = await session.append(messages=[{"role": "system", "content": "Be brief."}])
    second = await session.generate(**user("two"))
    assert await seen() == [("one", 0), ("two", told.position)]
    with pytest.raises(RequestFailedError):
        await session.generate(**user("x" * 3000))
    assert (await session.generate(**user("one"), request_id="one")).repeat_of == first.seq
    await session.generate(**user("three"))
    assert await seen() == [("one", 0), ("two", told.position), ("three", second.position)]
    await session.rewind(second.position - 1)
    assert await seen() == [("one", 0)]
    await session.close()
    assert await seen() == []
    await session.open()
    await session.generate(text="raw", max_tokens=2)
    assert await seen() == [("raw", 0)]


async def test_a_chat_cannot_be_rewound_to_an_exchange_whose_tokens_a_later_exchange_has_rewritten(
    worker: LocalWorker,
) -> None:
    session = worker.client.session("s")
    for word in ("one", "two"):
        await session.generate(**user(word))
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    third = await session.generate(**user("three"), tools=tools)
    assert third.rewritten_from == 1
    assert [one.start for one in await last_exchanges(worker.client, "s", 9)] == [0, None, None]
    with pytest.raises(InvalidMessageError, match="rewind further"):
        await rewind_last(worker.client, "s", 2, 20)
    await session.append(messages=[{"role": "system", "content": "Be brief."}], tools=[])
    fourth = await session.generate(**user("four"))
    assert [one.start is None for one in await last_exchanges(worker.client, "s", 9)] == [
        False,
        True,
        True,
        False,
    ]
    assert fourth.position < third.position, "without the tools"
    await rewind_last(worker.client, "s", 1, 20)
    assert [one.question for one in await last_exchanges(worker.client, "s", 9)] == ["one", "two", "three"]
