"""Pooled embeddings to other nodes, put group by group by the kernel that pools them: no collective is in their way.

A rank has a heap (`comm.network`), alike on all ranks:

    signals, twice        [slots, groups] int64: slot j's are raised by the j-th rank that sends here (`Reach.sources`)
    sent, twice           a message to each other node is staged here, in the one of even epochs or of odd ones
    received, twice       a message of each rank that sends here arrives here, likewise

Step e uses the memory of e mod 2. Its messages may be staged and put when those of step e - 2 have been read. Rank S
sends to R of another node, and Q takes R's message to the node of S. S begins step e after all flags of e - 1, R's
among them. Q has raised that one when the signals of R's message of e - 1 had come. R has put that message after its
own step e - 2, which R ends when it has read all that was sent to it for e - 2, by S as well. So S knows that R has
read its message of e - 2, and therefore that the put has read the staged memory. This holds if each rank sends to each
other node in every epoch. Where there are no rows or no columns, and in an epoch that is skipped, the signal of group 0
goes alone.
"""

import torch

from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.comm.network import NvshmemHeap
from dlrm_overlap.embedding.backends.pgas import DeviceLookup
from dlrm_overlap.embedding.internode import Crossing, Message
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import BatchSizes, Step, StepCache
from dlrm_overlap.embedding.windows import PairFlags, WindowPair, one_flag_each
from dlrm_overlap.kernels.arguments import FeatureTable, Windows, put_tuning_for
from dlrm_overlap.kernels.forward.put_pooled import put_pooled
from dlrm_overlap.kernels.messages import Groups, Outgoing, Waiting, send_signal, wait_message

