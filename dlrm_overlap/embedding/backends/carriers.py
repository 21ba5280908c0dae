"""What carries messages to other hosts, on GPUs: a carrier for each direction of a step; here those by a collective.

`puts` has the carriers by kernels. A backend between hosts has one of either kind, and need not know which.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from dlrm_overlap.embedding.backends.messages import MessageBuffers
from dlrm_overlap.embedding.device.lookup import DeviceLookup
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.protocol.cache import StepCache
from dlrm_overlap.embedding.protocol.crossing import Crossing, Message
from dlrm_overlap.embedding.protocol.step import BatchSizes, Step
from dlrm_overlap.kernels.arguments import FeatureTable, Windows
from dlrm_overlap.kernels.forward.put_columns import PutColumns, put_columns

Pack = Callable[[Message, torch.Tensor], None]
"""Fills a message [rows, pitch] of gradients, on the current stream."""


class Carrier:
    """What brings the messages of one direction to other hosts, on GPUs."""

    def skip(self, status: torch.Tensor) -> bool:
        """Take an epoch without messages, if they have epochs; else return False, and the hosts do so alone."""
        return False

    def check(self) -> None:  # a collective records nothing
        """Raise what a kernel has recorded."""

    def close(self) -> None:  # nor has it anything to release
        """Release what outlives Python references."""


class PooledCarrier(Carrier, ABC):
    """What brings pooled embeddings to other hosts, on GPUs. All that is issued is in the order of the epochs."""

    @abstractmethod
    def send(self, step: Step, tables: list[FeatureTable]) -> None:
        """Pool for the other hosts on the current stream; what is sent by then need not be all."""

    @abstractmethod
    def receive(self, step: Step) -> None:
        """Send the rest and receive, on the current stream, which is behind `send`."""

    @abstractmethod
    def put(
        self, step: Step, slot: int, place: PutColumns, windows: Windows, first_sample: torch.Tensor, rank: int
    ) -> None:
        """Store the message of the `slot`-th rank that sends here into the windows of this host's ranks.

        Args:
            place: where its columns go.
            windows: of this host's ranks, in order.
            first_sample: [ranks + 1] int32 of these ranks.
            rank: this one's place among them.
        """


class GradientCarrier(Carrier, ABC):
    """What brings gradients to other hosts, on GPUs."""

    @abstractmethod
    def send(self, step: Step, pack: Pack) -> None:
        """Fill each message by `pack`, and start to send it, on the current stream."""

    @abstractmethod
    def receive(self, step: Step) -> None:
        """Receive, and send the rest, on the current stream; every rank calls this, also one that receives nothing."""

    @abstractmethod
    def arrived(self, step: Step, slot: int) -> torch.Tensor:
        """Return the message of the `slot`-th rank that sends here, for which the current stream waits."""


def rows_of_ranks(rows: torch.Tensor, host: range, batch: BatchSizes) -> Windows:
    """Return where the rows of each rank of `host` begin in a message [rows, pitch] to it, as windows to pool into."""
    begin, row_bytes = batch.first_sample[host.start], rows.shape[1] * rows.element_size()
    addresses = [rows.data_ptr() + (batch.first_sample[rank] - begin) * row_bytes for rank in host]
    return Windows(torch.tensor(addresses, dtype=torch.int64, device=rows.device), rows.shape[1], rows.dtype)


class PooledByCollective(PooledCarrier):
    """Pooled embeddings in one call of the group's backend, when all are pooled."""

    def __init__(self, context: ExchangeContext, crossing: Crossing, lookup: DeviceLookup) -> None:
        self._crossing, self._lookup = crossing, lookup
        self._buffers = MessageBuffers(context, crossing.pooled(context.largest_batch))
        self._windows = StepCache[BatchSizes, list[tuple[range, Windows]]]()

    def send(self, step: Step, tables: list[FeatureTable]) -> None:
        """Pool into the messages; `receive` sends them."""
        for host, windows in self._windows.get(step.batch, self._windows_of, step.batch):
            self._lookup.store(windows, step, tables, host)

    def _windows_of(self, batch: BatchSizes) -> list[tuple[range, Windows]]:
        """Return the other hosts, the next one first, and where in its message each of their ranks has its rows."""
        by_host = {message.host: message for message in self._crossing.pooled(batch).sent if message.elements}
        return [
            (host, rows_of_ranks(by_host[host].within(self._buffers.sent), host, batch))
            for host in self._crossing.reach.others
            if host in by_host
        ]

    def receive(self, step: Step) -> None:
        """Send all messages and receive the other hosts', in one call."""
        self._buffers.exchange(self._crossing.pooled(step.batch)).wait()

    def put(
        self, step: Step, slot: int, place: PutColumns, windows: Windows, first_sample: torch.Tensor, rank: int
    ) -> None:
        """Store a message that has arrived into the windows of this host's ranks."""
        rows = self._crossing.pooled(step.batch).received[slot].within(self._buffers.received)
        put_columns(rows, place, windows.addresses, first_sample, windows.stride, step.batch.most, rank)


class GradientsByCollective(GradientCarrier):
    """Gradients in one call of the group's backend."""

    def __init__(self, context: ExchangeContext, crossing: Crossing) -> None:
        self._crossing = crossing
        self._work: Any = None
        self._buffers = MessageBuffers(context, crossing.gradients(context.largest_batch))

    def send(self, step: Step, pack: Pack) -> None:
        """Fill the messages, and start to exchange them."""
        messages = self._crossing.gradients(step.batch)
        for message in messages.sent:
            if message.elements:
                pack(message, message.within(self._buffers.sent))
        self._work = self._buffers.exchange(messages)

    def receive(self, step: Step) -> None:
        """Wait until all messages are here, and those of this rank are sent."""
        assert self._work is not None
        self._work.wait()
        self._work = None

    def arrived(self, step: Step, slot: int) -> torch.Tensor:
        """Return a message that `receive` has waited for."""
        return self._crossing.gradients(step.batch).received[slot].within(self._buffers.received)
