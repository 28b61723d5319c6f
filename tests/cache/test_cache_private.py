"""Only the owner can read a cache; archives that would write elsewhere or fill the memory are refused."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from made_kv import stored

from cache.admin import archive
from cache.names.errors import CacheError
from commands.cli import main
from worker.process.datadir import DataDir

TOKENS = list(range(10))


@pytest.fixture(autouse=True)
def open_to_all() -> Iterator[None]:
    """Set umask 0, so that files created without an explicit mode are accessible to everybody."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
async def filled(open_store, tmp_path) -> Path:
    await (await stored(open_store, TOKENS)).close()
    return tmp_path / "cache"


def open_to_others(directory: Path) -> list[str]:
    """Return the files and folders to which others than the owner have any access."""
    return sorted(
        str(path.relative_to(directory))
        for path in (directory, *directory.rglob("*"))
        if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) & 0o077
    )


def take(directory: Path, source: Path) -> archive.Transfer:
    return archive.import_files(directory, source, max_bytes=1 << 30, min_free_bytes=0)


async def test_the_files_of_a_cache_give_other_users_of_the_system_no_access(open_store, tmp_path) -> None:
    await stored(open_store, TOKENS)
    assert (tmp_path / "cache" / "index.sqlite-wal").exists()
    assert open_to_others(tmp_path / "cache") == []


async def test_opening_a_store_removes_the_access_of_other_system_users_to_its_files(
    open_store, filled, tmp_path
) -> None:
    outside = tmp_path / "mine.txt"
    outside.write_text("")
    (filled / "snapshots" / f"{'ab' * 32}.safetensors").symlink_to(outside)
    (filled / "notes.txt").write_text("")
    for path in (filled, *filled.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o644)
    store = await open_store()
    assert open_to_others(filled) == ["notes.txt"]
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644, "no link is followed"
    assert store.kv.match(store.kv.chain("a"), TOKENS).num_tokens == 10
    await store.close()
    filled.chmod(0o700)
    (filled / "quarantine").chmod(0o755)
    await open_store()
    assert stat.S_IMODE((filled / "quarantine").stat().st_mode) == 0o700


def test_opening_a_data_directory_removes_the_access_of_other_system_users_to_its_private_folders(
    tmp_path,
) -> None:
    DataDir.open(tmp_path / "data").close()
    for path in (tmp_path / "data").iterdir():
        path.chmod(0o777)
    with DataDir.open(tmp_path / "data"):
        assert open_to_others(tmp_path / "data") == ["models", "worker.lock"], "which say nothing of anybody"


async def test_a_cache_command_with_json_prints_only_json_even_if_it_makes_the_cache_directory_private(
    filled,
) -> None:
    filled.chmod(0o755)
    said = CliRunner().invoke(main, ["cache", "prune", "--to-bytes", "0", "--json", "--dir", str(filled)])
    assert json.loads(said.stdout)["files"] == 3
    assert "cache_closed_to_others" in said.stderr


async def test_an_exported_archive_is_readable_only_by_its_owner_and_never_written_through_a_symbolic_link(
    filled, tmp_path
) -> None:
    target, victim = tmp_path / "all.tar", tmp_path / "victim"
    victim.write_text("mine")
    for name in (target, target.with_name("all.tar.part")):
        name.symlink_to(victim)
    archive.export(filled, None, target)
    assert victim.read_text() == "mine"
    assert not target.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


async def test_an_exported_archive_is_a_plain_tar_without_extended_headers_or_user_names(
    filled, tmp_path
) -> None:
    archive.export(filled, None, tmp_path / "all.tar")
    with tarfile.open(tmp_path / "all.tar", "r:") as tar:
        members = tar.getmembers()
        assert [member.isreg() for member in members] == [True] * 3
        assert {(member.mode, member.uid, member.uname) for member in members} == {(0o600, 0, "")}
    assert (tmp_path / "all.tar").read_bytes()[156:157] == tarfile.REGTYPE, (
        "no extended header comes before it"
    )


