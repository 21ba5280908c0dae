"""Memory of one rank that its peers read and write: the only file that touches symmetric memory.

An arena is made of regions, alike on every rank, each a tensor that every rank of its node can address (`comm.reach`).
On GPUs it is one allocation of PyTorch's symmetric memory; between processes of one node, a nameless file in memory
that all map.

Synchronisation is by epochs, 1, 2, 3, .., one a step: a producer stores, then raises its flag at the consumer to the
step's epoch; the consumer waits until the flag has reached it. Flags are never reset. On GPUs kernels raise and await
them (`kernels.flags`); here are the host's twins, which lean on the processor's store order (x86-64).
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
from dlrm_overlap.comm.reach import Reach
from dlrm_overlap.config import InputError, in_one_line

_ALIGNMENT_BYTES = 256
_ORDERED_STORES = ("x86_64", "AMD64")  # machines whose stores other processors see in order


class Region(NamedTuple):
    """A tensor of every rank's arena."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class BufferView:
    """A region that is lent as a tensor, and knows whether anything still uses it."""

    def __init__(self, region: torch.Tensor) -> None:
        """Take a tensor [rows, columns] with a storage of its own."""
        self._region, self._storage = region, region.untyped_storage()
        self._columns, self._strides = region.shape[1], region.stride()
        self._count_users: Callable[[int], int] = torch._C._storage_Use_Count  # type: ignore[attr-defined]
        self._address = self._storage._cdata
        self._idle = self._count_users(self._address)

    def acquire(self, rows: int, first_column: int = 0, columns: int | None = None) -> torch.Tensor:
        """Return `columns` columns, None for all, from `first_column` on, of the first `rows` rows.

        It is a tensor of its own on the region's storage: autograd lets nobody change a view in place that an autograd
        function has made.
        """
        columns = self._columns - first_column if columns is None else columns
        with torch.inference_mode(False):  # else no later step could save it for its backward
            return self._region.new_empty(0).set_(self._storage, first_column, (rows, columns), self._strides)

    @property
    def held(self) -> bool:
        """Whether a tensor that was lent lives, or a view of one, or a graph that saved one."""
        return self._count_users(self._address) > self._idle


class CudaMemory:
    """GPU memory as `torch.as_tensor` takes it: without a copy, into a tensor with a storage of its own."""

    def __init__(self, address: int, size_bytes: int, holds: object = None) -> None:
        """Take bytes at an address, and the owner that keeps them alive."""
        self._holds = holds
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


