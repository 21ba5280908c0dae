"""Memory that kernels put into from any node: the only file that touches NVSHMEM.

PyTorch's symmetric memory has one backend a process, and refuses another after the first allocation. The arena's is
CUDA's, since NVSHMEM allocates for all ranks alone, not for those of a node. So NVSHMEM's host library, which PyTorch
brings along, is called here: a heap beside the arena, started when an exchange first needs one.
"""

import ctypes
import importlib.util
import logging
import os
import threading
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
_UNIQUE_ID_BYTES, _ATTRIBUTE_BYTES, _ARGUMENT_BYTES, _ID_ARGUMENT_BYTES = 128, 144, 128, 24


def missing_puts() -> str:
    """Return why kernels of this machine cannot put to other nodes; empty if they can."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    for name in (_HOST_LIBRARY, _DEVICE_LIBRARY):
        if _library(name) is None:
            return f"NVSHMEM's {name} is not found (pip install nvidia-nvshmem-cu{(torch.version.cuda or '13')[:2]})"
    return ""


def _library(name: str) -> Path | None:
    """Return a file of NVSHMEM's, from NVSHMEM_LIB_DIR if that is set, else from the package that PyTorch needs."""
    folders = [Path(os.environ["NVSHMEM_LIB_DIR"])] if "NVSHMEM_LIB_DIR" in os.environ else []
    if importlib.util.find_spec("nvidia") and (found := importlib.util.find_spec("nvidia.nvshmem")):
        folders += [Path(place) / "lib" for place in found.submodule_search_locations or ()]
    return next((folder / name for folder in folders if (folder / name).exists()), None)


class NvshmemHeap:
    """A block of NVSHMEM's heap, alike on every rank, into which kernels put. Making one is a collective.

    NVSHMEM allocates and frees on all ranks at once. Who closes an exchange since a peer has failed must not wait for
    that peer, so a block is not freed, but kept for the next exchange whose size it is.
    """

    def __init__(self, size_bytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        """Take a block of zeros; `start_puts` has been called.

        Raises:
            InputError: if there is no room for it.
        """
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
        """[size] uint8: this rank's"""
        self.local.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)  # nobody puts before all have zeroed
        heaps = torch.zeros(group.size(), dtype=torch.int64, device="cpu")
        heaps[group.rank()] = self._address
        library = str(_library(_DEVICE_LIBRARY))
        self.network = Network("nvshmem", heaps.to(device), group.rank(), library, self._nvshmem.prepare)
        """the argument by which kernels put into it"""

    def close(self) -> None:
        """Keep the block for another heap of its size. Nothing may put into it any more, here or at a peer."""
        self._nvshmem.keep(self._size, self._address)


