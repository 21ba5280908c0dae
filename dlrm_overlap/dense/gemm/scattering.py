"""A reduce-scatter whose partial products are stored in their owners' windows, and added up there."""

import torch

from dlrm_overlap.dense.gemm.linear import Layer
from dlrm_overlap.dense.gemm.window import Window
from dlrm_overlap.kernels.dense.arguments import LINE
from dlrm_overlap.kernels.flags import Flags, wait_flags
from dlrm_overlap.kernels.gemm.publish import begin_call
from dlrm_overlap.kernels.gemm.sum_parts import Parts, sum_parts


def lines_of(rows: int, columns: int) -> int:
    """Return how many lines of LINE elements hold so many rows: one rank's partial products in an owner's window."""
    return -(-rows * columns // LINE)


class Scattering:
    """One call's partial products; when it is made, the current stream waits until all windows may be written to.

    Peers await the end of a call from then on, so who makes it takes all other memory of the call before.
    """

    def __init__(self, window: Window, x: torch.Tensor, layer: Layer) -> None:
        """Begin the call.

        Args:
            window: of at least W * lines_of(M / W, N) lines.
            x: [M, K] of this rank.
            layer: from K to N columns; its bias and activation come behind the sum.
        """
        self.window, self.rows, self.columns = window, x.shape[0] // window.world_size, layer.columns
        lines = lines_of(self.rows, self.columns)
        self.offset_bytes = window.rank * lines * LINE * x.dtype.itemsize
        """of this rank's partial products in every window"""
        self._lines, self._dtype = lines, x.dtype
        self._out = x.new_empty(lines * LINE)  # sums are stored 16 bytes at a time
        received = window.at(window.rank, x.dtype)[: window.world_size * lines * LINE]
        self._parts = Parts(received, lines, self._out, self.columns, layer.bias, layer.activation == "relu")
        begin_call(window.flags, window.rank)

    def target(self, owner: int) -> torch.Tensor:
        """Return where this rank's partial products lie at `owner`, [M / W, N]."""
        first = self.window.rank * self._lines * LINE
        memory = self.window.at(owner, self._dtype)
        return memory[first : first + self.rows * self.columns].view(self.rows, self.columns)

    def add_up(self, arrived: Flags, begin: int, end: int) -> None:
        """Wait for some flags, and add up the rows [begin, end) of all ranks; the last row is in the last call."""
        window = self.window
        wait_flags(arrived, window.rank, 0)
        is_last = end == self.rows
        sum_parts(self._parts, window.flags.done, window.flags.counted, window.rank, (begin, end), is_last)

    def sums(self) -> torch.Tensor:
        """Return the sums [M / W, N], once all rows have been added up."""
        return self._out.resize_(self.rows, self.columns)  # no view, which autograd would let nobody change in place
