"""The console's page while sessions, answers and lists change under it, in a real browser."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ops.browser import Browser
from tests.ops.test_console import SHELF, TOKEN, serving
from tests.parts import LocalWorker
from turnkeep_client.client import Client

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(300)]

ENTER = "\ue007"
SAID = "[...document.querySelectorAll('.turn .said > .text')].map((one) => one.textContent)"
#: The page asks for what is new at once.
FRESH = "dispatchEvent(new Event('doubt'))"
#: Opens the menu; a pointer could miss it while the page scrolls with an answer.
MENU = "document.querySelector('.menu > summary').click()"


async def walked(browser: Browser, client: Client, walk: Callable[[Callable[..., Any]], None]) -> None:
    """Open the console in a thread, and walk there; `walk` gets what awaits a coroutine for it."""
    loop = asyncio.get_running_loop()

    def await_(call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, loop).result(60)

    def look(url: str) -> None:
        browser.open("about:blank")
        browser.open(f"{url}/?token={TOKEN}")
        walk(await_)

    async with serving(client) as url:
        await asyncio.to_thread(look, url)


def show(browser: Browser, name: str) -> None:
    browser.run("location.hash = arguments[0]", f"#/session/{name}")
    browser.wait_for("document.querySelectorAll('.turn').length")


def button(words: str) -> str:
    """Return the expression that is true while a button of these words is shown."""
    buttons = "[...document.querySelectorAll('button')]"
    return f"{buttons}.some((one) => one.innerText === '{words}' && one.checkVisibility())"


def choose(browser: Browser, words: str) -> None:
    browser.run(MENU)
    script = """[...document.querySelectorAll('.menu button')]
        .find((one) => one.innerText.startsWith(arguments[0])).click()"""
    browser.run(script, words)


async def test_the_console_page_shows_all_turns_that_arrive_in_a_burst_and_no_turns_of_a_removed_session(
    browser: Browser, client: Client
) -> None:
    session = client.session("notes")
    await session.append(text="n0")

    async def go_on() -> None:
        for number in range(1, 80):
            await session.append(text=f"n{number}")

    async def begin_anew() -> None:
        await session.close(forget=True)
        await session.open()
        await session.append(text="anew")

    def walk(await_: Any) -> None:
        show(browser, "notes")
        await_(go_on())
        browser.wait_for(f"{SAID}.at(-1) === 'n79'")
        said = browser.run(f"return {SAID}")
        assert said == [f"n{number}" for number in range(80 - len(said), 80)]
        browser.click("Earlier turns")
        browser.wait_for(f"{SAID}.length > arguments[0]", len(said))
        said = browser.run(f"return {SAID}")
        assert said == [f"n{number}" for number in range(80 - len(said), 80)]
        await_(begin_anew())
        browser.wait_for(f"{SAID}.at(-1) === 'anew'")
        assert browser.run(f"return {SAID}") == ["anew"]
        assert not browser.run(f"return {button('Earlier turns')}")

    await walked(browser, client, walk)


@pytest.mark.serves("endless_model")
async def test_the_console_page_shows_that_an_answer_has_ended_even_if_40_further_requests_are_waiting(
    browser: Browser, client: Client
) -> None:
    session = client.session("notes")
    first = session.generate(text="first", max_tokens=60_000)
    await first.send()

    async def queue() -> None:
        for number in range(40):
            await session.generate(text=f"q{number}", max_tokens=1).send()

    def walk(await_: Any) -> None:
        show(browser, "notes")
        browser.wait_for("document.querySelector('.growing')?.source.length > 20")
        await_(queue())
        browser.wait_for(f"{SAID}.includes('q39')")
        assert browser.run("return document.querySelector('.growing')"), "it still runs, and is still there"
        if browser.run(f"return {button('Earlier turns')}"):
            browser.run("document.querySelector('.conversation > button').click()")
        browser.wait_for(f"{SAID}.includes('q0')")
        for _ in range(2):
            browser.run(FRESH)
            browser.run("return new Promise((then) => setTimeout(then, 700))")
        assert browser.run(f"return {SAID}.filter((one) => one.startsWith('q')).length") == 40
        await_(first.cancel())
        browser.wait_for("document.querySelector('.turn:last-child.done')")
        browser.wait_for("!document.querySelector('.turn.waiting')")
        browser.wait_for(f"!{button('Stop')}")

    await walked(browser, client, walk)


@pytest.mark.serves("endless_model")
async def test_the_console_menu_stays_open_while_an_answer_ends_and_its_delete_entry_removes_the_session(
    browser: Browser, client: Client
) -> None:
    session = client.session("notes")
    answer = session.generate(text="first", max_tokens=60_000)
    await answer.send()

    async def ask() -> None:
        await session.generate(text="second", max_tokens=60_000).send()

    def walk(await_: Any) -> None:
        show(browser, "notes")
        browser.wait_for("document.querySelector('.badge.running')")
        browser.wait_for("document.querySelector('.menu')")
        browser.run(
            "document.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', isComposing: true }))"
        )
        browser.run(MENU)
        await_(answer.cancel())
        browser.wait_for("!document.querySelector('.badge')")
        assert browser.run("return document.querySelector('.menu').open")
        browser.run(MENU)
        await_(ask())
        browser.wait_for("document.querySelector('.badge.running')")
        choose(browser, "Delete")
        browser.click("Delete", "#dialog-yes")
        for _ in range(100):
            if browser.run("return location.hash === '#/'"):
                break
            browser.run("return new Promise((then) => setTimeout(then, 100))")
        assert browser.run("return location.hash") == "#/", browser.text("#toast")

    await walked(browser, client, walk)


async def test_the_consoles_regenerate_button_uses_a_new_session_name_and_refuses_options_out_of_range(
    browser: Browser, client: Client
) -> None:
    for name in ("plan", "plan--v2"):
        await client.session(name).generate(messages=[{"role": "user", "content": name}], max_tokens=3)

    def walk(await_: Any) -> None:
        show(browser, "plan")
        browser.click("Options")
        browser.type("textarea[placeholder^='{']", "{")
        browser.click("Regenerate")
        browser.wait_for("document.querySelector('#toast').innerText.includes('no JSON')")
        assert sorted(one.name for one in await_(client.sessions())) == ["plan", "plan--v2"]
        browser.type("textarea[placeholder^='{']", "\ue003")  # Backspace
        browser.type("input[placeholder='what fits']", "-1")
        browser.click("Regenerate")
        browser.wait_for("document.querySelector('#toast').innerText.includes('max_tokens')")
        browser.type("input[placeholder='what fits']", "\ue003\ue0033")
        browser.click("Regenerate")
        browser.wait_for("location.hash.startsWith('#/session/plan--v')")
        browser.wait_for("document.querySelector('.switch')")
        assert "2/2" in browser.text(".switch")

    await walked(browser, client, walk)


async def test_a_title_given_to_a_session_is_not_shown_for_a_session_of_similar_name_or_of_another_model(
    browser: Browser, local_worker: Callable[..., Awaitable[LocalWorker]], tmp_path: Path
) -> None:
    worker = await local_worker()
    other = await local_worker(prefix=f"{worker.settings.prefix}-v2", data_dir=tmp_path / "other")
    for client, name in ((worker.client, "plan"), (worker.client, "plan-v2"), (other.client, "plan")):
        await client.session(name).generate(messages=[{"role": "user", "content": name}], max_tokens=3)
    names = "[...document.querySelectorAll('.side .name')].map((one) => one.innerText).sort().join()"

    def walk(url: str) -> None:
        browser.open(f"{url}/?token={TOKEN}")
        show(browser, "plan")
        browser.run(MENU)
        browser.click("Rename", ".menu button")
        browser.type("#dialog-name", "Mine\ue007")
        browser.wait_for(f"{names} === 'Mine,plan-v2'")
        assert browser.text(".side a[aria-current] .name") == "Mine"
        browser.open(f"{url}/of/p1/#/session/plan")
        browser.wait_for("document.querySelector('.turn.done')")
        browser.wait_for(f"{names} === 'plan'")
        assert browser.text("h1") == "plan"

    async with serving(worker.client, others=(other.client,)) as url:
        await asyncio.to_thread(walk, url)


async def test_a_double_click_on_the_consoles_regenerate_button_starts_only_one_new_answer(
    browser: Browser, client: Client
) -> None:
    await client.session("plan").generate(messages=[{"role": "user", "content": "?"}], max_tokens=3)

    def walk(await_: Any) -> None:
        show(browser, "plan")
        browser.run(
            """const again = document.querySelector('[title="Another answer; this one stays"]');
            again.click();
            again.click();"""
        )
        browser.wait_for("location.hash === '#/session/plan--v2'")
        browser.run("return new Promise((then) => setTimeout(then, 1000))")
        assert browser.run("return document.querySelector('#toast').hidden"), browser.text("#toast")
        assert len(await_(client.sessions())) == 2

    await walked(browser, client, walk)


async def test_the_consoles_close_button_closes_the_shown_variant_even_if_another_variant_is_already_closed(
    browser: Browser, client: Client
) -> None:
    session = client.session("plan")
    await session.generate(messages=[{"role": "user", "content": "?"}], max_tokens=3)

    def walk(await_: Any) -> None:
        show(browser, "plan")
        browser.click("Regenerate")
        browser.wait_for("location.hash === '#/session/plan--v2'")
        browser.wait_for("document.querySelector('.turn.done .switch')")
        await_(session.close())
        browser.run("location.reload()")
        browser.wait_for("document.querySelector('.turn.done .switch')")
        choose(browser, "Close")
        browser.click("Close", "#dialog-yes")
        browser.wait_for("document.querySelector('.badge.closed')")

    await walked(browser, client, walk)


async def test_a_slow_send_of_a_question_does_not_take_the_user_back_from_a_console_page_opened_meanwhile(
    browser: Browser, client: Client
) -> None:
    def walk(await_: Any) -> None:
        browser.wait_for("document.querySelector('#message')")
        browser.run(
            """const send = window.fetch;
            window.fetch = async (...given) => {
                if (given[1]?.method === 'POST') await new Promise((then) => setTimeout(then, 800));
                return send(...given);
            }"""
        )
        browser.type("#message", "Late?" + ENTER)
        browser.run("location.hash = '#/workers'")
        browser.wait_for("!document.querySelector('#message')")
        browser.run("return new Promise((then) => setTimeout(then, 2500))")
        assert len(await_(client.sessions())) == 1
        assert browser.run("return location.hash") == "#/workers"

    await walked(browser, client, walk)


async def test_in_the_console_page_a_folded_option_out_of_range_is_unfolded_and_focused(
    browser: Browser, client: Client
) -> None:
    def walk(_: Any) -> None:
        browser.click("Options")
        browser.type("input[placeholder='what fits']", "0")
        browser.click("Options")
        browser.wait_for("!document.querySelector('.composer details').open")
        browser.type("#message", "Hello?" + ENTER)
        browser.wait_for("document.querySelector('.composer details').open")
        browser.wait_for("document.activeElement.placeholder === 'what fits'")

    await walked(browser, client, walk)


async def test_refreshing_the_consoles_session_list_keeps_the_focus_and_leaves_a_page_that_has_become_empty(
    browser: Browser, client: Client
) -> None:
    for number in range(51):
        await client.session(f"s{number:02}").append(text="the same words")

    def walk(await_: Any) -> None:
        browser.run("location.hash = '#/sessions'")
        browser.wait_for("document.querySelectorAll('.sessions tbody tr').length === 50")
        href = browser.run(
            "const one = document.querySelectorAll('.sessions a')[3]; one.focus(); return one.href"
        )
        browser.run("document.querySelector('.sessions tbody tr').remove()")
        browser.run(FRESH)
        browser.wait_for("document.querySelectorAll('.sessions tbody tr').length === 50")
        assert browser.run("return document.activeElement.href") == href
        browser.click("Older")
        browser.wait_for("document.querySelectorAll('.sessions tbody tr').length === 1")
        await_(client.session("s00").close(forget=True))
        browser.wait_for("document.querySelectorAll('.sessions tbody tr').length === 50")

    await walked(browser, client, walk)


async def test_the_consoles_model_list_keeps_the_focus_while_a_download_makes_progress(
    browser: Browser, client: Client
) -> None:
    def walk(_: Any) -> None:
        browser.run("location.hash = '#/models'")
        browser.wait_for("document.querySelector('[aria-label=\"Serve c\"]')")
        browser.run("document.querySelector('[aria-label=\"Serve c\"]').focus()")
        SHELF.pulled.append("org/other")
        try:
            browser.wait_for("document.body.innerText.includes('org/other')")
        finally:
            SHELF.pulled.clear()
        assert browser.run("return document.activeElement.ariaLabel") == "Serve c"

    await walked(browser, client, walk)


async def test_a_console_page_whose_first_request_failed_shows_the_message_field_once_the_console_answers(
    browser: Browser, client: Client
) -> None:
    def walk(_: Any) -> None:
        browser.wait_for("document.querySelector('#message')")
        browser.cdp("Network.enable")
        browser.cdp("Network.setBlockedURLs", urls=["*/api/workers*"])
        try:
            browser.run("location.reload()")
            browser.wait_for(
                "document.querySelector('#gone')?.innerText.startsWith('The console does not answer')"
            )
        finally:
            browser.cdp("Network.setBlockedURLs", urls=[])
        browser.wait_for("!document.querySelector('#gone').innerText")
        browser.wait_for("document.querySelector('#message')")
        assert "prefix" in browser.text("#about")

    await walked(browser, client, walk)


async def test_the_console_page_removes_the_token_count_if_the_current_message_cannot_be_counted(
    browser: Browser, client: Client
) -> None:
    """It is of an earlier text; and the browser may have no place for the draft of the new one."""
    put = """const field = document.querySelector('#message');
        field.value = 'x'.repeat(arguments[0]);
        field.dispatchEvent(new Event('input'))"""

    def walk(_: Any) -> None:
        browser.wait_for("document.querySelector('#message')")
        for length in (2_000_000, 7_000_000):
            browser.run(put, 5000)
            browser.wait_for("document.querySelector('.count').innerText.includes('tokens')")
            browser.run(put, length)
            browser.wait_for("!document.querySelector('.count').innerText")
        browser.run(put, 0)

    await walked(browser, client, walk)


async def test_a_console_page_that_the_user_has_left_sends_no_requests_when_its_model_download_ends(
    browser: Browser, client: Client
) -> None:
    def walk(_: Any) -> None:
        browser.run("location.hash = '#/models'")
        browser.wait_for("document.querySelector('[aria-label=\"Download org/good\"]')")
        browser.run(
            """const send = window.fetch;
            window.asked = 0;
            window.fetch = async (...given) => {
                const answer = await send(...given);
                if (given[1]?.method === 'POST') await new Promise((then) => setTimeout(then, 500));
                else window.asked += given[0] === 'api/models';
                return answer;
            };
            document.querySelector('[aria-label="Download org/good"]').click();
            location.hash = '#/connect'"""
        )
        browser.run("return new Promise((then) => setTimeout(then, 3000))")
        SHELF.pulled.clear()
        assert browser.run("return window.asked") == 0

    await walked(browser, client, walk)


async def test_a_refresh_of_the_consoles_conversation_list_leaves_the_focus_in_the_tree_of_forks(
    browser: Browser, client: Client
) -> None:
    await client.session("notes").append(text="x")
    await client.session("notes").fork("notes-2")

    def walk(_: Any) -> None:
        show(browser, "notes-2")
        browser.click("notes-2", ".about summary")
        browser.wait_for("document.querySelector('.tree a')")
        browser.wait_for("document.querySelectorAll('.side li').length === 2")
        browser.run("document.querySelector('.tree a').focus()")
        browser.run(
            "document.querySelector('.side ol').replaceChildren();"
            "document.querySelector('.side input').dispatchEvent(new Event('input'))"
        )
        browser.wait_for("document.querySelectorAll('.side li').length === 2")
        assert browser.run("return document.activeElement === document.querySelector('.tree a')")

    await walked(browser, client, walk)
