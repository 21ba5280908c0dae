"""Windows that peers store into, their flags, and the epochs that both ends count."""

import gc
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dlrm_overlap.comm.arena import Arena, BufferView, Region
from dlrm_overlap.comm.counters import Counter
from dlrm_overlap.kernels.bags import Windows
from dlrm_overlap.kernels.flags import Flags, prepare_signals, prepare_wait, signal_flags


class BufferInUseError(RuntimeError):
    """A forward began while the pooled embeddings of the previous one were in use."""


def __getattr__(name: str) -> Any:
    if name != "WindowHeldError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("WindowHeldError is deprecated; use BufferInUseError", FutureWarning, stacklevel=2)
    return BufferInUseError


class WindowSpec(NamedTuple):
    name: str
    window: Region
    """shape and dtype of each of the two windows"""
    slots: int
    """number of flags that each rank sets at each other rank"""

    def regions(self, world_size: int) -> Mapping[str, Region]:
        """Return windows NAME0 and NAME1, and the flags NAME_ready, [W, slots] int64."""
        flags = Region((world_size, self.slots), torch.int64)
        return {f"{self.name}0": self.window, f"{self.name}1": self.window, f"{self.name}_ready": flags}


class WindowPair:
    """Two windows of every rank, and ready flags [W, slots], whose row w rank w sets.

    Step e = 1, 2, 3, .. uses window e mod 2: peers store into it, then set their flags to e. Nothing is ever reset. A
    rank that has seen every peer's flags of step e - 1 may store step e, because a peer's stream reads the window of
    step e - 2 before it sets its flags of step e - 1. So no step may begin while an earlier window is in use (`begin`
    checks the views of `acquire`), and each rank sets a flag at each other rank in every step.

    Example: in step 3 rank 1 stores into NAME1 of rank 0, then sets slot 0 of row 1 of rank 0's NAME_ready to 3.
    """

    def __init__(self, spec: WindowSpec, arena: Arena, counter: Counter) -> None:
        self.arena, self.counter = arena, counter
        self.names, self.flags = (f"{spec.name}0", f"{spec.name}1"), f"{spec.name}_ready"
        self._windows = [arena.local(name) for name in self.names]
        self._views: list[BufferView] = []

    @property
    def epoch(self) -> int:
        """The current step's epoch, 0 before the first."""
        return self.counter.value

    @property
    def name(self) -> str:
        return self.names[self.epoch % 2]

    @property
    def local(self) -> torch.Tensor:
        return self._windows[self.counter.value % 2]

    def begin(self) -> int:
        """Begin a step and return its epoch; a BufferInUseError, with nothing begun, if an acquired view is in use."""
        if self._views and self._held():
            gc.collect()  # a reference cycle may be all that holds it
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
        """Return a view of the current window, which is in use until nothing refers to the view."""
        if not self._views:
            self._views = [self.arena.buffer_view(name) for name in self.names]
        return self._views[self.epoch % 2].acquire(rows, first_column, columns)

    def peers(self, stride: int, dtype: torch.dtype) -> list[Windows]:
        """Return the windows of the ranks reached, of even and of odd epochs, with rows of `stride` elements."""
        return [Windows(self.arena.addresses(name), stride, dtype) for name in self.names]


def one_flag_each(ranks: range, world_size: int) -> torch.Tensor:
    """Return [W] int32: 1 flag to wait for from each of `ranks`, 0 from the others."""
    return torch.tensor([int(rank in ranks) for rank in range(world_size)], dtype=torch.int32, device="cpu")


class Signals(ABC):
    """Sets flags of a pair at the ranks reached, and waits for flags of other ranks, in the current epoch.

    Args:
        counts: [W] int32: flags to wait for, by rank.
        status: where an expired wait is recorded on GPUs, see `DeviceErrorRecord.status`.
        unit: what the error of an expired wait calls a flag on CPUs.
    """

    def __init__(
        self, pair: WindowPair, counts: torch.Tensor, timeout_s: float,
        status: torch.Tensor | None = None, unit: str = "slice",
    ) -> None:  # fmt: skip
        self._pair, self._counts, self._timeout_s, self._status, self._unit = pair, counts, timeout_s, status, unit
        self.prepare()

    def prepare(self) -> None:  # noqa: B027  optional
        """Prepare `signal` and `wait`."""

    @abstractmethod
    def signal(self, source: int | None = None) -> None:
        """Set the first flag of this rank, or of `source`, a rank of another node, at all ranks reached.

        On GPUs the current stream does so, after all work on it.
        """

    @abstractmethod
    def wait(self) -> None:
        """Wait for the flags of the current epoch; on GPUs the current stream waits, not the host."""


class DeviceSignals(Signals):
    def prepare(self) -> None:
        assert self._status is not None
        pair, arena = self._pair, self._pair.arena
        self.flags = Flags(
            addresses=arena.addresses(pair.flags),
            clock=pair.counter.word,
            local=arena.local(pair.flags),
            counts=self._counts.to(arena.device),
            timeout=int(self._timeout_s * 1e9),
            status=self._status,
        )
        self._signal, self._wait = prepare_signals(self.flags, arena.rank, 0), prepare_wait(self.flags, arena.rank)

    def signal(self, source: int | None = None) -> None:
        if source is None:
            self._signal(self._pair.counter.argument)
        else:
            signal_flags(self.flags, source, 0, self._pair.counter.argument)

    def wait(self) -> None:
        self._wait(self._pair.counter.argument)


def skip_epoch(pair: WindowPair, kind: type[Signals], timeout_s: float, status: torch.Tensor | None = None) -> None:
    """Take an epoch in which nothing is stored: signal the ranks reached, and wait for their signals.

    A collective of the ranks reached; no other rank stores into this rank's windows.
    """
    signals = kind(pair, one_flag_each(pair.arena.reached, pair.arena.world_size), timeout_s, status)
    pair.begin()
    signals.signal()
    signals.wait()


def flags_among(flags: Flags, reached: range) -> Flags:
    """Return flags for a kernel that only sets them: row i belongs to the i-th of the ranks reached."""
    if len(reached) == len(flags.local):
        return flags
    row_bytes = flags.local.shape[1] * flags.local.element_size()
    ranks, addresses = len(reached), flags.addresses + reached.start * row_bytes
    return replace(flags, addresses=addresses, local=flags.local[:ranks], counts=flags.counts[:ranks])
