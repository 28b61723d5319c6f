"""The protocol page and the AsyncAPI document match the code, and the examples run."""

import asyncio
import json
import os
import re
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, get_args

import jsonschema
import msgspec
import pytest
import yaml
from scripted_worker import generated, metrics, plain_result, session_info

import turnkeep_client
from tests.parts import WorkerProcess, free_port, until
from turnkeep_client import asyncapi, log, messages, typescript
from turnkeep_client.errors import ERROR_CODES, RETRYABLE, InvalidMessageError
from turnkeep_client.subjects import ChunkKind, SessionKind

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text()
README = (ROOT / "README.md").read_text()


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
    await until(lambda: '"ready"' in worker.log)
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
    (tmp_path / "client.py").write_text(fenced("## The Python client", "python", pages))
    (tmp_path / "readme.py").write_text(fenced("## From Python", "python", README))
    assert re.search(r"\n generated \{'prompt_tokens': \d", await output(await shell("python example.py")))
    for file in ("client.py", "readme.py"):
        assert re.search(r"\nUsage\(prompt_tokens=\d", await output(await shell(f"python {file}"))), file
    for file in ("client.py", "readme.py"):
        alone = await shell(f"env -u NATS_URL python {file}")
        _, err = await alone.communicate()
        assert err == b"first: export NATS_URL=$(.venv/bin/turnkeep info --url)\n", file


