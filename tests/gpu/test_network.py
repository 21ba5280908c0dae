"""NVSHMEM starts in processes that have used page-locked memory, which it reads before it writes to it."""

import ctypes
import os
import random
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm.network import NvshmemHeap, missing_puts, start_puts

pytestmark = pytest.mark.gpu

_BLOCKS = 3000
_SIZES = (4, 8, 60, 500, 1000, 5000, 100_000)
_STOPS_NVSHMEM = 2  # PROXY_GLOBAL_EXIT_REQUESTED


@pytest.mark.parametrize("size_bytes", [4, 512, 4096, 0])  # 0: of all sizes
def test_nvshmem_starts_in_used_memory(size_bytes: int) -> None:
    if reason := missing_puts():
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.gpu.test_network", str(size_bytes)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]


def _leave_used_memory(size_bytes: int) -> None:
    """Free every other one of many page-locked blocks, in any order, with the number in them that ends NVSHMEM."""
    from cuda.bindings import runtime  # pyright: ignore # compiled, and not on every CPU

    chance, blocks = random.Random(size_bytes), list[int]()
    for _ in range(_BLOCKS):
        size = size_bytes or chance.choice(_SIZES)
        error, address = runtime.cudaMallocHost(size)
        assert error.value == 0
        words = size // 4
        ctypes.memmove(address, (ctypes.c_int * words)(*[_STOPS_NVSHMEM] * words), 4 * words)
        blocks.append(address)
    free = blocks[1::2]
    chance.shuffle(free)
    for address in free:
        runtime.cudaFreeHost(address)


def _start(size_bytes: int) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    torch.zeros(1, device=device)
    _leave_used_memory(size_bytes)
    start_puts(dist.group.WORLD, device, 60.0)
    heap = NvshmemHeap(1 << 20, dist.group.WORLD, device)
    assert not heap.local.any()
    os._exit(0)  # as ranks end: NVSHMEM would wait for its peers


if __name__ == "__main__":
    _start(int(sys.argv[1]))
