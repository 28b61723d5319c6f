"""The page about the protocol tells the truth where a test can tell."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from scripted_worker import KEY, TEXTS, FakeWorker, NatsServer, generated, plain_result

from turnkeep_client.errors import ERROR_CODES, RETRYABLE, InvalidMessageError
from turnkeep_client.messages import (
    Append,
    Close,
    Generate,
    Message,
    Open,
    Request,
    Rewind,
    decode_request,
    encode,
    failure,
)

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


async def test_the_example_runs_as_it_is_written(server: NatsServer, worker: FakeWorker) -> None:
    """With raw nats-py and nothing of ours; only the address and the session's name are the test's."""
    found = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    program = (
        found[1]
        .replace("nats://127.0.0.1:4222", server.url)
        .replace("default.demo", f"default.{KEY.session}")
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert err == b""
    assert out.decode().startswith("".join(TEXTS) + "\n generated {'prompt_tokens': 3")
    asked = Generate(
        id="turn-1", max_tokens=32, messages=(Message(role="user", content="Name three primes."),)
    )
    assert [request for _, request in worker.requests] == [asked]


def test_every_error_code_stands_there_with_its_retryable() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (yes|no) \|", PAGE, re.MULTILINE)
    assert dict(rows) == {code: "yes" if code in RETRYABLE else "no" for code in ERROR_CODES}


def test_every_field_of_every_request_stands_there() -> None:
    for kind in (Open, Append, Generate, Rewind, Close):
        for field in (kind.__struct_config__.tag, *kind.__struct_fields__):
            assert f"`{field}`" in PAGE, (kind, field)


def test_the_fields_of_openai_that_the_page_refuses_are_refused_and_the_others_taken() -> None:
    rows = PAGE[PAGE.index("## Fields") : PAGE.index("Only here:")].splitlines()
    cells = [row.split("|")[1:3] for row in rows if row.startswith("| `")]
    told = {
        name: "refused by name" in what for names, what in cells for name in re.findall(r"`(\w+)`", names)
    }
    assert {"max_tokens", "stop", "seed", "tools", "stream", "model"} <= set(told)
    for name, refused in told.items():
        body = json.dumps({"type": "generate", "id": "a", name: []}).encode()
        said = ""
        try:
            decode_request(body)
        except InvalidMessageError as error:
            said = str(error)
        in_message = name in Message.__struct_fields__
        assert (f"has no field {name!r}" in said) == (refused or in_message), name


def example(beginning: str, language: str, url: str) -> str:
    """Find the example behind these words, with the test's server and session."""
    behind = PAGE[PAGE.index(beginning) :]
    found = re.search(rf"```{language}\n(.*?)```", behind, re.DOTALL)
    assert found is not None
    return found[1].replace("nats://127.0.0.1:4222", url).replace("default.demo", f"default.{KEY.session}")


async def test_the_example_in_javascript_runs_as_it_is_written(
    server: NatsServer, worker: FakeWorker, tmp_path: Path
) -> None:
    """Needs node, and the npm packages in a `node_modules` that NODE_PATH names."""
    node = shutil.which("node")
    paths = [Path(each) for each in os.environ.get("NODE_PATH", "").split(os.pathsep) if each]
    modules = next((path for path in paths if (path / "@nats-io" / "jetstream").is_dir()), None)
    if node is None or modules is None or not (modules / "@nats-io" / "transport-node").is_dir():
        pytest.skip("node, or @nats-io/transport-node and @nats-io/jetstream on NODE_PATH, are not installed")
    (tmp_path / "node_modules").symlink_to(modules)  # modules of this kind are not found by NODE_PATH
    (tmp_path / "example.mjs").write_text(example("The same in JavaScript", "js", server.url))
    process = await asyncio.create_subprocess_exec(
        node, str(tmp_path / "example.mjs"), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert err == b""
    assert out.decode().startswith("".join(TEXTS) + "\n generated {")
    assert [request.id for _, request in worker.requests] == ["turn-1"]


async def test_the_agent_loop_runs_as_it_is_written_and_again_after_it_died(
    server: NatsServer, worker: FakeWorker
) -> None:
    """The second run gets the first one's answers; a tool that says something else changes nothing."""
    said: list[str] = []
    recorded: dict[str, tuple[bytes, int]] = {}

    async def script(fake: FakeWorker, seq: int, request: Request) -> None:
        body, first = recorded.setdefault(request.id, (encode(request), seq))
        if body != encode(request):
            text = "the id was used before"
            await fake.result(failure(request.id, "id_conflict", text, seq=seq))
            return
        if isinstance(request, Append) and first == seq:
            said.append(str(request.messages[0].content) if request.messages else "")
        text = "LOOK Rome" if request.id == "think-0" else "It is sunny."
        result = (
            generated(seq, request, text=text)
            if isinstance(request, Generate)
            else plain_result(seq, request)
        )
        await fake.result(result)

    worker.script = script
    program = example("### An agent loop", "python", server.url).replace("agent-1", KEY.session)
    for text in (program, program.replace("24 degrees", "25 degrees")):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", text, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), 20)
        assert (out.decode(), err) == ("It is sunny.\n", b"")
    assert [each.partition(".")[0] for each in said] == [
        "What is the weather in Rome? To look it up, say LOOK and the place",
        "Rome: sunny, 24 degrees",
    ]
