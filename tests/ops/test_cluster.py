"""A cluster of three NATS nodes with the generated configuration; one node may be killed during an answer."""

import asyncio
import contextlib
import json
import re
import shutil
import stat
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats
import pytest
from click.testing import CliRunner
from nats.aio.client import Client
from nats.js.api import StreamConfig
from parts import free_port, nats_server_program

from ops.nats.tenants import main
from tests.ops.test_tenants import run
from turnkeep_client.client import connect
from turnkeep_client.subjects import SessionKey, Subjects
from worker.wire.journal import Journal

pytestmark = [pytest.mark.packaging, pytest.mark.process, pytest.mark.timeout(400)]

STREAMS = ("turnkeep_log", "turnkeep_tok", "KV_turnkeep_workers")


def make_certificates(folder: Path) -> None:
    """Make a CA, and a certificate that it signs for nodes on 127.0.0.1."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    named = ("-subj", "/CN=ca", "-addext", "keyUsage=critical,keyCertSign")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", *named)
    asked = ("-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1")
    openssl("req", *new_key, "-keyout", "node.key", "-out", "node.csr", *asked)
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-copy_extensions", "copy")
    openssl("x509", "-req", "-in", "node.csr", "-out", "node.pem", *signing)


class Nodes:
    """Three nodes on this machine, each with a copy of the configuration, free ports, and routes with TLS."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = ("n1", "n2", "n3")
        routes = [free_port() for _ in self.names]
        self._clients = dict(zip(self.names, (free_port() for _ in self.names), strict=True))
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        told = run(folder, "acme", "beta", "--cluster", ",".join(f"127.0.0.1:{port}" for port in routes))
        assert "start nats-server -c cluster.conf --name NAME on each node" in told
        make_certificates(folder)
        text = (folder / "cluster.conf").read_text()
        for name, port in zip(self.names, routes, strict=True):
            shutil.copytree(folder, self._home(name))
            mine = text.replace("0.0.0.0:4222", f"127.0.0.1:{self._clients[name]}")
            mine = mine.replace("0.0.0.0:6222", f"127.0.0.1:{port}")
            mine, num = re.subn(r"# (tls \{ cert_file: node\.pem.*)", r"\1", mine)
            assert num == 1
            (self._home(name) / "cluster.conf").write_text(mine)

    def _home(self, name: str) -> Path:
        return self.folder.with_name(name)

    @property
    def url(self) -> str:
        return ",".join(f"nats://127.0.0.1:{port}" for port in self._clients.values())

    def seed(self, name: str) -> str:
        return str(self.folder / f"{name}.nk")

    def start(self, name: str) -> None:
        command = [nats_server_program(), "-c", "cluster.conf", "--name", name]
        with self._home(name).with_suffix(".log").open("ab") as log:
            self._running[name] = subprocess.Popen(command, cwd=self._home(name), stderr=log)

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def end(self) -> None:
        for name in list(self._running):
            self.kill(name)

    async def operator(self) -> Client:
        """Connect as the worker's user, once the nodes have agreed on a leader."""
        client = await nats.connect(
            self.url.split(","), nkeys_seed=self.seed("worker"), max_reconnect_attempts=-1
        )
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(Exception):
                    await client.jetstream().account_info()
                    return client
                await asyncio.sleep(0.2)


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    made = Nodes(tmp_path / "nats")
    try:
        for name in made.names:
            made.start(name)
        yield made
    finally:
        made.end()


async def in_step(operator: Client, *streams: str, copies: int = 3) -> dict[str, Any]:
    """Wait until all replicas of the streams are current; return each stream's leader, by stream."""
    leaders = {}
    async with asyncio.timeout(60):
        for stream in streams:
            while True:
                with contextlib.suppress(nats.errors.Error, nats.js.errors.Error):
                    reply = await operator.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=2)
                    found = json.loads(reply.data)
                    assert found["config"]["num_replicas"] == copies
                    cluster = found["cluster"]
                    others = cluster.get("replicas", [])
                    current = [one["current"] and not one.get("offline") for one in others]
                    if cluster.get("leader") and current == [True] * (copies - 1):
                        leaders[stream] = cluster["leader"]
                        break
                await asyncio.sleep(0.1)
    return leaders


