"""The console's page in a real browser: clicks, keys, a worker that is killed, hostile names and messages."""

import asyncio
import re
from base64 import b64encode
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import quote

import nats
import pytest
from nats.aio.msg import Msg

from tests.commands.command_runs import serving_process
from tests.ops.browser import Browser
from tests.ops.test_console import EVIL, SHELF, TOKEN, serving
from tests.ops.test_top import Watched
from tests.parts import LocalWorker, WorkerProcess, png
from turnkeep_client.client import Client
from turnkeep_client.messages import Generated, decode_result, encode
from turnkeep_client.results import failure
from turnkeep_client.subjects import Subjects

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(400)]

TAB, ENTER, ESCAPE = "\ue004", "\ue007", "\ue00c"
ANSWER = "document.querySelector('.turn:last-child .assistant')?.source ?? ''"


def console(worker: WorkerProcess, listen: str = "127.0.0.1:0") -> AbstractContextManager[str]:
    """Run `turnkeep console` as a process; the context is the address that it prints."""
    place = ("--data-dir", worker.data_dir, "--nats-port", worker.url.rpartition(":")[2])
    return serving_process("console", *place, "--listen", listen)


async def recorded(client: Client, session: str) -> list[Generated]:
    results = [decode_result(entry.body) for entry in await client.log(session) if entry.kind == "out"]
    return [one for one in results if isinstance(one, Generated)]


async def test_in_the_browser_a_chat_answer_grows_again_after_its_killed_worker_was_restarted(
    browser: Browser, worker_process: Callable[..., WorkerProcess], endless_model: Path
) -> None:
    worker = worker_process(model=endless_model)
    worker.start()
    async with await worker.client() as client:
        await client.session("garden").generate(
            messages=[{"role": "user", "content": "What grows?"}], max_tokens=3
        )

        def chat(url: str) -> str:
            browser.open(url)
            browser.click("Sessions")
            browser.wait_for("document.querySelector('.words')?.textContent === 'garden'")
            browser.click("What grows?", ".sessions a")
            browser.wait_for("document.querySelectorAll('.turn').length === 1")
            browser.click("Options")
            browser.type("input[type=number]", "3000")
            browser.type("#message", "Go on, and on.\ue007")  # Enter
            browser.wait_for(f"({ANSWER}).length > 20")
            worker.kill()
            browser.wait_for("document.body.innerText.includes('the answer continues when a worker is back')")
            before = browser.run(f"return {ANSWER}")
            assert (
                browser.run("return document.querySelector('.growing').getAttribute('aria-busy')") == "true"
            )
            worker.start()
            browser.wait_for(f"({ANSWER}).length > arguments[0]", len(before))
            assert browser.run("return document.querySelectorAll('.growing').length"), (
                "it goes on in its place"
            )
            assert str(browser.run(f"return {ANSWER}")).startswith(before)
            browser.wait_for("!document.querySelector('.growing')")
            return str(browser.run(f"return {ANSWER}"))

        with console(worker) as url:
            whole = await asyncio.to_thread(chat, url)
            last = (await recorded(client, "garden"))[-1]
            assert last.text == whole
            assert (last.usage.completion_tokens, last.resumed_tokens > 0) == (3000, True)
            await asyncio.to_thread(act, browser)
        assert await client.log("garden-2")
        assert not [entry for entry in await client.log("garden") if entry.kind == "in"][1:]


def choose(browser: Browser, words: str) -> None:
    """Open the menu of actions, and choose the one that begins with these words."""
    browser.click("⋯", "summary")
    browser.wait_for("document.querySelector('.menu').open")
    script = """[...document.querySelectorAll('.menu :is(button, a)')]
        .find((one) => one.firstChild.innerText === arguments[0]).click()"""
    browser.run(script, words)


