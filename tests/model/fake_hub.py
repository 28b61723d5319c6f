"""A fake Hugging Face hub on loopback: answers the requests of its library, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

COMMIT = "c" * 40
#: A repository of the fixture `server`.
ID = "org/tiny"
LARGE = 10_000


@dataclass
class FakeHub:
    """Serves the files of `repositories`, by repository id, and records the requests for files in `asked`.

    `cuts` are numbers of bytes after which the next bodies of large files break off; `broken` are files whose
    content does not match their checksum; `claimed` has false sizes by file.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    about: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    claimed: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # file names, and ranges of bytes
    stalled: threading.Event | None = None  # a body that broke off stays open until this is set

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, hub_id: str, folder: Path) -> None:
        self.repositories[hub_id] = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }

    def files(self, hub_id: str) -> list[dict[str, Any]]:
        """Describe a repository's files, as the hub does."""
        return [
            {"path": name, "rfilename": name, "type": "file", **self._about(name, content)}
            for name, content in self.repositories[hub_id].items()
        ]

    def _about(self, name: str, content: bytes) -> dict[str, Any]:
        git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        size = self.claimed.get(name, len(content))
        about: dict[str, Any] = {"size": size, "oid": git, "blobId": git}
        if len(content) >= LARGE:
            digest = hashlib.sha256(content).hexdigest()
            about["lfs"] = {"oid": digest, "sha256": digest, "size": size, "pointerSize": 100}
        return about

    def etag(self, name: str, content: bytes) -> str:
        about = self._about(name, content)
        return str(about["lfs"]["sha256"] if "lfs" in about else about["oid"])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/tree/.*|/revision/.*)?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        hub_id = (info or file or [None, ""])[1]
        if hub_id not in self.hub.repositories:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif info:
            files = self.hub.files(hub_id)
            whole = {"id": hub_id, "sha": COMMIT, "siblings": files, **self.hub.about.get(hub_id, {})}
            is_tree = (info[2] or "").startswith("/tree")
            self._send(200, json.dumps(files if is_tree else whole).encode())
        elif file:
            self._send_file(file[2], self.hub.repositories[hub_id][file[2]])

    do_HEAD = do_GET  # noqa: N815  # the library's name

    def _send_file(self, name: str, content: bytes) -> None:
        headers = {"ETag": f'"{self.hub.etag(name, content)}"', "X-Repo-Commit": COMMIT}
        if self.command == "HEAD":
            self._send(200, content, headers)
            return
        self.hub.asked.append((name, self.headers["Range"]))
        if name in self.hub.broken:
            content = bytes(len(content))
        start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        cut = self.hub.cuts.pop(0) if self.hub.cuts and len(content) >= LARGE else None
        self._send(206 if start else 200, content[start:], headers, cut)

    def _send(
        self, code: int, body: bytes, headers: Mapping[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.wfile.flush()
            if self.hub.stalled is not None:
                self.hub.stalled.wait(60)
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Log nothing."""
