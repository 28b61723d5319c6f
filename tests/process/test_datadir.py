"""One worker at a time uses a data directory; a directory that cannot be used is refused with the reason."""

import json
import os
import subprocess
import sys
import time

import pytest

from worker.process import datadir
from worker.process.datadir import DataDir, DataDirError, holder, is_same
from worker.wire.broker import server_name


def test_opening_a_new_data_directory_creates_a_private_directory_with_subfolders_and_a_lock_file(tmp_path):
    path = tmp_path / "a" / "b"
    with DataDir.open(path, "w1") as opened:
        assert opened.path == path
        for folder in (opened.nats, opened.models, opened.snapshots, opened.logs):
            assert folder.is_dir()
            assert folder.parent == path
        assert path.stat().st_mode & 0o077 == 0
        inode = (opened.path / "worker.lock").stat().st_ino
        note = {"pid": os.getpid(), "worker": "w1", "directory": opened.name, "inode": inode, "nats": None}
        note |= {"limits": {}, "gateway": None}
        assert json.loads((path / "worker.lock").read_text()) == note


def test_a_data_directory_keeps_the_name_generated_at_its_first_use_under_any_later_worker_name(tmp_path):
    with DataDir.open(tmp_path / "a", "a longer name") as opened:
        name = opened.name
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "worker.lock").write_text('["no note"]')
    with DataDir.open(tmp_path / "a", "w") as again, DataDir.open(tmp_path / "b") as other:
        assert again.name == name != other.name


def test_on_macos_the_folders_of_models_and_snapshots_are_excluded_from_time_machine_backups_once(
    tmp_path, monkeypatch
):
    asked = []
    monkeypatch.setattr(datadir.sys, "platform", "darwin")
    monkeypatch.setattr(datadir.subprocess, "run", lambda words, **_: asked.append(words))
    for _ in range(2):
        with DataDir.open(tmp_path / "a") as opened:
            pass
    assert asked == [["tmutil", "addexclusion", folder] for folder in (opened.models, opened.snapshots)]


def test_the_nats_server_name_of_a_data_directory_is_the_same_under_every_spelling_of_its_path(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert server_name(tmp_path / "link" / "data") == server_name(tmp_path / "real" / "data")
    assert server_name(tmp_path / "link") != server_name(tmp_path)


def test_on_a_case_insensitive_disk_differently_capitalised_paths_name_the_same_data_directory(
    tmp_path, monkeypatch
):
    stat = os.stat
    (tmp_path / "data").mkdir()
    assert not is_same(tmp_path / "DATA", tmp_path / "data")
    monkeypatch.setattr(os, "stat", lambda path, **more: stat(str(path).replace("DATA", "data"), **more))
    assert is_same(tmp_path / "DATA", tmp_path / "data")
    assert not is_same(tmp_path / "DATA", tmp_path)


def test_a_child_process_of_the_worker_does_not_hold_the_lock_of_the_data_directory(tmp_path):
    """The NATS server outlives a killed worker; the next worker must still be able to lock the directory."""
    opened = DataDir.open(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as child:
        opened.close()
        opened.close()
        DataDir.open(tmp_path).close()
        child.kill()


def test_opening_a_data_directory_fails_with_an_error_that_names_a_file_in_its_place(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DataDirError, match=r"there is a file in its place.*--data-dir"):
            DataDir.open(path)
    (tmp_path / "link").symlink_to(tmp_path / "not mounted")
    with pytest.raises(DataDirError, match=r"a link to what is not there; .* mount its disk"):
        DataDir.open(tmp_path / "link")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "nats").touch()
    with pytest.raises(DataDirError, match=rf"because of {tmp_path}/data/nats: there is a file in its place"):
        DataDir.open(tmp_path / "data")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_opening_an_unwritable_data_directory_fails_with_an_error_that_says_not_writable(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(DataDirError, match="not writable for this user; mount its disk"):
        DataDir.open(tmp_path / "new")
    with pytest.raises(DataDirError, match="not writable for this user"):
        DataDir.open(tmp_path)


def test_disk_limits_that_are_read_again_while_a_worker_ends_are_not_written_to_its_lock_file(tmp_path):
    with DataDir.open(tmp_path) as opened:
        pass
    before = (tmp_path / "worker.lock").read_text()
    opened.note_limits({"max_disk": 5})
    assert (tmp_path / "worker.lock").read_text() == before


@pytest.mark.parametrize(("shift_s", "starts"), [(0, True), (-3600, False), (3600, False)])
def test_a_worker_counts_as_starting_only_if_the_mtime_of_its_lock_file_is_close_to_the_current_time(
    shift_s, starts, tmp_path
):
    with DataDir.open(tmp_path):
        locked_s = time.time() + shift_s
        os.utime(tmp_path / "worker.lock", (locked_s, locked_s))
        assert datadir.starting_pid(tmp_path) == (os.getpid() if starts else None)


def test_a_locked_data_directory_is_refused_to_other_workers_even_if_its_lock_file_is_still_empty(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(datadir, "_ENDING_S", 0.1)
    opened = DataDir.open(tmp_path)
    (tmp_path / "worker.lock").write_text("")
    with pytest.raises(DataDirError, match="another worker that is just starting"):
        DataDir.open(tmp_path)
    opened.close()


def test_a_running_worker_is_recognised_by_the_lock_it_holds_whatever_the_mtime_of_the_lock_file(tmp_path):
    with DataDir.open(tmp_path, "first"):
        os.utime(tmp_path / "worker.lock", (0, 0))  # so it is if the clock was set after the start
        held = holder(tmp_path)
        assert held is not None
        assert (held.name, held.pid) == (f"worker first (pid {os.getpid()})", os.getpid())
    assert holder(tmp_path) is None


def test_a_worker_can_lock_its_data_directory_while_other_processes_ask_who_holds_the_lock(tmp_path):
    DataDir.open(tmp_path).close()
    asking = "import sys\nfrom pathlib import Path\nfrom worker.process.datadir import holder"
    asking = f"{asking}\nprint(1, flush=True)\nwhile True: holder(Path(sys.argv[1]))"
    with subprocess.Popen([sys.executable, "-c", asking, tmp_path], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"1\n"
        for _ in range(300):
            DataDir.open(tmp_path).close()
        other.kill()