def act(browser: Browser) -> None:
    """Fork the session at its first turn; then forget it, after cancelling the dialog once."""
    title = "document.querySelector('h1')?.textContent"
    assert re.fullmatch(r"[\d.]+k? tokens/s", browser.text(".turn:last-child .cost summary"))
    browser.run("document.querySelector('.turn:last-child .cost').open = true")
    assert re.search(
        r"\d+ found\s+\d+ prefilled\s+3k generated\s+[\d.]+ m?s first token\s+[\d.]+ m?s in all",
        browser.text(".turn:last-child .cost"),
    )
    browser.click("Fork", ".turn button")
    browser.type("#dialog-name", "garden-2\ue007")  # in the place of the name that is proposed; Enter
    browser.wait_for("location.hash === '#/session/garden-2'")
    browser.wait_for(f"{title} === 'garden-2'")  # nothing was said in it
    browser.click("garden-2", ".about summary")
    browser.wait_for("document.querySelector('.tree li')?.innerText.startsWith('garden')")
    browser.click("garden", ".tree a")
    browser.wait_for(f"{title} === 'What grows?'")
    browser.wait_for("document.querySelectorAll('.turn').length === 2")
    choose(browser, "Delete")
    assert "It is removed from the log" in browser.text("dialog")
    browser.type("dialog", "\ue00c")  # Escape
    choose(browser, "Delete")
    browser.click("Cancel", "dialog button")
    browser.wait_for("document.querySelectorAll('.turn').length === 2")
    choose(browser, "Delete")
    browser.click("Delete", "#dialog-yes")
    browser.wait_for("location.hash === '#/'")
    browser.wait_for("document.querySelectorAll('.side li').length === 1")
    assert browser.text(".side .name") == "garden-2"


MARKDOWN = (
    "1. a **b**\n\n```python\nreturn 1\n```\n\n| a |\n|---|\n| 1 |\n\n[out](https://a.example)\n\n"
    "- [x] done\n\n$$\\int_0^1 \\sqrt{x}$$\n\n"
)


