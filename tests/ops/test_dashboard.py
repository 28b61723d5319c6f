"""`turnkeep dashboard`: the history of messages, what is answered over HTTP, and the page in a browser."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import nats
import pytest
from msgspec import structs

from ops.dashboard import PAGE, DashboardError, serving
from ops.fleet import Fleet
from ops.history import SERIES, History
from tests.commands.command_runs import command, environment
from tests.ops.test_exporter import get
from tests.ops.test_operating_page import block
from tests.parts import free_port
from tests.protocol.scripted_worker import metrics
from turnkeep_client.messages import Histogram, Metrics, encode
from turnkeep_client.subjects import Subjects
from worker.commands.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ops.dashboard import Dashboard

BOUNDS = (0.1, 0.5, 1.0, 5.0)


def message(worker: str, second: int) -> Metrics:
    """A worker that answers a request a second, half of the time: 10 tokens, 4 prefilled, 36 found in KV."""
    few, slow = Histogram(BOUNDS, (second, 0, 0, 0, 0), 0.0, second), second // 2
    return structs.replace(
        metrics(worker),
        uptime_s=float(second),
        decoding_s=second / 2,
        time_per_output_token=Histogram(BOUNDS, (10 * second, 0, 0, 0, 0), second / 2, 10 * second),
        prefilled_tokens=4 * second,
        cached_tokens=36 * second,
        time_to_first_token=few,
        request_duration=Histogram(BOUNDS, (0, second - slow, slow, 0, 0), 0.0, second),
        sessions=second // 10,
    )


class Watched:
    """A dashboard whose workers were heard of for `seconds`, by a clock of its own."""

    def __init__(self, seconds: int, *workers: str, keep_s: float = 3600) -> None:
        self.now_s = 0.0
        self.fleet = Fleet(keep_s, lambda: self.now_s, window_s=60)
        self.history = History(keep_s)
        self.hear(seconds, *workers)

    def hear(self, seconds: int, *workers: str) -> None:
        """Go on for so long, a message of each worker every five seconds."""
        for _ in range(seconds // 5):
            self.now_s += 5
            for worker in workers:
                self.fleet.hear(message(worker, int(self.now_s)))
            self.history.take(self.fleet.sightings(), self.now_s)

    def document(self, worker: str | None) -> dict[str, Any]:
        return {"prefix": "turnkeep", "connected": True, **self.history.shown(worker)}


@contextmanager
def served(watched: Watched) -> Iterator[str]:
    dashboard: Dashboard = watched  # type: ignore[assignment]  # only its document is asked for
    with serving(dashboard, "127.0.0.1", 0) as url:
        yield url


def test_a_course_has_the_figures_of_each_moment() -> None:
    course = Watched(100, "w1").history.course("w1")
    assert course["at_s"] == [5 * step for step in range(1, 21)]
    last = {name: values[-1] for name, values in course.items()}
    assert (last["generated_per_s"], last["prefilled_per_s"], last["cached_per_s"]) == (20, 4, 36)
    assert (last["first_token_p50_s"], last["duration_p50_s"]) == (0.05, 0.5)
    assert last["duration_p95_s"] == pytest.approx(0.95)
    assert (last["kv_bytes"], last["kv_limit_bytes"], last["sessions"]) == (1024, 2048, 10)
    assert course["generated_per_s"][0] is None, "there is no rate before a second message"


def test_a_silent_worker_has_a_gap_and_is_forgotten_with_its_history() -> None:
    watched = Watched(60, "w1", "w2", keep_s=120)
    watched.hear(30, "w2")
    course = watched.history.course("w1")
    assert course["sessions"][-3:] == (None, None, None)
    assert course["sessions"][11] == 6
    shown = watched.history.shown()
    assert (shown["workers"]["w1"]["up"], shown["worker"]) == (False, "w2"), "one that is up is shown first"
    assert watched.history.shown("w1")["worker"] == "w1"
    watched.hear(130, "w2")
    assert [*watched.history.shown("w1")["workers"]] == ["w2"]
    assert watched.history.course("w1") == {"at_s": [], **dict.fromkeys(SERIES, ())}
    assert watched.history.course("w2")["at_s"][0] == watched.now_s - 120


def test_what_is_served_is_the_page_and_its_figures_and_nothing_can_be_changed() -> None:
    with served(Watched(20, "w1", "w2")) as url:
        status, page, headers = get(url)
        assert (status, page) == (200, PAGE.read_text())
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        status, body, headers = get(url, "/history.json?worker=w2")
        assert (status, headers["Content-Type"]) == (200, "application/json")
        found = json.loads(body)
        assert (found["worker"], len(found["course"]["at_s"])) == ("w2", 4)
        assert get(url, "/history.json", "HEAD")[:2] == (200, "")
        assert get(url, "/../dashboard.py")[0] == 404
        assert get(url, "/", "POST")[0] == 501


@pytest.mark.parametrize("host", ["localhost:80", "127.0.0.1", "[::1]:9423"])
def test_a_page_on_loopback_is_for_names_of_this_machine(host: str) -> None:
    with served(Watched(5, "w1")) as url:
        assert get(url, Host=host)[0] == 200
        assert get(url, Host="rebound.example")[0] == 421


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ("GET / HTTP/1.1\r\nHost: [", 421),
        ("GET / HTTP/1.1\r\nHost: [::1", 421),
        ("GET http://[/ HTTP/1.1\r\nHost: localhost", 404),
    ],
)
def test_a_malformed_request_is_refused_without_a_traceback(
    asked: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with served(Watched(5, "w1")) as url:
        host, _, port = url.split("/")[2].partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{asked}\r\n\r\n".encode())
            assert connection.makefile().readline().split()[1:2] == [str(status)]
    assert capfd.readouterr().err == ""


def test_a_client_that_hangs_up_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with served(Watched(5, "w1")) as url:
        host, _, port = url.split("/")[2].partition(":")
        connection = socket.create_connection((host, int(port)))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.sendall(b"GET / HTTP/1.1\r\n")
        connection.close()
        assert get(url)[0] == 200
    assert capfd.readouterr().err == ""


def test_the_page_asks_no_other_address() -> None:
    addresses = set(re.findall(r"https?://[^\"'\s]+", PAGE.read_text()))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a name, not an address"


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DashboardError, match=rf"cannot listen on 127\.0\.0\.1:{port} \("):
            serving(Watched(5, "w1"), "127.0.0.1", port).__enter__()  # type: ignore[arg-type]


def test_the_exporter_takes_the_same_options() -> None:
    assert {one.name for one in main.commands["exporter"].params} == {
        one.name for one in main.commands["dashboard"].params
    }


@pytest.mark.parametrize("name", ["dashboard", "exporter"])
async def test_an_address_without_a_port_is_one_line(name: str) -> None:
    done = await command(name, "--listen", "localhost")
    assert done.returncode == 2
    assert "'localhost' is no address; it must be like 127.0.0.1:9423 or [::1]:9423" in done.stderr


async def test_the_command_shows_workers_of_the_metrics_subject(nats_url: str) -> None:
    port = free_port()
    written = block("sh", "turnkeep dashboard").replace("nats://127.0.0.1:4222", nats_url)
    _, *arguments = shlex.split(written.replace("9423", str(port)))
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-m", "worker", *arguments], env=environment(), stderr=subprocess.PIPE, text=True
    )
    worker = await nats.connect(nats_url)
    try:
        assert process.stderr is not None
        said = await asyncio.to_thread(process.stderr.readline)
        assert said == f"the dashboard is at http://127.0.0.1:{port}/\n"
        deadline, found = time.monotonic() + 30, {"workers": {}}
        while len(found["workers"]) < 2:
            assert time.monotonic() < deadline
            for name in ("w1", "w2"):
                await worker.publish(Subjects().metrics(name), encode(metrics(name)))
            await worker.flush()
            await asyncio.sleep(0.05)
            found = json.loads((await asyncio.to_thread(get, said.split()[-1], "/history.json"))[1])
        assert (found["prefix"], found["connected"], found["worker"]) == ("turnkeep", True, "w1")
        assert found["course"]["kv_bytes"][-1] == 1024
    finally:
        await worker.close()
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 30) == 130
        process.stderr.close()


def dom(url: str) -> str:
    """The page as a browser has drawn it."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium is installed")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom")
    done = subprocess.run([browser, *flags, url], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_a_browser_draws_the_course_of_the_worker_that_was_chosen() -> None:
    watched = Watched(600, "w1", "<b>w2</b>")
    with served(watched) as url:
        page = dom(f"{url}?worker=%3Cb%3Ew2%3C%2Fb%3E")
    assert 'data-points="120"' in page
    assert "<b>w2" not in page, "names are text"
    assert '<h2 id="name">&lt;b&gt;w2&lt;/b&gt;</h2>' in page
    assert page.count("<figure>") == 8
    paths = re.findall(r'<path d="([^"]*)"', page)
    assert len(paths) == 13
    assert max(path.count("L") for path in paths) == 119
    assert "found in KV 36" in re.sub(r"<[^>]*>", "", page)
    assert ">90%<" in page
    clocks = re.findall(r">([^<]*\d:\d[^<]*)<", page)
    assert len(clocks) == 1 + 8 * 3
    assert all(re.fullmatch(r"(as of )?\d\d:\d\d:\d\d", clock) for clock in clocks), clocks


def test_a_browser_says_that_there_is_no_worker_yet() -> None:
    with served(Watched(0)) as url:
        assert "No worker has been heard of yet" in dom(url)
