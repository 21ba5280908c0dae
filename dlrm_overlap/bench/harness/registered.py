"""Memory that NCCL has allocated and registered, in a group of its own; its copy engines take no other."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_WARM_UP_BYTES = 1 << 10


class RegisteredGroup:
    """A group of all ranks, and memory that its collectives take registered. On GPUs, by NCCL."""

    def __init__(self, device: torch.device, copy_engines: bool) -> None:
        """Make the group; all ranks call this.

        Args:
            device: of this rank.
            copy_engines: ask NCCL to take no multiprocessor (its zero-CTA policy), and so copy engines where it can:
                between registered memory, in collectives whose parts are alike.
        """
        options: Any = dist.ProcessGroupNCCL.Options()
        if copy_engines:
            options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
        group: Any = dist.new_group(backend="nccl", pg_options=options, device_id=device)
        self.group = group
        warm_up = torch.zeros(group.size() * _WARM_UP_BYTES, dtype=torch.uint8, device=device)
        dist.all_to_all_single(torch.empty_like(warm_up), warm_up, group=group)  # makes the communicator
        self._backend = group._get_backend(device)
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)

    def allocate(self, make: Callable[[], T]) -> T:
        """Return what `make` makes, its memory registered; once, and alike on all ranks, which all call this."""
        with torch.cuda.use_mem_pool(self._pool):
            made = make()
        self._backend.register_mem_pool(self._pool, symm=True)
        return made

    def close(self) -> None:
        """Take the memory off NCCL's list, and end the group; nobody may use the memory any more."""
        self._backend.deregister_mem_pool(self._pool)
        dist.destroy_process_group(self.group)
