"""The commands `turnkeep cache` on real directories, also while a worker changes them."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import re
import shutil
import sqlite3
import subprocess
import tarfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from made_kv import cut, flip, identity, num_restored, put, save_all, stored

from cache.admin import archive, survey
from cache.admin.stored_blocks import StoredBlocks
from cache.disk.catalog import Catalog
from cache.disk.codec import PLAIN
from cache.disk.folder import Folder
from cache.disk.rows import SnapshotRow
from cache.disk.tier import FileKey, SharedDirectory
from cache.names.blocks import Span
from cache.names.errors import CacheError
from cache.names.identity import FORMAT_VERSION
from cache.names.images import ImageSpan
from cache.names.tokens import as_tokens
from cache.store import Store
from commands.cli import main

TOKENS = list(range(10))
OTHER = [*TOKENS[:8], 77, 78]


@pytest.fixture
def turnkeep(tmp_path):
    def run(command, *arguments, directory=tmp_path / "cache", code=0):
        found = CliRunner().invoke(main, ["cache", command, *map(str, arguments), "--dir", str(directory)])
        assert found.exit_code == code, found.output + found.stderr
        return found

    return run


@pytest.fixture
async def filled(open_store, tmp_path):
    """A closed cache with two sessions that share two blocks, and a session of another model."""
    other = await open_store(identity=identity(weights="other"))
    save_all(other, "a", TOKENS[:4])
    await other.close()
    store = await stored(open_store, TOKENS, model="tiny")
    save_all(store, "a", OTHER)
    await store.close()
    return tmp_path / "cache"


def snapshots(directory):
    return sorted((directory / "snapshots").iterdir())


async def test_cache_list_reports_token_sequences_and_sizes_that_match_the_snapshot_files(
    filled, turnkeep
) -> None:
    found = json.loads(turnkeep("list", "--json").stdout)
    chains = {(chain["model"], chain["tokens"], chain["files"]) for chain in found["chains"]}
    assert chains == {("tiny", 10, 3), ("", 4, 1)}
    assert [chain["tokens"] for chain in found["chains"]] == [10, 10, 4], "the last used first"
    one, two, _ = found["chains"]
    assert one["own_bytes"] < one["size_bytes"] == two["size_bytes"]
    assert found["total_bytes"] == sum(path.stat().st_size for path in snapshots(filled))
    shown = turnkeep("list").stdout
    assert re.search(r"^tiny \w+: 4 files, ", shown, re.MULTILINE)
    assert "max_disk" in shown


async def test_cache_commands_that_change_no_file_succeed_beside_a_running_worker_and_all_others_are_refused(
    open_store, filled, turnkeep, tmp_path
) -> None:
    store = await open_store()
    before = snapshots(filled)
    for command in (("list",), ("verify",)):
        await asyncio.to_thread(turnkeep, *command)
    await asyncio.to_thread(turnkeep, "export", "--all", tmp_path / "all.tar")
    assert snapshots(filled) == before
    for command in (("prune", "--all"), ("import", tmp_path / "all.tar"), ("verify", "--quarantine")):
        refused = await asyncio.to_thread(lambda command=command: turnkeep(*command, code=1))
        assert f"in use by process {os.getpid()}: stop that worker first" in refused.stderr
    assert await num_restored(store, TOKENS) == 10


async def test_cache_verify_ignores_the_ds_store_file_that_macos_leaves_in_a_folder(filled, turnkeep) -> None:
    (filled / "snapshots" / ".DS_Store").write_text("icons")
    assert "5 files, 0 doubtful" in turnkeep("verify").stdout


async def test_cache_list_shows_the_files_even_if_the_index_is_missing_or_damaged(filled, turnkeep) -> None:
    def listed():
        chains = json.loads(turnkeep("list", "--json").stdout)["chains"]
        return sorted((chain["digest"], chain["size_bytes"], chain["tokens"]) for chain in chains)

    before = listed()
    for path in filled.glob("index.sqlite*"):
        path.unlink()
    assert listed() == before
    (filled / "index.sqlite").write_bytes(b"not a database" * 100)
    assert listed() == before
    assert (filled / "index.sqlite").read_bytes().startswith(b"not a database"), "nothing is mended here"


async def test_cache_verify_lists_damaged_files_and_quarantines_them_only_with_the_option_quarantine(
    filled, turnkeep
) -> None:
    assert "5 files, 0 doubtful" in turnkeep("verify").stdout
    flipped, cut, misnamed = snapshots(filled)[:3]
    flip(flipped)
    os.truncate(cut, 60)
    misnamed.rename(misnamed.with_name("ab" * 32 + ".safetensors"))
    (filled / "snapshots" / "notes.txt").write_text("mine")
    found = json.loads(turnkeep("verify", "--json", code=1).stdout)
    reasons = {entry["file"]: entry["reason"] for entry in found["doubtful"]}
    assert reasons[flipped.name] == "wrong checksum"
    assert "shorter than its header" in reasons[cut.name]
    assert "another snapshot's name" in reasons["ab" * 32 + ".safetensors"]
    assert reasons["notes.txt"] == "not the name of a snapshot"
    assert (found["files"], found["quarantined"]) == (6, [])

    turnkeep("verify", "--quarantine", code=1)
    assert len(list((filled / "quarantine").iterdir())) == 3
    assert (filled / "snapshots" / "notes.txt").exists()
    (filled / "snapshots" / "notes.txt").unlink()
    assert "2 files, 0 doubtful" in turnkeep("verify").stdout


@pytest.mark.parametrize(
    "name", ["zz" * 32, "ab" * 31, "AB" * 32, "ab" * 40, "a" * 63 + "\N{DIGIT ONE FULL STOP}"]
)
async def test_cache_verify_reports_a_file_whose_name_is_no_digest_and_does_not_move_it(
    filled, turnkeep, name
) -> None:
    stray = filled / "snapshots" / f"{name}.safetensors"
    stray.write_bytes(snapshots(filled)[0].read_bytes())
    for arguments in (("--json",), ("--json", "--quarantine")):
        found = json.loads(turnkeep("verify", *arguments, code=1).stdout)
        assert [entry["file"] for entry in found["doubtful"]] == [stray.name]
        assert found["quarantined"] == []
    assert stray.exists()
    turnkeep("list")
    turnkeep("prune", "--all")


async def test_snapshot_files_of_another_format_version_are_not_read_and_stay_on_disk_until_eviction(
    open_store, filled, turnkeep
) -> None:
    later = snapshots(filled)[0]
    ours, other = f'"version":"{FORMAT_VERSION}"'.encode(), b'"version":"9"'
    later.write_bytes(later.read_bytes().replace(ours, other).replace(b'"parent"', b'"ancestor"'))
    for path in filled.glob("index.sqlite*"):
        path.unlink()
    for _ in range(2):  # first the index is rebuilt, then the rebuilt index is read
        store = await open_store()
        assert store.stats().rejected == 0
        await store.close()
        assert later.exists()
    assert "1 of other versions" in turnkeep("verify").stdout
    assert json.loads(turnkeep("list", "--json").stdout)["other_versions_bytes"] == later.stat().st_size
    store = await open_store(max_bytes=100)
    await store.queue.drained(5)
    assert not later.exists()
    assert store.stats().stored == 0


async def test_cache_prune_removes_snapshots_by_age_by_model_and_down_to_a_total_size(
    open_store, filled, turnkeep
) -> None:
    chains = json.loads(turnkeep("list", "--json").stdout)["chains"]
    other = next(chain for chain in chains if not chain["model"])
    with sqlite3.connect(filled / "index.sqlite") as db:
        day_ago = int((time.time() - 90_000) * 1e6)
        db.execute("UPDATE snapshot SET used = ? WHERE used = (SELECT min(used) FROM snapshot)", (day_ago,))
    db.close()
    assert "removed 0 files" in turnkeep("prune", "--older-than", "2d").stdout
    assert "removed 0 files" in turnkeep("prune", "--older-than", "1h", "--identity", "f" * 12).stdout
    tiny = next(chain for chain in chains if chain["model"])["identity"]
    num_bytes = sum(path.stat().st_size for path in (filled / "snapshots").iterdir())
    pruned = turnkeep("prune", "--identity", tiny[:8], "--to-bytes", str(num_bytes - 1)).stdout
    assert "removed 1 files" in pruned, "the other model's older one, which stays, does not count"
    assert "removed 1 files" in turnkeep("prune", "--older-than", "1d").stdout
    assert other["identity"] not in turnkeep("list", "--json").stdout
    assert "removed 3 files" in turnkeep("prune", "--identity", tiny[:8]).stdout


async def test_cache_prune_all_leaves_an_empty_cache_that_accepts_new_snapshots(
    open_store, filled, turnkeep
) -> None:
    (filled / "quarantine" / "bad").write_text("x")
    assert "removed 5 files" in turnkeep("prune", "--all").stdout
    assert json.loads(turnkeep("list", "--json").stdout)["chains"] == []
    assert list((filled / "quarantine").iterdir()) == []
    store = await open_store()
    assert save_all(store, "a", TOKENS) == [True] * 3


async def test_snapshots_exported_from_one_cache_can_be_imported_into_another_and_restored(
    open_store, filled, turnkeep, tmp_path
) -> None:
    chain = json.loads(turnkeep("list", "--json").stdout)["chains"][0]
    turnkeep("export", chain["digest"][:10], tmp_path / "one.tar")
    there = await open_store(directory=tmp_path / "there")
    await there.close()
    took = json.loads(turnkeep("import", "--json", tmp_path / "one.tar", directory=tmp_path / "there").stdout)
    assert (took["files"], took["skipped"]) == (3, [])
    there = await open_store(directory=tmp_path / "there")
    assert {await num_restored(there, TOKENS), await num_restored(there, OTHER)} == {10, 8}
    await there.close()
    again = turnkeep("import", tmp_path / "one.tar", directory=tmp_path / "there")
    assert "added 0 files, 0 B; skipped 3" in again.stdout
    assert again.stderr.count("there already") == 3


def tar_of(path, *members) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


async def test_cache_import_reports_and_skips_members_that_are_damaged_misnamed_or_lack_the_preceding_block(
    open_store, filled, tmp_path, turnkeep
) -> None:
    archive.export(filled, None, tmp_path / "all.tar")
    with tarfile.open(tmp_path / "all.tar") as tar:
        sound = [(member.name, tar.extractfile(member).read()) for member in tar]
    flipped = bytearray(sound[0][1])
    flipped[-1] ^= 1
    pieces = await open_store(directory=tmp_path / "pieces")
    for end in (10, 11):
        await put(pieces, [7] * end)
    await pieces.close()
    archive.export(tmp_path / "pieces", None, tmp_path / "pieces.tar")
    with tarfile.open(tmp_path / "pieces.tar") as tar:
        orphan = [(member.name, tar.extractfile(member).read()) for member in tar][-1]
    outside = tmp_path / "outside.safetensors"
    tar_of(
        tmp_path / "bad.tar",
        (sound[0][0], bytes(flipped)),
        (sound[1][0], sound[0][1]),
        orphan,
        (f"../../{outside.name}", sound[0][1]),
        (str(outside), sound[0][1]),
        (f"./{sound[0][0]}", sound[0][1]),
        ("README", b"hello"),
        ("ab" * 32 + ".safetensors", b""),
    )
    with tarfile.open(tmp_path / "bad.tar", "a") as tar:
        link = tarfile.TarInfo(sound[0][0])
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    there = await open_store(directory=tmp_path / "there")
    await there.close()
    took = archive.import_files(tmp_path / "there", tmp_path / "bad.tar", max_bytes=1 << 30, min_free_bytes=0)
    assert took.num_files == 0
    reasons = [reason for _, reason in took.skipped]
    assert reasons[:3] == [
        "wrong checksum",
        "the file bears another snapshot's name",
        "the prefix that it continues is not there",
    ]
    assert reasons[3:7] == ["not a file with the name of a snapshot"] * 4
    assert reasons[7] == "shorter than its header"
    assert reasons[8] == "not a file with the name of a snapshot"
    assert not outside.exists()
    assert snapshots(tmp_path / "there") == list((tmp_path / "there" / "tmp").iterdir()) == []
    (tmp_path / "cut.tar").write_bytes((tmp_path / "all.tar").read_bytes()[:2000])
    assert "no sound tar file" in turnkeep("import", tmp_path / "cut.tar", code=1).stderr


async def test_cache_import_stays_within_max_disk_and_leaves_min_free_disk_free(
    open_store, filled, tmp_path
) -> None:
    archive.export(filled, None, tmp_path / "all.tar")
    there = await open_store(directory=tmp_path / "there")
    await there.close()
    least = max(path.stat().st_size for path in snapshots(filled))
    took = archive.import_files(tmp_path / "there", tmp_path / "all.tar", max_bytes=least, min_free_bytes=0)
    assert (took.num_files, len(took.skipped)) == (1, 4)
    assert "over the limit" in took.skipped[0][1]
    took = archive.import_files(
        tmp_path / "there", tmp_path / "all.tar", max_bytes=1 << 30, min_free_bytes=1 << 60
    )
    assert took.num_files == 0
    assert "bytes free" in took.skipped[-1][1]


async def test_cache_export_of_damaged_or_unknown_snapshots_fails_and_leaves_no_archive(
    filled, tmp_path
) -> None:
    for path in snapshots(filled):
        path.write_bytes(path.read_bytes()[:-1] + b"\xaa")
    with pytest.raises(CacheError, match="is doubtful"):
        archive.export(filled, None, tmp_path / "all.tar")
    with pytest.raises(CacheError, match="no snapshot has a name that begins with 'zz'; see"):
        archive.export(filled, ["zz"], tmp_path / "all.tar")
    assert not list(tmp_path.glob("all.tar*"))


@pytest.mark.parametrize("command", ["list", "verify", "prune", "export", "import"])
def test_cache_commands_refuse_a_directory_that_is_missing_or_is_not_a_cache(
    turnkeep, tmp_path, command
) -> None:
    tar_of(tmp_path / "x.tar")
    more = {"prune": ["--all"], "export": ["--all", tmp_path / "y.tar"], "import": [tmp_path / "x.tar"]}.get(
        command, []
    )
    missing = turnkeep(command, *more, directory=tmp_path / "missing", code=1)
    assert missing.stderr.startswith("turnkeep: there is no directory")
    (tmp_path / "photos").mkdir()
    wrong = turnkeep(command, *more, directory=tmp_path / "photos", code=1)
    assert "is no snapshot cache" in wrong.stderr
    assert list((tmp_path / "photos").iterdir()) == [], "nor made into one"


def test_cache_prune_without_options_or_with_conflicting_or_ill_formed_options_is_a_usage_error(
    turnkeep,
) -> None:
    assert "say what to remove" in turnkeep("prune", code=2).stderr
    assert "say what to remove" in turnkeep("prune", "--all", "--older-than", "1d", code=2).stderr
    assert "not a duration" in turnkeep("prune", "--older-than", "soon", code=2).stderr


async def test_a_cache_on_a_read_only_disk_can_be_inspected_and_verified(open_store, filled, mounted) -> None:
    """On a disk image, for example, SQLite cannot even create its lock files."""
    folder = mounted("size=4m")
    shutil.copytree(filled, folder / "cache")
    await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,ro", folder], check=True)
    found = survey.inspect(folder / "cache")
    assert [chain.model.name for chain in found.chains] == ["tiny", "tiny", ""]
    assert survey.verify(folder / "cache", lambda done, total: None).doubtful == []


async def test_cache_export_overwrites_an_existing_file_only_with_the_option_force(
    filled, turnkeep, tmp_path
) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    refused = turnkeep("export", "--all", target, code=1).stderr
    assert "already; choose another name, or overwrite it with --force" in refused
    assert target.read_text() == "mine"
    turnkeep("export", "--all", "--force", target)
    with tarfile.open(target) as tar:
        assert len(tar.getmembers()) == len(snapshots(filled))
    os.mkfifo(pipe := tmp_path / "pipe")
    assert f"{pipe} is not a file" in turnkeep("export", "--all", "--force", pipe, code=1).stderr


def rows_of(num: int, first: int) -> list[SnapshotRow]:
    return [SnapshotRow(i.to_bytes(16), bytes(16), 0, 4, 0, i) for i in range(first, first + num)]


def listed(directory) -> set[bytes]:
    """Return the digests in a copy of the index, as a survey makes it."""
    with survey._copied(directory / "index.sqlite") as db:
        return {digest for (digest,) in db.execute("SELECT digest FROM snapshot")}


def test_copying_the_cache_index_starts_again_if_sqlite_restarts_the_write_ahead_log_meanwhile(
    tmp_path, monkeypatch
) -> None:
    """Otherwise the copy would have old pages for which the new log has no replacement."""
    folder = Folder(tmp_path)
    catalog = Catalog(folder)
    early, late = rows_of(2000, 0), rows_of(2000, 2000)
    catalog.put(early)
    copied, copy = [], shutil.copyfile

    def copy_while_it_changes(source, target) -> None:
        copy(source, target)
        copied.append(source.name)
        if len(copied) == 1:
            for _ in range(5):  # each writes so much that SQLite restarts its log
                catalog.clear()
                catalog.put(early)
            catalog.put(late)

    monkeypatch.setattr(shutil, "copyfile", copy_while_it_changes)
    assert listed(tmp_path) == {row.digest for row in (*early, *late)}
    assert copied == ["index.sqlite", "index.sqlite-wal"] * 2
    catalog.close()
    folder.close()


@pytest.fixture
async def without_files(open_store, tmp_path, monkeypatch):
    """A closed cache whose index is lost, and whose files cannot be opened (too many open files)."""
    await (await stored(open_store, range(10))).close()
    (tmp_path / "cache" / "index.sqlite").unlink()

    def lacking(path, *more):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(survey, "read_header", lacking)
    monkeypatch.setattr(archive, "read_name", lacking)
    return tmp_path / "cache"


async def test_inspecting_or_verifying_a_cache_raises_an_error_if_the_process_has_too_many_open_files(
    without_files,
) -> None:
    with pytest.raises(OSError, match="Too many open files"):
        survey.verify(without_files, lambda done, total: None)
    with pytest.raises(OSError, match="Too many open files"):
        survey.inspect(without_files)


async def test_cache_export_fails_and_leaves_no_archive_if_the_process_has_too_many_open_files(
    without_files, tmp_path
) -> None:
    with pytest.raises(CacheError, match=r"cannot be exported: .*Too many open files"):
        archive.export(without_files, None, tmp_path / "all.tar")
    assert not (tmp_path / "all.tar").exists()


async def test_the_list_of_restorable_blocks_omits_blocks_after_a_missing_block_and_blocks_with_images(
    open_store: Callable[..., Awaitable[Store]], tmp_path: Path
) -> None:
    lost, forked, seen = [*range(10)], [*range(4), 77, 78], as_tokens(range(20, 32), [ImageSpan(5, 7, b"1")])
    store = await open_store()
    other = identity(weights="other")
    for tokens in (lost, forked, seen):
        save_all(store, "a", tokens)
    await store.close()
    await (await stored(open_store, lost, identity=other)).close()
    blocks = StoredBlocks(tmp_path / "cache", PLAIN)

    def listed() -> list[tuple[list[int], int, str]]:
        num, found = blocks.of(identity().digest())
        files = [([*tokens], span.start, file) for tokens, span, file in found]
        assert len(files) <= num
        return sorted(files)

    every = listed()
    assert [(tokens, start) for tokens, start, _ in every] == [
        ([0, 1, 2, 3], 0),
        ([0, 1, 2, 3, 4, 5, 6, 7], 4),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
        ([0, 1, 2, 3, 77, 78], 4),
        ([20, 21, 22, 23], 0),
    ]
    for tokens, start, file in every:
        found = blocks.read(file)
        assert found is not None
        for one in cut(tokens, Span(start, len(tokens))):
            assert (found[one.name].shape, bytes(found[one.name].data)) == (one.shape, bytes(one.data))
    (tmp_path / "cache" / "snapshots" / every[1][2]).unlink()
    assert [file for _, _, file in listed()] == [every[i][2] for i in (0, 3, 4)]
    assert blocks.read(every[1][2]) is None


async def test_cache_commands_refuse_a_remote_tier_in_the_place_of_a_cache_and_leave_it_as_it_was(
    filled, turnkeep, tmp_path
) -> None:
    tier = tmp_path / "tier"
    shutil.copytree(filled, tier)
    (tier / "lock").unlink()
    shared = SharedDirectory(tier, PLAIN, max_bytes=2**30, min_free_bytes=0)
    for path in list((tier / "snapshots").iterdir()):
        shared.put(FileKey("a" * 64, path.name), path)
        path.unlink()
    before = sorted(tier.rglob("*"))
    for command in (("list",), ("verify", "--quarantine"), ("prune", "--all"), ("export", "--all", "x.tar")):
        assert f"{tier} is a remote tier" in turnkeep(*command, directory=tier, code=1).stderr
    assert sorted(tier.rglob("*")) == before


async def test_cache_commands_refuse_a_data_directory_in_the_place_of_its_cache(
    filled, turnkeep, tmp_path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    filled.rename(data / "snapshots")
    for command in (("list",), ("verify", "--quarantine"), ("prune", "--all"), ("export", "--all", "x.tar")):
        assert f"{data} is a data directory" in turnkeep(*command, directory=data, code=1).stderr
    assert {path.name for path in data.iterdir()} == {"snapshots"}
    assert len(json.loads(turnkeep("list", "--json", directory=data / "snapshots").stdout)["chains"]) == 3