async def test_in_the_browser_a_chat_can_be_renamed_regenerated_edited_stopped_searched_and_exported(
    browser: Browser, local_worker: Callable[..., Awaitable[LocalWorker]], endless_model: Path
) -> None:
    worker = await local_worker(model=str(endless_model))
    client = worker.client
    await client.session("notes").generate(
        messages=[{"role": "user", "content": "Rhubarb?"}], prefix=MARKDOWN, max_tokens=3
    )

    def names() -> list[str]:
        return browser.run("return [...document.querySelectorAll('.side .name')].map((one) => one.innerText)")

    def begin(url: str) -> str:
        """Open the console, ask a question in a new chat, and rename the chat; return its session's name."""
        browser.open(f"{url}/?token={TOKEN}")
        browser.wait_for("document.activeElement.id === 'message'")
        browser.click("Options")
        browser.type("input[placeholder='what fits']", "5")
        browser.type("#message", "What grows?\ue007")
        browser.wait_for("location.hash.startsWith('#/session/chat-')")
        browser.wait_for("document.querySelector('.turn.done')")
        browser.wait_for("document.querySelector('h1').innerText === 'What grows?'")
        browser.wait_for(
            "document.querySelectorAll('.side .name').length === 2"
        )  # it is read again meanwhile
        assert names() == ["What grows?", "Rhubarb?"]
        choose(browser, "Rename")
        browser.type("#dialog-name", "My <b>garden</b>\ue007")
        browser.wait_for("document.querySelector('h1').innerText === 'My <b>garden</b>'")
        browser.wait_for("document.querySelector('.side .name').innerText === 'My <b>garden</b>'")
        return str(browser.run("return location.hash")).removeprefix("#/session/")

    def again(name: str) -> None:
        question, shown = (
            "document.querySelector('.turn:last-child .user .text')?.innerText",
            ".turn:last-child .switch",
        )
        browser.click("Regenerate")
        browser.wait_for("location.hash === arguments[0]", f"#/session/{name}--v2")
        browser.wait_for("document.querySelectorAll('.turn.done').length === 1")
        assert "2/2" in browser.text(shown)
        browser.click("", ".switch button")  # the variant before
        browser.wait_for("location.hash === arguments[0]", f"#/session/{name}")
        browser.wait_for(f"document.querySelector('{shown}')?.innerText.includes('1/2')")
        browser.click("Edit")
        assert browser.run(
            "return document.querySelector('.turn .edit') && !document.querySelector('.turn .user')"
        )
        browser.type(".edit textarea", ESCAPE)
        browser.wait_for(f"{question} === 'What grows?' && !document.querySelector('.edit')")
        assert browser.run("return document.activeElement.innerText") == "Edit"
        browser.press(ENTER)
        browser.type(".edit textarea", " And why?")
        browser.click("Send", ".edit button")
        browser.wait_for("location.hash === arguments[0]", f"#/session/{name}--v3")
        browser.wait_for(f"{question} === 'What grows? And why?'")
        browser.wait_for(f"document.querySelector('{shown}')?.innerText.includes('3/3')")
        browser.wait_for("document.querySelectorAll('.side .name').length === 2")
        assert names() == ["My <b>garden</b>", "Rhubarb?"], "one entry for all variants"
        assert browser.text("h1") == "My <b>garden</b>"
        assert browser.text(".side a[aria-current] .name") == "My <b>garden</b>"

    def draft() -> None:
        """Leave a message half written, for another variant and by shortcuts, and come back to it."""
        here = browser.run("return location.hash")
        browser.type("#message", "On and")
        browser.click("", ".switch button")
        browser.wait_for("location.hash !== arguments[0] && document.querySelector('.switch')", here)
        assert browser.run("return document.querySelector('#message').value") == "On and"
        browser.run(
            "dispatchEvent(new KeyboardEvent('keydown', { key: 'O', ctrlKey: true, shiftKey: true }))"
        )
        browser.wait_for("location.hash === '#/' && document.querySelector('#message')?.value === ''")
        browser.run("location.hash = '#/workers'")
        browser.wait_for("!document.querySelector('.side')")
        browser.run("dispatchEvent(new KeyboardEvent('keydown', { key: 'k', ctrlKey: true }))")
        browser.wait_for("document.querySelector('.conversation > p')?.innerText.startsWith('It begins')")
        assert browser.run("return document.activeElement.type") == "search"
        browser.run("location.hash = arguments[0]", here)
        browser.wait_for("document.querySelector('#message')?.value === 'On and'")
        browser.wait_for("document.querySelector('.turn.done')")

    def stop() -> None:
        browser.click("Options")
        browser.type("input[placeholder='what fits']", "0000")  # it still has the 5
        browser.type("#message", " on\ue007")  # behind its draft
        browser.wait_for(f"({ANSWER}).length > 20")
        browser.type(".side input", ESCAPE)  # stops nothing
        browser.wait_for(f"({ANSWER}).length > arguments[0]", 20 + browser.run(f"return ({ANSWER}).length"))
        browser.type("#message", "And then?\ue007")
        browser.wait_for("document.querySelectorAll('.turn.waiting').length === 2")
        browser.type("body", "\ue00c")  # Escape
        browser.wait_for("!document.querySelector('.turn.waiting')")
        assert "stopped" in browser.text(".turn:nth-last-child(2)")
        assert not browser.run("return document.querySelector('.composer button').checkVisibility()")

    def stop_the_first() -> None:
        browser.click("New chat")  # whose limit is still 50,000
        browser.type("#message", "On and on\ue007")
        browser.wait_for(f"({ANSWER}).length > 20")
        browser.type("#message", "And then?\ue007")
        browser.wait_for("document.querySelectorAll('.turn.waiting').length === 2")
        browser.type("body", ESCAPE)
        browser.wait_for("document.querySelectorAll('.turn.done').length === 2")
        told = browser.text(".turn:last-child .meta").split()
        assert told[:2] == ["Regenerate", "stopped"], (
            "nothing was computed for it, and its position is no button"
        )

    def search() -> None:
        browser.type(".side input", "rhub")
        browser.wait_for("document.querySelectorAll('.side li').length === 1")
        browser.click("Rhubarb?", ".side .name")
        browser.wait_for("document.querySelector('.rich td')?.innerText === '1'")
        assert browser.text(".rich li strong") == "b"
        fits = "[...document.querySelectorAll('.wide')].every((one) => one.scrollHeight === one.clientHeight)"
        assert browser.run(f"return {fits}"), "no table or formula scrolls up and down"
        assert browser.run("return document.querySelector('math msqrt').namespaceURI.endsWith('MathML')")
        assert browser.text(".said.assistant .who") == endless_model.name
        assert browser.text(".code .code-k").strip() == "return"
        assert browser.run("return document.querySelector('.rich a').rel") == "noreferrer"
        browser.click("Copy", ".code button")
        browser.wait_for("document.querySelector('#toast').innerText === 'Copied'")
        assert browser.run("return navigator.clipboard.readText()") == "return 1\n"
        browser.click("Copy", ".meta button")
        deadline = f"navigator.clipboard.readText().then((text) => text.startsWith({MARKDOWN!r}))"
        assert browser.run(f"return {deadline}")

    def export() -> None:
        browser.click("⋯", "summary")
        links = browser.run("return [...document.querySelectorAll('.menu a')].map((one) => one.href)")
        read = "return fetch(arguments[0]).then((answer) => answer.text())"
        assert browser.run(read, links[0]).startswith("# notes\n\n## You\n\nRhubarb?\n")
        assert '"role": "user"' in browser.run(read, links[1])
        browser.press(ESCAPE)
        assert not browser.run("return document.querySelector('.menu').open")

    async with serving(client) as url:
        browser.cdp(
            "Browser.grantPermissions",
            origin=url,
            permissions=["clipboardReadWrite", "clipboardSanitizedWrite"],
        )
        name = await asyncio.to_thread(begin, url)
        assert re.fullmatch(r"chat-\d{8}-\d{6}", name)
        await asyncio.to_thread(again, name)
        for then in (draft, stop, stop_the_first, search, export):
            await asyncio.to_thread(then)


