"""Who takes part in the figure of the collectives: the process group's, plain and registered, and our own."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.registered import RegisteredGroup
from dlrm_overlap.comm.calls import fastest_way
from dlrm_overlap.comm.collectives import PeerCollectives


class CollectiveContender(ABC):
    """One way to carry rows between all ranks, with an input and an output of its own choice."""

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device, capacity_bytes: int) -> None:
        """Make its memory; all ranks call this.

        Args:
            name: of the contender.
            group: the ranks.
            device: of this rank.
            capacity_bytes: of the greatest output, and of the greatest input.
        """
        self.name, self.group, self.device = name, group, device
        self.input, self.output = self._memory(capacity_bytes)

    @abstractmethod
    def _memory(self, capacity_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [capacity_bytes] uint8 each: where inputs and outputs lie."""

    @abstractmethod
    def begin(self, operation: str, output: torch.Tensor, input: torch.Tensor, beside: str) -> Callable[[], object]:
        """Begin a collective on the current stream, and return what makes the stream wait for it."""

    def way(self, row_bytes: int, beside: str, captured: bool) -> str | None:
        """Return which way is taken, where there is a choice."""
        return None

    def close(self) -> None:
        """Give the memory back; all ranks call this."""
        self.input = self.output = torch.empty(0)


class GroupCollectives(CollectiveContender):
    """The process group's own: NCCL between GPUs, gloo between CPUs."""

    def _memory(self, capacity_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        make = lambda: torch.empty(capacity_bytes, dtype=torch.uint8, device=self.device)  # noqa: E731
        return make(), make()

    def begin(self, operation: str, output: torch.Tensor, input: torch.Tensor, beside: str) -> Callable[[], object]:
        """Begin NCCL's collective."""
        call: Any = dist.all_to_all_single if operation == "all_to_all" else dist.all_gather_into_tensor
        return call(output.view(-1), input.view(-1), group=self.group, async_op=True).wait


class RegisteredCollectives(GroupCollectives):
    """NCCL's, in memory that NCCL has allocated and registered; by copy engines where its policy asks for no CTA."""

    def _memory(self, capacity_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._registered = RegisteredGroup(self.device, self.name == "nccl_copy_engines")
        self.group = self._registered.group
        make = super()._memory
        return self._registered.allocate(lambda: make(capacity_bytes))

    def close(self) -> None:
        """Take the memory off NCCL's list, and end the group."""
        super().close()
        self._registered.close()


class OwnCollectives(CollectiveContender):
    """`PeerCollectives`, by the way that is the contender's name."""

    def _memory(self, capacity_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._collectives = PeerCollectives(self.group, self.device, capacity_bytes, wait_timeout_s=60.0)
        self._way: Any = self.name
        output = self._collectives.empty((capacity_bytes,), torch.uint8)
        return torch.empty(capacity_bytes, dtype=torch.uint8, device=self.device), output

    def set_programs(self, programs: int) -> None:
        """Let the kernel of stores have so many programs, on GPUs."""
        flow: Any = self._collectives._flow
        flow.programs = programs

    def begin(self, operation: str, output: torch.Tensor, input: torch.Tensor, beside: str) -> Callable[[], object]:
        """Begin our own collective."""
        call: Any = getattr(self._collectives, operation)
        return call(output, input, self._way, beside).wait

    def way(self, row_bytes: int, beside: str, captured: bool) -> str | None:
        """Return the way, that which auto chooses included."""
        return fastest_way(row_bytes, beside, captured) if self._way == "auto" else self._way

    def close(self) -> None:
        """Give the memory back."""
        super().close()
        self._collectives.close()


def make_contenders(
    names: tuple[str, ...], group: dist.ProcessGroup, device: torch.device, capacity_bytes: int, programs: int
) -> list[CollectiveContender]:
    """Return the contenders of these names, on CPUs without those that need NCCL; all ranks call this."""
    made: list[CollectiveContender] = []
    for name in names:
        if not name.startswith("nccl"):
            own = OwnCollectives(name, group, device, capacity_bytes)
            own.set_programs(programs)
            made.append(own)
        elif name == "nccl":
            made.append(GroupCollectives(name, group, device, capacity_bytes))
        elif device.type == "cuda":
            made.append(RegisteredCollectives(name, group, device, capacity_bytes))
    return made
