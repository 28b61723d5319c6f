"""The commands `export` and `import`: copy a session's log, over NATS; an export may have its KV, too."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import UNSET

from cache.admin import archive
from ops.log import importing, session_file
from turnkeep_client.errors import NoWorkerError, RequestFailedError
from turnkeep_client.session_log import read
from turnkeep_client.subjects import session_key
from worker.observe.progress import terminal_progress
from worker.process.cache_parts import cache_codec
from worker.process.formatting import size

from .cache import in_one_line
from .flags import check_target, force_option, tenant_option, with_settings
from .nats_connection import CLIENT_SETTINGS, no_session, talk

if TYPE_CHECKING:
    from turnkeep_client.client import Client

    from .flags import GivenSettings


@click.command()
@click.argument("session")
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE")
@tenant_option
@click.option("--kv", is_flag=True, help="With its KV, of a worker that runs on this machine.")
@force_option
@with_settings("cache_key_file", *CLIENT_SETTINGS)
def export(given: GivenSettings, session: str, target: Path, tenant: str, kv: bool, force: bool) -> None:
    """Write a session to a file, with its KV if wanted.

    Another log can import the file, and `turnkeep replay` can play it. Requests without a result are left
    out.
    """
    settings = given.load()
    key = session_key(tenant, session)
    check_target(target, force=force)

    async def run(client: Client) -> session_file.Manifest:
        log = await read(client.stored, key)
        if not log.asked:
            raise await no_session(client, session)
        parts = await session_file.read_parts(client, log)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            snapshots = Path(folder) / "kv.tar"
            if kv:
                info = await client.session(session).info(limit=0, snapshot=True)
                if info.snapshot is UNSET:
                    raise session_file.CopyError(
                        f"the worker has stored no KV of {session} yet; leave out --kv"
                    )
                place = settings.data_dir / "snapshots"
                archive.export(place, [info.snapshot], snapshots, cache_codec(settings))
            return session_file.export(target, log, parts, snapshots if kv else None)

    with in_one_line(target):
        written = talk(settings, tenant, run)
    what = f"{written.exchanges} requests with their results"
    kept = sum(size_bytes for _, size_bytes in written.kv)
    click.echo(f"wrote {what}{f' and {size(kept)} of KV' if kv else ''} to {target}")


@click.command("import")
@click.argument("source", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE")
@click.option("--as", "name", metavar="NAME", help="Name of the session. [default: as it was]")
@click.option("--tenant", metavar="NAME", help="Tenant of the session. [default: as it was]")
@with_settings(*CLIENT_SETTINGS)
def import_(given: GivenSettings, source: Path, name: str | None, tenant: str | None) -> None:
    """Put the session in a file into the log.

    It works beside a worker or without one. `turnkeep cache import` reads the KV in the same file.

    The file is checked before anything is stored. It is trusted content: import only from people whom you
    would let forge the session's answers.
    """
    manifest, lines = session_file.read(source)
    key = session_key(tenant or manifest.tenant, name or manifest.session)

    async def run(client: Client) -> str:
        into = importing.Import(client, key)
        await into.check()
        with terminal_progress(of_bytes=False) as progress:
            await into.run(lines, progress)
        return await _said_by_worker(client, key.session)

    said = talk(given.load(), key.tenant, run)
    click.echo(f"imported {key}: {manifest.exchanges} requests with their results{said}")


async def _said_by_worker(client: Client, session: str) -> str:
    """Return, as a phrase, the position that the worker reports, or its error; empty without a worker."""
    try:
        return f", at position {(await client.session(session).info(limit=0)).position}"
    except NoWorkerError:
        return ""
    except RequestFailedError as error:
        return "" if error.code == "unknown_session" else f"; the worker says {error}"
