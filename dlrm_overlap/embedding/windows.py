"""Windows that peers store into: two that take turns, their ready flags, and the epochs that both ends count."""

import gc
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dlrm_overlap.comm.arena import Arena, BufferView, Region
from dlrm_overlap.comm.counters import Counter
from dlrm_overlap.kernels.bags import Windows
from dlrm_overlap.kernels.flags import Flags, prepare_signals, prepare_wait, signal_flags


class BufferInUseError(RuntimeError):
    """A forward began while the pooled embeddings of the one before were still in use."""


def __getattr__(name: str) -> Any:
    """Return what has had another name, with a warning."""
    if name != "WindowHeldError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("WindowHeldError is deprecated; use BufferInUseError", FutureWarning, stacklevel=2)
    return BufferInUseError


class WindowSpec(NamedTuple):
    """The needs of a `WindowPair` in every rank's arena."""

    name: str
    """prefix of its regions' names"""
    window: Region
    """shape and type of either window"""
    slots: int
    """ready flags that each rank raises at each other"""

    def regions(self, world_size: int) -> Mapping[str, Region]:
        """Return the regions: NAME0 and NAME1, the windows, and NAME_ready [W, slots] int64, the flags."""
        flags = Region((world_size, self.slots), torch.int64)
        return {f"{self.name}0": self.window, f"{self.name}1": self.window, f"{self.name}_ready": flags}


class WindowPair:
    """Two windows of every rank, and [W, slots] ready flags, of which rank w raises row w.

    Step e = 1, 2, 3, .. uses window e mod 2: peers store into it, then raise their flags to e. Nothing is ever reset.
    A rank that has seen every peer's flags of step e - 1 may store step e into the peers' windows: whatever reads
    there step e - 2's values in the same window precedes that peer's step e - 1 on its stream. That holds if no rank
    begins a step while the window of an earlier one is in use, which `begin` checks of windows that are lent, and if
    each rank raises a flag at each other in every step, also where it has nothing to send.

    Example: in step 3 rank 1 stores into NAME1 of rank 0, then raises slot 0 of row 1 of rank 0's NAME_ready to 3.
    """

    def __init__(self, spec: WindowSpec, arena: Arena, counter: Counter) -> None:
        """Take the windows of `spec` in an arena that has its regions; the arena's owner closes it.

        Args:
            counter: of the epochs, which goes on from where an earlier pair has left it.
        """
        self.arena, self.counter = arena, counter
        self.names, self.flags = (f"{spec.name}0", f"{spec.name}1"), f"{spec.name}_ready"
        self._windows = [arena.local(name) for name in self.names]
        self._views: list[BufferView] = []

    @property
    def epoch(self) -> int:
        """Epoch of the current step, 0 before the first."""
        return self.counter.value

    @property
    def name(self) -> str:
        """Name of the current step's window in the arena."""
        return self.names[self.epoch % 2]

    @property
    def local(self) -> torch.Tensor:
        """This rank's window of the current step."""
        return self._windows[self.counter.value % 2]

    def begin(self) -> int:
        """Begin a step and return its epoch.

        Raises:
            BufferInUseError: if a window that was lent is still in use; nothing has begun.
        """
        if self._views and self._held():
            gc.collect()  # a cycle may be all that holds it
            if self._held():
                raise BufferInUseError(
                    "pooled embeddings: a forward began while the output of the one before is in use, and peers would "
                    "overwrite it; give the sharder copy_output=True, or run its backward or drop it first"
                )
        self.counter.value += 1
        return self.counter.value

    def _held(self) -> bool:
        first, second = self._views
        return first.held or second.held

    def acquire(self, rows: int, first_column: int = 0, columns: int | None = None) -> torch.Tensor:
        """Return `columns` columns, None for all, from `first_column` on, of the first `rows` rows of the window.

        The window is in use until nothing holds them any more.
        """
        if not self._views:
            self._views = [self.arena.buffer_view(name) for name in self.names]
        return self._views[self.epoch % 2].acquire(rows, first_column, columns)

    def peers(self, stride: int, dtype: torch.dtype) -> list[Windows]:
        """Return the windows of the ranks reached, of even epochs and of odd ones; `stride` is a row's, in elements."""
        return [Windows(self.arena.addresses(name), stride, dtype) for name in self.names]


def one_flag_each(ranks: range, world_size: int) -> torch.Tensor:
    """Return [W] int32 that has one awaited flag of each of `ranks`, and none of the others."""
    return torch.tensor([int(rank in ranks) for rank in range(world_size)], dtype=torch.int32, device="cpu")


class PairFlags:
    """The flags of a pair on the device: raised at the ranks reached, and awaited of all, in the current epoch."""

    def __init__(
        self, pair: WindowPair, counts: torch.Tensor, timeout_s: float, status: torch.Tensor, unit: str = "slice"
    ) -> None:
        """Take the flags.

        Args:
            counts: [W] int32, how many flags this rank awaits of each rank.
            timeout_s: bound of a wait.
            status: [1 + kinds] int64 on the device, where a wait that expires is recorded: `Record.status`.
            unit: for which a flag stands, where an expired wait is raised at once.
        """
        arena, self._pair = pair.arena, pair
        self.flags = Flags(
            addresses=arena.addresses(pair.flags),
            clock=pair.counter.word,
            local=arena.local(pair.flags),
            counts=counts.to(arena.device),
            timeout=int(timeout_s * 1e9),
            status=status,
        )
        self._raising, self._awaiting = prepare_signals(self.flags, arena.rank, 0), prepare_wait(self.flags, arena.rank)

    def raise_at_all(self, source: int | None = None) -> None:
        """Raise the first flag of this rank, or of `source`, of another node, as that one would."""
        if source is None:
            self._raising(self._pair.counter.argument)
        else:
            signal_flags(self.flags, source, 0, self._pair.counter.argument)

    def wait(self) -> None:
        """Wait for the flags."""
        self._awaiting(self._pair.counter.argument)


def skip_epoch(pair: WindowPair, kind: type[PairFlags], timeout_s: float, status: Any) -> None:
    """Take an epoch of a pair in which nothing is stored: raise a flag at each rank reached, and await one of each.

    Only ranks of this node store into its windows, so those of other nodes need not be awaited.
    """
    flags = kind(pair, one_flag_each(pair.arena.reached, pair.arena.world_size), timeout_s, status)
    pair.begin()
    flags.raise_at_all()
    flags.wait()


def flags_among(flags: Flags, reached: range) -> Flags:
    """Return the flags that the ranks reached raise at each other, as if they were all ranks, for who raises them.

    Rank i of these has row i, as `Flags` says, since each address is that of the first one's row. They are not awaited:
    `local` and `counts` are of the shape alone.
    """
    if len(reached) == len(flags.local):
        return flags
    row_bytes = flags.local.shape[1] * flags.local.element_size()
    ranks, addresses = len(reached), flags.addresses + reached.start * row_bytes
    return replace(flags, addresses=addresses, local=flags.local[:ranks], counts=flags.counts[:ranks])
