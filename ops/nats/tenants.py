"""Makes the accounts of a NATS server for tenants that do not trust each other, and their nkeys.

The workers' account holds the streams and exports a tenant's subjects only to the account of the same name:
the server compares the two (`account_token_position`). Each tenant's account holds a mirror of its own part
of the streams, and its clients read missed messages from this mirror. They may not read the workers' streams,
because these contain the messages of all tenants (ADR 0038). Monitoring (exporter, top, console) has an
account too, for the workers' metrics and the state of the log's consumer. An account whose name begins with
an underscore is not a tenant.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import nkeys

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.nats_client import Nats, NatsError, refusal
from turnkeep_client.subjects import CONSUMER, DEFAULT_PREFIX, Subjects, check_id

from .routes import CLUSTER, ROUTES, write_routes

WORKERS: Final = "_turnkeep"
METRICS: Final = "_metrics"
SYSTEM: Final = "_sys"
_CONF: Final = "nats-server.conf"
_ACCOUNTS: Final = "accounts.conf"
_CLIENT: Final = ".client.nk"
_PATIENCE_S: Final = 10.0
_MIB: Final = 2**20
#: The prefix of other accounts' requests to the workers' JetStream; requests to their own have $JS.API.
_API: Final = "JS.turnkeep.API"
#: The stream operations allowed to the user that makes the mirrors.
_MIRRORING: Final = ("CREATE", "UPDATE")


def make_seed(path: Path) -> str:
    """Return the public key of the nkey seed in a file; if the file is missing, create it with a new seed."""
    with contextlib.suppress(FileExistsError), open(path, "xb", opener=_private) as file:
        file.write(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
    return str(nkeys.from_seed(bytearray(path.read_bytes().strip())).public_key.decode())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountLimits:
    """The limits of one tenant's account. Subscriptions are counted for each connection."""

    max_bytes: int = 256 * _MIB
    max_connections: int = 100
    max_subscriptions: int = 1000
    max_payload_bytes: int | None = None  # None: the server's limit
    copies: int = 1  # replicas of each stored message; all count


def accounts(
    subjects: Subjects, users: dict[str, tuple[str, str]], worker: str, metrics: str, limits: AccountLimits
) -> dict[str, Any]:
    """Build the server's accounts. `users` maps a tenant to the public keys of its clients and its mirrors.

    `worker` and `metrics` are the public keys of the workers and of monitoring.
    """
    position = subjects.prefix.count(".") + 2
    mine = {"account_token_position": position}
    exports: list[dict[str, Any]] = [
        # An answer may take long to begin; by default the server drops the reply subject after two minutes.
        *(
            {
                "service": _of("*", subjects, kind),
                "response_type": "Stream",
                "response_threshold": "1h",
                **mine,
            }
            for kind in ("ctl", "ask")
        ),
        *({"service": _of("*", subjects, kind), **mine} for kind in ("in", "image.*")),
        *({"stream": _of("*", subjects, kind), **mine} for kind in ("out", "tok.*")),
        # The filter is a part of the subject, and the server refuses a different filter in the body.
        *(
            {"service": f"$JS.API.{_mirrored(subjects, stream, '*')}", "account_token_position": 6 + position}
            for stream in (subjects.log_stream, subjects.token_stream)
        ),
        {"stream": "deliver.*.>", "account_token_position": 2},
        {"service": "$JS.FC.>"},
        {"stream": subjects.metrics("*"), "accounts": [METRICS]},
        {"service": _backlog(subjects), "accounts": [METRICS]},
    ]
    made = {
        SYSTEM: {},
        METRICS: _watcher(subjects, metrics),
        WORKERS: {"jetstream": "enabled", "users": [{"nkey": worker}], "exports": exports},
    }
    for tenant, (client, mirrors) in users.items():
        made[tenant] = _tenant(subjects, tenant, client, mirrors, limits)
    return made


def _watcher(subjects: Subjects, key: str) -> dict[str, Any]:
    heard, asked = subjects.metrics("*"), _backlog(subjects)
    elsewhere = asked.replace("$JS.API", _API)
    return {
        "users": [{"nkey": key, "permissions": {"publish": [elsewhere], "subscribe": [heard, "_INBOX.>"]}}],
        "imports": [
            {"stream": {"account": WORKERS, "subject": heard}},
            {"service": {"account": WORKERS, "subject": asked}, "to": elsewhere},
        ],
        # With the same subject, the server would also answer that this account has no JetStream. The server
        # maps subjects before it checks permissions.
        "mappings": {asked: elsewhere},
    }


def _backlog(subjects: Subjects) -> str:
    return f"$JS.API.CONSUMER.INFO.{subjects.log_stream}.{CONSUMER}"


