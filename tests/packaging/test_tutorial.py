"""The commands of docs/tutorial.md, run in order by one shell, as a new user would."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.commands.command_runs import environment
from tests.parts import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()

pytestmark = [pytest.mark.process, pytest.mark.model, pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A new user's home directory; processes that the page leaves running there are killed after the test."""
    folder = tmp_path / "home"
    (folder / "turnkeep").mkdir(parents=True)
    yield folder
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's, or gone
            if process.environ().get("HOME") == str(folder):
                process.kill()


@pytest.mark.parametrize(
    "installed", [True, pytest.param(False, marks=pytest.mark.registry)], ids=["from here", "from nothing"]
)
def test_the_commands_of_the_tutorial_succeed_in_order_even_after_the_kill_of_its_worker(
    installed: bool, home: Path, request: pytest.FixtureRequest
) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    if installed:
        assert "pip install" in blocks[0]
        del blocks[0]
    ports = {"9422": str(free_port()), "9423": str(free_port())}
    lines = "".join(blocks)
    lines = lines.replace("turnkeep exporter", f"turnkeep exporter --listen 127.0.0.1:{ports['9422']}")
    lines = lines.replace("turnkeep console", f"turnkeep console --listen 127.0.0.1:{ports['9423']}")
    lines = re.sub(r"127\.0\.0\.1:(9422|9423)", lambda found: f"127.0.0.1:{ports[found[1]]}", lines)
    here = {}
    if installed:
        here["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        here["TURNKEEP_MODEL"] = str(request.getfixturevalue("packaged_folder"))
    script = home / "page.sh"
    script.write_text(lines)
    kept = {name: value for name, value in environment().items() if not name.startswith(("XDG_", "VIRTUAL_"))}
    done = subprocess.run(
        # Stop at an error: a shell without `-e` would go on, and its exit status would prove nothing.
        ["bash", "-e", "-u", "-o", "pipefail", str(script)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd=home / "turnkeep" if installed else ROOT,
        timeout=800,
        env={
            **kept,
            "HOME": str(home),
            "TURNKEEP_NATS_PORT": str(free_port()),
            "PIP_NO_COMPILE": "1",
            **here,
        },
    )
    folder = home / "turnkeep"
    said = f"{done.stdout}\n{done.stderr}\n{(folder / 'worker.log').read_text()[-2000:]}"
    assert done.returncode == 0, said
    assert "Paris" in done.stdout, said
    assert "Berlin" in done.stdout, said  # after the crash; the question refers to what was said before it
    assert re.search(r"^turnkeep_up\{.*\} 1\.0$", done.stdout, re.MULTILINE), said
    assert re.search(r'^turnkeep_requests_total\{.*type="generate".*\} [2-9]', done.stdout, re.MULTILINE), (
        said
    )
    assert "resuming an interrupted answer" in (folder / "worker.log").read_text(), said
    assert len((folder / "story.txt").read_text().split()) > 50, said
