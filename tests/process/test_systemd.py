"""A user's systemd, if there is one, runs a worker with the unit of `turnkeep service`."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from parts import free_port

from ops import units
from turnkeep_client.client import connect
from turnkeep_client.errors import NoServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from turnkeep_client.client import Client

NAME = f"turnkeep-test-{os.getpid()}"
ROOT = Path(__file__).parents[2]
REQUEST: Final[dict[str, Any]] = {"tokens": (1, 2, 3), "max_tokens": 300}


def systemctl(*words: str, check: bool = True) -> str:
    done = subprocess.run(["systemctl", "--user", *words], check=check, capture_output=True, text=True)
    return done.stdout


def is_there() -> bool:
    if sys.platform != "linux" or shutil.which("systemctl") is None or "XDG_RUNTIME_DIR" not in os.environ:
        return False
    return bool(systemctl("show-environment", check=False))


def wait_for(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


async def reach(url: str) -> Client:
    """Connect a client as soon as the server listens."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await connect(url, timeout_s=60)
            except NoServerError:
                await asyncio.sleep(0.1)


pytestmark = [
    pytest.mark.packaging,
    pytest.mark.process,
    pytest.mark.skipif(not is_there(), reason="this user has no systemd"),
]


@pytest.fixture
def url(tmp_path: Path, endless_model: Path) -> Iterator[str]:
    """Run a worker with a temporary systemd unit of its own name; yield the URL of its NATS server."""
    config, port, token = tmp_path / "turnkeep.toml", free_port(), tmp_path / "data" / "nats-token"
    config.write_text(f"data_dir = 'data'\nnats_port = {port}\nmodel = '{endless_model}'\n")
    text = units.unit([sys.executable, "-P", "-m", "commands", "serve", "--config", str(config)])
    found = f"[Service]\nEnvironment=PYTHONPATH={ROOT}:{ROOT / 'protocol'}"
    path = Path(os.environ["XDG_RUNTIME_DIR"]) / "systemd" / "user" / f"{NAME}.service"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("[Service]", found))
    systemctl("daemon-reload")
    systemctl("start", NAME)
    try:
        wait_for(token.exists)
        yield f"nats://{token.read_text().strip()}@127.0.0.1:{port}"
    finally:
        systemctl("stop", NAME)
        path.unlink()
        systemctl("daemon-reload")


def pid() -> int:
    return int(systemctl("show", NAME, "--property=MainPID", "--value"))


def test_a_worker_under_systemd_has_a_system_call_filter_and_resumes_an_answer_after_a_kill(
    url: str, tmp_path: Path
) -> None:
    first = pid()
    assert "Seccomp:\t2" in Path(f"/proc/{first}/status").read_text()

    async def ask() -> int:
        async with await reach(url) as client, client.session("s1").generate(**REQUEST) as answer:
            async for chunk in answer:
                if chunk.i == 3:
                    os.kill(first, signal.SIGKILL)
            return len(answer.result.tokens)

    assert asyncio.run(ask()) == REQUEST["max_tokens"]
    assert pid() not in {0, first}
    wait_for(lambda: list(tmp_path.glob("data/snapshots/snapshots/*.safetensors")))
