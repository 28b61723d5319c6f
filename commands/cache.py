"""`turnkeep cache`: list, verify, remove, export and import the snapshots on disk.

Commands that only read (`list`, `verify`, `export`) work beside a running worker. Commands that write
need the cache's lock; if another process has it, the error names that process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import shutil
import sqlite3
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import click

from cache.admin import archive, pruning, survey
from cache.admin.stored_blocks import StoredBlocks
from cache.names.errors import CacheError, DirectoryLockedError
from ops.log.session_file import OWN
from turnkeep_client.errors import TurnkeepError
from worker.models.blas import preload
from worker.observe.logs import logs_on_stderr
from worker.observe.progress import terminal_progress
from worker.process.cache_parts import cache_codec
from worker.process.formatting import size, span
from worker.process.limits import with_running_limits
from worker.process.setting_kinds import parse_duration, parse_size

from .flags import as_json, check_target, force_option, with_settings
from .interrupts import importing
from .printing import table
from .remains import remains

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cache.admin.survey import Survey
    from worker.process.settings import Settings
    from worker.recomputation import Recomputation

    from .flags import GivenSettings


class CacheCommandError(TurnkeepError):
    """A command on the cache failed; the message is one line."""


@contextlib.contextmanager
def in_one_line(place: Path | None = None) -> Iterator[None]:
    """Turn errors of the cache and the disk within the block into a `CacheCommandError` of one line.

    `place` is the path that the block writes, for errors that name no file, as of a full disk.
    """
    try:
        yield
    except DirectoryLockedError as error:
        raise CacheCommandError(
            f"the cache {error.directory} is in use by process {error.owner}: stop that worker first"
            " (list, verify and export work beside it)"
        ) from None
    except (CacheError, sqlite3.Error) as error:
        raise CacheCommandError(str(error)) from None
    except OSError as error:
        if error.errno == errno.EPIPE or not (error.filename or place):  # of the output
            raise
        name = error.filename or place
        if place is not None and Path(str(name)).parent == place.parent:  # a temporary file's
            name = place
        raise CacheCommandError(f"{name}: {error.strerror}") from None


class _Group(click.Group):
    """The command group; reports each error of the cache or the disk as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        with logs_on_stderr(logging.INFO), in_one_line():
            return super().invoke(ctx)


def _parsed(parse: Callable[[object], Any], wants: str) -> Callable[[Any, Any, str | None], Any]:
    def callback(_: Any, parameter: click.Parameter, value: str | None) -> Any:
        if value is None:
            return None
        try:
            return parse(value)
        except (ValueError, OverflowError):
            raise click.BadParameter(f"{value!r} is not {wants}", param=parameter) from None

    return callback


@dataclass(frozen=True)
class _Where:
    """Where a command looks for the cache: in `--dir`, otherwise in the data directory."""

    directory: Path | None
    given: GivenSettings

    def existing(self) -> tuple[Path, Settings]:
        """Find the cache. Raises `CacheCommandError` if no worker has made one yet."""
        place, settings, is_fresh = self.located()
        if is_fresh:
            raise CacheCommandError(
                f"{_empty_message(place)}; a worker with this data directory makes a cache there"
            )
        return place, settings

    def located(self) -> tuple[Path, Settings, bool]:
        """Return the cache's path, the settings, and whether the data directory has no cache yet.

        An empty data directory is normal; a wrong `--dir` is the user's error.
        """
        settings = self.given.load()
        place = self.directory or settings.data_dir / "snapshots"
        is_fresh = self.directory is None and survey.is_fresh(place)
        return place, settings, is_fresh


def _cache_options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options that locate the cache, passed as `where`, and options for the settings in `names`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @with_settings("data_dir", "cache_key_file", *names)
        @functools.wraps(command)
        def called(given: GivenSettings, directory: Path | None, **options: Any) -> None:
            command(where=_Where(directory, given), **options)

        return click.option(
            "--dir",
            "directory",
            type=click.Path(path_type=Path),
            help="The cache's directory. [default: the folder snapshots of --data-dir]",
        )(called)

    return decorate


def _empty_message(place: Path) -> str:
    if not place.parent.is_dir():
        return f"nothing is cached in {place}: there is no folder {place.parent}"
    several = sorted(str(path.parent) for path in place.parent.glob("workers/*/snapshots"))
    if several:
        return f"nothing is cached in {place}; each of several models has a --data-dir: {', '.join(several)}"
    return f"nothing is cached yet in {place}"


@click.group(cls=_Group)
def cache() -> None:
    """Snapshots on disk: list, verify, remains, prune, export and import."""


cache.add_command(remains)


