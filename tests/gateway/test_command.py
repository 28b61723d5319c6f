"""The commands gateway and launch: how they start, what they print and refuse."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from starlette.applications import Starlette

import gateway
import ops.console
from commands.agents import AGENTS, INSTALLS, GatewayAccess, start_of
from commands.cli import main
from commands.gateway import greeting
from ops.http_server import listening, serve, server
from tests.commands.command_runs import turnkeep
from tests.parts import TINY_CONTEXT, until


def said(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["gateway", *arguments])
    assert result.exit_code == 1
    return result.output


@pytest.mark.parametrize(
    ("command", "package", "library", "extra"),
    [
        ("gateway", gateway, "starlette", "gateway"),
        ("gateway", gateway, "uvicorn", "gateway"),
        ("console", ops.console, "uvicorn", "ops"),
        ("exporter", ops, "prometheus_client", "ops"),
    ],
)
def test_a_command_that_lacks_a_library_names_the_library_and_the_extra_that_installs_it(
    command: str, package: Any, library: str, extra: str, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((package, "app"), (ops, "exporter"), (ops, "http_server")):
        monkeypatch.delitem(sys.modules, f"{owner.__name__}.{name}", raising=False)
        monkeypatch.delattr(owner, name, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)  # type: ignore[arg-type]
    result = CliRunner().invoke(main, [command, "--nats", nats_url])
    assert result.exit_code == 1
    assert f"turnkeep: {library} is missing; " in result.output
    assert f"[{extra}]' brings it" in result.output


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/path", "*", "https://"])
def test_the_command_gateway_refuses_a_cors_option_that_is_not_an_origin(origin: str) -> None:
    result = CliRunner().invoke(main, ["gateway", "--cors", "https://a.example", "--cors", origin])
    assert (result.exit_code, "is no origin" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("host", "has_keys", "warns"),
    [
        ("127.0.0.1", False, False),
        ("[::1]", False, False),
        ("0.0.0.0", True, False),
        ("0.0.0.0", False, True),
    ],
    ids=["IPv4 loopback", "IPv6 loopback", "network with keys", "network without keys"],
)
def test_only_a_gateway_that_listens_on_the_network_without_keys_warns_at_its_start(
    host: str, has_keys: bool, warns: bool
) -> None:
    text = greeting(f"http://{host}:8080", has_keys=has_keys)
    assert f"http://{host}:8080/v1" in text
    assert ("--keys" in text) == warns


def test_the_command_gateway_fails_and_names_its_port_in_use_or_its_missing_key_file(
    nats_url: str, tmp_path: Path
) -> None:
    with listening("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        text = said("--listen", port, "--nats", nats_url, "--data-dir", str(tmp_path))
    assert f"cannot listen on 127.0.0.1:{port} (" in text
    assert "no-keys" in said("--keys", str(tmp_path / "no-keys"), "--data-dir", str(tmp_path))


def test_the_gateway_sets_tcp_nodelay_on_the_connections_that_it_accepts() -> None:
    """Without this, small events that follow each other wait for the client's delayed ACK."""
    with listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


#: Writes its environment and arguments.
_AGENT = f"""#!{sys.executable}
import json, os, sys
json.dump({{"environment": dict(os.environ), "arguments": sys.argv[1:]}}, sys.stdout)
sys.exit(7)
"""

Said = tuple[int, str, str]
#: A gateway of this machine is asked past it.
PROXY = {"http_proxy": "http://127.0.0.1:1"}


@pytest.fixture
async def url(gateway: Any) -> str:
    started = await gateway()
    return str(started.url)


async def launched(folder: Path, *arguments: str, **environment: str) -> Said:
    for name in (*AGENTS, "other"):
        (folder / name).write_text(_AGENT)
        (folder / name).chmod(0o755)
    given = {"HOME": str(folder / "home"), "PATH": f"{folder}:{os.environ['PATH']}", **environment}
    words = ("launch", "--data-dir", folder / "data", *arguments)
    done = await asyncio.to_thread(turnkeep, *words, **given)
    return done.returncode, done.stdout, done.stderr


async def test_a_running_http_server_leaves_the_handling_of_signals_to_the_command_that_started_it() -> None:
    """A signal that uvicorn handled would come again at its end, and cancel what the command closes."""
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with listening("127.0.0.1", 0) as listener:
        running = server(Starlette(), 1)
        task = asyncio.create_task(serve(running, listener))
        await until(lambda: running.started)
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
        running.should_exit = True
        await task


