"""Sends the ids of TorchRec's pipelines through windows instead of by collectives.

TorchRec's input_dist exchanges numbers of ids by a collective, whose result the host waits for, then lengths and ids by
further collectives. Here the host learns only the greatest sizes of a batch over all ranks, from the other CPUs:

input_dist    `WindowInputDist.request`: a kernel counts the ids of this rank's batch, for the host
.. the forward of the step before; the CPUs reduce the numbers meanwhile ..
first wait    `WindowInputDist.send`: if the batch exceeds the capacity, larger windows; then this rank publishes its
              ids, and the owners of the rows read them (`backends.ids`), on the pipeline's stream of ids
second wait   nothing is left to do
forward       the exchange looks up the ids that have arrived
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from dlrm_overlap.comm.arena import Arena, open_arena
from dlrm_overlap.comm.order import CurrentStream, uncompiled
from dlrm_overlap.embedding.backends.ids import ArrivedIds, CpuIdExchange, IdExchange
from dlrm_overlap.embedding.capacity import CapacityTracker, PendingResult, RankConsensus, SizesBuffer, ended
from dlrm_overlap.embedding.exchange import Exchange, PooledAwaitable, poison_on_error
from dlrm_overlap.embedding.id_layout import IdLayout
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import Step
from dlrm_overlap.embedding.windows import WindowPair
from dlrm_overlap.torchrec_private import KJTList

log = logging.getLogger("dlrm_overlap")

ByTorchRec = tuple[Any, KJTList]
"""a context of TorchRec's, and the ids that its input_dist has sent"""
SendByTorchRec = Callable[[], ByTorchRec]
"""sends the ids of a batch by TorchRec's input_dist; a collective"""


class _Batch(NamedTuple):
    ids: Sequence[KeyedJaggedTensor]


@dataclass(frozen=True, eq=False)
class WindowInput(Multistreamable):
    """A batch whose ids have arrived through windows, or were sent by TorchRec in the end."""

    arrived: ArrivedIds | None
    """None if TorchRec has sent the ids"""
    samples: int
    """number of this rank's samples"""
    by_torchrec: ByTorchRec | None = None
    send_again: SendByTorchRec | None = None
    """sends the same ids by TorchRec; None if it has sent them"""

    def record_stream(self, stream: Any) -> None:
        for given in self.by_torchrec or (() if self.arrived is None else (self.arrived.ids,)):
            given.record_stream(stream)


class Counted(NamedTuple):
    """A batch whose ids will be sent."""

    features: KeyedJaggedTensor
    sizes: PendingResult
    buffer: SizesBuffer | None
    """the memory of the sizes, if they were counted"""
    by_torchrec: SendByTorchRec
    stream: torch.cuda.Stream | None
    """on which the features are ready; None on a CPU"""


class _Request(Awaitable[Awaitable[WindowInput]]):
    def __init__(self, input_dist: "WindowInputDist", counted: Counted) -> None:
        super().__init__()
        self._input_dist, self._counted = input_dist, counted

    def _wait_impl(self) -> Awaitable[WindowInput]:
        return NoWait(self._input_dist.send(self._counted))


