"""The command `turnkeep gateway`: errors, warnings and sockets."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gateway
import ops.console
from commands.cli import main
from commands.gateway import greeting
from ops.http_server import listening


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
def test_a_command_names_a_missing_library_and_the_extra_that_installs_it(
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
def test_a_cors_option_that_is_no_origin_is_refused(origin: str) -> None:
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
)
def test_a_gateway_open_to_the_network_without_keys_warns_at_its_start(
    host: str, has_keys: bool, warns: bool
) -> None:
    text = greeting(f"http://{host}:8080", has_keys=has_keys)
    assert f"http://{host}:8080/v1" in text
    assert ("--keys" in text) == warns


def test_the_gateway_command_reports_a_port_in_use_and_a_missing_key_file(
    nats_url: str, tmp_path: Path
) -> None:
    with listening("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        text = said("--listen", port, "--nats", nats_url, "--data-dir", str(tmp_path))
    assert f"cannot listen on 127.0.0.1:{port} (" in text
    assert "no-keys" in said("--keys", str(tmp_path / "no-keys"), "--data-dir", str(tmp_path))


def test_accepted_connections_have_tcp_nodelay_set() -> None:
    """Without this, small events that follow each other wait for the client's delayed ACK."""
    with listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
