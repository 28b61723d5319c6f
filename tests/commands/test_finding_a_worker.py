"""Commands find their worker: by its data directory, by NATS_URL, or the error says where one runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.command_runs import turnkeep
from tests.parts import WorkerProcess, free_port

pytestmark = pytest.mark.process

ASKED = ("ask", "Hello?", "--max-tokens", 2)


def until_ready(process: WorkerProcess) -> None:
    while '"ready"' not in process.log:
        assert process.running, process.log
        time.sleep(0.02)


@pytest.fixture
def started(worker_process: Callable[..., WorkerProcess]) -> Callable[..., WorkerProcess]:
    def start(*options: str) -> WorkerProcess:
        process = worker_process(*options)
        process.start()
        until_ready(process)
        return process

    return start


def test_ask_finds_a_worker_on_another_port_by_its_data_directory(
    started: Callable[..., WorkerProcess],
) -> None:
    worker = started()
    done = turnkeep(*ASKED, "--data-dir", worker.data_dir)
    assert done.returncode == 0, done.stderr
    assert "waiting" not in done.stderr


def test_info_url_prints_the_address_of_the_running_nats_server(
    started: Callable[..., WorkerProcess],
) -> None:
    worker = started()
    for port in ("", "4223"):
        said = turnkeep("info", "--url", "--data-dir", worker.data_dir, TURNKEEP_NATS_PORT=port)
        assert (said.returncode, said.stdout.strip()) == (0, worker.url), said.stderr


def test_a_command_without_options_finds_the_worker_of_the_standard_data_directory(
    started: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    worker, home = started(), tmp_path / "home"
    for folder in (home, home / "Library" / "Application Support"):
        folder.mkdir(parents=True)
        (folder / "turnkeep").symlink_to(worker.data_dir)
    said = turnkeep("info", "--url", HOME=str(home), XDG_DATA_HOME=str(home))
    assert (said.returncode, said.stdout.strip()) == (0, worker.url), said.stderr


def test_a_worker_on_an_external_nats_server_is_found_by_its_data_directory(
    started: Callable[..., WorkerProcess], nats_url: str
) -> None:
    server = nats_url.replace("nats://", "nats://name:secret@")
    worker = started("--nats", server, "--prefix", "found")
    place = ("--data-dir", worker.data_dir)
    done = turnkeep(*ASKED, *place, "--prefix", "found")
    assert done.returncode == 0, done.stderr
    assert "secret" not in (worker.data_dir / "worker.lock").read_text()
    said = turnkeep("info", "--url", *place)
    assert said.returncode == 2
    assert said.stderr == (
        f"turnkeep: the worker of {worker.data_dir} has no NATS server of its own; it uses {nats_url}\n"
    )


def test_a_wrong_nats_port_fails_with_an_error_that_names_the_right_one(
    started: Callable[..., WorkerProcess],
) -> None:
    worker, wrong = started(), free_port()
    done = turnkeep(*ASKED, "--data-dir", worker.data_dir, "--nats-port", wrong)
    assert done.returncode == 1
    right = worker.url.rpartition(":")[2]
    assert done.stderr == (
        f"turnkeep: no NATS server at nats://127.0.0.1:{wrong}: connection refused; the one of"
        f" {worker.data_dir} is at nats://127.0.0.1:{right}: leave out --nats-port\n"
    )


def test_a_client_without_a_worker_is_not_advised_to_start_one_as_its_own_user(
    nats_url: str, tmp_path: Path
) -> None:
    context = tmp_path / "agent.json"
    context.write_text('{"user": "agent", "password": "secret"}')
    options = ("--nats", nats_url, "--prefix", "nobody")
    done = turnkeep("info", *options, "--nats-context", context)
    assert done.returncode == 1
    assert done.stderr.endswith(f"; start a worker with: turnkeep serve {' '.join(options)}\n"), done.stderr


def test_the_variable_nats_url_names_the_server_unless_an_option_does(
    started: Callable[..., WorkerProcess],
) -> None:
    worker, nowhere = started(), f"nats://127.0.0.1:{free_port()}"
    done = turnkeep(*ASKED, NATS_URL=worker.url)
    assert done.returncode == 0, done.stderr
    for options in (("--data-dir", worker.data_dir), ("--nats", worker.url)):
        assert turnkeep("sessions", *options, NATS_URL=nowhere).returncode == 0, options
    gone = turnkeep("sessions", NATS_URL=nowhere)
    assert gone.stderr == (
        f"turnkeep: no NATS server at {nowhere}: connection refused;"
        " start it, or name another one with --nats or NATS_URL\n"
    )
    wrong = turnkeep("sessions", NATS_URL="http://s3cret@x")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("turnkeep: NATS_URL: its value is not valid: it must be ")
    assert "s3cret" not in wrong.stderr


def test_giving_the_local_worker_s_address_without_its_token_fails_with_advice_to_omit_it(
    started: Callable[..., WorkerProcess],
) -> None:
    worker = started()
    bare = f"nats://127.0.0.1:{worker.url.rpartition(':')[2]}"
    helps = "it is that of this machine's own worker: leave out --nats or NATS_URL"
    done = turnkeep("exporter", "--data-dir", worker.data_dir, "--nats", bare)
    assert done.returncode == 1
    assert done.stderr == f"turnkeep: the NATS server at {bare} wants its token; {helps}\n"
    done = turnkeep("sessions", TURNKEEP_DATA_DIR=str(worker.data_dir), NATS_URL=bare)
    assert "leave out" not in done.stderr, "a data directory comes before NATS_URL"