async def test_cache_export_leaves_out_symbolic_links(filled, tmp_path) -> None:
    """The link's target could change between the check and the read."""
    first, *others, leaf = sorted((filled / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    archive.export(filled, [leaf.name[:64]], tmp_path / "one.tar")
    with tarfile.open(tmp_path / "one.tar") as tar:
        assert set(tar.getnames()) == {path.name for path in (*others, leaf)}


async def test_cache_import_refuses_a_compressed_archive(filled, tmp_path) -> None:
    """A few kilobytes could unpack to more than the disk can hold."""
    archive.export(filled, None, tmp_path / "all.tar")
    for kind in ("gz", "bz2", "xz"):
        with tarfile.open(tmp_path / f"all.{kind}", f"w:{kind}") as packed:
            packed.addfile(*member_of("README", b""))
        with pytest.raises(CacheError, match=r"no sound tar file .*not compressed"):
            take(filled, tmp_path / f"all.{kind}")


def member_of(name: str, content: bytes, kind: bytes = tarfile.REGTYPE) -> tuple[tarfile.TarInfo, io.BytesIO]:
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname = kind, len(content), "/etc/passwd"
    return member, io.BytesIO(content)


#: Kinds of members that have no content.
EMPTY = [
    *(tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE),
    tarfile.DIRTYPE,
]


async def test_cache_import_takes_only_regular_files_from_an_archive(open_store, filled, tmp_path) -> None:
    archive.export(filled, None, tmp_path / "all.tar")
    with tarfile.open(tmp_path / "all.tar", "r:") as tar:
        name = tar.getnames()[0]
        content = tar.extractfile(name).read()
    with (tmp_path / "bad.tar").open("wb") as bad:
        for kind in (*EMPTY, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE, b"Z"):
            member, _ = member_of(name, content, kind)
            bad.write(member.tobuf(tarfile.GNU_FORMAT))
            bad.write(b"" if kind in EMPTY else content + bytes(-len(content) % 512))
        bad.write(bytes(1024))
    there = await open_store(directory=tmp_path / "there")
    await there.close()
    took = take(tmp_path / "there", tmp_path / "bad.tar")
    assert took.num_files == 0
    assert [reason for _, reason in took.skipped] == ["not a file with the name of a snapshot"] * 9
    assert list((tmp_path / "there" / "snapshots").iterdir()) == []


async def test_cache_import_skips_huge_extended_tar_headers_without_reading_them_into_memory(
    open_store, filled, tmp_path, monkeypatch
) -> None:
    """Each header has 1 GiB, in a sparse file."""
    archive.export(filled, None, tmp_path / "all.tar")
    sound = (tmp_path / "all.tar").read_bytes()
    for kind in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
        extended = tarfile.TarInfo("x")
        extended.type, extended.size = kind, 1 << 30
        with (tmp_path / "bad.tar").open("wb") as bad:
            bad.write(extended.tobuf(tarfile.GNU_FORMAT))
            bad.seek((1 << 30) + 512)
            bad.write(sound)
        most, frombuf = [], tarfile.TarInfo.frombuf
        monkeypatch.setattr(
            tarfile.TarInfo,
            "frombuf",
            lambda block, *rest, most=most, frombuf=frombuf: (most.append(len(block)), frombuf(block, *rest))[
                1
            ],
        )
        there = await open_store(directory=tmp_path / kind.hex())
        await there.close()
        took = take(tmp_path / kind.hex(), tmp_path / "bad.tar")
        monkeypatch.undo()
        assert (took.num_files, took.skipped) == (3, [])
        assert set(most) == {512}


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda whole: whole[:700], "ends in the middle of a member"),
        (lambda whole: whole[:512], "ends in the middle of a member"),
        (lambda whole: whole[:100], "truncated header"),
        (lambda _: b"", "empty header"),
        (lambda whole: b"\x00" + whole[1:], "bad checksum"),
        (lambda whole: whole.rstrip(b"\0"), "header|ends"),
    ],
    ids=["cut in a file", "cut after a header", "cut in a header", "empty", "one byte changed", "no end"],
)
async def test_cache_import_of_a_truncated_or_damaged_archive_fails_with_the_reason(
    open_store, filled, tmp_path, spoil, why
) -> None:
    archive.export(filled, None, tmp_path / "all.tar")
    (tmp_path / "bad.tar").write_bytes(spoil((tmp_path / "all.tar").read_bytes()))
    there = await open_store(directory=tmp_path / "there")
    await there.close()
    with pytest.raises(CacheError, match=rf"no sound tar file .*({why})"):
        take(tmp_path / "there", tmp_path / "bad.tar")
    assert list((tmp_path / "there" / "tmp").iterdir()) == []


async def test_cache_import_refuses_an_archive_member_with_a_negative_size(filled, tmp_path) -> None:
    header = bytearray(tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 10 + b"\xfe\x00"  # -512, in base 256
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "bad.tar").write_bytes(bytes(header) * 2)
    with pytest.raises(CacheError, match="less than no bytes"):
        take(filled, tmp_path / "bad.tar")


async def test_cache_import_stops_after_a_thousand_archive_members_that_are_not_snapshots(
    filled, tmp_path
) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        for i in range(1100):
            tar.addfile(tarfile.TarInfo(f"{i}.jpg"))
    with pytest.raises(CacheError, match="more than 1000 members that are no snapshots"):
        take(filled, tmp_path / "bad.tar")