@pytest.mark.parametrize("name", [*AGENTS, "other"])
async def test_launch_starts_a_coding_agent_with_the_gateways_url_key_and_model(
    name: str, url: str, tmp_path: Path
) -> None:
    given = ("--flag", "a b", "--print")
    code, said, complained = await launched(
        tmp_path, "--gateway", f"{url}/v1/", name, *given, TURNKEEP_GATEWAY_KEY="secret-1", **PROXY
    )
    assert code == 7, complained  # the agent's own
    assert ("own prompt takes about" in complained) == (name in {"claude", "codex"})
    started = json.loads(said)
    assert tuple(started["arguments"][-3:]) == given
    files = [*(tmp_path / "data" / "agents").glob("*")]
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    known = "\n".join(
        [*started["environment"].values(), *started["arguments"], *(file.read_text() for file in files)]
    )
    for word in (url, "secret-1", "tiny", *(() if name in {"other", "pi"} else (str(TINY_CONTEXT),))):
        assert word in known, word
    assert not (tmp_path / "home").exists()

    _, printed, _ = await launched(
        tmp_path, "--gateway", url, "--print", name, *given, TURNKEEP_GATEWAY_KEY="secret-1"
    )
    again = await asyncio.create_subprocess_exec(
        *shlex.split(printed),
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stdout=asyncio.subprocess.PIPE,
    )
    assert json.loads((await again.communicate())[0])["arguments"] == started["arguments"]


@pytest.mark.parametrize(("context", "most"), [(8192, 512), (131_072, 32_000)])
def test_launch_gives_claude_code_a_smaller_output_limit_if_the_model_has_a_short_context(
    context: int, most: int
) -> None:
    """After an answer that reaches this limit, Claude Code asks three times for the rest."""
    asked = start_of("claude", GatewayAccess("http://127.0.0.1:1", "none", "m", context)).environment
    assert int(asked["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == most


async def test_launch_warns_of_the_long_system_prompt_of_claude_code_unless_an_option_shortens_the_prompt(
    url: str, tmp_path: Path, tiny_model: Path
) -> None:
    for options in (("--tools", "Bash"), ("--tools=Bash",), ("-p", "x", "--system-prompt", "Be brief.")):
        _, _, complained = await launched(tmp_path, "--gateway", url, "claude", *options)
        assert complained == ""
    _, _, complained = await launched(tmp_path, "--gateway", url, "claude", "-p", "Which --tools have you?")
    assert "own prompt takes about 20,000 tokens" in complained
    shown = ("serve --model mlx-community/Qwen3-", "serve another model,")  # by this machine's memory
    assert any(one in complained for one in shown)
    there = tmp_path / "data" / "models" / "long"
    shutil.copytree(tiny_model, there)
    config = json.loads((there / "config.json").read_text()) | {"max_position_embeddings": 32_768}
    (there / "config.json").write_text(json.dumps(config))
    _, _, complained = await launched(tmp_path, "--gateway", url, "claude")
    assert "; serve one that is here: --model long" in complained


async def test_launch_fails_with_the_reason_for_an_unknown_agent_gateway_or_model(
    url: str, tmp_path: Path
) -> None:
    (plain := tmp_path / "plain").write_text("hello")
    plain.chmod(0o755)
    assert INSTALLS.keys() == AGENTS.keys()
    for arguments, says in [
        ((str(plain),), f"turnkeep: {plain}: Exec format error\n"),
        ((str(tmp_path / "nowhere" / "pi"),), f"on the PATH; `{INSTALLS['pi']}` installs it"),
        (("nothing-there",), "known agents are aider, claude, cn, codex, opencode, pi"),
        (("--gateway", "http://127.0.0.1:1", "claude"), "/data --listen 1` starts one"),
        (("--gateway", "http://127.0.0.1:99999", "claude"), "no gateway answers"),
        (("--gateway", "localhost", "claude"), "no URL of a gateway"),
        (("--of", "other", "claude"), "has no model 'other'; it has tiny"),
        (("--key", "schlüssel", "claude"), "the key is not printable ASCII"),
        (("--data-dir", "/dev/null/data", "pi"), "/dev/null/data/agents: Not a directory"),
        (("--gateway", f"{url}/nothing", "claude"), "refuses: GET /nothing/v1/models is not served"),
    ]:
        code, said, complained = await launched(tmp_path, "--gateway", url, *arguments)
        assert (code, said) == (1, "")
        assert says in complained


@pytest.mark.parametrize("answers", [b"HTTP/1.0 200 OK\r\n\r\n<html>", b'INFO {"server_id":"N"}\r\n'])
async def test_launch_refuses_an_address_where_a_server_other_than_the_gateway_answers(
    answers: bytes, tmp_path: Path
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        code, _, complained = await launched(tmp_path, "--gateway", address, "claude")
    assert code == 1
    assert "is no gateway of Turnkeep" in complained
