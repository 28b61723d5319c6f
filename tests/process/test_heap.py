"""Reserved memory causes few page faults, and freed memory is kept: counted in real processes."""

import subprocess
import sys

import pytest

from worker.models.blas import computes_on_linux_cpu
from worker.process.heap import SpareMemory

MIB = 2**20
PAGES = 48 * MIB // 4096

#: Allocates, writes and frees 48 MiB in pieces, twice, and prints the number of page faults of each time.
PROGRAM = """
import ctypes, resource, sys
from worker.process.heap import SpareMemory

MIB = 2**20
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    taken = [libc.malloc(2 * MIB) for _ in range(24)]
    for address in taken:
        ctypes.memset(address, 1, 2 * MIB)
    found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    for address in taken:
        libc.free(address)
    return found

spare = SpareMemory(int(sys.argv[1]))
spare.fill()
weights = libc.malloc(8 * MIB)  # what comes before the release takes nothing of it
ctypes.memset(weights, 1, 8 * MIB)
spare.release()
print(faults(), faults())
"""

needs_glibc = pytest.mark.skipif(not computes_on_linux_cpu(), reason="MLX has its own memory here")


def faults(size_bytes: int) -> list[int]:
    command = [sys.executable, "-c", PROGRAM, str(size_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [int(number) for number in done.stdout.split()]


@needs_glibc
def test_repeated_allocations_within_the_heap_reserve_cause_page_faults_for_under_a_tenth_of_pages() -> None:
    assert max(faults(64 * MIB)) < PAGES / 10


@needs_glibc
def test_allocating_without_a_heap_reserve_causes_a_page_fault_for_every_page() -> None:
    first, _ = faults(0)
    assert first >= PAGES


@needs_glibc
def test_at_least_half_of_freed_memory_is_reused_even_if_its_size_exceeds_the_heap_reserve() -> None:
    first, second = faults(16 * MIB)
    assert first >= PAGES / 2
    assert second <= PAGES / 2


def test_releasing_an_empty_heap_reserve_raises_no_error() -> None:
    SpareMemory(0).release()
