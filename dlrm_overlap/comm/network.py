"""Memory that kernels of any node can write to, by NVSHMEM's host library; the only file that uses it."""

import ctypes
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist

from dlrm_overlap.comm.arena import CudaMemory
from dlrm_overlap.comm.every_rank import faults, gathered, on_every_rank
from dlrm_overlap.config import InputError, in_one_line
from dlrm_overlap.kernels.network import Network

log = logging.getLogger("dlrm_overlap")

_HOST_LIBRARY, _DEVICE_LIBRARY = "libnvshmem_host.so.3", "libnvshmem_device.bc"
_WITH_UNIQUE_ID = 1 << 3  # NVSHMEMX_INIT_WITH_UNIQUEID
_ZEROS, _MOST_TAKEN = 1024, 1 << 18
"""zero blocks in a row after which memory counts as unused; largest number of blocks to take, some seconds of work"""
_UNIQUE_ID_BYTES, _ATTRIBUTE_BYTES, _ARGUMENT_BYTES, _ID_ARGUMENT_BYTES = 128, 144, 128, 24


def missing_puts() -> str:
    """Return why this machine's kernels cannot put to other nodes, empty if they can."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    for name in (_HOST_LIBRARY, _DEVICE_LIBRARY):
        if _library(name) is None:
            return f"NVSHMEM's {name} is not found (pip install nvidia-nvshmem-cu{(torch.version.cuda or '13')[:2]})"
    return ""


def _library(name: str) -> Path | None:
    folders = [Path(os.environ["NVSHMEM_LIB_DIR"])] if "NVSHMEM_LIB_DIR" in os.environ else []
    if importlib.util.find_spec("nvidia") and (found := importlib.util.find_spec("nvidia.nvshmem")):
        folders += [Path(package) / "lib" for package in found.submodule_search_locations or ()]
    return next((folder / name for folder in folders if (folder / name).exists()), None)


class NvshmemHeap:
    """A block of NVSHMEM's memory, of one size on every rank; the constructor is a collective.

    NVSHMEM frees on all ranks at once, and must not wait for a failed peer, so closed blocks are reused.
    """

    def __init__(self, size_bytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        """Take a zeroed block, after `start_puts`. Raises `InputError` if there is not enough memory."""
        self._nvshmem = _nvshmem()
        self._size, self._address = size_bytes, 0

        def allocate() -> None:
            self._address = self._nvshmem.allocate(size_bytes, group)
            if not self._address:
                raise InputError(
                    f"embedding.internode: no room for {size_bytes} bytes of messages in NVSHMEM's heap on "
                    f"{device}; take a smaller train.batch_size, or messages"
                )

        on_every_rank(allocate, group)
        self.local = torch.as_tensor(CudaMemory(self._address, size_bytes), device=device)
        self.local.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)  # no rank puts before all have zeroed
        heaps = torch.zeros(group.size(), dtype=torch.int64, device="cpu")
        heaps[group.rank()] = self._address
        library = str(_library(_DEVICE_LIBRARY))
        self.network = Network("nvshmem", heaps.to(device), group.rank(), library, self._nvshmem.prepare)
        """kernel argument with which kernels put data into the block at other ranks"""

    def close(self) -> None:
        """Keep the block for reuse; no rank may put into it any more."""
        self._nvshmem.keep(self._size, self._address)


def start_puts(group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
    """Start NVSHMEM on all ranks, within `timeout_s`; a collective. Raises `InputError` on all if one cannot start."""
    why = missing_puts() if device.type == "cuda" else "CPUs have no kernels that put"
    try:
        if not why:
            _nvshmem()
    except (OSError, AttributeError) as error:
        why = f"NVSHMEM's {_HOST_LIBRARY} does not load ({in_one_line(error):.200})"
    _refuse(why, group)
    _refuse(_started(_nvshmem(), group, device, timeout_s), group)


def _refuse(why: str, group: dist.ProcessGroup) -> None:
    """If some rank has a fault, raise it on all ranks: preferably one that caused others."""
    if found := faults(why and f"{why} (rank {group.rank()})", group):
        cause = min(found, key=lambda fault: "has not started" in fault)
        raise InputError(f"embedding.internode: puts, but {cause}; take messages")


def _started(nvshmem: "_Nvshmem", group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> str:
    """Start NVSHMEM unless that was tried before, and return this rank's fault, empty if none.

    NVSHMEM waits for all ranks without a timeout, so a thread starts it.
    """
    if any(gathered(nvshmem.start_fault is not None, group)):
        return nvshmem.start_fault or nvshmem.rank_mismatch(group.rank(), group.size())
    # NVSHMEM may end the process if it cannot start. Then this is the last line of the log.
    log.info("NVSHMEM starts, for puts to other nodes; embedding.internode: messages does not need it")
    shared = [nvshmem.unique_id() if group.rank() == 0 else b""]
    dist.broadcast_object_list(shared, dist.get_global_rank(group, 0), group)

    def start() -> None:
        try:
            torch.cuda.set_device(device)  # for this thread
            torch.cuda.synchronize(device)  # creates the CUDA context
            with unused_page_locked_memory():
                fault = nvshmem.start(shared[0], group.rank(), group.size())
        except Exception as error:
            fault = f"NVSHMEM does not start ({in_one_line(error):.200})"
        faults_found.append(fault)

    faults_found: list[str] = []
    thread = threading.Thread(target=start, name="start of NVSHMEM", daemon=True)
    thread.start()
    thread.join(timeout_s)
    nvshmem.start_fault = faults_found[0] if faults_found else f"NVSHMEM has not started within {timeout_s:g} s"
    return nvshmem.start_fault or nvshmem.rank_mismatch(group.rank(), group.size())


@contextmanager
def unused_page_locked_memory() -> Iterator[None]:
    """Take the small page-locked blocks that this process has freed, so that blocks allocated in the context are zero.

    A thread of NVSHMEM reads two page-locked integers that nobody has written (3.4.5, `src/host/proxy/proxy.cpp`,
    `global_exit_request_state`). In memory that the process has used, the first one may be 2 by chance. Then NVSHMEM
    ends the process: "nvshmem API called before nvshmem_init".
    """
    from cuda.bindings import runtime  # pyright: ignore # compiled, and not on every CPU

    taken, zeros = list[int](), 0
    while zeros < _ZEROS and len(taken) < _MOST_TAKEN:
        error, address = runtime.cudaMallocHost(ctypes.sizeof(ctypes.c_int))
        if error.value != 0:  # NVSHMEM allocates next, and reports it
            break
        zeros = 0 if ctypes.c_int.from_address(address).value else zeros + 1
        taken.append(address)
    try:
        yield
    finally:
        for address in taken:
            runtime.cudaFreeHost(address)


@lru_cache(maxsize=1)
def _nvshmem() -> "_Nvshmem":
    return _Nvshmem()


class _Nvshmem:
    def __init__(self) -> None:
        # No multicast, as in symmetric memory and NCCL, and the same network interface as NCCL.
        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
        if interface := os.environ.get("NCCL_SOCKET_IFNAME"):
            os.environ.setdefault("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", interface)
        self._calls = calls = ctypes.CDLL(str(_library(_HOST_LIBRARY)))
        calls.nvshmem_malloc.restype = ctypes.c_void_p
        calls.nvshmem_malloc.argtypes = [ctypes.c_size_t]
        calls.nvshmemx_cumodule_init.argtypes = [ctypes.c_void_p]
        self.start_fault: str | None = None
        """None before the start, empty if it succeeded"""
        self._allocated = 0
        self._numbers: dict[int, int] = {}
        """address of a block -> its number in the order of allocation, the same on all ranks"""
        self._free: dict[int, dict[int, int]] = {}
        """size -> number of a free block -> its address"""

    def unique_id(self) -> bytes:
        found = ctypes.create_string_buffer(_UNIQUE_ID_BYTES)
        _set_version(found, 0, _UNIQUE_ID_BYTES)
        status = self._calls.nvshmemx_get_uniqueid(found)
        return found.raw if status == 0 else b""

    def start(self, unique_id: bytes, rank: int, world_size: int) -> str:
        """Start with the other ranks, without a timeout; return the fault, empty if none."""
        if not unique_id:
            return "NVSHMEM gives no id to start with"
        identity = ctypes.create_string_buffer(unique_id, _UNIQUE_ID_BYTES)
        # Layout: version, pointer to an MPI communicator, then the arguments: version, id's arguments, content.
        attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        _set_version(attributes, 0, _ATTRIBUTE_BYTES)
        _set_version(attributes, 16, _ARGUMENT_BYTES)
        _set_version(attributes, 24, _ID_ARGUMENT_BYTES)
        status = self._calls.nvshmemx_set_attr_uniqueid_args(rank, world_size, identity, attributes)
        status = status or self._calls.nvshmemx_hostlib_init_attr(_WITH_UNIQUE_ID, attributes)
        return f"NVSHMEM does not start, status {status}, its log says why" if status else ""

    def rank_mismatch(self, rank: int, world_size: int) -> str:
        started = self.start_fault == "" and (self._calls.nvshmem_my_pe(), self._calls.nvshmem_n_pes())
        return "" if started == (rank, world_size) else f"NVSHMEM was started by other ranks (rank {rank})"

    def allocate(self, size_bytes: int, group: dist.ProcessGroup) -> int:
        """Return the address of a block, 0 if there is no memory; a collective of all ranks.

        A block is reused once it is free on all ranks: until then some rank may write to it.
        """
        mine = self._free.get(size_bytes, {})
        if common := set.intersection(*gathered(set(mine), group)):
            return mine.pop(min(common))
        address = self._calls.nvshmem_malloc(size_bytes) or 0
        self._numbers[address] = self._allocated
        self._allocated += 1
        return address

    def keep(self, size_bytes: int, address: int) -> None:
        self._free.setdefault(size_bytes, {})[self._numbers[address]] = address

    def prepare(self, module: int) -> None:
        if status := self._calls.nvshmemx_cumodule_init(module):
            raise RuntimeError(f"NVSHMEM cannot be initialized in a kernel's module, status {status}")


def _set_version(structure: ctypes.Array, offset: int, size_bytes: int) -> None:
    ctypes.c_int.from_buffer(structure, offset).value = (1 << 16) + size_bytes
