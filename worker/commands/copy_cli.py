"""The commands `export` and `import`: a session's log by NATS, its KV from and to this machine's cache."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import UNSET

from cache.admin import archive, survey
from cache.names.errors import CacheError, DirectoryLockedError
from ops.log import copies, importing
from turnkeep_client.errors import NoWorkerError, RequestFailedError
from turnkeep_client.subjects import session_key
from worker.formatting import size
from worker.keys import cache_access

from .flags import check_target, force_option, load_settings, tenant_option, with_settings
from .progress import terminal_progress
from .talking import CLIENT_SETTINGS, talk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from turnkeep_client.client import Client
    from worker.settings import Settings


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """Turn errors of the cache and the disk into one line."""
    try:
        yield
    except DirectoryLockedError as error:
        raise copies.CopyError(
            f"the cache {error.directory} is in use by process {error.owner}; import without --kv beside the"
            " worker, or stop it first"
        ) from None
    except (CacheError, sqlite3.Error) as error:
        raise copies.CopyError(str(error)) from None
    except OSError as error:
        raise copies.CopyError(f"{error.filename}: {error.strerror}") from None


@click.command()
@click.argument("session")
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE")
@tenant_option
@click.option("--kv", is_flag=True, help="With its KV, of a worker that runs on this machine.")
@force_option
@with_settings("cache_key_file", *CLIENT_SETTINGS)
def export(
    config: Path | None, session: str, target: Path, tenant: str, kv: bool, force: bool, **flags: Any
) -> None:
    """Write SESSION's log to FILE, which another log can import and `turnkeep replay` can play.

    Requests without a result are left out.
    """
    settings = load_settings(config, flags)
    key = session_key(tenant, session)
    check_target(target, force=force)

    async def run(client: Client) -> copies.Manifest:
        entries = await client.log(session)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            snapshots, identity, place = Path(folder) / "kv.tar", None, settings.data_dir / "snapshots"
            if kv:
                info = await client.session(session).info(limit=0, snapshot=True)
                if info.snapshot is UNSET:
                    raise copies.CopyError(f"the worker has stored no KV of {session} yet; leave out --kv")
                access = cache_access(settings)
                archive.export(place, [info.snapshot], snapshots, access)
                identity = archive.identity_of(place, info.snapshot, access)
            return copies.export(target, key, entries, snapshots if kv else None, identity)

    with _one_line():
        written = talk(settings, tenant, run)
    what = f"{written.exchanges} requests with their results"
    kept = sum(size_bytes for _, size_bytes in written.kv)
    click.echo(f"wrote {what}{f' and {size(kept)} of KV' if kv else ''} to {target}")


@click.command("import")
@click.argument("source", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE")
@click.option("--as", "name", metavar="NAME", help="Name of the session. [default: as it was]")
@click.option("--tenant", metavar="NAME", help="Tenant of the session. [default: as it was]")
@click.option("--kv", is_flag=True, help="With its KV, into the cache of a worker that is stopped.")
@with_settings("max_disk", "min_free_disk", "cache_key_file", *CLIENT_SETTINGS)
def import_(
    config: Path | None, source: Path, name: str | None, tenant: str | None, kv: bool, **flags: Any
) -> None:
    """Put the session in FILE into the log, beside a worker or without one.

    The file is checked before anything is stored. It is trusted content: import only from people whom you
    would let forge the session's answers, and with --kv, change the model.
    """
    settings = load_settings(config, flags)
    manifest, lines = copies.read(source)
    key = session_key(tenant or manifest.tenant, name or manifest.session)
    with _one_line():
        if kv:
            _check_kv(manifest, key.tenant, settings, source)

        async def run(client: Client) -> str:
            into = importing.Import(client, key)
            await into.check()
            if kv:
                _import_kv(settings, source)
            with terminal_progress(of_bytes=False) as progress:
                await into.run(lines, progress)
            return await _said_by_worker(client, key.session)

        said = talk(settings, key.tenant, run)
    click.echo(f"imported {key}: {manifest.exchanges} requests with their results{said}")


async def _said_by_worker(client: Client, session: str) -> str:
    """Say what a worker, if one serves, makes of the session."""
    try:
        return f", at position {(await client.session(session).info(limit=0)).position}"
    except NoWorkerError:
        return ""
    except RequestFailedError as error:
        return "" if error.code == "unknown_session" else f"; the worker says {error}"


def _check_kv(manifest: copies.Manifest, tenant: str, settings: Settings, source: Path) -> None:
    """Raise `CopyError` where no worker here could use the KV of a file."""
    place = settings.data_dir / "snapshots"
    if not manifest.kv:
        raise copies.CopyError(f"{source} holds no KV; leave out --kv")
    if tenant != manifest.tenant:
        raise copies.CopyError(
            f"KV serves the tenant it was made for, {manifest.tenant}; leave out --kv or --tenant"
        )
    if not place.is_dir():
        raise copies.CopyError(f"there is no cache in {place}; a worker with this --data-dir makes one")
    here = {
        usage.model.identity: usage.model.name
        for usage in survey.inspect(place, cache_access(settings)).usage
    }
    if here and manifest.identity not in here:
        names = ", ".join(sorted({name or "another model" for name in here.values()}))
        raise copies.CopyError(
            f"its KV is of another model or settings ({manifest.model}) than this cache's ({names});"
            " leave out --kv"
        )


def _import_kv(settings: Settings, source: Path) -> None:
    place = settings.data_dir / "snapshots"
    added = archive.import_files(
        place,
        source,
        cache_access(settings),
        max_bytes=settings.max_disk,
        min_free_bytes=settings.min_free_disk,
    )
    reasons = [
        (name, why) for name, why in added.skipped if name not in copies.OWN and why != "there already"
    ]
    if reasons:
        raise copies.CopyError(
            f"{len(reasons)} files of its KV cannot be taken: {reasons[0][0]}: {reasons[0][1]}"
        )
    click.echo(f"added {added.num_files} files, {size(added.size_bytes)} of KV")
