"""Messages between hosts that kernels put, group by group: no collective and no CPU is in their way.

A rank has a heap for each kind of message, pooled embeddings, sums, gradients and ids (`comm.network`), alike on all
ranks:

    signals, twice        [slots, groups] int64: slot j's are raised by the j-th rank that sends here (`Reach.sources`)
    sent, twice           a message to each other host is staged here, in the one of even epochs or of odd ones; once
                          for all of them if they are the same
    received, twice       a message of each rank that sends here arrives here, likewise

Step e uses the memory of e mod 2. Its messages may be staged and put when those of step e - 2 have been read. Rank S
sends to R of another host, and Q takes R's message to the host of S. S begins step e after all flags of e - 1, R's
among them. Q has raised that one when the signals of R's message of e - 1 had come. R has put that message after its
own step e - 2, which R ends when it has read all that was sent to it for e - 2, by S as well. So S knows that R has
read its message of e - 2, and therefore that the put has read the staged memory. This holds if each rank sends to each
other host in every epoch. Where there are no rows or no columns, and in an epoch that is skipped, the signal of group 0
goes alone. Sums are read before the step's end as well, and need no message in an epoch that is skipped.
"""

from collections.abc import Sequence

import torch

from dlrm_overlap.comm.network import NvshmemHeap
from dlrm_overlap.comm.record import Record
from dlrm_overlap.embedding.backends.messages import MessagesOf, Pack
from dlrm_overlap.embedding.backends.pgas import DeviceLookup, rows_of_ranks
from dlrm_overlap.embedding.crossing import Crossing, Message, Messages, arriving_windows
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.steps import BatchSizes, Step, StepCache
from dlrm_overlap.embedding.windows import WindowPair, one_flag_each, ready_flags
from dlrm_overlap.kernels.arguments import FeatureTable, Windows, put_tuning_for
from dlrm_overlap.kernels.flags import raise_flags, wait_flags
from dlrm_overlap.kernels.forward.put_pooled import put_pooled
from dlrm_overlap.kernels.messages import Groups, Incoming, Outgoing, Waiting, await_message, put_message

_ALIGNMENT_BYTES = 256


