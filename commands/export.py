"""The commands `export` and `import`: copy a session's log, over NATS, and its KV in the local cache."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import click
from msgspec import UNSET

from cache.admin import archive, survey
from cache.names.errors import CacheError, DirectoryLockedError
from cache.names.identity import differing
from ops.log import copies, importing
from turnkeep_client.errors import NoWorkerError, RequestFailedError
from turnkeep_client.subjects import Subjects, session_key
from worker.observe.logs import logs_on_stderr
from worker.process.datadir import DataDir
from worker.process.formatting import size
from worker.process.keys import cache_access
from worker.wire.credentials import client_options

from .flags import check_target, force_option, tenant_option, with_settings
from .progress import terminal_progress
from .talking import (
    CLIENT_SETTINGS,
    ignore_signals,
    interrupted_by_signals,
    located,
    no_session,
    talk,
    url_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from turnkeep_client.client import Client
    from worker.process.settings import Settings
    from worker.wire.broker import EmbeddedServer

    from .flags import Given


#: Identity fields that differ between two models; all other fields are settings and versions.
_MODEL: Final = frozenset({"weights", "config", "tokenizer"})


@contextlib.contextmanager
def _one_line(place: Path) -> Iterator[None]:
    """Turn errors of the cache and the disk within the block into a `CopyError` of one line.

    `place` is what the block writes: an error of a full disk names no file.
    """
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
        raise copies.CopyError(f"{error.filename or place}: {error.strerror}") from None


@click.command()
@click.argument("session")
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE")
@tenant_option
@click.option("--kv", is_flag=True, help="With its KV, of a worker that runs on this machine.")
@force_option
@with_settings("cache_key_file", *CLIENT_SETTINGS)
def export(given: Given, session: str, target: Path, tenant: str, kv: bool, force: bool) -> None:
    """Write a session to a file, with its KV if wanted.

    Another log can import the file, and `turnkeep replay` can play it. Requests without a result are left
    out.
    """
    settings = given.load()
    key = session_key(tenant, session)
    check_target(target, force=force)

    async def run(client: Client) -> copies.Manifest:
        entries = await client.log(session)
        if not entries:
            raise await no_session(client, session)
        parts = await copies.read_parts(client, key, entries)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            snapshots = Path(folder) / "kv.tar"
            if kv:
                info = await client.session(session).info(limit=0, snapshot=True)
                if info.snapshot is UNSET:
                    raise copies.CopyError(f"the worker has stored no KV of {session} yet; leave out --kv")
                place = settings.data_dir / "snapshots"
                archive.export(place, [info.snapshot], snapshots, cache_access(settings))
            return copies.export(target, key, entries, parts, snapshots if kv else None)

    with _one_line(target):
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
def import_(given: Given, source: Path, name: str | None, tenant: str | None, kv: bool) -> None:
    """Put the session in a file into the log.

    It works beside a worker or without one. With --kv no worker may run on the data directory. The cache and
    the log are created if they do not exist; without --nats, the NATS server runs during the import.

    The file is checked before anything is stored. It is trusted content: import only from people whom you
    would let forge the session's answers, and with --kv, change the model.
    """
    settings = located(given.load())
    manifest, lines = copies.read(source)
    key = session_key(tenant or manifest.tenant, name or manifest.session)
    with _one_line(settings.data_dir), contextlib.ExitStack() as stack:
        if kv:
            _check_kv(manifest, key.tenant, settings, source)
            stack.enter_context(_log_of(settings))

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


@contextlib.contextmanager
def _log_of(settings: Settings) -> Iterator[None]:
    """Make sure that the log exists while the block runs; create it if needed.

    Without the setting `nats`, run the data directory's NATS server until the block ends. Raises
    `TurnkeepError`, also if a worker runs on the directory.
    """
    from worker.wire import broker

    with contextlib.ExitStack() as stack:
        stack.enter_context(logs_on_stderr())
        if settings.nats is None:
            directory = stack.enter_context(DataDir.open(settings.data_dir, "import", settings.own_port))
            server = broker.EmbeddedServer(directory, settings)
            stack.enter_context(interrupted_by_signals())
            stack.callback(_end, server)
            anyio.run(server.start)
        anyio.run(_make_log, settings)
        yield


def _end(server: EmbeddedServer) -> None:
    """Stop a NATS server, unless it ran before; no signal interrupts this, as the server would go on."""
    ignore_signals()
    if not server.adopted:
        anyio.run(server.stop)


async def _make_log(settings: Settings) -> None:
    from worker.wire import connection, streams

    url = url_of(settings)
    nc = await connection.connect(url, name="turnkeep import", **client_options(settings))
    try:
        await streams.ensure_log(nc.jetstream(), Subjects(settings.prefix), settings)
    finally:
        await nc.close()


async def _said_by_worker(client: Client, session: str) -> str:
    """Return, as a phrase, the position that the worker reports, or its error; empty without a worker."""
    try:
        return f", at position {(await client.session(session).info(limit=0)).position}"
    except NoWorkerError:
        return ""
    except RequestFailedError as error:
        return "" if error.code == "unknown_session" else f"; the worker says {error}"


def _check_kv(manifest: copies.Manifest, tenant: str, settings: Settings, source: Path) -> None:
    """Raise `CopyError` if no worker on this data directory could use the KV in the file."""
    place = settings.data_dir / "snapshots"
    if not manifest.kv:
        raise copies.CopyError(f"{source} holds no KV; leave out --kv")
    if tenant != manifest.tenant:
        raise copies.CopyError(
            f"KV serves the tenant it was made for, {manifest.tenant}; leave out --kv or --tenant"
        )
    if survey.is_fresh(place):
        return
    wanted, here = archive.fields_in(source), archive.fields_here(place, cache_access(settings))
    apart = [(differing(wanted, fields), fields) for _, fields in here]
    if not here or not all(names for names, _ in apart):
        return
    of_model = [(names, fields) for names, fields in apart if _MODEL.isdisjoint(names)]
    if not of_model:
        named = ", ".join(sorted({name or "without a name" for name, _ in here}))
        raise copies.CopyError(
            f"its KV is of the model {manifest.model}, and this cache has KV of other models only ({named});"
            " leave out --kv"
        )
    names, fields = min(of_model, key=lambda one: len(one[0]))
    what = ", ".join(
        f"{name} {_short(wanted.get(name))} instead of {_short(fields.get(name))}" for name in names
    )
    raise copies.CopyError(f"its KV was made with other settings than this cache's ({what}); leave out --kv")


def _short(value: object) -> str:
    """Shorten and escape a field of a model's identity for printing.

    The field comes from a file, so it is not trusted; some fields are long digests.
    """
    return ascii(value).strip("'")[:24]


def _import_kv(settings: Settings, source: Path) -> None:
    place = settings.data_dir / "snapshots"
    added = archive.import_files(
        place,
        source,
        cache_access(settings),
        max_bytes=settings.max_disk,
        min_free_bytes=settings.min_free_disk,
        others=copies.OWN,
        fresh=True,
    )
    reasons = [(name, why) for name, why in added.skipped if why != "there already"]
    if reasons:
        raise copies.CopyError(
            f"{len(reasons)} files of its KV cannot be taken: {reasons[0][0]}: {reasons[0][1]}"
        )
    click.echo(f"added {added.num_files} files, {size(added.size_bytes)} of KV")
