"""The memory that control groups (cgroups, versions 1 and 2) leave to a process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.device import machine
from worker.process import system_memory as cgroups

MIB = 2**20


def group(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def left(tmp_path: Path, own: str) -> int | None:
    (tmp_path / "own").write_text(own)
    return cgroups.left_bytes(tmp_path / "own", tmp_path / "fs")


def test_cgroup_v2_leaves_the_limit_minus_the_used_memory_that_cannot_be_reclaimed(tmp_path: Path) -> None:
    stat = f"anon {200 * MIB}\nfile {150 * MIB}\ninactive_file {100 * MIB}"
    group(tmp_path / "fs", {"memory.max": 512 * MIB, "memory.current": 300 * MIB, "memory.stat": stat})
    assert left(tmp_path, "0::/\n") == 312 * MIB


def test_the_tightest_limit_of_a_group_and_its_parents_counts(tmp_path: Path) -> None:
    """`memory.high` (systemd's MemoryHigh) counts, too: a group that exceeds it is slowed down."""
    fs = tmp_path / "fs"
    group(fs, {"memory.stat": ""})  # the root has no limit
    group(fs / "a", {"memory.max": "max", "memory.high": 100 * MIB, "memory.current": 60 * MIB})
    group(fs / "a/b", {"memory.max": 500 * MIB, "memory.high": "max", "memory.current": 10 * MIB})
    assert left(tmp_path, "0::/a/b\n") == 40 * MIB
    assert left(tmp_path, "0::/a\n") == 40 * MIB
    assert cgroups.limit_bytes(tmp_path / "own", fs) == 100 * MIB, "whatever is used of it"


def test_cgroup_v1_limits_are_read_from_the_memory_controllers_group(tmp_path: Path) -> None:
    files = {
        "memory.limit_in_bytes": 256 * MIB,
        "memory.usage_in_bytes": 100 * MIB,
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {50 * MIB}",
    }
    group(tmp_path / "fs" / "memory" / "docker" / "x", files)
    own = "12:cpu,cpuacct:/docker/x\n5:hugetlb,memory:/docker/x\n1:name=systemd:/docker/x\n0::/\n"
    assert left(tmp_path, own) == 206 * MIB


def test_a_container_whose_group_path_is_not_mounted_reads_the_limit_at_the_root(tmp_path: Path) -> None:
    files = {"memory.limit_in_bytes": 64 * MIB, "memory.usage_in_bytes": 24 * MIB}
    group(tmp_path / "fs" / "memory", files)
    assert left(tmp_path, "4:memory:/kubepods/pod1/not-mounted-here\n") == 40 * MIB


def test_a_group_that_exceeds_its_limit_leaves_no_memory(tmp_path: Path) -> None:
    group(tmp_path / "fs", {"memory.max": 10 * MIB, "memory.current": 20 * MIB})
    assert left(tmp_path, "0::/\n") == 0


@pytest.mark.parametrize(
    "own", ["", "0::/\n", "nonsense\n", "0::/../../etc\n", "4:memory:/gone\n", "x" * 10_000, "0::/\0\n"]
)
def test_an_absent_or_unreadable_limit_counts_as_no_limit(tmp_path: Path, own: str) -> None:
    group(tmp_path / "fs", {"memory.max": "max", "memory.current": "?", "memory.stat": "a b c\n\nd"})
    assert left(tmp_path, own) is None
    assert cgroups.left_bytes(tmp_path / "gone", tmp_path) is None


def test_the_default_memory_limit_of_a_device_respects_the_control_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine.mx, "device_info", dict)
    monkeypatch.setattr(machine.mx, "get_active_memory", lambda: 0)
    monkeypatch.setattr(machine, "left_bytes", lambda: 100 * MIB)
    assert machine.default_limit().size_bytes == int(100 * MIB * machine.MEMORY_SHARE)
    assert machine.default_limit(40 * MIB).size_bytes == 40 * MIB + int(60 * MIB * machine.MEMORY_SHARE)
    monkeypatch.setattr(machine, "left_bytes", lambda: 2**60)
    assert machine.default_limit().size_bytes < 2**60 * machine.MEMORY_SHARE
    monkeypatch.setattr(machine, "left_bytes", lambda: None)
    assert machine.default_limit().size_bytes > 0


def test_the_limit_of_a_real_control_group_is_read() -> None:
    """Skipped where this process may not create a control group."""
    roots = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
    names = ["memory.limit_in_bytes", "memory.max"]
    for root, name in zip(roots, names, strict=True):
        made = root / f"turnkeep-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            if not (made / name).exists():
                continue
            (made / name).write_text(str(256 * MIB))
            program = (
                "import os; from pathlib import Path; from worker.process.system_memory import left_bytes;"
                f"Path({str(made)!r}, 'cgroup.procs').write_text(str(os.getpid())); print(left_bytes())"
            )
            said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
            assert 128 * MIB < int(said.stdout) <= 256 * MIB
        finally:
            with contextlib.suppress(OSError):
                made.rmdir()
        return
    pytest.skip("control groups cannot be made here")
