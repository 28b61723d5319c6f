"""The default model is fetched from the hub where its package is not installed: a hub of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from tests.parts import free_port
from worker.models import model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

COMMIT = "c" * 40

#: Resolves the default model as where its package is missing, and prints what it was told meanwhile.
RESOLVE = """
import json, sys
from pathlib import Path
from worker.models import model
model.packaged_gguf = lambda: None
reports = []
try:
    tell = lambda *report: reports.append(report)
    folder = model.resolve(None, Path(sys.argv[1]), dtype="keep", progress=tell)
    model.check_folder(folder)
    print(json.dumps({"reports": reports}))
except model.ModelError as error:
    print(json.dumps({"error": str(error)}))
"""


class _Hub(BaseHTTPRequestHandler):
    """Answers what the hub's client asks for one repository."""

    folder: Path

    def do_GET(self) -> None:
        files = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        if self.path.startswith(f"/api/models/{model.DEFAULT_ID}/tree/{COMMIT}"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": "b" * 40}
                for name, content in files.items()
            ]
            self._send(json.dumps(tree).encode())
        elif self.path.startswith(f"/api/models/{model.DEFAULT_ID}"):
            self._send(json.dumps({"id": model.DEFAULT_ID, "sha": COMMIT, "siblings": []}).encode())
        elif self.path.startswith(f"/{model.DEFAULT_ID}/resolve/{COMMIT}/"):
            name = self.path.rpartition("/")[2]
            self._send(files[name], ETag=f'"{name}"', **{"X-Repo-Commit": COMMIT})
        else:
            self.send_error(404)

    do_HEAD = do_GET  # noqa: N815  # the library's name

    def _send(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(tiny_model: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (_Hub,), {"folder": tiny_model}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def resolved(tmp_path: Path) -> Callable[[str], dict[str, object]]:
    def resolve(endpoint: str) -> dict[str, object]:
        done = subprocess.run(
            [sys.executable, "-c", RESOLVE, str(tmp_path)],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub")},
        )
        found: dict[str, object] = json.loads(done.stdout)
        return found

    return resolve


def test_the_default_model_is_fetched_from_the_hub_and_every_byte_is_reported(
    hub: str, resolved: Callable[[str], dict[str, object]], tiny_model: Path
) -> None:
    reports = resolved(hub)["reports"]
    assert isinstance(reports, list)
    assert {what for _, _, what in reports} == {f"downloading {model.DEFAULT_ID}"}
    size = sum(path.stat().st_size for path in tiny_model.iterdir())
    assert reports[-1][:2] == [size, size]


def test_what_was_fetched_once_is_used_while_the_hub_is_out_of_reach(
    hub: str, resolved: Callable[[str], dict[str, object]]
) -> None:
    resolved(hub)
    assert resolved(f"http://127.0.0.1:{free_port()}") == {"reports": []}


def test_a_hub_out_of_reach_is_one_line_with_the_command_that_brings_the_model(
    resolved: Callable[[str], dict[str, object]],
) -> None:
    assert resolved(f"http://127.0.0.1:{free_port()}") == {
        "error": f"there is no model yet: {model.DEFAULT_ID} is not in the hub's cache and the hub cannot be"
        f" reached; install one from the package index with {model.INSTALL_DEFAULT}, or give a model folder"
        " or a .gguf file with --model"
    }
