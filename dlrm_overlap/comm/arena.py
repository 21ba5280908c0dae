"""Memory that the ranks of a node share; the only file that uses PyTorch's symmetric memory.

Producers store data, then set a flag at the consumer to the step's epoch (signal), for which the consumer waits. Flags
only grow. On CPUs `HostArena` signals and waits, on GPUs kernels do.
"""

import mmap
import os
import platform
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.comm.deadline import Deadline
from dlrm_overlap.comm.device_errors import ExchangeTimeoutError
from dlrm_overlap.comm.every_rank import gathered, on_every_rank
from dlrm_overlap.comm.reach import Reach, find_nodes
from dlrm_overlap.config import InputError, in_one_line

_ALIGNMENT_BYTES = 256
# Processors whose stores become visible to other processors in program order.
_ORDERED_STORES = ("x86_64", "AMD64")


class Region(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


class BufferView:
    def __init__(self, region: torch.Tensor) -> None:
        """`region` [rows, columns] must have a storage of its own."""
        self._region, self._storage = region, region.untyped_storage()
        self._columns, self._strides = region.shape[1], region.stride()
        self._count_users: Callable[[int], int] = torch._C._storage_Use_Count  # type: ignore[attr-defined]
        self._address = self._storage._cdata
        self._idle = self._count_users(self._address)

    def acquire(self, rows: int, first_column: int = 0, columns: int | None = None) -> torch.Tensor:
        """Return the first `rows` rows, and of these `columns` columns (None: all) from `first_column` on.

        The tensor shares the region's memory, but is not a view to autograd, which forbids in-place changes of views
        that its functions return.
        """
        columns = self._columns - first_column if columns is None else columns
        with torch.inference_mode(False):  # a tensor made in inference mode could not be saved for a backward
            return self._region.new_empty(0).set_(self._storage, first_column, (rows, columns), self._strides)

    @property
    def held(self) -> bool:
        """Whether a tensor from `acquire`, a view of it, or an autograd graph that saved it is alive."""
        return self._count_users(self._address) > self._idle


class CudaMemory:
    """GPU memory that `torch.as_tensor` wraps without a copy; the object `holds` keeps the memory allocated."""

    def __init__(self, address: int, size_bytes: int, holds: object = None) -> None:
        self._holds = holds
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


class Arena(ABC):
    """Named memory regions, with the same shapes on every rank of a node, that all ranks of the node can access.

    The constructor is a collective.
    """

    def __init__(
        self, regions: Mapping[str, Region], group: dist.ProcessGroup, device: torch.device, reach: Reach | None = None
    ) -> None:
        self.rank, self.world_size, self.device = group.rank(), group.size(), device
        self.reach = reach or Reach.of_one_node(group)
        self.reached = self.reach.here
        """ranks whose arenas are mapped here"""
        self._regions: dict[str, tuple[int, Region]] = {}
        self._addresses: dict[str, torch.Tensor] = {}
        self.size_bytes = 0
        for name, region in regions.items():
            self._regions[name] = self.size_bytes, region
            region_bytes = prod(region.shape) * region.dtype.itemsize
            self.size_bytes += -(-region_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._memory = self._map(group)

    @abstractmethod
    def _map(self, group: dist.ProcessGroup) -> list[torch.Tensor]:
        """Return each reached rank's memory, [size_bytes] uint8; a rank zeroes its memory before peers can write."""

    def view(self, name: str, rank: int) -> torch.Tensor:
        offset, (shape, dtype) = self._regions[name]
        memory = self._memory[self.reached.index(rank)]
        return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def local(self, name: str) -> torch.Tensor:
        return self.view(name, self.rank)

    def addresses(self, name: str) -> torch.Tensor:
        """Return [reached] int64 on the device: addresses of region `name` of each reached rank.

        The first call copies them to the device, and must not be captured.
        """
        if name not in self._addresses:
            pointers = [self.view(name, rank).data_ptr() for rank in self.reached]
            self._addresses[name] = torch.tensor(pointers, dtype=torch.int64, device=self.device)
        return self._addresses[name]

    def buffer_view(self, name: str) -> BufferView:
        region = self.local(name)
        region_bytes = region.numel() * region.dtype.itemsize
        memory: Any = region.flatten().view(torch.uint8)
        memory = CudaMemory(region.data_ptr(), region_bytes, region) if region.is_cuda else memory.numpy()
        return BufferView(torch.as_tensor(memory, device=self.device).view(region.dtype).view(region.shape))

    def close(self) -> None:
        """Wait for the GPU and free the memory, also if a kernel has stopped the GPU, which raises a RuntimeError.

        No kernel, here or at a peer, may still use the memory.
        """
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        finally:
            self._memory = []


class CudaArena(Arena):
    def _map(self, group: dist.ProcessGroup) -> list[torch.Tensor]:
        if len(self.reached) == 1:
            return [torch.zeros(self.size_bytes, dtype=torch.uint8, device=self.device)]
        import torch.distributed._symmetric_memory as symmetric_memory

        # Zero this rank's memory before any peer maps it.
        def allocate() -> torch.Tensor:
            try:
                memory = symmetric_memory.empty(self.size_bytes, dtype=torch.uint8, device=self.device)
                memory.zero_()
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:  # also torch.OutOfMemoryError
                raise InputError(
                    f"embedding.backend: no room for {self.size_bytes} bytes of windows on {self.device} "
                    f"({in_one_line(error):.200}); take a smaller train.batch_size, or cap the tables"
                ) from error
            return memory

        local = on_every_rank(allocate, group)

        # Map the peers' memory.
        def meet() -> Any:
            try:
                return symmetric_memory.rendezvous(local, self.reach.group or group)
            except RuntimeError as error:
                raise _unreachable(len(self.reached), in_one_line(error)[:200]) from error

        handle = on_every_rank(meet, group)
        peers = [handle.get_buffer(i, (self.size_bytes,), torch.uint8) for i in range(len(self.reached))]
        peers[self.reached.index(self.rank)] = local
        return peers


class HostArena(Arena):
    """Memory shared by the processes of a machine, in unnamed files."""

    def _map(self, group: dist.ProcessGroup) -> list[torch.Tensor]:
        files: list[int] = []
        try:
            on_every_rank(lambda: files.append(self._make_file()), group)
            found = os.fstat(files[0])
            # Peers open the file through this process's table of open files.
            location = socket.gethostname(), f"/proc/{os.getpid()}/fd/{files[0]}", (found.st_dev, found.st_ino)
            every = gathered(location, group)
            locations = [every[rank] for rank in self.reached]
            if (machines := len({machine for machine, _, _ in locations})) > 1:
                raise InputError(
                    f"embedding.backend: CPU ranks on {machines} machines share no memory; use --embedding.backend "
                    f"torchrec, or ranks of one machine"
                )
            # A rank keeps its file open until all ranks have mapped it.
            return on_every_rank(lambda: [self._open(path, file) for _, path, file in locations], group)
        finally:
            for file in files:
                os.close(file)

    def _make_file(self) -> int:
        if (machine := platform.machine()) not in _ORDERED_STORES:
            raise InputError(
                f"embedding.backend: ranks on CPUs rely on the store order of x86-64, and this is {machine}; "
                f"use --embedding.backend torchrec"
            )
        descriptor = os.memfd_create("dlrm_overlap_arena")
        try:
            os.posix_fallocate(descriptor, 0, max(1, self.size_bytes))
        except OSError as error:
            os.close(descriptor)
            raise InputError(
                f"embedding.backend: no room for {self.size_bytes} bytes of shared memory a rank "
                f"({error.strerror}); take a smaller train.batch_size"
            ) from None
        return descriptor

    def _open(self, path: str, expected: tuple[int, int]) -> torch.Tensor:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _out_of_reach(path, str(error.strerror)) from None
        try:
            found = os.fstat(descriptor)
            if (found.st_dev, found.st_ino) != expected:
                raise _out_of_reach(path, "another process has that id here")
            return torch.frombuffer(mmap.mmap(descriptor, max(1, self.size_bytes)), dtype=torch.uint8)
        finally:
            os.close(descriptor)

    def signal_flag(self, name: str, peer: int, slot: int, epoch: int, source: int | None = None) -> None:
        """Set flag `slot` of rank `source` (None: own) at `peer` to `epoch`. Region `name` is [W, slots] int64."""
        # x86-64 makes this rank's earlier stores visible before this one.
        self.view(name, peer)[self.rank if source is None else source, slot] = epoch

    def wait(self, name: str, counts: torch.Tensor, epoch: int, timeout_s: float, what: str = "slice") -> None:
        """Wait on the host until, in this rank's region `name`, the first counts[w] flags of each rank w reach `epoch`.

        Raises `ExchangeTimeoutError` after `timeout_s`; its message calls a slot `what`.
        """
        flags = self.local(name)
        used = torch.arange(flags.shape[1], device="cpu") < counts[:, None]
        deadline = None
        # x86-64 does not reorder loads: what follows sees the stores before the signals.
        while (missing := used & (flags < epoch)).any():
            deadline = deadline or Deadline(timeout_s)
            if deadline.is_over():
                peer, slot = missing.nonzero()[0].tolist()
                raise ExchangeTimeoutError((self.rank, peer, slot, epoch, int(flags[peer, slot])), timeout_s, what)
            time.sleep(20e-6)


def _unreachable(ranks: int, why: str) -> InputError:
    return InputError(
        f"embedding.backend: the GPUs of these {ranks} ranks do not reach each other's memory ({why}); use "
        f"--embedding.backend torchrec, or ranks within one NVLink domain"
    )


def _out_of_reach(path: str, why: str) -> InputError:
    return InputError(
        f"embedding.backend: {path}, a peer's memory, cannot be opened ({why}); start all ranks as one user in one "
        f"container, or use --embedding.backend torchrec"
    )


def open_arena(
    regions: Mapping[str, Region], group: dist.ProcessGroup, device: torch.device, reach: Reach | None = None
) -> Arena:
    """Make a zeroed arena for the ranks of `reach` (None: all ranks of `group`).

    A collective, to which all ranks pass the same `regions`.

    Raises `InputError` if ranks that should share memory cannot.
    """
    # Symmetric memory may wait forever for a rank that it cannot reach.
    if reach is None and device.type == "cuda":
        found = Reach(group.rank(), *find_nodes(group, device))
        if not found.is_one_node:
            raise _unreachable(group.size(), found.summary())
    return (CudaArena if device.type == "cuda" else HostArena)(regions, group, device, reach)