async def test_the_console_page_shows_scripts_in_session_names_and_messages_as_text(
    browser: Browser, worker: LocalWorker
) -> None:
    tool = {"id": "c", "type": "function", "function": {"name": "<img>", "arguments": EVIL}}
    told = [
        {"role": "user", "content": EVIL},
        {"role": "assistant", "content": EVIL, "tool_calls": [tool]},
    ]
    await worker.client.session("evil").append(messages=told)
    raw = await nats.connect(worker.settings.nats)
    await raw.jetstream().publish(f"{worker.settings.prefix}.default.<script>alert(1)</script>.in", b"{}")
    await raw.close()
    name = "<img>"

    def look(url: str) -> None:
        browser.open(url)
        browser.type("input[name=token]", TOKEN + "x\n")
        browser.wait_for("document.body.innerText.includes('not the one of this console')")
        browser.type("input[name=token]", TOKEN + "\n")
        browser.click("Sessions")
        browser.wait_for("document.querySelectorAll('.sessions tbody tr').length === 1")
        browser.run("document.querySelector('.sessions a').click()")
        browser.wait_for("document.querySelectorAll('.said').length === 2")
        assert browser.text(".user .text") == browser.text(".assistant .text") == EVIL
        browser.click(f"Calls {name}")
        assert EVIL in browser.text(".call pre")
        browser.run("location.hash = arguments[0]", f"#/session/{quote(name, safe='')}")
        browser.wait_for("document.body.innerText.includes('is not valid')")
        assert browser.text("h1") == name
        browser.run("location.hash = '#/session/%'")
        browser.wait_for("document.querySelector('h1')?.textContent === 'There is no such page'")
        assert browser.run("return document.title") == "There is no such page · Turnkeep"
        assert browser.run("return document.querySelectorAll('main script, main img').length") == 0

    async with serving(worker.client) as url:
        await asyncio.to_thread(look, url)