def _tenant(
    subjects: Subjects, tenant: str, client: str, mirrors: str, limits: AccountLimits
) -> dict[str, Any]:
    streams = (subjects.log_stream, subjects.token_stream)
    publish = [_of(tenant, subjects, kind) for kind in ("in", "image.*", "ctl", "ask")]
    hear = [_of(tenant, subjects, kind) for kind in ("out", "tok.*")]

    def taken(kind: str, subject: str, to: str | None = None) -> dict[str, Any]:
        return {kind: {"account": WORKERS, "subject": subject}} | ({"to": to} if to else {})

    payload = {"max_payload": limits.max_payload_bytes} if limits.max_payload_bytes else {}
    return {
        "jetstream": {"max_file": limits.max_bytes * limits.copies, "max_mem": 0},
        "limits": {
            "max_connections": limits.max_connections,
            "max_subscriptions": limits.max_subscriptions,
            **payload,
        },
        "users": [
            _user(client, [*publish, *(f"$JS.API.DIRECT.GET.{stream}" for stream in streams)], hear),
            _user(
                mirrors, [f"$JS.API.STREAM.{deed}.{s}" for s in streams for deed in ("CREATE", "UPDATE")], []
            ),
        ],
        "imports": [
            *(taken("service", subject) for subject in publish),
            *(taken("stream", subject) for subject in hear),
            *(
                taken(
                    "service",
                    f"$JS.API.{_mirrored(subjects, s, tenant)}",
                    f"{_API}.{_mirrored(subjects, s, tenant)}",
                )
                for s in streams
            ),
            taken("stream", f"deliver.{tenant}.>"),
            taken("service", "$JS.FC.>"),
        ],
    }


def _user(nkey: str, publish: list[str], hear: list[str]) -> dict[str, Any]:
    """Build a user with this key, who may publish on `publish`, and subscribe to `hear` and to replies."""
    return {"nkey": nkey, "permissions": {"publish": [*publish], "subscribe": [*hear, "_INBOX.>"]}}


def _of(tenant: str, subjects: Subjects, kind: str) -> str:
    return f"{subjects.prefix}.{tenant}.*.{kind}"


def _mirrored(subjects: Subjects, stream: str, tenant: str) -> str:
    return f"CONSUMER.CREATE.{stream}.*.{subjects.prefix}.{tenant}.>"


