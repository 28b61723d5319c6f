"""The output of `turnkeep serve` and `turnkeep demo` when a user runs them for the first time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from command_runs import Terminal, turnkeep

from tests.parts import free_port

pytestmark = pytest.mark.process


def test_serve_on_a_terminal_prints_its_progress_and_then_the_next_commands_to_type(
    tmp_path: Path, tiny_model: Path
) -> None:
    place = ("--data-dir", str(tmp_path / "data"), "--nats-port", str(free_port()))
    beside = ("--gateway", free_port(), "--console", "0")
    with Terminal("serve", *place, *beside, "--model", tiny_model, columns=200) as terminal:
        terminal.wait_for("starting")
        terminal.wait_for("testing how this model runs best")
        terminal.wait_for(r"loaded the model +context=\d+ model=tiny vision=False\s+\d")
        terminal.wait_for(r"ready +nats=nats://127.0.0.1:\d+ worker=\w+\s")
        agent = f"turnkeep launch --data-dir {place[1]} pi"
        terminal.wait_for(
            f"\nIn another terminal: turnkeep chat {' '.join(place)}, or {agent} .Ctrl-C stops .*\r\n"
        )
        terminal.wait_for(r"the (gateway|console) is at http://")
        terminal.wait_for(r"the (gateway|console) is at http://")
        turnkeep("ask", "Hello", "--session", "garden", "--max-tokens", 3, *place)
        terminal.wait_for(r"\n\d\d:\d\d:\d\d answered garden: \d tokens? in \d+\.\d+ s *\r\n")
        terminal.type("\x03")
        assert terminal.end() == 0
        assert terminal.transcript.count("testing how") == 1
        assert "trial=" not in terminal.transcript, "its figures are for the debug level"
        assert "created stream" not in terminal.transcript
        address = re.search(r"the console is at (http://\S+)", terminal.transcript)
        assert address
        with pytest.raises(httpx2.ConnectError):  # it has ended too
            httpx2.get(address[1])
    with Terminal("serve", *place, "--model", tiny_model, "--log-level", "info") as terminal:
        terminal.wait_for("ready ")
        turnkeep("ask", "And now?", "--session", "garden", "--max-tokens", 3, *place)
        terminal.wait_for(r"answered .* outcome=ok .*request=")
        terminal.type("\x03")
        assert terminal.end() == 0
    with Terminal("serve", *place, "--model", tiny_model, "--log-format", "json", columns=2000) as terminal:
        terminal.wait_for('"ready"')
        terminal.type("\x03")
        assert terminal.end() == 0
        assert "testing how" not in terminal.transcript, "only a first start tests the model"
        assert "In another terminal" not in terminal.transcript, "programs read JSON"
        assert "turnkeep launch" not in terminal.transcript, "it needs a gateway"


def test_importing_the_worker_does_not_import_rich() -> None:
    program = "import sys, commands.serve, worker.app; print({'rich', 'attr'} & set(sys.modules));"
    program += "import rich"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_demo_with_a_missing_model_fails_and_says_why(tmp_path: Path) -> None:
    done = turnkeep("demo", "--data-dir", tmp_path / "data", "--model", "no/where/at/all")
    assert done.returncode == 1
    why, end = done.stderr.splitlines()[-2:]
    assert why.startswith("turnkeep: there is no model at no/where/at/all; give a model folder")
    assert end == "turnkeep: the worker ended with exit code 1"