async def test_the_console_page_shows_an_outage_of_worker_nats_or_console_and_its_end_without_a_reload(
    browser: Browser, worker_process: Callable[..., WorkerProcess]
) -> None:
    worker = worker_process()  # so that its silence would be noticed late
    worker.start()
    gone = "document.querySelector('#gone').innerText"

    def look(url: str) -> None:
        browser.open(url)
        browser.wait_for("document.querySelector('#state').innerText === '1 worker up'")
        browser.run("location.hash = '#/session/notes'")
        browser.wait_for("document.querySelectorAll('.turn').length === 1")
        worker.lose_worker()
        browser.wait_for(f"{gone}.startsWith('No worker is up: turnkeep serve starts one')")
        assert browser.text("#state") == "no worker"
        worker.go_on()
        browser.wait_for(f"!{gone}")
        browser.wait_for("document.querySelector('#state').innerText === '1 worker up'")
        worker.stop()
        browser.wait_for(f"{gone}.startsWith('NATS does not answer')")
        assert browser.run("return document.querySelectorAll('.turn').length") == 1, "what was shown stays"
        browser.run("location.hash = '#/sesions'")
        browser.wait_for("document.querySelector('h1')?.innerText === 'There is no such page'")
        browser.click("here is the first one")
        worker.start()
        browser.wait_for(f"!{gone}")
        browser.run("location.hash = '#/session/nots'")
        browser.wait_for("document.body.innerText.includes('There is no session nots yet.')")

    async with await worker.client() as client:
        await client.session("notes").append(text="abc")
    with console(worker) as url:
        await asyncio.to_thread(look, url)
    assert "The console does not answer" in browser.wait_for(gone)
    assert browser.text("h1") == "nots"
    with console(worker, url.split("/")[2]) as again:
        assert again == url
        await asyncio.to_thread(browser.wait_for, f"!{gone}")


@pytest.mark.parametrize("dark", [False, True])
async def test_each_console_page_passes_accessibility_checks_and_is_operable_by_keyboard(
    browser: Browser, client: Client, *, dark: bool
) -> None:
    await client.session("notes").generate(
        messages=[{"role": "user", "content": "?"}], prefix=f"{MARKDOWN}> said `so`", max_tokens=3
    )

    def look(url: str) -> None:
        for width in (1200, 400):
            browser.look(width, 900, dark=dark)
            browser.open(f"{url}/?token={TOKEN}")
            for page, is_there in (
                ("", "h1"),
                ("session/notes", ".rich code"),
                ("sessions", ".sessions td"),
                ("workers", ".log:not([hidden]) pre"),
                ("connect", ".examples pre"),
                ("models", ".models td"),
                ("nothing", "h1 + p"),
            ):
                browser.run("location.hash = arguments[0]", f"#/{page}")
                browser.wait_for("document.querySelector(arguments[0])", is_there)
                browser.run("for (const one of document.querySelectorAll('details')) one.open = true")
                assert [*browser.faults(), *browser.unreached()] == [], page
                assert browser.run("return document.documentElement.scrollWidth") == width, (
                    "nothing sticks out"
                )
            browser.open(url.replace("127.0.0.1", "localhost"))  # which has no cookie
            browser.wait_for("document.querySelector('input[name=token]')")
            assert [*browser.faults(), *browser.unreached()] == []
        browser.look(1200, 900)

    async with serving(client, Watched(60, "w1")) as url:
        await asyncio.to_thread(look, url)


