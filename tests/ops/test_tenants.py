"""Two tenants on a NATS server with the generated configuration: each can reach only its own sessions."""

import asyncio
import contextlib
import json
import shlex
import signal
import stat
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import nats
import nats.errors
import nats.js.errors
import pytest
from click.testing import CliRunner
from nats.aio.client import Client
from parts import free_port, nats_server_program, until

import turnkeep_client.client
from gateway.app import Gateway
from gateway.keys import Keys
from ops.nats.tenants import main
from tests.commands.command_runs import command
from turnkeep_client import wire
from turnkeep_client.client import connect
from turnkeep_client.errors import NotPermittedError
from turnkeep_client.wire import Backlog
from worker.wire.connection import confirm_subscriptions


async def add(folder: Path, *arguments: str) -> str:
    return await asyncio.to_thread(run, folder, *arguments)


def run(folder: Path, *arguments: str) -> str:
    done = CliRunner().invoke(main, [str(folder), *arguments])
    assert done.exit_code == 0, done.output
    return done.output


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: Any = None
        self.log = folder.with_suffix(".log")
        self.url = f"nats://127.0.0.1:{free_port()}"

    def seed(self, name: str) -> str:
        return str(self.folder / f"{name}.nk")

    async def raw(self, name: str, heard: list[str] | None = None) -> Client:
        """Connect with plain nats-py as the user of a seed; the server's refusals are added to `heard`."""

        async def note(error: Exception) -> None:
            if heard is not None:
                heard.append(str(error))

        return await nats.connect(
            self.url, nkeys_seed=self.seed(name), error_cb=note, reconnect_time_wait=0.1
        )


@pytest.fixture
async def server(tmp_path: Path, local_worker: Any) -> AsyncIterator[Server]:
    """A NATS server with a worker, and accounts for the tenants acme and beta."""
    folder = tmp_path / "Application Support"
    made = Server(folder)
    assert "run this again with --nats" in await add(folder, "acme", "beta")
    port = made.url.rpartition(":")[2]
    command = [nats_server_program(), "-c", "nats-server.conf", "-p", port]
    with made.log.open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stderr=log)  # noqa: ASYNC220
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", int(port))
                writer.close()
                break
            await asyncio.sleep(0.05)
        seed = folder / "worker.nk"
        worker = await local_worker(nats=made.url, nats_creds=seed, prefix="turnkeep")
        printed = await add(folder, "--nats", made.url)
        assert f"--tenant beta --nats-creds {shlex.quote(str(made.seed('beta.client')))}" in printed
        made.process = process
        yield made
        await worker.stop()
    finally:
        process.kill()
        process.wait()


async def mirrored(client: Client, num_entries: int) -> list[str]:
    """Wait until a tenant's mirror of the log has `num_entries` entries; return their subjects."""
    found: list[str] = []
    async with asyncio.timeout(10):
        while len(found) < num_entries:
            replies = await client.subscribe(client.new_inbox())
            request = {"seq": 1, "batch": 100, "next_by_subj": "turnkeep.>"}
            body = json.dumps(request).encode()
            await client.publish("$JS.API.DIRECT.GET.turnkeep_log", body, reply=replies.subject)
            found = []
            while subject := ((await replies.next_msg(5)).headers or {}).get("Nats-Subject"):
                found.append(subject)
            await replies.unsubscribe()
    return found


async def test_two_tenants_can_use_the_same_session_name_and_each_reads_only_its_own_log(
    server: Server,
) -> None:
    told = {}
    for tenant in ("acme", "beta"):
        seed = server.seed(f"{tenant}.client")
        async with connect(server.url, tenant=tenant, nkeys_seed=seed) as client:
            answer = client.session("s").generate(text=tenant, max_tokens=4)
            chunks = [chunk async for chunk in answer]
            assert [token for chunk in chunks for token in chunk.tokens] == list(answer.result.tokens)
            assert (await client.session("s").info()).position == answer.result.position
            told[tenant] = answer.result
    for tenant in ("acme", "beta"):
        raw = await server.raw(f"{tenant}.client")
        assert await mirrored(raw, 2) == [f"turnkeep.{tenant}.s.in", f"turnkeep.{tenant}.s.out"]
        await raw.close()


