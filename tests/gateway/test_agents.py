"""Agents and clients of other vendors work with the gateway."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from crafted import LETTERS
from steering import Steering

from tests.parts import TINY_CONTEXT
from turnkeep_client.client import Client
from turnkeep_client.errors import NoWorkerError
from turnkeep_client.messages import Generated, Usage, decode_result

if TYPE_CHECKING:  # its import takes a second, in each process of a run
    from anthropic import AsyncAnthropic

SYSTEM = "You are a careful assistant. " + "Work in small steps, say what you did, and use the tools. " * 60
COMMAND = "echo kept > made.txt"
TASK = "{task}"
#: One pixel.
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="


class Agent(NamedTuple):
    """An agent's npm package and command line; `again` has the options that continue the last conversation.

    `tool` with these `arguments` runs a shell command. `files` are written to the project. `looks` has
    options that add a picture to the first message. `develops`: the agent's prompt has the role `developer`.
    """

    package: str
    tool: str
    command: Sequence[str]
    again: Sequence[str]
    arguments: Mapping[str, str] = MappingProxyType({"command": COMMAND})
    files: Mapping[str, str] = MappingProxyType({})
    looks: Sequence[str] = ()
    develops: bool = False


AGENTS = {
    "claude": Agent(
        "@anthropic-ai/claude-code@2.1.197",
        "Bash",
        ["-p", TASK, "--tools", "Bash", "--allowedTools", "Bash", "--system-prompt", SYSTEM],
        ["--continue"],
        {"command": COMMAND, "description": "Make the file"},
    ),
    "pi": Agent(
        "@mariozechner/pi-coding-agent@0.73.1",
        "bash",
        ["-p", "--tools", "bash", "--system-prompt", SYSTEM, "--offline", "-ns", "-nc", TASK],
        ["--continue"],
    ),
    "opencode": Agent(
        "opencode-ai@1.18.33",
        "bash",
        ["run", "--auto", TASK],
        ["--continue"],
        {"command": COMMAND, "description": "Make the file"},
        {
            "opencode.json": json.dumps(
                {"agent": {"build": {"prompt": SYSTEM, "tools": {"*": False, "bash": True}}}}
            )
        },
    ),
    "codex": Agent(
        "@openai/codex@0.169.0",
        "exec_command",
        [
            *("exec", "--skip-git-repo-check", "-s", "danger-full-access"),
            *("-c", "model_instructions_file='instructions.md'", "-c", "web_search='disabled'"),
            *("--disable", "multi_agent", "--disable", "apps", "--disable", "plugins"),
            TASK,
        ],
        ["resume", "--last"],
        {"cmd": COMMAND},
        {"instructions.md": SYSTEM},
        looks=["--image=picture.png"],
        develops=True,
    ),
    "cn": Agent("@continuedev/cli@1.5.47", "Bash", ["-p", TASK, "--auto"], ["--resume"]),
}


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the agents, in the folder TURNKEEP_TEST_AGENTS if set, where later runs find them."""
    given = os.environ.get("TURNKEEP_TEST_AGENTS")
    folder = Path(given) if given else tmp_path_factory.mktemp("agents")
    found = folder / "node_modules" / ".bin"
    if not found.exists():
        packages = [agent.package for agent in AGENTS.values()]
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return found


class Desk:
    """A project folder in which an agent works; `turnkeep launch` starts the agent there."""

    def __init__(self, name: str, folder: Path, programs: Path, steering: Steering, url: str) -> None:
        self.agent = AGENTS[name]
        self.project = folder / "project"
        self.steering = steering
        self._name = name
        self._url = url
        self._folder = folder
        self._environment = {"HOME": str(folder), "PATH": f"{programs}:{os.environ['PATH']}"}
        self.project.mkdir()
        for file, text in self.agent.files.items():
            (self.project / file).write_text(text)
        (self.project / "picture.png").write_bytes(base64.b64decode(PICTURE))

    async def ask(self, text: str, *before: str) -> str:
        """Give the agent a task, wait until it ends, and return its output."""
        command = self.agent.command
        given = [part for word in command for part in ((*before, text) if word == TASK else (word,))]
        launch = ["launch", "--gateway", self._url, "--data-dir", str(self._folder / "data"), self._name]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "commands", *launch, *given),
            env=self._environment,
            cwd=self.project,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            said, complained = await asyncio.wait_for(process.communicate(), 600)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        assert process.returncode == 0, (said, complained)
        assert not self.steering.faults
        return said.decode().strip()


async def answers(client: Client) -> list[Generated]:
    """Return all answers in the log, in order; assert that no request has two."""
    keys = await client.stored.subjects(client.tenant)
    entries = [entry for key in keys for entry in await client.log(key.session) if entry.kind == "out"]
    results = [decode_result(entry.body) for entry in sorted(entries, key=lambda entry: entry.seq)]
    found = [result for result in results if isinstance(result, Generated)]
    assert len({result.id for result in found}) == len(found)
    return found


async def until_ready(client: Client) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(NoWorkerError):
                await client.worker_metrics()
                return
            await asyncio.sleep(0.2)


