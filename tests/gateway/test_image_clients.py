"""Clients from the registries send a picture as their users do; a model that was taught digits names it."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands.agents import GatewayAccess, start_of
from tests import taught
from tests.commands.command_runs import installed

Start = Any

PYDANTIC = """
import sys
from pydantic_ai import Agent, BinaryContent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
url, path = sys.argv[1:]
parts = ["What is this?", BinaryContent(open(path, "rb").read(), media_type="image/png")]
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind("m", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    print(Agent(model, model_settings={"temperature": 0, "max_tokens": 16}).run_sync(parts).output)
"""
OLLAMA = """
import ollama, sys
url, path = sys.argv[1:]
told = [{"role": "user", "content": "What is this?", "images": [path]}]
options = {"temperature": 0, "num_predict": 12}
print(ollama.Client(url).chat("m", told, options=options).message.content)
"""
#: pi as a coding agent is started: by `turnkeep launch`, with a file named on the command line.
PI = ["-p", "--no-tools", "--system-prompt", "Look.", "--offline", "-ns", "-nc", "@{path}", "What is this?"]
#: By client: its package, and the program that sends a picture.
PYTHON = {
    "pydantic-ai": ("pydantic-ai-slim[openai]", PYDANTIC),
    "ollama": ("ollama", OLLAMA),
}
PI_PACKAGE = "@mariozechner/pi-coding-agent@0.73.1"


def installed_python(name: str, folder: Path) -> list[str]:
    package, program = PYTHON[name]
    return [str(installed(folder / "venv", package) / "python"), "-c", program, "{url}", "{path}"]


def installed_node(name: str, folder: Path) -> list[str]:
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), PI_PACKAGE]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    launch = ("launch", "--gateway", "{url}", "--data-dir", str(folder / "data"), name)
    return [sys.executable, "-P", "-m", "commands", *launch, *PI]


@pytest.mark.packaging
@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "install"),
    [
        *(pytest.param(name, installed_python, marks=pytest.mark.registry) for name in PYTHON),
        pytest.param("pi", installed_node, marks=pytest.mark.registry("npm")),
    ],
)
async def test_a_client_program_that_sends_an_image_of_a_digit_gets_that_digit_as_the_answer(
    name: str, install: Any, local_worker: Start, door: Start, taught_model: Path, tmp_path: Path
) -> None:
    command = await asyncio.to_thread(install, name, tmp_path)
    worker = await local_worker(model=str(taught_model))
    started = await door(worker.settings.nats, worker.settings.prefix)
    path = tmp_path / "picture.png"
    environment = {
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path}/node_modules/.bin:{os.environ['PATH']}",
    }
    for seed in (3, 17, 45):
        picture = taught.picture(seed)
        path.write_bytes(picture.file)
        given = [word.format(url=started.url, path=path) if len(word) < 80 else word for word in command]
        process = await asyncio.create_subprocess_exec(
            *given, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        said = (await process.communicate())[0].decode().split("\n")
        assert {*said} == {picture.answer, ""}


def test_launch_tells_each_agent_whether_the_model_accepts_images() -> None:
    told = {}
    for sees in (False, True):
        door = GatewayAccess("http://127.0.0.1:1", "none", "m", 8192, sees)
        starts = {name: start_of(name, door) for name in ("aider", "cn", "opencode", "pi")}
        opencode = json.loads(starts["opencode"].environment["OPENCODE_CONFIG_CONTENT"])
        model = opencode["provider"]["turnkeep"]["models"]["m"]
        told[sees] = (
            model["attachment"],
            "image" in model["modalities"]["input"],
            '"image"' in starts["pi"].files["pi.js"],
            "image_input" in starts["cn"].files["continue.yaml"],
            json.loads(starts["aider"].files["aider.json"])["openai/m"]["supports_vision"],
        )
    assert told == {False: (False,) * 5, True: (True,) * 5}