async def test_a_gateway_that_logs_in_to_a_tenants_nats_account_is_healthy_and_answers(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "API_S", 600)  # it asks first for the log's sessions, and is denied at once
    (tmp_path / "keys").write_text("k acme\n")

    async def connected(tenant: str, _model: str) -> Any:
        return await connect(server.url, tenant=tenant, nkeys_seed=server.seed("acme.client"))

    gateway = Gateway(connected, Keys.read(tmp_path / "keys"), idle_s=60.0)
    asked = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}
    transport = httpx2.ASGITransport(gateway.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as http:
        answer = await http.post("/v1/chat/completions", json=asked, headers={"x-api-key": "k"})
        assert answer.status_code == 200, answer.text
        assert (await http.get("/health")).status_code == 200
    await gateway.connections.close()


async def unrefused(client: Client, heard: list[str], publish: list[str], subscribe: list[str]) -> list[str]:
    """Publish and subscribe to subjects as a client that hears refusals; return the subjects not refused."""
    for subject in publish:
        await client.publish(subject, b"{}")
    for subject in subscribe:
        await client.subscribe(subject)
    await client.flush()
    await client.flush()
    refused = "\n".join(heard).lower()
    return [one for one in (*publish, *subscribe) if f'"{one.lower()}"' not in refused]


async def test_a_tenants_nats_user_can_neither_publish_as_other_tenants_nor_receive_their_messages(
    server: Server,
) -> None:
    refused: list[str] = []
    beta = await server.raw("beta.client", refused)
    kinds = ("commit", "out", "chunk.g", "tok.g", "checkpoint", "attempt", "dead", "closed")
    publish = [
        *(f"turnkeep.acme.s.{kind}" for kind in ("in", "image.x", "ctl", "ask", *kinds)),
        *(f"turnkeep.beta.s.{kind}" for kind in kinds),
        "turnkeep._metrics.test",
        *(f"$SRV.{verb}" for verb in ("PING", "INFO.turnkeep", "STATS")),
        *(f"$JS.API.STREAM.{deed}.turnkeep_log" for deed in ("UPDATE", "DELETE", "PURGE", "MSG.GET")),
        "$JS.API.CONSUMER.CREATE.turnkeep_log.x.turnkeep.acme.>",
        "JS.turnkeep.API.CONSUMER.CREATE.turnkeep_log.x.turnkeep.beta.>",
        "$JS.FC.x",
    ]
    hear = ["turnkeep.acme.s.out", "turnkeep.acme.s.tok.g", "turnkeep.>", ">", "turnkeep._metrics.*"]
    hear += ["deliver.>", "turnkeep.*.*.out", "$SRV.>"]
    assert await unrefused(beta, refused, publish, hear) == []
    await hears_nothing(server, beta)


async def hears_nothing(server: Server, client: Client) -> None:
    """Let the tenant acme talk; nothing may reach an inbox of another user, all of which it listens to."""
    inbox = await client.subscribe("_INBOX.>")
    await confirm_subscriptions(client)
    seed = server.seed("acme.client")
    async with connect(server.url, tenant="acme", nkeys_seed=seed) as acme:
        await acme.session("s").generate(text="abc", max_tokens=4)
        await acme.session("s").info()
    await client.flush()
    assert inbox.pending_msgs == 0, "answers to workers and tenants are in other accounts"
    await client.close()


async def test_a_forged_reply_subject_cannot_write_into_another_tenants_account(server: Server) -> None:
    """The server looks up the reply subject of a message in the account of the sender."""
    acme, beta = await server.raw("acme.client"), await server.raw("beta.client")
    forged = await acme.subscribe("turnkeep.acme.*.out")
    inbox = await acme.subscribe("_INBOX.acme")
    await confirm_subscriptions(acme)
    body = json.dumps({"v": 1, "op": "append", "id": "a", "text": "x"}).encode()
    for reply in (
        "turnkeep.acme.s.out",
        "turnkeep.acme.s.commit",
        "_INBOX.acme",
        "$JS.API.STREAM.PURGE.turnkeep_log",
    ):
        for kind in ("in", "ctl", "ask"):
            await beta.publish(f"turnkeep.beta.s.{kind}", body, reply=reply)
    await beta.flush()
    read = await mirrored(beta, 5)  # four requests and at least one result
    assert all(subject.startswith("turnkeep.beta.s.") for subject in read)
    await acme.flush()
    assert (forged.pending_msgs, inbox.pending_msgs) == (0, 0)
    await acme.close()
    await beta.close()


async def test_the_nats_user_for_metrics_receives_the_workers_metrics_and_the_counts_of_waiting_requests(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turnkeep_client.client, "METRICS_S", 600)  # asking the worker is denied at once
    seed = server.seed("metrics")
    async with connect(server.url, nkeys_seed=seed) as client:
        async with asyncio.timeout(10):
            heard = await anext(client.metrics())
        assert heard.worker == "test"
        assert (await client.backlog()) == Backlog(0, 0, 0)
    shown = await command("info", "--nats", server.url, "--nats-creds", seed)
    assert (shown.returncode, shown.stderr) == (0, "")


async def test_the_nats_user_for_metrics_can_publish_and_subscribe_only_to_its_few_allowed_subjects(
    server: Server,
) -> None:
    refused: list[str] = []
    watcher = await server.raw("metrics", refused)
    kinds = ("in", "image.x", "ctl", "ask", "commit", "out", "chunk.g", "checkpoint", "dead", "closed")
    publish = [
        *(f"turnkeep.acme.s.{kind}" for kind in kinds),
        "turnkeep._metrics.test",
        "_INBOX.x",
        "$SRV.PING",
        "$JS.API.INFO",
        "$JS.API.STREAM.LIST",
        *(f"$JS.API.STREAM.{deed}.turnkeep_log" for deed in ("INFO", "UPDATE", "DELETE", "PURGE", "MSG.GET")),
        *(f"$JS.API.CONSUMER.{deed}.turnkeep_log.worker" for deed in ("CREATE", "DELETE", "MSG.NEXT")),
        "$JS.API.CONSUMER.INFO.turnkeep_tok.worker",
        "$JS.API.CONSUMER.INFO.KV_turnkeep_workers.worker",
        *(f"$JS.API.DIRECT.GET.{name}" for name in ("turnkeep_log", "turnkeep_tok", "KV_turnkeep_workers")),
        "$KV.turnkeep_workers.worker",
        "$SYS.REQ.SERVER.PING",
    ]
    hear = ["turnkeep.>", "turnkeep.acme.s.out", "turnkeep.*.*.tok.*", "$JS.>", "$SRV.>", "$SYS.>", ">"]
    assert await unrefused(watcher, refused, publish, hear) == []
    await hears_nothing(server, watcher)


async def reloaded(server: Server, *arguments: str) -> None:
    """Change limits or keys, and wait until the server has reloaded; meanwhile it may refuse all clients."""
    await add(server.folder, *arguments)
    server.process.send_signal(signal.SIGHUP)
    await until(lambda: "Reloaded server configuration" in server.log.read_text())


async def test_a_tenant_at_its_connection_limit_is_refused_at_once_and_other_tenants_still_connect(
    server: Server,
) -> None:
    await reloaded(server, "--max-connections", "2")
    seeds = {tenant: server.seed(f"{tenant}.client") for tenant in ("acme", "beta")}
    held = [await server.raw("acme.client") for _ in range(2)]
    with pytest.raises(NotPermittedError) as told:
        await connect(server.url, tenant="acme", nkeys_seed=seeds["acme"], connect_timeout_s=300)
    assert str(told.value) == (
        f"the NATS server at {server.url} has no connection left for this account; close some, or have its"
        " limit raised"
    )
    async with connect(server.url, tenant="beta", nkeys_seed=seeds["beta"]) as client:
        await client.session("s").generate(text="abc", max_tokens=2)
    await held.pop().close()
    async with connect(server.url, tenant="acme", nkeys_seed=seeds["acme"]) as client:
        await client.session("s").generate(text="abc", max_tokens=2)
    await held.pop().close()


async def test_creating_a_log_mirror_larger_than_its_nats_account_allows_fails_and_names_the_mirror(
    server: Server,
) -> None:
    await reloaded(server, "--max-mib", "1")
    arguments = [str(server.folder), "--max-mib", "64", "--nats", server.url]
    done = await asyncio.to_thread(CliRunner().invoke, main, arguments)
    assert done.exit_code == 1
    assert "the mirror turnkeep_log of acme cannot be made: " in done.output
    assert "storage" in done.output


async def test_after_a_key_rotation_the_old_tenant_key_is_refused_and_the_new_key_reads_all_data(
    server: Server,
) -> None:
    old = server.folder / "acme.old.nk"
    old.write_bytes((server.folder / "acme.client.nk").read_bytes())
    beta = await connect(server.url, tenant="beta", nkeys_seed=server.seed("beta.client"))
    async with connect(server.url, tenant="acme", nkeys_seed=str(old)) as client:
        before = await client.session("s").generate(text="abc", max_tokens=4)
        raw = await server.raw("acme.client")
        await mirrored(raw, 2)
        body = json.dumps({"type": "append", "id": "last", "text": "asked with the old key"}).encode()
        await raw.jetstream().publish("turnkeep.acme.other.in", body)
        await raw.close()
    await reloaded(server, "--rotate", "acme")
    assert old.read_bytes() != (server.folder / "acme.client.nk").read_bytes()
    with pytest.raises(NotPermittedError, match="refuses the credentials"):
        await connect(server.url, tenant="acme", nkeys_seed=str(old))
    seed = server.seed("acme.client")
    async with connect(server.url, tenant="acme", nkeys_seed=seed) as client:
        read = await client.log("s")
        assert json.loads(read[-1].body)["tokens"] == list(before.tokens)
        again = await client.session("s").append(text="def")
        async with asyncio.timeout(20):
            while len(answered := await client.log("other")) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert json.loads(answered[-1].body)["type"] == "appended"
    assert again.position == before.position + 3
    await beta.session("s").generate(text="abc", max_tokens=2)
    await beta.close()


def test_rotating_a_tenants_key_changes_no_other_key_and_fails_for_an_unknown_tenant(tmp_path: Path) -> None:
    run(tmp_path, "acme", "beta")
    kept = {path.name: path.read_bytes() for path in tmp_path.glob("*.nk")}
    done = CliRunner().invoke(main, [str(tmp_path), "--rotate", "gamma"])
    assert (done.exit_code, "there is no tenant gamma in" in done.output) == (1, True)
    run(tmp_path, "--rotate", "acme")
    now = {path.name: path.read_bytes() for path in tmp_path.glob("*.nk")}
    assert {name for name in kept | now if kept.get(name) != now.get(name)} == {"acme.client.nk"}
    assert stat.S_IMODE((tmp_path / "acme.client.nk").stat().st_mode) == 0o600


def test_tenant_key_seeds_are_readable_only_by_their_owner_and_kept_when_a_tenant_is_added(
    tmp_path: Path,
) -> None:
    run(tmp_path, "acme")
    seeds = {path.name: path.read_bytes() for path in tmp_path.glob("*.nk")}
    assert sorted(seeds) == ["acme.client.nk", "acme.mirrors.nk", "metrics.nk", "worker.nk"]
    (tmp_path / "nats-server.conf").write_text("mine")
    printed = run(tmp_path, "beta")
    assert all((tmp_path / name).read_bytes() == seed for name, seed in seeds.items())
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tmp_path.glob("*.nk"))
    assert (tmp_path / "nats-server.conf").read_text() == "mine"
    for seed in seeds.values():
        assert seed.decode() not in printed + (tmp_path / "accounts.conf").read_text()


@pytest.mark.parametrize("name", ["_sys", "a.b", "*", ""])
def test_adding_a_tenant_with_a_reserved_or_ill_formed_name_is_refused_and_writes_no_key_file(
    tmp_path: Path, name: str
) -> None:
    done = CliRunner().invoke(main, [str(tmp_path), name])
    assert done.exit_code == 1
    assert "it must be" in done.output
    assert not list(tmp_path.glob("*.nk"))


async def test_adding_a_tenant_fails_if_the_running_nats_server_has_not_loaded_the_tenants_account_yet(
    server: Server,
) -> None:
    done = await asyncio.to_thread(
        CliRunner().invoke, main, [str(server.folder), "gamma", "--nats", server.url]
    )
    assert done.exit_code == 1
    assert "does not take gamma (refuses the credentials" in done.output
    assert "restart it with this configuration" in done.output