class MessageHeap:
    """Where the messages of one direction are in this rank's heap, and at the ranks that take them."""

    def __init__(
        self,
        context: ExchangeContext,
        windows: WindowPair,
        runs: int,
        shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        staged_once: bool = False,
    ) -> None:
        """Make the heap; a collective.

        Args:
            windows: of the direction, whose epochs are the messages'.
            runs: that a message has at most.
            shapes: the rows and the pitch of the largest messages of any ranks, whose runs are alike.
            dtype: of a message's elements.
            staged_once: the messages of a step are the same for all hosts.
        """
        self.reach, self._windows, self._options = windows.arena.reach, windows, context.options
        self._dtype, self._item = dtype, dtype.itemsize
        self._slots = max(1, self.reach.most_taken)
        takers = [self.reach.relay(self.reach.rank, host) for host in self.reach.others]
        self._slot_at = {peer: self.reach.taken_by(peer).index(self.reach.rank) for peer in takers}
        """which of a peer's slots is this rank's"""
        self._staged = 1 if staged_once else len(self.reach.hosts) - 1
        largest = max(rows * pitch * self._item for rows, pitch in shapes)
        self._slot_bytes = -(-largest // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.most_groups = max(runs * self.groups(rows // runs, pitch).each for rows, pitch in shapes)
        signals = 2 * self._slots * self.most_groups * 8
        self._first_sent = -(-signals // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._first_received = self._first_sent + 2 * self._staged * self._slot_bytes
        size_bytes = self._first_received + 2 * self._slots * self._slot_bytes
        self._heap = NvshmemHeap(size_bytes, context.group, context.device)
        self.network, self._begin = self._heap.network, self._heap.local.data_ptr()
        self._record = Record(context.device)
        self.waiting = Waiting(int(context.options.wait_timeout_s * 1e9), self._record.status)

    def groups(self, longest: int, pitch: int) -> Groups:
        """Return how a message of rows of `pitch` elements is cut whose longest run has `longest` rows."""
        return Groups.of(longest, pitch * self._item, self._options.aggregate_bytes)

    def _signals_at(self, slot: int, parity: int) -> int:
        return self._begin + (parity * self._slots + slot) * self.most_groups * 8

    def _sent_at(self, number: int, parity: int) -> int:
        return self._first_sent + (parity * self._staged + min(number, self._staged - 1)) * self._slot_bytes

    def _received_at(self, slot: int, parity: int) -> int:
        return self._first_received + (parity * self._slots + slot) * self._slot_bytes

    def _rows_at(self, offset: int, message: Message) -> torch.Tensor:
        memory = self._heap.local[offset : offset + message.elements * self._item]
        return memory.view(self._dtype).view(message.rows, message.pitch)

    def staged(self, number: int, message: Message, parity: int) -> torch.Tensor:
        """Return [rows, pitch]: where the message to the `number`-th other host is staged in epochs of `parity`."""
        return self._rows_at(self._sent_at(number, parity), message)

    def outgoing(self, number: int, message: Message, parity: int) -> Outgoing:
        """Return where that message is staged, where it arrives and who takes it, as kernels take it."""
        slot = self._slot_at[message.peer]
        sent, signals = self._sent_at(number, parity), self._signals_at(slot, parity)
        return Outgoing(self._begin + sent, self._received_at(slot, parity) - sent, signals, message.peer)

    def arrived(self, slot: int, message: Message, parity: int) -> torch.Tensor:
        """Return [rows, pitch]: where the message of the `slot`-th rank that sends here arrives."""
        return self._rows_at(self._received_at(slot, parity), message)

    def incoming(self, slot: int, message: Message, parity: int) -> Incoming:
        """Return where that message arrives and who sends it, as kernels take it."""
        address = self._begin + self._received_at(slot, parity)
        return Incoming(address, self._signals_at(slot, parity), message.peer)

    @property
    def parity(self) -> int:
        """Which of the heap's two windows the current epoch uses: 0 or 1."""
        return self._windows.epoch % 2

    def put(self, number: int, message: Message, rows: int) -> None:
        """Put a message that is staged, as one run of `rows` rows, on the current stream; its signal alone if none."""
        counter, out = self._windows.counter, self.outgoing(number, message, self.parity)
        groups = self.groups(rows, message.pitch)
        put_message(self.network, out, rows, message.pitch * self._item, groups, counter.word, counter.argument)

    def wait(self, slot: int, message: Message, rows: int, first_sample: torch.Tensor | None = None) -> None:
        """Make the current stream wait for a message.

        Args:
            rows: of the longest run of any message; of the message itself, if it is one run, which `put` has sent.
            first_sample: [ranks + 1] int32 of this host's ranks, whose samples are the runs; None: it is one run.
        """
        counter, arriving = self._windows.counter, self.incoming(slot, message, self.parity)
        groups, epoch = self.groups(rows, message.pitch), counter.argument
        await_message(self.network, arriving, rows, groups, self.waiting, counter.word, epoch, first_sample)

    def skip(self, messages: Messages, status: torch.Tensor) -> None:
        """Take an epoch in which messages are signals alone, on the current stream."""
        pair, reach = self._windows, self.reach
        everyone = one_flag_each(range(pair.arena.world_size), pair.arena.world_size)
        flags = ready_flags(pair, everyone, status, self._options.wait_timeout_s)
        pair.begin()
        for number, message in enumerate(messages.sent):
            self.put(number, message, 0)
        raise_flags(flags, reach.rank, 0, pair.counter.argument)
        for slot, message in enumerate(messages.received):
            self.wait(slot, message, 0)
            raise_flags(flags, message.peer, 0, pair.counter.argument)
        wait_flags(flags, reach.rank, pair.counter.argument)

    def check(self) -> None:
        """Raise the fault that a wait has recorded.

        Raises:
            ExchangeTimeoutError: if it has expired.
        """
        self._record.raise_expired(self._options.wait_timeout_s, "group")

    def close(self) -> None:
        """Give the memory back."""
        self._heap.close()


def _no_samples(context: ExchangeContext) -> BatchSizes:
    return BatchSizes.of((0,) * context.group.size())


class _ByPuts:
    """The base of carriers by puts: a heap, and an epoch of signals alone."""

    _heap: MessageHeap
    _without_rows: Messages
    """of an epoch in which nothing is sent"""

    def receive(self, step: Step) -> None:
        """Do nothing: each message is awaited where it is passed on."""

    def skip(self, status: torch.Tensor) -> bool:
        """Take an epoch in which signals go alone."""
        self._heap.skip(self._without_rows, status)
        return True

    def check(self) -> None:
        """Raise the fault that a wait for a group has recorded."""
        self._heap.check()

    def close(self) -> None:
        """Give the heap back."""
        self._heap.close()


class PooledByPuts(_ByPuts):
    """Pooled embeddings to other hosts, by the kernel that pools them."""

    def __init__(self, context: ExchangeContext, windows: WindowPair, crossing: Crossing, lookup: DeviceLookup) -> None:
        reach, most = crossing.reach, context.samples_per_rank
        widest = max(len(host) for host in reach.hosts)
        ranks = range(context.group.size())
        shapes = [(most * widest, crossing.pitch(crossing.pooled_columns[rank])) for rank in ranks]
        self._heap = MessageHeap(context, windows, widest, shapes, context.options.wire_dtype)
        self._windows, self._crossing, self._lookup = windows, crossing, lookup
        self._without_rows = crossing.pooled(_no_samples(context))
        self._features = sum(map(len, lookup.pooled_together))
        room = self._heap.most_groups
        self._counts = [torch.zeros(room, dtype=torch.int32, device=context.device) for _ in reach.others]
        """finished rows of each group of the message to each other host, see `put_pooled`"""
        self._tables = StepCache[BatchSizes, dict[tuple[int, int], Windows]]()
        """by number of the other host and parity, where its ranks' rows begin in the message to it"""

    def send(self, step: Step, tables: list[FeatureTable]) -> None:
        """Pool for the other hosts, the next one first, and put groups as they are finished."""
        heap, counter, lookup = self._heap, self._windows.counter, self._lookup
        lookup.first_samples(step.batch, heap.reach.here)  # for `arrived`: made, if it is new, on this stream
        messages, parity = self._crossing.pooled(step.batch), heap.parity
        for host in heap.reach.others:
            number = next(i for i, message in enumerate(messages.sent) if message.host == host)
            message = messages.sent[number]
            if not message.elements:
                heap.put(number, message, 0)
                continue
            windows = self._tables.get(step.batch, self._rows, step.batch)[number, parity]
            out = heap.outgoing(number, message, parity)
            groups = heap.groups(step.batch.most, message.pitch)
            for shards, table in zip(lookup.pooled_together, tables, strict=True):
                put_pooled(
                    lookup.bags(shards, step, host),
                    table,
                    windows,
                    lookup.record.status,
                    lookup.pooling_options(put_tuning_for(table.dim, table.weight_dtype.itemsize)),
                    heap.network,
                    out,
                    groups,
                    self._counts[number],
                    self._features,
                    counter.word,
                    counter.argument,
                )

    def _rows(self, batch: BatchSizes) -> dict[tuple[int, int], Windows]:
        """Return, by number of the other host and parity, where its ranks' rows begin in the message to it."""
        return {
            (number, parity): rows_of_ranks(self._heap.staged(number, message, parity), message.host, batch)
            for number, message in enumerate(self._crossing.pooled(batch).sent)
            for parity in (0, 1)
            if message.elements
        }

    def arrived(self, step: Step, slot: int) -> torch.Tensor:
        """Make the current stream wait for the message in `slot`, and return it."""
        heap, message = self._heap, self._crossing.pooled(step.batch).received[slot]
        if message.elements:
            heap.wait(slot, message, step.batch.most, self._lookup.first_samples(step.batch, heap.reach.here))
        else:
            heap.wait(slot, message, 0)
        return heap.arrived(slot, message, heap.parity)

    def close(self) -> None:
        """Give the heap back."""
        self._tables.clear()
        super().close()


class PackedByPuts(_ByPuts):
    """Gradients or sums to other hosts: packed by PyTorch, put by a kernel."""

    def __init__(
        self,
        context: ExchangeContext,
        windows: WindowPair,
        messages_of: MessagesOf,
        shapes: Sequence[tuple[int, int]],
    ) -> None:
        """Make the heap; a collective. `windows` and `shapes` are as `MessageHeap` takes them."""
        self._heap = MessageHeap(context, windows, 1, shapes, context.options.wire_dtype)
        self._messages_of, self._without_rows = messages_of, messages_of(_no_samples(context))

    def send(self, step: Step, pack: Pack) -> None:
        """Let `pack` fill each message, and put it."""
        for number, message in enumerate(self._messages_of(step.batch).sent):
            if message.elements:
                pack(message, self._heap.staged(number, message, self._heap.parity))
            self._heap.put(number, message, message.rows if message.elements else 0)

    def arrived(self, step: Step, slot: int) -> torch.Tensor:
        """Make the current stream wait for the message in `slot`, and return it."""
        message = self._messages_of(step.batch).received[slot]
        self._heap.wait(slot, message, message.rows if message.elements else 0)
        return self._heap.arrived(slot, message, self._heap.parity)


_ROW_WORDS = 256  # a window has no rows of its own, but puts count in rows


class IdsByPuts(_ByPuts):
    """Windows put by kernels, and copied out of the heap to where the ranks of this host read them."""

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        reach, self._windows = windows.arena.reach, windows
        rows = -(-windows.local.numel() // _ROW_WORDS)

        def message(peer: int) -> Message:
            return Message(peer, reach.host_of(peer), 0, rows, _ROW_WORDS)

        other_hosts = [host for host in reach.hosts if host != reach.here]
        self._without_rows = self._messages = Messages(
            sent=[message(reach.relay(reach.rank, host)) for host in other_hosts],
            received=[message(source) for source in reach.sources],
        )
        self._heap = MessageHeap(context, windows, 1, [(rows, _ROW_WORDS)], torch.int32, staged_once=True)

    def bring(self) -> None:
        """Stage the window once, put it to each host, and copy arrivals, source by source."""
        heap, window, (sent, received) = self._heap, self._windows.local.flatten(), self._messages
        words, parity = window.numel(), heap.parity
        heap.staged(0, sent[0], parity).flatten()[:words].copy_(window)
        for number, message in enumerate(sent):
            heap.put(number, message, message.rows)
        arriving = arriving_windows(self._windows.arena, self._windows.name)
        for slot, message in enumerate(received):
            heap.wait(slot, message, message.rows)
            here = arriving[slot * words : (slot + 1) * words]
            here.copy_(heap.arrived(slot, message, parity).flatten()[:words])
