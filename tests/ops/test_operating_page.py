"""The commands in docs/operating.md run as written, and Prometheus accepts its configuration."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nats
import pytest

from tests.commands.command_runs import Terminal, environment
from tests.ops.test_panels import FOLDER, RULES
from tests.parts import free_port
from tests.protocol.scripted_worker import metrics
from turnkeep_client.messages import encode
from turnkeep_client.subjects import Subjects

pytestmark = pytest.mark.packaging

PAGE = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()


def block(language: str, beginning: str) -> str:
    """Return the page's only code block in this language that begins with `beginning`."""
    (found,) = re.findall(rf"```{language}\n({re.escape(beginning)}.*?)```", PAGE, re.DOTALL)
    return str(found)


async def test_the_exporter_commands_of_the_operating_page_run_as_written(nats_url: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    port = str(free_port())

    def here(command: str) -> str:
        program = f"{shlex.quote(sys.executable)} -m commands"
        command = re.sub(r"^turnkeep\b", program, command, flags=re.MULTILINE)
        return command.replace("9422", port)

    command = f"exec {here(block('sh', 'turnkeep exporter'))}"
    exporter = subprocess.Popen(["sh", "-c", command], env=environment() | {"NATS_URL": nats_url})  # noqa: ASYNC220
    try:
        look = ["sh", "-c", here(block("sh", "curl"))]
        worker = await nats.connect(nats_url)
        shown, deadline = "", time.monotonic() + 60
        while 'turnkeep_up{device="cpu",model="tiny",worker="w1"} 1.0' not in shown:
            assert time.monotonic() < deadline, shown
            await worker.publish(Subjects().metrics("w1"), encode(metrics("w1")))
            await worker.flush()
            shown = subprocess.run(look, check=False, capture_output=True, text=True).stdout  # noqa: ASYNC221
        await worker.close()
    finally:
        exporter.terminate()
        exporter.wait(30)


def test_the_top_command_of_the_operating_page_runs_as_written(nats_url: str) -> None:
    _, *arguments = shlex.split(block("sh", "turnkeep top"))
    with Terminal(*arguments, NATS_URL=nats_url) as terminal:
        terminal.wait_for("no worker has published metrics yet")
        terminal.type("q")
        assert terminal.end() == 0


def test_the_operating_page_states_the_right_number_of_alerts() -> None:
    assert f"`ops/prometheus/alerts.yml` has {len(RULES)} alerts" in PAGE


def test_promtool_accepts_the_prometheus_configuration_of_the_operating_page(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed; Debian's package prometheus has it")
    (tmp_path / "prometheus.yml").write_text(block("yaml", "rule_files:"))
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    command = ["promtool", "check", "config", "prometheus.yml"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