def start_puts(group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
    """Start NVSHMEM on all ranks of `group`, so that kernels put to other nodes; a collective.

    Args:
        group: all ranks.
        device: of this rank.
        timeout_s: bound of the start, in which ranks wait for each other within NVSHMEM.

    Raises:
        InputError: on all ranks, if some rank cannot.
    """
    why = missing_puts() if device.type == "cuda" else "CPUs have no kernels that put"
    try:
        if not why:
            _nvshmem()
    except (OSError, AttributeError) as error:
        why = f"NVSHMEM's {_HOST_LIBRARY} does not load ({in_one_line(error):.200})"
    _refuse(why, group)
    _refuse(_started(_nvshmem(), group, device, timeout_s), group)


def _refuse(why: str, group: dist.ProcessGroup) -> None:
    """Raise a rank's fault on all ranks, best of one for which others wait; `why` is empty where there is none."""
    if found := faults(why and f"{why} (rank {group.rank()})", group):
        cause = min(found, key=lambda fault: "has not started" in fault)
        raise InputError(f"embedding.internode: puts, but {cause}; take messages")


def _started(nvshmem: "_Nvshmem", group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> str:
    """Start as `start_puts`, once every rank has the library, and return this rank's fault.

    NVSHMEM waits for all ranks without a bound. So a thread starts it, which is left there if a rank has failed; a
    failed start is not tried again.
    """
    if any(gathered(nvshmem.verdict is not None, group)):
        return nvshmem.verdict or nvshmem.misfit(group.rank(), group.size())
    # Where it cannot start, NVSHMEM may end the process: then this is the last line.
    log.info("NVSHMEM starts, for puts to other nodes; embedding.internode: messages goes without")
    shared = [nvshmem.unique_id() if group.rank() == 0 else b""]
    dist.broadcast_object_list(shared, dist.get_global_rank(group, 0), group)

    def start() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # of the thread that this runs in
                torch.cuda.synchronize(device)  # the context is there
            fault = nvshmem.start(shared[0], group.rank(), group.size())
        except Exception as error:
            fault = f"NVSHMEM does not start ({in_one_line(error):.200})"
        told.append(fault)

    told: list[str] = []
    thread = threading.Thread(target=start, name="start of NVSHMEM", daemon=True)
    thread.start()
    thread.join(timeout_s)
    nvshmem.verdict = told[0] if told else f"NVSHMEM has not started within {timeout_s:g} s"
    return nvshmem.verdict or nvshmem.misfit(group.rank(), group.size())


@lru_cache(maxsize=1)
def _nvshmem() -> "_Nvshmem":
    """Return NVSHMEM, of which a process has one."""
    return _Nvshmem()


class _Nvshmem:
    """NVSHMEM's host library, as far as it is used, and the blocks of its heap that are free."""

    def __init__(self) -> None:
        # Multicast stays off, as in symmetric memory and NCCL. The network is the one that NCCL takes.
        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
        if interface := os.environ.get("NCCL_SOCKET_IFNAME"):
            os.environ.setdefault("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", interface)
        self._calls = calls = ctypes.CDLL(str(_library(_HOST_LIBRARY)))
        calls.nvshmem_malloc.restype = ctypes.c_void_p
        calls.nvshmem_malloc.argtypes = [ctypes.c_size_t]
        calls.nvshmemx_cumodule_init.argtypes = [ctypes.c_void_p]
        self.verdict: str | None = None
        """this rank's fault in a start, empty if it has started; None before it"""
        self._allocated = 0
        self._numbers: dict[int, int] = {}
        """address of a block -> its number in the order in which all ranks have allocated"""
        self._free: dict[int, dict[int, int]] = {}
        """size -> number of a block that is kept -> its address"""

    def unique_id(self) -> bytes:
        """Return the id with which all ranks start; called on one of them."""
        found = ctypes.create_string_buffer(_UNIQUE_ID_BYTES)
        _set_version(found, 0, _UNIQUE_ID_BYTES)
        status = self._calls.nvshmemx_get_uniqueid(found)
        return found.raw if status == 0 else b""

    def start(self, unique_id: bytes, rank: int, world_size: int) -> str:
        """Start with the other ranks, waiting for them without a bound; return the fault, empty if none."""
        if not unique_id:
            return "NVSHMEM gives no id to start with"
        identity = ctypes.create_string_buffer(unique_id, _UNIQUE_ID_BYTES)
        # Version, pointer to an MPI communicator, then arguments: version, arguments of the id, content.
        attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        _set_version(attributes, 0, _ATTRIBUTE_BYTES)
        _set_version(attributes, 16, _ARGUMENT_BYTES)
        _set_version(attributes, 24, _ID_ARGUMENT_BYTES)
        status = self._calls.nvshmemx_set_attr_uniqueid_args(rank, world_size, identity, attributes)
        status = status or self._calls.nvshmemx_hostlib_init_attr(_WITH_UNIQUE_ID, attributes)
        return f"NVSHMEM does not start, status {status}, its log says why" if status else ""

    def misfit(self, rank: int, world_size: int) -> str:
        """Return a fault if it was started by other ranks than these."""
        started = self.verdict == "" and (self._calls.nvshmem_my_pe(), self._calls.nvshmem_n_pes())
        return "" if started == (rank, world_size) else f"NVSHMEM was started by other ranks (rank {rank})"

    def allocate(self, size_bytes: int, group: dist.ProcessGroup) -> int:
        """Return the address of a block, 0 if there is no room; a collective of all ranks, `group`.

        It is the first block of this size that all ranks have kept. One that some rank still has may be put into there,
        and that rank would wait in NVSHMEM's allocation for the others, without a bound.
        """
        mine = self._free.get(size_bytes, {})
        if common := set.intersection(*gathered(set(mine), group)):
            return mine.pop(min(common))
        address = self._calls.nvshmem_malloc(size_bytes) or 0
        self._numbers[address] = self._allocated
        self._allocated += 1
        return address

    def keep(self, size_bytes: int, address: int) -> None:
        """Take a block back."""
        self._free.setdefault(size_bytes, {})[self._numbers[address]] = address

    def prepare(self, module: int) -> None:
        """Make a loaded module of kernels know this rank's heap."""
        if status := self._calls.nvshmemx_cumodule_init(module):
            raise RuntimeError(f"NVSHMEM does not take a module of kernels, status {status}")


def _set_version(structure: ctypes.Array, offset: int, size_bytes: int) -> None:
    """Set the version of a structure of NVSHMEM's, which is its first, and its size."""
    ctypes.c_int.from_buffer(structure, offset).value = (1 << 16) + size_bytes
