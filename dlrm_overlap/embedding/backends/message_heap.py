"""The memory through which kernels put messages to other hosts, part by part: no collective and no host is in the way.

A rank has a heap for each kind of message, pooled embeddings, their gradients and ids (`comm.network`), alike on all
ranks:

    signals, twice        [slots, parts] int64: slot j's are raised by the j-th rank that sends here (`Reach.sources`)
    sent, twice           a message to each other host is staged here, in the one of even epochs or of odd ones; once
                          for all of them if they are the same
    received, twice       a message of each rank that sends here arrives here, likewise

Step e uses the memory of e mod 2. Its messages may be written, staged as well as put, when those of step e - 2 have
been read. Rank S sends to R of another host, and R's message to the host of S is taken by Q. S begins step e behind all
flags of e - 1, R's among them. Q has raised that one when the signals of R's message of e - 1 had come, and R has put
that message behind its own step e - 2, which R ends when it has read all that was sent to it for e - 2, by S as well.
So S knows that R has read its message of e - 2, which also tells that the put has read what S had staged. This holds
if each rank sends to each other host in every epoch. Where there are no rows or no columns, and in an epoch that is
skipped, the signal of part 0 goes alone.
"""

from collections.abc import Sequence

import torch

from dlrm_overlap.comm.network import open_heap
from dlrm_overlap.comm.record import Record
from dlrm_overlap.embedding.device.peers import ready_flags
from dlrm_overlap.embedding.options import ExchangeContext
from dlrm_overlap.embedding.protocol.crossing import Message, Messages
from dlrm_overlap.embedding.protocol.windows import WindowPair, one_flag_each
from dlrm_overlap.kernels.flags import raise_flags, wait_flags
from dlrm_overlap.kernels.messages import Incoming, Outgoing, Parts, Waiting, await_message, put_message

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
        self.most_parts = max(runs * self.parts(rows // runs, pitch).each for rows, pitch in shapes)
        signals = 2 * self._slots * self.most_parts * 8
        self._first_sent = -(-signals // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._first_received = self._first_sent + 2 * self._staged * self._slot_bytes
        size_bytes = self._first_received + 2 * self._slots * self._slot_bytes
        self._heap = open_heap(size_bytes, context.group, context.device)
        self.network, self._begin = self._heap.network, self._heap.local.data_ptr()
        self._record = Record(context.device)
        self.waiting = Waiting(int(context.options.wait_timeout_s * 1e9), self._record.status)

    def parts(self, longest: int, pitch: int) -> Parts:
        """Return how a message of rows of `pitch` elements is cut whose longest run has `longest` rows."""
        return Parts.of(longest, pitch * self._item, self._options.aggregate_bytes)

    def _signals_at(self, slot: int, parity: int) -> int:
        return self._begin + (parity * self._slots + slot) * self.most_parts * 8

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
        """Return where that message is staged, where it arrives and who takes it, as kernels are told."""
        slot = self._slot_at[message.peer]
        sent, signals = self._sent_at(number, parity), self._signals_at(slot, parity)
        return Outgoing(self._begin + sent, self._received_at(slot, parity) - sent, signals, message.peer)

    def arrived(self, slot: int, message: Message, parity: int) -> torch.Tensor:
        """Return [rows, pitch]: where the message of the `slot`-th rank that sends here arrives."""
        return self._rows_at(self._received_at(slot, parity), message)

    def incoming(self, slot: int, message: Message, parity: int) -> Incoming:
        """Return where that message arrives and who sends it, as kernels are told."""
        address = self._begin + self._received_at(slot, parity)
        return Incoming(address, self._signals_at(slot, parity), message.peer)

    @property
    def parity(self) -> int:
        """Which of the heap's two windows the current epoch uses: 0 or 1."""
        return self._windows.epoch % 2

    def put(self, number: int, message: Message, rows: int) -> None:
        """Put a message that is staged, as one run of `rows` rows, on the current stream; its signal alone if none."""
        counter, out = self._windows.counter, self.outgoing(number, message, self.parity)
        parts = self.parts(rows, message.pitch)
        put_message(self.network, out, rows, message.pitch * self._item, parts, counter.word, counter.argument)

    def await_run(self, slot: int, message: Message, rows: int) -> None:
        """Make the current stream wait for a message of one run of `rows` rows, which `put` has sent."""
        self._await(slot, message, rows, None)

    def await_runs(self, slot: int, message: Message, longest: int, first_sample: torch.Tensor) -> None:
        """Make the current stream wait for a message whose runs are the samples of this host's ranks.

        Args:
            longest: rows of the longest run of any message.
            first_sample: [ranks + 1] int32 of these ranks.
        """
        self._await(slot, message, longest, first_sample)

    def _await(self, slot: int, message: Message, rows: int, first_sample: torch.Tensor | None) -> None:
        counter, arriving = self._windows.counter, self.incoming(slot, message, self.parity)
        parts, epoch = self.parts(rows, message.pitch), counter.argument
        await_message(self.network, arriving, rows, parts, self.waiting, counter.word, epoch, first_sample)

    def skip(self, messages: Messages, status: torch.Tensor) -> None:
        """Take an epoch in which messages are signals alone, on the current stream."""
        pair, reach = self._windows, self.reach
        everyone = one_flag_each(range(pair.arena.world_size), pair.arena.world_size)
        flags = ready_flags(pair, everyone, status, self._options)
        pair.begin()
        for number, message in enumerate(messages.sent):
            self.put(number, message, 0)
        raise_flags(flags, reach.rank, 0, pair.counter.argument)
        for slot, message in enumerate(messages.received):
            self.await_run(slot, message, 0)
            raise_flags(flags, message.peer, 0, pair.counter.argument)
        wait_flags(flags, reach.rank, pair.counter.argument)

    def check(self) -> None:
        """Raise what a wait has recorded.

        Raises:
            ExchangeTimeoutError: if it has expired.
        """
        self._record.raise_expired(self._options.wait_timeout_s, "part")

    def close(self) -> None:
        """Give the memory back."""
        self._heap.close()
