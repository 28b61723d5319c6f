"""docs/protocol.md matches the code, and the examples in the documentation run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest

from tests.parts import WorkerProcess, free_port
from turnkeep_client import log
from turnkeep_client.errors import ERROR_CODES, RETRYABLE, InvalidMessageError
from turnkeep_client.messages import (
    OPTIONS,
    Append,
    Appended,
    Called,
    CallPart,
    Cancelled,
    CancelRequest,
    Chunk,
    Close,
    Closed,
    Counted,
    CountRequest,
    DeadLetter,
    Embedded,
    EmbedRequest,
    Failed,
    FinishReason,
    GatewayMetrics,
    Generate,
    Generated,
    Histogram,
    InfoRequest,
    Message,
    Open,
    Opened,
    Parent,
    Progress,
    Reranked,
    RerankRequest,
    Rewind,
    Rewound,
    Seconds,
    SessionCache,
    SessionInfo,
    TokenLogprob,
    Usage,
    decode_request,
)
from turnkeep_client.subjects import ChunkKind, SessionKind

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Awaitable, Callable

    from msgspec import Struct

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text()
README = (ROOT / "README.md").read_text()

RESULTS = (Opened, Appended, Generated, Rewound, Closed, Failed)
PARTS = (SessionCache, Parent, Usage, Seconds, TokenLogprob, Called, CallPart, Progress)
CONTROL = (InfoRequest, CancelRequest, CountRequest, EmbedRequest, RerankRequest)
REPLIES = (SessionInfo, Cancelled, Counted, Embedded, Reranked)
COUNTS = (Histogram, GatewayMetrics)
TOLD = (*RESULTS, *PARTS, Chunk, DeadLetter, *CONTROL, *REPLIES, *COUNTS)


def fenced(beginning: str, language: str, page: str = PAGE) -> str:
    """Return the first code block in this language after the words `beginning` on a page."""
    found = re.search(rf"```{language}\n(.*?)```", page[page.index(beginning) :], re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
async def shell(
    worker_process: Callable[..., WorkerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Awaitable[Process]]:
    """Run commands in a shell that gets the URL of a worker's own NATS server as the page says."""
    worker = worker_process(port=(port := free_port()))
    worker.start()
    while '"ready"' not in worker.log:  # noqa: ASYNC110  # a process tells nobody
        await asyncio.sleep(0.05)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("TURNKEEP_DATA_DIR", str(worker.data_dir))
    monkeypatch.setenv("TURNKEEP_NATS_PORT", str(port))
    monkeypatch.delenv("NATS_URL", raising=False)
    url = fenced("## An example", "sh")

    async def start(command: str) -> Process:
        script = f"{url}exec {command}"
        return await asyncio.create_subprocess_exec(
            *("bash", "-ec", script),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    return start


async def output(process: Process) -> str:
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert err == b""
    return out.decode()


async def test_the_python_examples_of_the_documentation_run_as_written(
    shell: Callable[[str], Awaitable[Process]], tmp_path: Path
) -> None:
    (tmp_path / "example.py").write_text(fenced("## An example", "python"))
    pages = (ROOT / "docs" / "python.md").read_text()
    (tmp_path / "ask.py").write_text(fenced("## Without the client library", "python", pages))
    (tmp_path / "client.py").write_text(fenced("## The Python client", "python", pages))
    (tmp_path / "readme.py").write_text(fenced("## From Python", "python", README))
    assert re.search(r"\n generated \{'prompt_tokens': \d", await output(await shell("python example.py")))
    for file in ("ask.py", "client.py", "readme.py"):
        assert await output(await shell(f"python {file}")) != "", file
    for file in ("client.py", "readme.py"):
        assert re.search(r"\nUsage\(prompt_tokens=\d", await output(await shell(f"python {file}"))), file
    for file in ("client.py", "readme.py"):
        alone = await shell(f"env -u NATS_URL python {file}")
        _, err = await alone.communicate()
        assert err == b"first: export NATS_URL=$(.venv/bin/turnkeep info --url)\n", file


@pytest.mark.registry("npm")
async def test_the_example_in_javascript_runs_as_written(
    shell: Callable[[str], Awaitable[Process]], tmp_path: Path
) -> None:
    program = (ROOT / "examples" / "one_turn.mjs").read_text()
    (tmp_path / "one_turn.mjs").write_text(program)
    (install,) = re.findall(r"^// npm install (.*)$", program, re.MULTILINE)
    await output(await shell(f"npm install --silent --no-audit --no-fund {install}"))
    said = await output(await shell("node one_turn.mjs"))
    assert re.search(r"\n generated \{\s+prompt_tokens: \d", said), said


def test_the_protocol_page_lists_every_error_code_and_whether_it_is_retryable() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (yes|no) \|", PAGE, re.MULTILINE)
    assert dict(rows) == {code: "yes" if code in RETRYABLE else "no" for code in ERROR_CODES}


def test_the_protocol_page_documents_every_field_of_every_request() -> None:
    for kind in (Open, Append, Generate, Rewind, Close):
        for field in {kind.__struct_config__.tag, *kind.__struct_encode_fields__} - {*OPTIONS}:
            assert f"`{field}`" in PAGE, (kind, field)


@pytest.mark.parametrize("kind", TOLD, ids=lambda kind: kind.__name__)
def test_the_protocol_page_documents_every_field_that_workers_publish(kind: type[Struct]) -> None:
    """Except the fields of `Metrics` and its `TenantFigures`, which only the reference lists."""
    fields = [field for field in kind.__struct_encode_fields__ if not re.search(rf"[`\"]{field}[`\" ]", PAGE)]
    assert fields == []
    tag = kind.__struct_config__.tag
    assert tag is None or kind is DeadLetter or f"`{tag}`" in PAGE


def test_the_protocol_page_names_every_subject_header_and_finish_reason() -> None:
    for name in (*get_args(SessionKind), *get_args(ChunkKind)):
        assert re.search(rf"\.{name}[.`]", PAGE), name
    headers = [value for name, value in vars(log).items() if name.endswith("_HEADER")]
    assert len(headers) > 7
    for name in (*headers, *get_args(FinishReason)):
        assert f"`{name}`" in PAGE, name


def test_openai_fields_are_refused_or_accepted_as_the_protocol_page_says() -> None:
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