_ALIGNMENT_BYTES = 256


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class PooledByPuts:
    """The carrier of pooled embeddings, see `messages`, whose epochs are those of the output's windows."""

    def __init__(self, context: ExchangeContext, windows: WindowPair, crossing: Crossing, lookup: DeviceLookup) -> None:
        """Make the heap; a collective."""
        self._windows, self._crossing, self._lookup, self._options = windows, crossing, lookup, context.options
        self._reach = reach = crossing.reach
        takers = [reach.relay(reach.rank, node) for node in reach.others]
        self._slot_at = {peer: reach.taken_by(peer).index(reach.rank) for peer in takers}
        """which of a peer's slots is this rank's"""
        self._slots, self._staged = max(1, reach.most_taken), len(reach.others)
        most, ranks = context.samples_per_rank, max(len(node) for node in reach.nodes)
        pitches = [crossing.pitch(columns) for columns in crossing.pooled_columns]
        self._most_groups = max(ranks * self._groups(most, pitch).each for pitch in pitches)
        # Also where no message has rows, so that the memory of each begins at a multiple of the alignment.
        self._message_bytes = _aligned(max(1, ranks * most * max(pitches) * context.options.wire_dtype.itemsize))
        signals_bytes = 2 * self._slots * self._most_groups * 8
        sizes = [_aligned(signals_bytes), *(2 * count * self._message_bytes for count in (self._staged, self._slots))]
        self._heap = NvshmemHeap(sum(sizes), context.group, context.device)
        signals, sent, received = self._heap.local.split(sizes)
        self._signals = signals[:signals_bytes].view(torch.int64).view(2, self._slots, self._most_groups)
        self._sent = sent.view(2, self._staged, self._message_bytes)
        self._received = received.view(2, self._slots, self._message_bytes)
        self._record = DeviceErrorRecord(context.device)
        self._waiting = Waiting(int(context.options.wait_timeout_s * 1e9), self._record.status)
        self._features = sum(map(len, lookup.pooled_together))
        room = self._most_groups
        self._counts = [torch.zeros(room, dtype=torch.int32, device=context.device) for _ in reach.others]
        """finished rows of each group of the message to each other node, see `put_pooled`"""
        self._tables = StepCache[BatchSizes, dict[tuple[int, int], Windows]]()
        """by number of the other node and buffer_index, where its ranks' rows begin in the message to it"""
        self._one_row = torch.tensor([0, 1], dtype=torch.int32, device=context.device)

    def _groups(self, samples: int, pitch: int) -> Groups:
        """Return how a message of rows of `pitch` elements is cut if no rank has more than `samples` samples."""
        return Groups.of(samples, pitch * self._options.wire_dtype.itemsize, self._options.aggregate_bytes)

    @property
    def _parity(self) -> int:
        return self._windows.epoch % 2

    def _rows_in(self, memory: torch.Tensor, message: Message) -> torch.Tensor:
        dtype = self._options.wire_dtype
        return memory[: message.elements * dtype.itemsize].view(dtype).view(message.rows, message.pitch)

    def _outgoing(self, number: int, message: Message) -> Outgoing:
        """Return where the message to the `number`-th other node is staged, where it arrives and who takes it."""
        slot, buffer_index = self._slot_at[message.peer], self._parity
        shift_bytes = self._received[buffer_index, slot].data_ptr() - self._sent[buffer_index, number].data_ptr()
        return Outgoing(shift_bytes, self._signals[buffer_index, slot].data_ptr(), message.peer)

    def send(self, step: Step, tables: list[FeatureTable]) -> None:
        """Pool for the other nodes, the next one first, and put groups as they are finished."""
        counter, lookup, network = self._windows.counter, self._lookup, self._heap.network
        lookup.first_samples(step.batch, self._reach.here)  # for `arrived`: made, if it is new, on this stream
        sent = self._crossing.pooled(step.batch).sent
        for node in self._reach.others:
            number = next(i for i, message in enumerate(sent) if message.node == node)
            message = sent[number]
            out = self._outgoing(number, message)
            if not message.elements:
                send_signal(network, out, counter.word, counter.argument)
                continue
            windows = self._tables.get(step.batch, self._rows, step.batch)[number, self._parity]
            for shards, table in zip(lookup.pooled_together, tables, strict=True):
                put_pooled(
                    lookup.bags(shards, step, node),
                    table,
                    windows,
                    lookup.record.status,
                    lookup.pooling_options(put_tuning_for(table.dim, table.weight_dtype.itemsize)),
                    network,
                    out,
                    self._groups(step.batch.most, message.pitch),
                    self._counts[number],
                    self._features,
                    counter.word,
                    counter.argument,
                )

    def _rows(self, batch: BatchSizes) -> dict[tuple[int, int], Windows]:
        """Return, by number of the other node and buffer_index, where its ranks' rows begin in the message to it."""
        rows_of = self._lookup.rows_of_ranks
        return {
            (number, buffer_index): rows_of(
                self._rows_in(self._sent[buffer_index, number], message), message.node, batch
            )
            for number, message in enumerate(self._crossing.pooled(batch).sent)
            for buffer_index in (0, 1)
            if message.elements
        }

    def receive(self, step: Step) -> None:
        """Do nothing: `arrived` awaits each message."""

    def arrived(self, step: Step, slot: int) -> torch.Tensor:
        """Make the current stream wait for the message in `slot`, and return it."""
        message = self._crossing.pooled(step.batch).received[slot]
        if message.elements:
            first_sample = self._lookup.first_samples(step.batch, self._reach.here)
            self._wait(slot, message, self._groups(step.batch.most, message.pitch), first_sample)
        else:
            self._wait_for_signal(slot, message)
        return self._rows_in(self._received[self._parity, slot], message)

    def _wait(self, slot: int, message: Message, groups: Groups, first_sample: torch.Tensor) -> None:
        network, counter = self._heap.network, self._windows.counter
        signals = self._signals[self._parity, slot].data_ptr()
        word, epoch = counter.word, counter.argument
        wait_message(network, message.peer, signals, groups, self._waiting, word, epoch, first_sample)

    def _wait_for_signal(self, slot: int, message: Message) -> None:
        self._wait(slot, message, Groups(1, 1), self._one_row)

    def skip(self) -> None:
        """Take an epoch in which signals go alone."""
        pair, world_size = self._windows, self._windows.arena.world_size
        everyone = one_flag_each(range(world_size), world_size)
        flags = PairFlags(pair, everyone, self._options.wait_timeout_s, self._record.status)
        pair.begin()
        word, epoch = pair.counter.word, pair.counter.argument
        messages = self._crossing.pooled(BatchSizes.of((0,) * world_size))
        for number, message in enumerate(messages.sent):
            send_signal(self._heap.network, self._outgoing(number, message), word, epoch)
        flags.raise_at_all()
        for slot, message in enumerate(messages.received):
            self._wait_for_signal(slot, message)
            flags.raise_at_all(message.peer)
        flags.wait()

    def check(self) -> None:
        """Raise the fault that a wait for a group has recorded.

        Raises:
            ExchangeTimeoutError: if it has expired.
        """
        self._record.raise_expired(self._options.wait_timeout_s, "group")

    def close(self) -> None:
        """Give the heap back."""
        self._heap.close()