class Arena(ABC):
    """This rank's regions and its view of those of its node's ranks. Making one is a collective over `group`."""

    def __init__(
        self, regions: Mapping[str, Region], group: dist.ProcessGroup, device: torch.device, reach: Reach | None = None
    ) -> None:
        """Open it over the ranks that `reach` names; None is all of `group`."""
        self.rank, self.world_size, self.device = group.rank(), group.size(), device
        self.reach = reach or Reach.of_one_node(group)
        self.reached = self.reach.here
        """the ranks whose regions are seen here, this rank among them"""
        self._places: dict[str, tuple[int, Region]] = {}
        self._addresses: dict[str, torch.Tensor] = {}
        self.size_bytes = 0
        for name, region in regions.items():
            self._places[name] = self.size_bytes, region
            region_bytes = prod(region.shape) * region.dtype.itemsize
            self.size_bytes += -(-region_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._memory = self._map(group)

    @abstractmethod
    def _map(self, group: dist.ProcessGroup) -> list[torch.Tensor]:
        """Return the memory of each rank reached, [size_bytes] uint8; this rank's is zeroed before a peer can write."""

    def view(self, name: str, rank: int) -> torch.Tensor:
        """Return region `name` of the arena of `rank`, one of those reached."""
        offset, (shape, dtype) = self._places[name]
        memory = self._memory[self.reached.index(rank)]
        return memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def local(self, name: str) -> torch.Tensor:
        """Return region `name` of this rank's arena."""
        return self.view(name, self.rank)

    def addresses(self, name: str) -> torch.Tensor:
        """Return int64 on the device, one for each rank reached: where this process finds its region `name`.

        The first call copies them to the device, so it may not be within a capture; later ones return the same tensor.
        """
        if name not in self._addresses:
            pointers = [self.view(name, rank).data_ptr() for rank in self.reached]
            self._addresses[name] = torch.tensor(pointers, dtype=torch.int64, device=self.device)
        return self._addresses[name]

    def buffer_view(self, name: str) -> BufferView:
        """Return a `BufferView` of region `name` of this rank's arena, by which its window is lent to the model."""
        region = self.local(name)
        region_bytes = region.numel() * region.dtype.itemsize
        memory: Any = region.flatten().view(torch.uint8)
        memory = CudaMemory(region.data_ptr(), region_bytes, region) if region.is_cuda else memory.numpy()
        return BufferView(torch.as_tensor(memory, device=self.device).view(region.dtype).view(region.shape))

    def close(self) -> None:
        """Give the memory back. Nothing may read or write it any more, here or at a peer."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._memory = []


class CudaArena(Arena):
    """Symmetric memory of GPUs that reach each other by loads and stores."""

    def _map(self, group: dist.ProcessGroup) -> list[torch.Tensor]:
        if len(self.reached) == 1:
            return [torch.zeros(self.size_bytes, dtype=torch.uint8, device=self.device)]
        import torch.distributed._symmetric_memory as symmetric_memory

        def allocate() -> torch.Tensor:
            try:
                memory = symmetric_memory.empty(self.size_bytes, dtype=torch.uint8, device=self.device)
                memory.zero_()
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:  # of which torch.OutOfMemoryError is one
                raise InputError(
                    f"embedding.backend: no room for {self.size_bytes} bytes of windows on {self.device} "
                    f"({in_one_line(error):.200}); take a smaller train.batch_size, or cap the tables"
                ) from error
            return memory

        local = on_every_rank(allocate, group)

        def meet() -> Any:
            try:
                return symmetric_memory.rendezvous(local, self.reach.group or group)
            except RuntimeError as error:
                raise InputError(
                    f"embedding.backend: the GPUs of these {len(self.reached)} ranks do not reach each other's memory "
                    f"({in_one_line(error):.200}); use --embedding.backend torchrec, or ranks within one NVLink domain"
                ) from error

        handle = on_every_rank(meet, group)
        peers = [handle.get_buffer(i, (self.size_bytes,), torch.uint8) for i in range(len(self.reached))]
        peers[self.reached.index(self.rank)] = local
        return peers


class HostArena(Arena):
    """Memory that each process of one node makes without a name, so that no kill at any moment leaves it behind."""

    def _map(self, group: dist.ProcessGroup) -> list[torch.Tensor]:
        files: list[int] = []
        try:
            on_every_rank(lambda: files.append(self._make_file()), group)
            found = os.fstat(files[0])
            # The peers find the file in the table of this process's open files.
            place = socket.gethostname(), f"/proc/{os.getpid()}/fd/{files[0]}", (found.st_dev, found.st_ino)
            every = gathered(place, group)
            places = [every[rank] for rank in self.reached]
            if (nodes := len({node for node, _, _ in places})) > 1:
                raise InputError(
                    f"embedding.backend: CPU ranks on {nodes} nodes share no memory; use --embedding.backend torchrec, "
                    f"or ranks of one node"
                )
            # No rank goes on, or closes its file, before all have mapped it.
            return on_every_rank(lambda: [self._open(path, file) for _, path, file in places], group)
        finally:
            for file in files:
                os.close(file)

    def _make_file(self) -> int:
        """Return the descriptor of a new file of zeros in memory, which the size of /dev/shm does not bound."""
        if (machine := platform.machine()) not in _ORDERED_STORES:
            raise InputError(
                f"embedding.backend: ranks on CPUs lean on the order in which x86-64 stores, and this is {machine}; "
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
        """Map the file that `path` leads to; `expected` is its device and its inode."""
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
        """Raise flag `slot` of this rank, or of `source`, at `peer` to `epoch`; region `name` is [W, slots] int64."""
        self.view(name, peer)[self.rank if source is None else source, slot] = epoch

    def wait(self, name: str, counts: torch.Tensor, epoch: int, timeout_s: float, what: str = "slice") -> None:
        """Wait until the first counts[w] flags of every rank w have reached `epoch` here; each stands for a `what`.

        Raises:
            ExchangeTimeoutError: if that takes longer than `timeout_s`.
        """
        flags = self.local(name)
        used = torch.arange(flags.shape[1], device="cpu") < counts[:, None]
        deadline = None
        while (missing := used & (flags < epoch)).any():
            deadline = deadline or Deadline(timeout_s)
            if deadline.is_over():
                peer, slot = missing.nonzero()[0].tolist()
                raise ExchangeTimeoutError((self.rank, peer, slot, epoch, int(flags[peer, slot])), timeout_s, what)
            time.sleep(20e-6)


def _out_of_reach(path: str, why: str) -> InputError:
    return InputError(
        f"embedding.backend: {path}, a peer's memory, cannot be opened ({why}); start all ranks as one user in one "
        f"container, or use --embedding.backend torchrec"
    )


def open_arena(
    regions: Mapping[str, Region], group: dist.ProcessGroup, device: torch.device, reach: Reach | None = None
) -> Arena:
    """Make an arena of zeros on every rank of `group`, which all call this with the same regions.

    Args:
        reach: which ranks see each other's regions; None is all of `group`.

    Raises:
        InputError: if ranks that are to see each other's memory cannot reach it.
    """
    return (CudaArena if device.type == "cuda" else HostArena)(regions, group, device, reach)
