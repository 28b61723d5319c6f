"""Writes a NATS cluster's configuration of routes: the nodes' addresses, and the password that they share."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Final

CLUSTER: Final = "cluster.conf"
ROUTES: Final = "routes.conf"
_PORT: Final = 6222
_PASSWORD: Final = re.compile(r'password: "([\w-]+)"')


def write_routes(folder: Path, hosts: list[str]) -> None:
    """Write the routes to these hosts (`NAME` or `NAME:PORT`) to a file that only its owner can read.

    An existing file's password is reused, since nodes with different passwords refuse each other.
    """
    if not (folder / CLUSTER).exists():
        shutil.copy(Path(__file__).with_name(CLUSTER), folder / CLUSTER)
    there = folder / ROUTES
    known = _PASSWORD.search(there.read_text()) if there.exists() else None
    password = known[1] if known else secrets.token_urlsafe(32)
    places = (host if ":" in host else f"{host}:{_PORT}" for host in hosts)
    routes = json.dumps([f"nats://nodes:{password}@{place}" for place in places], indent=1)
    fresh = folder / f"{ROUTES}.new"
    fresh.unlink(missing_ok=True)
    with open(fresh, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(f'authorization {{ user: nodes, password: "{password}", timeout: 5 }}\nroutes: {routes}\n')
    fresh.replace(there)