def write(
    folder: Path, tenants: tuple[str, ...], prefix: str, limits: AccountLimits, rotated: tuple[str, ...] = ()
) -> list[str]:
    """Add tenants to the configuration in a folder, and make missing seed files; return all of its tenants.

    All tenants get the `limits`. The clients of the tenants in `rotated` get a new seed. Raises
    `TurnkeepError` if such a tenant does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not ((folder / _CONF).exists() or (folder / CLUSTER).exists()):
        shutil.copy(Path(__file__).with_name(_CONF), folder / _CONF)
    known = {path.name.removesuffix(_CLIENT) for path in folder.glob(f"*{_CLIENT}")}
    if unknown := sorted(set(rotated) - known):
        raise TurnkeepError(f"there is no tenant {unknown[0]} in {folder}; add it first")
    for tenant in rotated:
        fresh = folder / f"{tenant}.fresh.nk"
        fresh.unlink(missing_ok=True)
        make_seed(fresh)
        fresh.replace(folder / f"{tenant}{_CLIENT}")
    every = sorted(known | {check_id("tenant", tenant) for tenant in tenants})
    users = {
        tenant: (make_seed(folder / f"{tenant}{_CLIENT}"), make_seed(folder / f"{tenant}.mirrors.nk"))
        for tenant in every
    }
    worker, metrics = (make_seed(folder / f"{name}.nk") for name in ("worker", "metrics"))
    made = accounts(Subjects(prefix), users, worker, metrics, limits)
    fresh = folder / (_ACCOUNTS + ".new")
    fresh.write_text("".join(f"{json.dumps(name)}: {json.dumps(made[name], indent=1)}\n" for name in made))
    fresh.replace(folder / _ACCOUNTS)
    return every


async def mirror(
    folder: Path, tenant: str, url: str, subjects: Subjects, keep_s: float, max_bytes: int
) -> None:
    """Create the mirrors of the streams in a tenant's account, or update the limits of existing mirrors.

    Connects with the tenant's seed in `folder`. Raises `TurnkeepError`.
    """
    client = Nats()
    said = "no answer"

    async def note(error: Exception) -> None:
        nonlocal said
        said = refusal(error) or str(error)

    try:
        async with asyncio.timeout(_PATIENCE_S):
            await client.connect(
                url.split(","),
                nkeys_seed_str=(folder / f"{tenant}.mirrors.nk").read_text(),
                error_cb=note,
                allow_reconnect=False,
            )
            for stream in (subjects.log_stream, subjects.token_stream):
                config = _mirror(stream, f"{subjects.prefix}.{tenant}.>", tenant, keep_s, max_bytes // 4)
                await _make(client, config | {"num_replicas": _copies(folder)}, tenant)
    except (TimeoutError, OSError, NatsError) as error:
        why = said if isinstance(error, TimeoutError) else refusal(error) or str(error)
        raise TurnkeepError(
            f"the NATS server at {url} does not take {tenant} ({why}); restart it with this configuration"
        ) from None
    finally:
        await client.abandon()


def _copies(folder: Path) -> int:
    """Return the number of replicas of each stream: three in a cluster, else one."""
    return 3 if (folder / ROUTES).exists() else 1


def _mirror(stream: str, filter_subject: str, tenant: str, keep_s: float, max_bytes: int) -> dict[str, Any]:
    return {
        "name": stream,
        "storage": "file",
        "allow_direct": True,
        "discard": "old",
        "max_age": int(keep_s * 1e9),
        "max_bytes": max_bytes,
        "mirror": {
            "name": stream,
            "filter_subject": filter_subject,
            "external": {"api": _API, "deliver": f"deliver.{tenant}"},
        },
    }


async def _make(client: Nats, config: dict[str, Any], tenant: str) -> None:
    stream = config["name"]
    for deed in ("CREATE", "UPDATE"):
        reply = await client.request(
            f"$JS.API.STREAM.{deed}.{stream}", json.dumps(config).encode(), timeout=5
        )
        error = json.loads(reply.data).get("error")
        if error is None:
            return
    raise TurnkeepError(f"the mirror {stream} of {tenant} cannot be made: {error['description']}")


def _hosts(given: str | None) -> list[str]:
    hosts = given.split(",") if given is not None else []
    if given is not None and (len(hosts) != 3 or not all(hosts)):
        raise click.UsageError(f"--cluster is {given}; it must be three hosts, joined by commas")
    return hosts


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("tenants", nargs=-1, metavar="TENANT...")
@click.option("--prefix", default=DEFAULT_PREFIX, show_default=True, help="The workers' subject prefix.")
@click.option("--nats", "url", help="Make the tenants' mirrors on the servers at these URLs.")
@click.option(
    "--keep-s", default=86400.0, show_default=True, help="Time for which clients can read back, in seconds."
)
@click.option("--max-mib", default=256, show_default=True, help="Disk space of a tenant's account.")
@click.option("--max-connections", default=100, show_default=True, help="Connections of a tenant's account.")
@click.option(
    "--max-subscriptions", default=1000, show_default=True, help="Subscriptions of one of its connections."
)
@click.option(
    "--max-payload-kib", type=click.IntRange(1), help="Size of its messages. [default: the server's]"
)
@click.option(
    "--cluster",
    "hosts",
    metavar="HOST,HOST,HOST",
    callback=lambda _context, _option, given: _hosts(given),
    help="Write a configuration for these three nodes.",
)
@click.option(
    "--rotate", "rotated", multiple=True, metavar="TENANT", help="Make another seed for its clients."
)
def main(
    folder: Path,
    tenants: tuple[str, ...],
    prefix: str,
    url: str | None,
    keep_s: float,
    max_mib: int,
    max_connections: int,
    max_subscriptions: int,
    max_payload_kib: int | None,
    hosts: list[str],
    rotated: tuple[str, ...],
) -> None:
    """Add each TENANT to the NATS configuration in FOLDER, created if missing; print the seed files.

    Then (re)start the server, and run this again with --nats, which creates the mirrors that clients read
    from. Every run gives all tenants the limits on its command line, or the defaults.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if hosts:
        write_routes(folder, hosts)
    limits = AccountLimits(
        max_bytes=max_mib * _MIB,
        max_connections=max_connections,
        max_subscriptions=max_subscriptions,
        max_payload_bytes=max_payload_kib and max_payload_kib * 2**10,
        copies=_copies(folder),
    )
    try:
        for tenant in write(folder, tenants, prefix, limits, rotated):
            if url:
                asyncio.run(mirror(folder, tenant, url, Subjects(prefix), keep_s, max_mib * _MIB))
            click.echo(
                f"{tenant}: --tenant {tenant} --nats-creds {shlex.quote(f'{folder / tenant}.client.nk')}"
            )
    except (OSError, TurnkeepError) as error:
        raise click.ClickException(str(error)) from None
    _say_what_is_next(folder, is_cluster=limits.copies > 1, is_done=bool(url))


def _say_what_is_next(folder: Path, *, is_cluster: bool, is_done: bool) -> None:
    """Print which program uses which seed and, unless `is_done`, how to start the server."""
    click.echo(f"workers: --nats-creds {shlex.quote(str(folder / 'worker.nk'))}")
    click.echo(
        f"exporter, top, console (workers only): --nats-creds {shlex.quote(str(folder / 'metrics.nk'))}"
    )
    if not is_done:
        start = f"-c {CLUSTER} --name NAME on each node" if is_cluster else f"-c {_CONF}"
        click.echo(f"start nats-server {start} in {folder}, and run this again with --nats", err=True)


if __name__ == "__main__":
    main()