async def test_an_answer_completes_when_the_nats_cluster_node_that_leads_the_log_stream_dies(
    nodes: Nodes, local_worker: Any, endless_model: Path
) -> None:
    operator = await nodes.operator()
    settings = {"nats": nodes.url, "nats_creds": nodes.folder / "worker.nk", "prefix": "turnkeep"}
    settings |= {"model": str(endless_model)}
    worker = await local_worker(**settings)
    await in_step(operator, *STREAMS, copies=1)
    await worker.stop()
    worker = await local_worker(**settings, log_replicas=3)
    await asyncio.to_thread(run, nodes.folder, "--nats", nodes.url)
    await in_step(operator, *STREAMS)

    async with connect(nodes.url, tenant="acme", nkeys_seed=nodes.seed("acme.client")) as client:
        asked = {"text": "Once upon a time", "max_tokens": 300, "timeout_s": 120}
        whole = await client.session("undisturbed").generate(**asked)
        leader = (await in_step(operator, *STREAMS))["turnkeep_log"]
        generation = client.session("s").generate(**asked)
        tokens: list[int] = []
        async for chunk in generation:
            if not tokens:
                await asyncio.to_thread(nodes.kill, leader)
            tokens += chunk.tokens
        assert tokens == list(whole.tokens)
        assert list(generation.result.tokens) == tokens
        assert (await in_place(operator))["turnkeep_log"] != leader
        more = await client.session("s").append(text=" and then", timeout_s=120)
        assert more.position > generation.result.position
        last = await client.session("s").generate(max_tokens=8, timeout_s=120)

        await asyncio.to_thread(nodes.start, leader)
        await in_step(operator, *STREAMS)
        async with asyncio.timeout(60):  # the mirror follows
            while len(entries := await client.log("s")) < 6:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    bodies = [json.loads(entry.body) for entry in entries]
    kinds = [body["type"] for body in bodies]
    assert sorted(kinds) == ["append", "appended", "generate", "generate", "generated", "generated"]
    answers = [body["tokens"] for body in bodies if body["type"] == "generated"]
    assert answers == [tokens, list(last.tokens)], "one result of each, and what was heard"
    async with connect(nodes.url, tenant="beta", nkeys_seed=nodes.seed("beta.client")) as client:
        assert await client.log("s") == []
        await client.session("s").append(text="abc", timeout_s=120)
    await worker.stop()
    await operator.close()


async def in_place(operator: Client) -> dict[str, str]:
    """Return the node that leads each stream now, by stream."""
    found = {}
    async with asyncio.timeout(60):
        for stream in STREAMS:
            while stream not in found:
                with contextlib.suppress(nats.errors.Error, KeyError):
                    reply = await operator.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=2)
                    found[stream] = json.loads(reply.data)["cluster"]["leader"]
    return found


def test_the_routes_of_a_nats_cluster_use_one_password_from_a_private_file_that_later_runs_keep(
    tmp_path: Path,
) -> None:
    run(tmp_path, "acme", "--cluster", "n1.lan,n2.lan:7222,n3.lan")
    routes = (tmp_path / "routes.conf").read_text()
    (password,) = re.findall(r'password: "([\w-]{43})"', routes)
    assert re.findall(r"nats://nodes:([\w-]+)@([\w.:]+)", routes) == [
        (password, "n1.lan:6222"),
        (password, "n2.lan:7222"),
        (password, "n3.lan:6222"),
    ]
    assert stat.S_IMODE((tmp_path / "routes.conf").stat().st_mode) == 0o600
    check = [nats_server_program(), "-t", "-c", str(tmp_path / "cluster.conf"), "--name", "n1"]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 0
    assert not (tmp_path / "nats-server.conf").exists()
    (tmp_path / "cluster.conf").write_text("mine")
    told = run(tmp_path, "beta", "--cluster", "a,b,c")
    again = (tmp_path / "routes.conf").read_text()
    assert re.findall(r"nodes:([\w-]+)@(\w)", again) == [(password, host) for host in "abc"]
    assert (tmp_path / "cluster.conf").read_text() == "mine"
    assert password not in told
    run(tmp_path, "gamma")
    assert (tmp_path / "routes.conf").read_text() == again


@pytest.mark.parametrize("hosts", ["n1", "n1,n2", "n1,n2,", "n1,n2,n3,n4", ""])
def test_a_nats_cluster_of_any_number_of_hosts_but_three_is_refused(tmp_path: Path, hosts: str) -> None:
    done = CliRunner().invoke(main, [str(tmp_path / "nats"), "acme", "--cluster", hosts])
    assert done.exit_code == 2
    assert "it must be three hosts, joined by commas" in done.output
    assert not (tmp_path / "nats").exists()


async def test_every_nats_cluster_node_returns_a_log_entry_just_stored_and_not_an_entry_just_deleted(
    nodes: Nodes,
) -> None:
    """A plain direct get may be answered by any replica; here, about one answer in seven was out of date."""
    operator = await nodes.operator()
    js, names, key = operator.jetstream(), Subjects("turnkeep"), SessionKey("default", "s")
    subjects = [names.every("in")]
    await js.add_stream(
        StreamConfig(name=names.log_stream, subjects=subjects, allow_direct=True, num_replicas=3)
    )
    await in_step(operator, names.log_stream)
    clients = [await nats.connect(url, nkeys_seed=nodes.seed("worker")) for url in nodes.url.split(",")]
    journals = [Journal(client, names) for client in clients]
    for _ in range(100):
        before, stored = [await js.publish(names.of(key, "in"), b"x") for _ in range(2)]
        for journal in journals:
            entries, _ = await journal.page(key, "in", before.seq)
            assert [entry.seq for entry in entries] == [stored.seq]
        await js.delete_msg(names.log_stream, stored.seq)
        for journal in journals:
            assert await journal.page(key, "in", before.seq) == ([], 0)
    for client in (*clients, operator):
        await client.close()