@cache.command("list")
@as_json
@_cache_options("max_disk", "min_free_disk")
def list_(where: _Where, as_json: bool) -> None:
    """List the stored chains of tokens, the last used first, and the disk space that they take and leave.

    The limits are those of the worker that runs there, otherwise those of the settings.

    The list cannot name sessions or tenants: names on disk are salted digests of tenant and tokens.
    """
    place, settings, is_fresh = where.located()
    settings, runs = with_running_limits(settings, place.parent)
    found = survey.Survey() if is_fresh else survey.inspect(place, cache_codec(settings))
    others_bytes = found.foreign_bytes + found.quarantined_bytes
    total = sum(model.size_bytes for model in found.models) + others_bytes
    free = shutil.disk_usage(next(parent for parent in (place, *place.parents) if parent.exists())).free
    if as_json:
        figures = {
            "chains": [_chain(chain) for chain in found.chains],
            "other_versions_bytes": found.foreign_bytes,
            "quarantined_bytes": found.quarantined_bytes,
            "total_bytes": total,
            "max_disk": settings.max_disk,
            "min_free_disk": settings.min_free_disk,
            "limits_of": runs,
            "disk_free_bytes": free,
        }
        click.echo(json.dumps(figures))
        return
    _print_chains(found, place)
    for model in found.models:
        click.echo(f"{_model(model)}: {model.num_files} files, {size(model.size_bytes)}")
    click.echo(
        f"total {size(total)} of {size(settings.max_disk)} (max_disk), {size(others_bytes)} of it of other"
        " versions or in quarantine"
    )
    click.echo(f"disk: {size(free)} free, {size(settings.min_free_disk)} to be left free (min_free_disk)")
    click.echo(f"limits: those of {runs}" if runs else "limits: those of the settings; no worker runs here")
    _print_unreadable(found)


def _chain(chain: survey.StoredChain) -> dict[str, Any]:
    """Return a chain's fields for JSON."""
    return {
        "digest": chain.digest.hex(),
        "identity": chain.model.identity,
        "model": chain.model.name,
        "tokens": chain.num_tokens,
        "files": chain.num_files,
        "size_bytes": chain.size_bytes,
        "own_bytes": chain.own_bytes,
        "last_used": datetime.fromtimestamp(chain.used_s, UTC).isoformat(timespec="seconds"),
    }


def _print_chains(found: survey.Survey, place: Path) -> None:
    now_s = time.time()
    rows = [
        [
            chain.digest.hex()[:12],
            _model(chain.model),
            str(chain.num_tokens),
            size(chain.size_bytes),
            size(chain.own_bytes),
            f"{span(now_s - chain.used_s)} ago",
        ]
        for chain in found.chains
    ]
    if rows:
        table(["chain", "model", "tokens", "size", "not shared", "last used"], rows, same=("model",))
    else:
        click.echo(_empty_message(place))


@cache.command()
@click.option("--quarantine", is_flag=True, help="Move doubtful files to quarantine; needs the lock.")
@click.option("--recompute", is_flag=True, help="Also compute the KV again with the model, and compare.")
@as_json
@_cache_options("model", "dtype", "kv_bits", "device_memory")
def verify(where: _Where, quarantine: bool, recompute: bool, as_json: bool) -> None:
    """Read every file and check its length, checksum, name and layout. Exit code 1 if a file is doubtful.

    With --recompute the model, settings and data directory must be the worker's. Of KV in 4 or 8 bits the
    scales are compared, states of recurrent layers are not. Blocks of other models or cache policies, and
    those with and after images, are skipped.
    """
    place, settings = where.existing()
    recomputed: Recomputation | None = None

    def wrong() -> list[tuple[str, str]]:
        nonlocal recomputed
        if recompute:
            recomputed = _recomputed(place, settings)
        return recomputed.wrong if recomputed is not None else []

    with terminal_progress() as show:
        found = survey.verify(
            place,
            lambda done, total: show(done, total, "verifying"),
            cache_codec(settings),
            quarantine=quarantine,
            wrong=wrong,
        )
    _print_verified(found, recomputed, as_json=as_json)
    sys.exit(1 if found.doubtful else 0)


def _print_verified(found: Survey, recomputed: Recomputation | None, *, as_json: bool) -> None:
    figures: dict[str, int] = {}
    if recomputed is not None:
        num_skipped = found.num_files - recomputed.num_blocks
        figures = {
            "recomputed": recomputed.num_blocks,
            "wrong": len(recomputed.wrong),
            "skipped": num_skipped,
        }
    if as_json:
        doubtful = [{"file": name, "reason": reason} for name, reason in found.doubtful]
        figures |= {"files": found.num_files, "other_versions": found.num_foreign}
        click.echo(json.dumps({**figures, "doubtful": doubtful, "quarantined": found.quarantined}))
    else:
        for name, reason in found.doubtful:
            click.echo(f"{name}: {reason}" + (" (moved to quarantine)" if name in found.quarantined else ""))
        click.echo(
            f"{found.num_files} files, {len(found.doubtful)} doubtful, {found.num_foreign} of other versions"
        )
        if figures:
            click.echo("{recomputed} blocks recomputed, {wrong} wrong, {skipped} skipped".format(**figures))