class WindowInputDist:
    """Sends ids to the owners of their rows, a batch at a time; on GPUs the host waits for no kernel that moves ids.

    All ranks call the same methods in the same order. Arrived ids are in new memory in every step, and belong to the
    step alone, so steps may be forgotten, and forwards may begin before the backwards of earlier steps.

    Args:
        exchange: looks up the ids; its layout has one input for each rank, see `joined`. It must be alive while this
            object is used, and closes it.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._of_exchange = weakref.ref(exchange)
        self._device = exchange.device
        self._current = CurrentStream(self._device) if self._device.type == "cuda" else None
        self._stream: torch.cuda.Stream | None = None
        """stream of the last `send`"""
        self._tracker: CapacityTracker | None = None
        self._keys: list[str] = []
        self._buffers: list[SizesBuffer] = []
        """buffers that are not in use"""
        self._arena: Arena | None = None
        self._ids: IdExchange | None = None
        self._is_off = False

    @property
    def _exchange(self) -> Exchange:
        exchange = self._of_exchange()
        assert exchange is not None, "the module is alive"
        return exchange

    @property
    def failure(self) -> str | None:
        return self._exchange.failure

    @failure.setter
    def failure(self, failure: str) -> None:
        self._exchange.failure = failure

    @uncompiled
    def request(
        self, features: KeyedJaggedTensor, by_torchrec: SendByTorchRec
    ) -> Awaitable[Awaitable[WindowInput]] | None:
        """Start to count the ids of a batch on the current stream; a collective.

        Args:
            features: one bag for each feature and sample, on the exchange's device.
            by_torchrec: called by the first wait on all ranks if the features of some rank differ from those of the
                first batch, or have weights.

        Returns:
            An awaitable, whose first wait sends the ids, on the stream that is current there. None if TorchRec must
            send the ids of all batches: the ranks are on several nodes, or ids of the first batch have weights.
        """
        if self._is_off:
            return None
        batch = _Batch([features]) if features.weights_or_none() is None else None
        if self._tracker is None and not self._learn(batch):
            self._is_off = True
            return None
        tracker = self._tracker
        assert tracker is not None
        buffer, described = None, None
        if batch is not None and features.keys() == self._keys:
            buffer = self._buffers.pop() if self._buffers else tracker.sizes_buffer(pinned=self._current is not None)
            described = tracker.describe(batch, buffer)
        sizes = tracker.ask(described, event=buffer and buffer.event)
        stream = self._current() if self._current is not None else None
        return _Request(self, Counted(features, sizes, buffer, by_torchrec, stream))

    def _learn(self, first: _Batch | None) -> bool:
        """Learn the capacity from the first batch; return False, on all ranks, if its ids cannot be sent."""
        exchange = self._exchange
        if not exchange.reach.is_one_node:
            return False
        check = weakref.WeakMethod(exchange.check)
        consensus = RankConsensus(exchange.group, lambda: (check() or (lambda: None))(), self._device)
        self._tracker = CapacityTracker(None, consensus, device=self._device)
        self._keys = [] if first is None else list(first.ids[0].keys())
        return self._tracker.learn(first)

    @uncompiled
    @poison_on_error
    def send(self, counted: Counted) -> WindowInput:
        """Send the ids of a batch on the current stream; a collective. See `request`."""
        tracker, samples = self._tracker, counted.features.stride()
        assert tracker is not None
        greatest = counted.sizes.wait()
        self._join_streams(counted)
        if tracker.are_beyond(greatest) and not ended(greatest):
            tracker.grow(greatest)
        most, has_other_features = tracker.samples_of(greatest), not tracker.are_captured(greatest)
        if counted.buffer is not None:
            self._buffers.append(counted.buffer)
        if has_other_features:  # on some rank
            return WindowInput(None, samples, counted.by_torchrec())
        if self._ids is None or self._ids.ids.batch_capacity != tracker.capacity:  # grown, perhaps by a batch before
            self._open(tracker)
        assert self._ids is not None
        return WindowInput(self._ids.send(counted.features, most), samples, send_again=counted.by_torchrec)

    def _join_streams(self, counted: Counted) -> None:
        """Let the current stream follow what made the features, and the last `send`, whose epoch comes before."""
        if self._current is None:
            return
        current = self._current()
        for stream in (counted.stream, self._stream):
            if stream is not None and stream != current:
                current.wait_stream(stream)
        if current != counted.stream:
            counted.features.record_stream(current)
        self._stream = current

    @uncompiled
    def start(self, given: WindowInput) -> PooledAwaitable:
        """Start the step of ids that have arrived; see `Exchange.start`."""
        assert given.arrived is not None, "ids that TorchRec has not sent"
        awaitable = self._exchange.start_step(Step([given.arrived.ids], given.arrived.batch, repeats=True))
        awaitable.samples = given.samples
        return awaitable

    def poll(self) -> None:
        """Let the CPUs reduce the sizes of the last batch if they are counted; never waits."""
        if self._tracker is not None:
            self._tracker.consensus.poll()

    def _open(self, tracker: CapacityTracker) -> None:
        """Make windows for the capacity, then free the former ones; a collective."""
        exchange, capacity = self._exchange, tracker.capacity
        ids = IdLayout(exchange.layout, self._keys, capacity)
        group, reach = exchange.group, exchange.reach
        # All ranks wait for their devices here, so no kernel reads the former windows afterwards.
        arena = open_arena(ids.windows.regions(group.size()), group, self._device, reach)
        try:
            self.close()
        finally:  # so that `close` frees it, whatever follows
            self._arena = arena
        order = nullcontext() if self._current is None else exchange.order
        fixed = exchange.layout, exchange.tables, exchange.options, group, self._device, capacity.samples
        context = ExchangeContext(*fixed, exchange.counters, order, ids, reach=reach)
        windows = WindowPair(ids.windows, arena, exchange.counters.ids)
        kind = CpuIdExchange if self._current is None else IdExchange
        self._ids = kind(context, ids, windows, in_new_memory=True)
        if dist.get_rank() == 0:
            log.info(
                "backend %s: ids are sent through windows, of batches up to %s", exchange.options.backend, capacity
            )

    def check(self) -> None:
        """Raise the errors that kernels have recorded; never waits for the device."""
        if self._ids is not None:
            self._ids.check()

    def close(self) -> None:
        """Wait for the device, free the windows, and raise recorded errors; the next `send` makes windows again.

        The windows are freed in every case, and further calls do nothing.
        """
        ids, arena, self._ids, self._arena = self._ids, self._arena, None, None
        try:
            if arena is not None:
                arena.close()
        finally:  # of all errors, one that a kernel has recorded says why
            try:
                if ids is not None and self.failure is None:  # else it has been raised already
                    ids.check()
            finally:
                if ids is not None:
                    ids.close()
