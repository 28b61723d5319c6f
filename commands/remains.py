"""The command `cache remains`: searches log and folders for what is left of a forgotten session."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from turnkeep_client.subjects import session_key
from worker.process.cache_parts import cache_codec
from worker.process.datadir import LOCK_NAME

from .flags import as_json, tenant_option, with_settings
from .nats_connection import CLIENT_SETTINGS, talk

if TYPE_CHECKING:
    from .flags import GivenSettings


@click.command()
@click.argument("session")
@tenant_option
@click.option("--text", "texts", metavar="TEXT", multiple=True, help="Also search files for this text.")
@click.option(
    "--in",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Also search this folder: another worker's, a tier, a NATS store; may be repeated.",
)
@as_json
@with_settings("cache_key_file", *CLIENT_SETTINGS)
def remains(
    given: GivenSettings,
    session: str,
    tenant: str,
    texts: tuple[str, ...],
    folders: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Search for what is left of a forgotten session; exit code 1 if anything is.

    Searches the log's streams, and the files of --data-dir and of each --in, for entries, for KV of its
    tokens (also if another session has stored the same tokens again), and for each --text, which another
    session may have too. Skips the models of a data directory. A text is not found in what is compressed or
    encrypted, nor is KV that ends before 128 tokens.
    """
    from cache.admin.remains import search
    from ops.log.remains import remains as remains_in_log

    settings = given.load()
    key = session_key(tenant, session)
    left = talk(settings, tenant, lambda client: remains_in_log(client, key))
    found = [("log", subject) for subject in left.entries]
    needles = sorted({form for text in texts for form in (text.encode(), json.dumps(text)[1:-1].encode())})
    for folder in dict.fromkeys([settings.data_dir, *folders] if settings.data_dir.exists() else folders):
        # A model's tokenizer has many words, and no session writes there.
        models = [lock.with_name("models") for lock in folder.rglob(LOCK_NAME)]
        hits = search(folder, left.marks, needles, cache_codec(settings), models)
        found += [(what, str(path)) for path, what in hits]
    if as_json:
        click.echo(json.dumps({"remains": [{"what": what, "where": place} for what, place in found]}))
    else:
        for what, place in found:
            click.echo(f"{what}: {place}")
        click.echo(f"{len(found)} remains of {key}")
    sys.exit(1 if found else 0)