def _recomputed(place: Path, settings: Settings) -> Recomputation:
    """Compute the stored KV again with the settings' model. Raises `TurnkeepError`."""
    preload()
    with importing():
        from worker.recomputation import recompute  # imports MLX

    blocks = StoredBlocks(place, cache_codec(settings))
    with terminal_progress(of_bytes=False) as show:
        return anyio.run(recompute, settings, blocks.of, blocks.read, show)


@cache.command()
@click.option(
    "--older-than",
    "older_than_s",
    metavar="TIME",
    callback=_parsed(parse_duration, "a duration such as 12h or 7d"),
    help="Remove snapshots not used for so long.",
)
@click.option(
    "--to-bytes",
    metavar="SIZE",
    callback=_parsed(parse_size, "a size such as 5GiB"),
    help="Remove the least recently used, until this size is left.",
)
@click.option(
    "--identity", metavar="IDENTITY", help="Only of the model whose identity, of `cache list`, begins so."
)
@click.option("--all", "everything", is_flag=True, help="Remove everything, also files that failed a check.")
@as_json
@_cache_options()
def prune(
    where: _Where,
    older_than_s: float | None,
    to_bytes: int | None,
    identity: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Remove snapshots that meet every condition given. Stop the worker first."""
    conditions = [older_than_s, to_bytes, identity]
    if everything == any(condition is not None for condition in conditions):
        raise click.UsageError(
            "say what to remove: --all, or conditions (--older-than, --to-bytes, --identity)"
        )
    place, settings = where.existing()
    if everything:
        pruned = pruning.prune_all(place)
    else:
        pruned = pruning.prune(
            place,
            cache_codec(settings),
            older_than_s=older_than_s,
            to_bytes=to_bytes,
            model=identity,
            now_s=time.time(),
        )
    if as_json:
        figures = {
            "files": pruned.num_files,
            "size_bytes": pruned.size_bytes,
            "left_bytes": pruned.left_bytes,
        }
        click.echo(json.dumps(figures))
        return
    click.echo(f"removed {pruned.num_files} files, {size(pruned.size_bytes)}; {size(pruned.left_bytes)} left")


@cache.command("export")
@click.argument("digests", nargs=-1, metavar="[DIGEST]...")
@click.argument("target", type=click.Path(path_type=Path), metavar="FILE.tar")
@click.option("--all", "everything", is_flag=True, help="Export all chains.")
@force_option
@_cache_options()
def export(
    where: _Where,
    digests: tuple[str, ...],
    target: Path,
    everything: bool,
    force: bool,
) -> None:
    """Write chains, named as in `list`, to a tar file that another cache can import; it is not encrypted."""
    if everything == bool(digests):
        raise click.UsageError("name the chains to export, or say --all")
    check_target(target, force=force)
    place, settings = where.existing()
    with in_one_line(target):
        carried = archive.export(place, None if everything else digests, target, cache_codec(settings))
    click.echo(f"wrote {carried.num_files} files, {size(carried.size_bytes)}, to {target}")


@cache.command("import")
@click.argument("source", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE.tar")
@as_json
@_cache_options("max_disk", "min_free_disk")
def import_(where: _Where, source: Path, as_json: bool) -> None:
    """Import the snapshots of a tar file, or of a session's export, after checking each.

    Stop the worker first. They serve the same model, settings and tenant names as in the cache they came
    from. In a new data directory this makes the cache.

    An archive is trusted content: import only from people whom you would let change the model. The checks
    prove that a file is complete and matches its name. They cannot prove that a model computed it: a session
    that continues from forged KV answers as if it had another history.
    """
    place, settings, is_fresh = where.located()
    carried = archive.import_files(
        place,
        source,
        cache_codec(settings),
        max_bytes=settings.max_disk,
        min_free_bytes=settings.min_free_disk,
        others=OWN,
        fresh=is_fresh,
    )
    if as_json:
        skipped = [{"file": name, "reason": reason} for name, reason in carried.skipped]
        figures = {"files": carried.num_files, "size_bytes": carried.size_bytes, "skipped": skipped}
        click.echo(json.dumps(figures))
        return
    for name, reason in carried.skipped:
        click.echo(f"skipped {name!r}: {reason}", err=True)
    click.echo(f"added {carried.num_files} files, {size(carried.size_bytes)}; skipped {len(carried.skipped)}")


def _model(model: survey.StoredModel) -> str:
    return " ".join(filter(None, [model.name, model.identity[:12]]))


def _print_unreadable(found: survey.Survey) -> None:
    for name, reason in found.doubtful:
        click.echo(f"{name}: {reason}", err=True)
    if found.num_foreign:
        click.echo(f"{found.num_foreign} files of other format versions, {size(found.foreign_bytes)}")