@pytest.mark.registry("npm")
async def test_the_javascript_example_of_the_documentation_runs_as_written(
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
    for kind in (messages.Open, messages.Append, messages.Generate, messages.Rewind, messages.Close):
        for field in {kind.__struct_config__.tag, *kind.__struct_encode_fields__} - {*messages.OPTIONS}:
            assert f"`{field}`" in PAGE, (kind, field)


#: The reference lists their fields, or they are OpenAI's.
ELSEWHERE = {
    *("Metrics", "TenantFigures", "SnapshotCounters", "Change", "PlacedImage", "Generate", "ToolFunction"),
    *("_ChosenFunction", "ChoiceFormat", "JsonObjectFormat", "JsonSchema", "JsonSchemaFormat", "LarkFormat"),
}


def test_the_protocol_page_documents_every_field_that_workers_publish(document: dict[str, Any]) -> None:
    for name in document["components"]["schemas"].keys() - ELSEWHERE:
        kind = getattr(messages, name)
        for field in kind.__struct_encode_fields__:
            assert re.search(rf"[`\"]{field}[`\" ]", PAGE), (name, field)
        tag = kind.__struct_config__.tag
        assert tag is None or kind is messages.DeadLetter or f"`{tag}`" in PAGE


def test_the_protocol_page_names_all_subjects_headers_and_finish_reasons() -> None:
    for name in (*get_args(SessionKind), *get_args(ChunkKind)):
        assert re.search(rf"\.{name}[.`]", PAGE), name
    headers = [value for name, value in vars(log).items() if name.endswith("_HEADER")]
    assert len(headers) > 7
    for name in (*headers, *get_args(messages.FinishReason)):
        assert f"`{name}`" in PAGE, name


def test_each_openai_field_is_accepted_or_refused_as_the_protocol_page_says() -> None:
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
            messages.decode_request(body)
        except InvalidMessageError as error:
            said = str(error)
        in_message = name in messages.Message.__struct_fields__
        assert (f"has no field {name!r}" in said) == (refused or in_message), name


WRITTEN = Path(__file__).parents[2] / "docs" / "asyncapi.yaml"
CALL = messages.ToolCall(id="c1", function=messages.Function(name="f", arguments="{}"))
SINK_WINDOW = messages.SessionCache(policy="sink_window", sink=4, window=1024)
CALLING = messages.Message(role="assistant", tool_calls=(CALL,))
ARRAY = messages.JsonSchema({"type": "array"}, strict=True)
REQUESTS = [
    messages.Open(id="r1"),
    messages.Open(id="r1", cache=messages.CachePolicy(policy="sink_window", sink=4, window=1024)),
    messages.Append(id="r2", messages=(messages.Message(role="user", content="Hi"), CALLING)),
    messages.Append(id="r3", tokens=(1, 2, 3), expect_position=4),
    messages.Generate(id="r4", text="Hi", temperature=0.5, stop=("\n",), seed=7),
    messages.Generate(id="r7", text="Hi", response_format=messages.JsonSchemaFormat(ARRAY)),
    messages.Generate(id="r8", response_format=messages.ChoiceFormat(("yes", "no"))),
    messages.Rewind(id="r5", position=3),
    messages.Close(id="r6"),
]
EXAMPLES = [
    *REQUESTS,
    *(plain_result(n, request) for n, request in enumerate(REQUESTS, 1)),
    generated(9, REQUESTS[4], rewritten_from=2, repeat_of=4),
    generated(9, REQUESTS[4], cache=SINK_WINDOW, visible_from=3),
    messages.Opened(id="r1", seq=1, position=0, cache=SINK_WINDOW, visible_from=0),
    messages.Failed(id=None, code="invalid_request", message="not a request", retryable=False, seq=3),
    messages.Chunk(i=0, tokens=(1, 2), text="Hi", seq=4),
    messages.DeadLetter(
        seq=4, id="r4", request="append", position=0, attempts=3, reason="it ends", worker="w", model="m"
    ),
    messages.InfoRequest(),
    messages.MetricsRequest(),
    messages.CancelRequest(id="r4"),
    messages.Cancelled(id="r4", was="running"),
    messages.LoadRequest(model="other"),
    messages.UnloadRequest(),
    messages.Serving(said="other is loaded"),
    messages.Counted(tokens=3, position=12),
    messages.CountRequest(text="abc"),
    messages.RerankRequest("a?", ("b", "c"), document_tokens=9),
    messages.Reranked(scores=(0.5, 1.0), tokens=(8, 9), model="m"),
    messages.EmbedRequest(inputs=("abc", (1, 2)), dimensions=4),
    messages.Embedded(vectors=(bytes(16), bytes(16)), tokens=(1, 2), model="m"),
    messages.Close(id="r7", forget=True),
    messages.Closed(id="r7", seq=7, position=9, forgotten=3, settled=False),
    session_info(),
    session_info(
        policy="sink_window", cache=SINK_WINDOW, capacity_tokens=1028, visible_tokens=9, visible_from=0
    ),
    metrics("w1"),
    messages.GatewayMetrics(
        gateway="g1",
        version="1",
        uptime_s=1.0,
        running=1,
        conversations=2,
        requests={"200": 3},
        answers={"begun": 2},
        tokens={"prefilled": 9},
        resumed=0,
    ),
]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return yaml.safe_load(asyncapi.render())


def schema_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    return {**document["components"]["schemas"][name], "components": document["components"]}


def test_the_committed_asyncapi_document_equals_the_document_generated_from_the_code() -> None:
    assert asyncapi.main(["--check", str(WRITTEN)]) == 0


def test_every_schema_of_the_asyncapi_document_is_valid_json_schema(document: dict[str, Any]) -> None:
    """Valid under draft 7 and 2020-12: AsyncAPI 3 accepts what both drafts accept."""
    for name in document["components"]["schemas"]:
        for draft in (jsonschema.Draft7Validator, jsonschema.Draft202012Validator):
            draft.check_schema(schema_of(document, name))


def test_in_the_asyncapi_document_every_operation_refers_to_an_existing_channel_and_message(
    document: dict[str, Any],
) -> None:
    used = set()
    for name, channel in document["channels"].items():
        assert set(re.findall(r"{(\w+)}", channel["address"] or "")) == set(channel.get("parameters", {}))
        assert channel["messages"], name
        used |= set(channel["messages"])
    assert used == set(document["components"]["messages"])
    reached = set()
    for operation in document["operations"].values():
        for side in filter(None, (operation, operation.get("reply"))):
            channel = side["channel"]["$ref"]
            reached.add(channel.removeprefix("#/channels/"))
            assert all(message["$ref"].startswith(f"{channel}/messages/") for message in side["messages"])
    assert reached == set(document["channels"])


def test_the_schema_tests_have_an_example_of_every_message_of_the_asyncapi_document(
    document: dict[str, Any],
) -> None:
    assert {type(each).__name__ for each in EXAMPLES} | {"EndOfTokens", "Image"} == set(
        document["components"]["messages"]
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: type(each).__name__)
def test_each_encoded_message_is_valid_under_its_asyncapi_schema(
    document: dict[str, Any], example: msgspec.Struct
) -> None:
    schema = schema_of(document, type(example).__name__)
    jsonschema.Draft202012Validator(schema).validate(json.loads(messages.encode(example)))


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_requests_that_a_worker_refuses_are_invalid_under_their_asyncapi_schema(
    document: dict[str, Any], request_: msgspec.Struct
) -> None:
    validator = jsonschema.Draft202012Validator(schema_of(document, type(request_).__name__))
    right = json.loads(messages.encode(request_))
    for wrong in (
        right | {"unknown": 1},
        right | {"id": "a.b"},
        right | {"id": "a\n"},
        right | {"type": "x"},
    ):
        assert not validator.is_valid(wrong)


@pytest.mark.packaging
@pytest.mark.registry("npm")
def test_the_official_asyncapi_parser_accepts_the_asyncapi_document(tmp_path: Path) -> None:
    """AsyncAPI's own parser, which other tools use, reports no error."""
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"]
    subprocess.run([*install, "@asyncapi/parser@3.6.6"], cwd=tmp_path, check=True, timeout=120)
    script = """
        const { Parser } = require('@asyncapi/parser');
        new Parser().parse(require('fs').readFileSync(process.argv[1], 'utf8')).then(({ diagnostics }) =>
            console.log(JSON.stringify(diagnostics.filter(each => each.severity < 2))));
    """
    command = ["node", "-e", script, str(WRITTEN)]
    parsed = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, timeout=60)
    assert json.loads(parsed.stdout) == []


TYPES = Path(__file__).parents[2] / "protocol" / "typescript" / "src" / "messages.ts"


def test_the_typescript_types_match_the_asyncapi_document() -> None:
    assert typescript.main(["--check", str(TYPES)]) == 0


def test_the_typescript_package_has_the_python_clients_version_and_pins_its_dependencies() -> None:
    package = json.loads((TYPES.parents[1] / "package.json").read_text())
    assert package["version"] == turnkeep_client.__version__
    versions = {**package["dependencies"], **package["devDependencies"]}.values()
    assert all(version[0].isdigit() for version in versions), "there is no lock file"


def test_outdated_typescript_types_fail_the_check_command_with_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "messages.ts"
    old.write_text(TYPES.read_text().replace("tool_calls?:", "calls?:"))
    assert typescript.main(["--check", str(old)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert typescript.main([]) == 0
    assert capsys.readouterr().out == TYPES.read_text()