def longest(results: Sequence[Generated]) -> Usage:
    """Return the usage of the answer with the longest prompt: others are for titles, which agents request."""
    return max((result.usage for result in results), key=lambda usage: usage.prompt_tokens)


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.registry("npm")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", AGENTS)
async def test_a_coding_agent_completes_a_task_through_the_gateway_despite_a_worker_kill_and_restart(
    name: str, programs: Path, worker_process: Any, packaged_folder: Path, door: Any, tmp_path: Path
) -> None:
    process = worker_process(model=packaged_folder)
    process.start()
    client = await process.client()
    await until_ready(client)
    served = await door(process.url)
    agent = AGENTS[name]
    async with Steering(served.url, agent.tool, agent.arguments) as steering:
        desk = Desk(name, tmp_path, programs, steering, steering.url)
        assert await desk.ask("Please make the file.", *agent.looks)
        assert (desk.project / "made.txt").read_text() == "kept\n"
        shown = any("replaced by a placeholder" in one for one in steering.warnings)
        assert shown == bool(agent.looks)
        first = await answers(client)
        told = [one for result in first for one in result.warnings]
        assert any("developer as system" in one for one in told) == agent.develops
        before, seen = longest(first), len(first)

        steering.calls = False
        for disturb in ("nothing", "restart", "kill"):
            if disturb == "restart":
                process.stop()
                process.start()
                await until_ready(client)
            steering.answering.clear()
            asking = asyncio.create_task(desk.ask("And what did you do?", *agent.again))
            if disturb == "kill":
                await steering.answering.wait()
                process.kill()
                process.start()
            assert await asking
            results = await answers(client)
            now = longest(results[seen:])
            assert now.prompt_tokens > before.prompt_tokens
            assert now.prompt_tokens - now.cached_tokens < 0.05 * before.prompt_tokens
            seen = len(results)
    assert "resuming an interrupted answer" in process.log
    await client.close()


SKY = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}},
    "required": ["sky"],
    "additionalProperties": False,
}
TOOL = {"name": "look", "description": "Look at the sky.", "input_schema": SKY}
BIASED = {"extra_body": {"logit_bias": LETTERS}}


@pytest.fixture
async def client(served: Any) -> AsyncIterator[AsyncAnthropic]:
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


async def test_the_anthropic_client_gets_a_tool_call_sends_its_result_and_streams_the_answer(
    client: AsyncAnthropic,
) -> None:
    given: dict[str, Any] = {"model": "m", "max_tokens": 400, "system": "Look first.", "tools": [TOOL]}
    messages: list[Any] = [{"role": "user", "content": "How is the sky?"}]
    only_one: Any = {"type": "any", "disable_parallel_tool_use": True}
    called = await client.messages.create(**given, messages=messages, tool_choice=only_one)
    call = called.content[-1]
    assert (called.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "look")
    assert call.input["sky"] in {"blue", "grey"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is blue."}
    messages += [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    async with client.messages.stream(**given | {"max_tokens": 8}, messages=messages, **BIASED) as stream:
        texts = [text async for text in stream.text_stream]
        answer = await stream.get_final_message()
    assert "".join(texts) == answer.content[0].text != ""
    assert answer.usage.cache_read_input_tokens >= called.usage.input_tokens + called.usage.output_tokens - 1


async def test_the_anthropic_client_lists_models_counts_tokens_and_raises_its_own_exceptions_for_errors(
    client: AsyncAnthropic,
) -> None:
    import anthropic

    (model,) = [model async for model in client.models.list()]
    assert (model.id, model.type, model.lifecycle) == ("tiny", "model", "active")
    assert (await client.models.retrieve("tiny")).max_input_tokens == TINY_CONTEXT
    counted = await client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "a"}])
    long = {"role": "user", "content": "a" * TINY_CONTEXT}
    assert 0 < counted.input_tokens < TINY_CONTEXT
    with pytest.raises(anthropic.BadRequestError, match=rf"prompt is too long: \d+ tokens > {TINY_CONTEXT}"):
        await client.messages.create(model="m", max_tokens=1, messages=[long])
    assert (await client.models.retrieve("other")).id == "other", "a request may use this name"
    with pytest.raises(anthropic.NotFoundError, match="is not served") as refused:
        await client.get("/v1/nothing", cast_to=object)
    assert refused.value.body["type"] == "error", "in this API's shape"


async def test_the_anthropic_client_raises_its_not_found_error_for_a_request_to_continue_a_thread(
    client: AsyncAnthropic,
) -> None:
    import anthropic

    given: Any = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi."}], **BIASED}
    begun = await client.beta.messages.with_raw_response.create(**given, thread={"type": "create"})
    answer = await begun.parse()
    assert "x-turnkeep-warnings" not in begun.headers
    assert begun.headers["request-id"] == begun.headers["x-request-id"]
    assert answer.id.endswith(begun.headers["request-id"])
    thread: Any = {"type": "continue", "previous_message_id": answer.id}
    with pytest.raises(anthropic.NotFoundError) as refused:
        await client.beta.messages.create(**given, thread=thread)
    assert refused.value.body["error"]["details"] == {"error_code": "thread_not_found"}