def models_shows_which_fit_and_downloads_one(browser: Browser, url: str) -> None:
    browser.open(f"{url}/?token={TOKEN}")
    browser.run("window.fetch_ = window.fetch; window.fetch = () => new Promise(() => {})")
    browser.click("Models")
    browser.wait_for("document.querySelector('main').innerText.startsWith('Models')")
    assert browser.text("main").split("\n") == ["Models", "", "Loading the list of models ..."]
    browser.run("window.fetch = window.fetch_; location.hash = '#/'")
    browser.click("Models")
    browser.wait_for("document.querySelectorAll('.models tbody tr').length === 6")
    downloads = "return [...document.querySelectorAll('[aria-label^=Download]')].map((one) => one.ariaLabel)"
    assert browser.run(downloads) == ["Download org/good"], "the other one is too large"
    seen = browser.text("main")
    assert "This machine has 8 GiB of memory" in seen
    assert ("fits: 2 GiB" in seen, "too large: 2 GiB" in seen) == (True, True)
    browser.click("Copy line")
    browser.wait_for("document.querySelector('#toast').innerText === 'Copied'")
    browser.click("Serve", ".models button")  # that of c: a is in use, b too large
    browser.wait_for("document.querySelector('#dialog-title').innerText === 'Serve c?'")
    browser.click("Serve", "#dialog-yes")
    browser.wait_for("document.querySelector('#toast').innerText === 'c cannot be served: it is not whole'")
    browser.click("Download", ".models button")
    browser.wait_for("document.querySelector('progress')?.position === 0.5")
    browser.type("form input", "x\ue007")
    browser.wait_for("document.querySelector('#toast').innerText === 'x is no id of the hub'")


def workers_lists_all_and_charts_the_selected_one(browser: Browser, url: str) -> None:
    browser.open(f"{url}/?token={TOKEN}")
    browser.click("Workers")
    browser.click("<b>w2</b>")
    browser.wait_for("document.querySelector('h2')?.textContent === '<b>w2</b>'")
    browser.wait_for("document.body.dataset.points === '120'")
    assert browser.text("tr.chosen a") == "<b>w2</b>"
    paths = browser.run(
        "return [...document.querySelectorAll('figure path')].map((one) => one.getAttribute('d'))"
    )
    assert (len(paths), max(path.count("L") for path in paths)) == (13, 119)
    assert "found in KV 36" in browser.text(".plots")
    assert "90%" in browser.text("tr.chosen")
    clocks = re.findall(r"\d\d:\d\d:\d\d", browser.run("return document.querySelector('.plots').textContent"))
    assert len(clocks) == 8 * 3
    assert browser.text("#state") == "2 workers up"
    for width in (400, 900, 1600):
        browser.look(width, 900)
        assert browser.run("return document.documentElement.scrollWidth") == width, "nothing sticks out"


def a_dialog_keeps_the_keyboard_focus_and_returns_it_when_closed(browser: Browser, url: str) -> None:
    focused = "document.activeElement.innerText"
    browser.open(f"{url}/?token={TOKEN}#/session/notes")
    browser.wait_for("document.querySelectorAll('.turn').length === 1")
    browser.run("document.querySelector('.skip').focus()")
    browser.press(ENTER)
    browser.press(TAB)
    assert browser.run("return document.activeElement.closest('main').id") == "main"
    browser.run("[...document.querySelectorAll('button')].find((one) => one.innerText === 'Fork').focus()")
    browser.press(ENTER)
    browser.wait_for("document.activeElement.id === 'dialog-name'")
    assert browser.faults() == []
    seen = set()
    for _ in range(6):
        browser.press(TAB)
        seen.add(browser.run(f"return {focused}"))
    assert {"Cancel", "Fork"} <= seen
    assert browser.run("return document.querySelector('main').contains(document.activeElement)") is False
    browser.press(ESCAPE)
    browser.wait_for("!document.querySelector('dialog').open")
    assert browser.run(f"return {focused}") == "Fork"


