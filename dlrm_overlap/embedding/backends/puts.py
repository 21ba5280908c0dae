"""Sends pooled embeddings to other nodes by puts: the kernel that pools puts each group of rows, without a collective.

Each rank has a heap of the same layout (`comm.network`), with two of each of these, for even epochs and for odd ones:

    signals        [slots, groups] int64: slot j is set by the j-th rank that sends here (`Reach.sources`)
    sent           the messages to other nodes are staged here
    received       the messages of ranks that send here arrive here

Step e may overwrite a message of step e - 2 when its receiver has read it. Suppose rank S sends to R of another node,
and Q receives R's message to the node of S. S begins step e after all flags of e - 1, including R's, which Q has set
after R's message of e - 1 arrived. R put that message after its own step e - 2, which ends when R has read all messages
of e - 2, including the one of S. So R has read S's message of e - 2, and the put has read its staged memory. This
requires that each rank sends to each other node in every epoch: without rows or columns, and in an epoch that is
skipped, it sends only the signal of group 0.
"""

import torch

from dlrm_overlap.comm.device_errors import DeviceErrorRecord
from dlrm_overlap.comm.network import NvshmemHeap
from dlrm_overlap.embedding.backends.lookup import DeviceLookup
from dlrm_overlap.embedding.internode import InternodeLayout, Message
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import BatchSizes, Step, tensors_of
from dlrm_overlap.embedding.windows import DeviceSignals, WindowPair, one_flag_each
from dlrm_overlap.kernels.bags import Windows
from dlrm_overlap.kernels.forward.put_pooled import put_pooled
from dlrm_overlap.kernels.launches import StepCache
from dlrm_overlap.kernels.messages import Groups, Outgoing, Waiting, send_signal, wait_message
from dlrm_overlap.kernels.tuning import put_tuning_for

_ALIGNMENT_BYTES = 256


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class PooledByPuts:
    """A carrier of pooled embeddings, see `messages`; its epochs are the epochs of the output's windows."""

    def __init__(
        self, context: ExchangeContext, windows: WindowPair, layout: InternodeLayout, lookup: DeviceLookup
    ) -> None:
        """Allocate the heap; a collective."""
        self._windows, self._layout, self._lookup, self._options = windows, layout, lookup, context.options
        self._reach = reach = layout.reach
        receivers = [reach.relay(reach.rank, node) for node in reach.others]
        self._slot_at = {peer: reach.sources_of(peer).index(reach.rank) for peer in receivers}
        """this rank's slot at each peer"""

        # The heap, for the largest messages of any rank.
        self._slots, self._staged = max(1, reach.max_sources), len(reach.others)
        most, ranks = context.samples_per_rank, max(len(node) for node in reach.nodes)
        pitches = [layout.pitch(columns) for columns in layout.pooled_columns]
        self._most_groups = max(ranks * self._groups(most, pitch).each for pitch in pitches)
        # At least 1, so that the memory of each message is aligned even if none has rows.
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
        groups = self._most_groups
        self._counts = [torch.zeros(groups, dtype=torch.int32, device=context.device) for _ in reach.others]
        """[groups] int32 for each other node: finished rows of each group of its message, see `put_pooled`"""
        self._tables = StepCache[BatchSizes, dict[tuple[int, int], Windows]]()
        self._one_row = torch.tensor([0, 1], dtype=torch.int32, device=context.device)

    def _groups(self, samples: int, pitch: int) -> Groups:
        """Return how to cut a message with rows of `pitch` elements, for up to `samples` samples a rank."""
        return Groups.of(samples, pitch * self._options.wire_dtype.itemsize, self._options.aggregate_bytes)

    @property
    def _buffer_index(self) -> int:
        return self._windows.epoch % 2

    def _rows_in(self, memory: torch.Tensor, message: Message) -> torch.Tensor:
        dtype = self._options.wire_dtype
        return memory[: message.elements * dtype.itemsize].view(dtype).view(message.rows, message.pitch)

    def _outgoing(self, number: int, message: Message) -> Outgoing:
        """Return where the message to the `number`-th other node is staged and arrives, and its receiver."""
        slot, buffer_index = self._slot_at[message.peer], self._buffer_index
        shift_bytes = self._received[buffer_index, slot].data_ptr() - self._sent[buffer_index, number].data_ptr()
        return Outgoing(shift_bytes, self._signals[buffer_index, slot].data_ptr(), message.peer)

    def send(self, step: Step) -> None:
        """Put each group when it is complete, to the next node first."""
        counter, lookup, network = self._windows.counter, self._lookup, self._heap.network
        lookup.first_samples(step.batch, self._reach.here)  # for `arrived`, copied on this stream
        sent = self._layout.pooled(step.batch).sent
        for node in self._reach.others:
            number = next(i for i, message in enumerate(sent) if message.node == node)
            message = sent[number]
            out = self._outgoing(number, message)
            if not message.elements:
                send_signal(network, out, counter.word, counter.argument)
                continue
            windows = self._tables.get(step.batch, self._rows, step.batch)[number, self._buffer_index]
            for shards, table in zip(lookup.pooled_together, lookup.tables, strict=True):
                put_pooled(
                    lookup.bags(tensors_of(step.inputs[shards[0].input]), step.batch, node),
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
        """Return where the rows of each rank begin in a message, by the other node's number and the buffer index."""
        rows_of = self._lookup.rows_of_ranks
        return {
            (number, buffer_index): rows_of(
                self._rows_in(self._sent[buffer_index, number], message), message.node, batch
            )
            for number, message in enumerate(self._layout.pooled(batch).sent)
            for buffer_index in (0, 1)
            if message.elements
        }

    def receive(self, step: Step) -> None:
        """Do nothing: `arrived` waits for each message."""

    def arrived(self, step: Step, slot: int) -> torch.Tensor:
        """Make the current stream wait for the message in `slot`; return the message."""
        message = self._layout.pooled(step.batch).received[slot]
        if message.elements:
            first_sample = self._lookup.first_samples(step.batch, self._reach.here)
            self._wait(slot, message, self._groups(step.batch.most, message.pitch), first_sample)
        else:
            self._wait_for_signal(slot, message)
        return self._rows_in(self._received[self._buffer_index, slot], message)

    def _wait(self, slot: int, message: Message, groups: Groups, first_sample: torch.Tensor) -> None:
        network, counter = self._heap.network, self._windows.counter
        signals = self._signals[self._buffer_index, slot].data_ptr()
        word, epoch = counter.word, counter.argument
        wait_message(network, message.peer, signals, groups, self._waiting, word, epoch, first_sample)

    def _wait_for_signal(self, slot: int, message: Message) -> None:
        self._wait(slot, message, Groups(1, 1), self._one_row)

    def skip(self) -> None:
        pair, world_size = self._windows, self._windows.arena.world_size
        everyone = one_flag_each(range(world_size), world_size)
        flags = DeviceSignals(pair, everyone, self._options.wait_timeout_s, self._record.status)
        pair.begin()
        word, epoch = pair.counter.word, pair.counter.argument
        messages = self._layout.pooled(BatchSizes.of((0,) * world_size))
        for number, message in enumerate(messages.sent):
            send_signal(self._heap.network, self._outgoing(number, message), word, epoch)
        flags.signal()
        for slot, message in enumerate(messages.received):
            self._wait_for_signal(slot, message)
            flags.signal(message.peer)
        flags.wait()

    def check(self) -> None:
        self._record.raise_expired(self._options.wait_timeout_s, "group")

    def close(self) -> None:
        self._heap.close()
