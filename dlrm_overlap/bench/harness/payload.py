"""What a communication between all ranks moves. It is made by formula, so every rank knows what its result must be."""

from typing import cast

import torch
import torch.distributed as dist

KINDS = ("all_to_all", "all_gather", "all_reduce")
_STEP = 1024  # a rank's part of a buffer is a multiple of so many elements
_PERIOD = 61  # of the contents: sums over few ranks are exact


class Payload:
    """What a communication of one kind and size moves, on one rank, in float32.

    `bytes` are those of the whole buffer, [W, n]: what `all_to_all` sends and receives, each with the rank's own row,
    what `all_gather` receives, and what `all_reduce` averages.
    """

    def __init__(self, kind: str, megabytes: float, group: dist.ProcessGroup, device: torch.device) -> None:
        self.kind, self.megabytes, self.group, self.device = kind, megabytes, group, device
        self.rank, self.world_size = group.rank(), group.size()
        self.part = max(_STEP, round(megabytes * 1e6 / 4 / self.world_size) // _STEP * _STEP)
        """n, elements of a row"""
        self.input = torch.empty(self._input_shape, device=device)
        rows = self.input.view(-1, self.part)
        for number, row in enumerate(rows):
            row.copy_(self._content(self.rank, number))

    @property
    def _input_shape(self) -> tuple[int, ...]:
        return (self.part,) if self.kind == "all_gather" else self.shape

    @property
    def shape(self) -> tuple[int, int]:
        """Of the result."""
        return self.world_size, self.part

    @property
    def link_bytes(self) -> int:
        """Bytes that leave a rank for its peers, by an implementation that sends each only once."""
        sent = (self.world_size - 1) * self.part * 4
        return 2 * sent if self.kind == "all_reduce" else sent

    def _content(self, sender: int, row: int) -> torch.Tensor:
        """Return row `row` [n] of what `sender` brings."""
        numbers = torch.arange(self.part, dtype=torch.int32, device=self.device)
        return ((numbers + 3 * sender + 5 * row) % _PERIOD).float()

    def is_right(self, result: torch.Tensor) -> bool:
        """Return whether `result` [W, n] is what the communication must give this rank."""
        for number, row in enumerate(result.view(self.shape)):
            if self.kind == "all_to_all":
                expected = self._content(number, self.rank)
            elif self.kind == "all_gather":
                expected = self._content(number, 0)
            else:
                parts = [self._content(sender, number) for sender in range(self.world_size)]
                expected = cast(torch.Tensor, sum(parts)) / self.world_size
            if not torch.allclose(row, expected, rtol=1e-6, atol=0.0):
                return False
        return True