@pytest.mark.parametrize(
    "walk",
    [
        models_shows_which_fit_and_downloads_one,
        workers_lists_all_and_charts_the_selected_one,
        a_dialog_keeps_the_keyboard_focus_and_returns_it_when_closed,
    ],
)
async def test_in_the_browser_a_user_can_download_a_model_see_a_workers_chart_and_use_dialogs_by_keyboard(
    browser: Browser, worker: LocalWorker, walk: Callable[[Browser, str], None]
) -> None:
    await worker.client.session("notes").append(text="abc")

    async def refuse(asked: Msg) -> None:
        await asked.respond(encode(failure(None, "invalid_request", "c cannot be served: it is not whole")))

    await worker.app._nc.subscribe(Subjects(worker.settings.prefix).serve, cb=refuse)
    watched = Watched(600, "1st", "<b>w2</b>")  # the first one is shown until another is chosen
    async with serving(worker.client, watched) as url:
        may = ["clipboardReadWrite", "clipboardSanitizedWrite"]
        browser.cdp("Browser.grantPermissions", origin=url, permissions=may)
        await asyncio.to_thread(walk, browser, url)
    SHELF.pulled.clear()


async def test_the_console_page_accepts_images_by_file_choice_paste_and_drop_and_enlarges_them_by_a_click(
    browser: Browser, worker: LocalWorker, tmp_path: Path
) -> None:
    (file := tmp_path / "screen.png").write_bytes(png(3, side=400))
    given = """const bytes = Uint8Array.from(atob(arguments[0]), (one) => one.charCodeAt(0));
        const data = new DataTransfer(), how = { bubbles: true, cancelable: true };
        data.items.add(new File([bytes], arguments[1], { type: 'image/png' }));
        const event = arguments[2] === 'paste' ? new ClipboardEvent('paste', { ...how, clipboardData: data })
            : new DragEvent('drop', { ...how, dataTransfer: data });
        document.querySelector(arguments[3]).dispatchEvent(event);
        return event.defaultPrevented"""
    waiting = "document.querySelectorAll('.composer .thumbs canvas').length"
    loaded = (
        "[...document.querySelectorAll('.turn .thumbs img')].map((one) => one.complete && one.naturalWidth)"
    )

    def look(url: str) -> None:
        browser.open(f"{url}/?token={TOKEN}")
        browser.wait_for("document.querySelector('#message')")
        (element,) = browser.run("return document.querySelector('input[type=file]')").values()
        browser.do(f"element/{element}/value", text=str(file))
        browser.wait_for(f"{waiting} === 1")
        for seed, (how, where) in enumerate((("paste", "#message"), ("drop", ".conversation"))):
            data = b64encode(png(seed, side=40 + seed)).decode()
            assert browser.run(given, data, f"{how}.png", how, where)
            browser.wait_for(f"{waiting} === arguments[0]", 2 + seed)
        assert browser.run(given, b64encode(b"no picture").decode(), "wrong.png", "paste", "#message")
        browser.wait_for("document.querySelector('#toast').innerText.startsWith('wrong.png is no image')")
        browser.run("document.querySelector('[title=\"Remove paste.png\"]').click()")
        browser.wait_for(f"{waiting} === 2")
        browser.type("#message", "Which colours?\ue007")  # Enter
        browser.wait_for("document.querySelectorAll('.turn').length === 1")
        assert browser.run(f"return {waiting}") == 0
        browser.wait_for(f"JSON.stringify({loaded}) === '[400,41]'")
        browser.wait_for("!document.querySelector('.growing')")
        assert not browser.faults()
        browser.run("document.querySelector('.turn .thumbs button').click()")
        browser.wait_for("document.querySelector('dialog.image[open] img')?.naturalWidth === 400")
        browser.press(ESCAPE)
        browser.wait_for("!document.querySelector('dialog.image')")
        browser.click("Regenerate")
        browser.wait_for("location.hash.endsWith('--v2')")
        browser.wait_for(f"JSON.stringify({loaded}) === '[400,41]'")
        browser.run(given, b64encode(png(5)).decode(), "alone.png", "paste", "#message")
        browser.wait_for(f"{waiting} === 1")
        browser.click("Send")
        browser.wait_for("document.querySelectorAll('.turn').length === 2")
        browser.wait_for(f"JSON.stringify({loaded}) === '[400,41,8]'")

    async with serving(worker.client) as url:
        await asyncio.to_thread(look, url)
