"""All-to-all and all-gather into the peers' memory, for ranks that reach each other by loads and stores.

Each rank writes its rows where they belong at the peers. Between two flags of each pair of ranks a call goes like this:

    current stream | raise FREE e at all, await theirs |  whatever else ...................  | await ARRIVED e of all
    side streams                                       | row to r + 1, flag | row to r + 2, flag | .. |

`dma`: copy engines write the rows and, after each, its flag; so no multiprocessor works, but for the two ends.
`stores`: one kernel of a few programs stores the rows, and the program that ends last raises the flags.

**Epochs.** e lies in one word of the device's memory. The hand-shake advances it, and all else reads it: the copies of
flags take it as their source, and the wait compares with it. The host counts nothing, so eager calls, captured ones and
replays of a graph may follow each other as they like. Every rank makes the same calls in the same order.

**Why nothing is overwritten too early.** FREE e of rank r is a release, on the stream that has read r's outputs of
before. Its peers store rows of call e only after they have acquired it, so they overwrite nothing that is still read.
They store nothing later either: r's next reading comes after its wait for ARRIVED e of every peer, each of which is
written after that peer's rows, and acquired there. A peer that runs ahead into call e + 1 waits for FREE e + 1, which r
raises after it has read call e's output. **Flags** only grow, and each has one writer, so none is lost: FREE e + 1 is
raised once the wait of e is done, and nobody raises or awaits anything of e + 2 before. **The word** is advanced by the
next hand-shake, which the stream orders after the wait of the call before, and the wait joins the side streams: by
then the copies of flags have read it. `input` is safe from then on, too. One output suffices therefore, where windows
that take turns would save the hand-shake.

**Captured beside others.** A CUDA graph need not run its branches side by side. Where a step has several of these, or
collectives of others, all that awaits a peer is to be in one order on all ranks, see `comm.order`.
"""

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dlrm_overlap.comm.arena import open_arena
from dlrm_overlap.comm.calls import Beside, Call, Place, Way, fastest_way
from dlrm_overlap.comm.every_rank import on_every_rank, require_alike
from dlrm_overlap.comm.flows import HostFlow, Transfer, regions
from dlrm_overlap.comm.reach import check_whole
from dlrm_overlap.comm.record import settle
from dlrm_overlap.config import InputError

if TYPE_CHECKING:
    from dlrm_overlap.comm.device_flow import DeviceFlow

_ALIGNMENT_BYTES = 256


class Work:
    """A collective under way."""

    def __init__(self, wait: Callable[[], None]) -> None:
        """Take the wait of a call, which also keeps the call's tensors alive."""
        self._wait: Callable[[], None] | None = wait

    @property
    def waited_for(self) -> bool:
        """Whether `wait` has returned."""
        return self._wait is None

    def wait(self) -> None:
        """Make the current stream wait until all rows of the output are here and the input has been read.

        To be called once for every call, on its stream or on one that is ordered after it; again, it does nothing. On
        a CPU it is the host that waits.

        Raises:
            ExchangeTimeoutError: on a CPU, if a peer's rows have not come in time. A GPU records that and stops, see
                `PeerCollectives.check`.
        """
        if self._wait is not None:
            self._wait()
            self._wait = None


class PeerCollectives:
    """Collectives on tensors, between ranks that reach each other's memory; see the module.

    Between processes on CPUs the same calls copy in shared memory, by the host, whatever the way.

    Example:
        collectives = PeerCollectives(group, device, capacity_bytes=1 << 30)
        received = collectives.empty(sent.shape, sent.dtype)
        work = collectives.all_to_all(received, sent, beside="compute")
        product = a @ b
        work.wait()
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, capacity_bytes: int, wait_timeout_s: float = 600.0
    ) -> None:
        """Make the memory of outputs, and the flags. All ranks of `group` call this alike.

        Args:
            group: of ranks that reach each other's memory.
            device: of this rank's tensors.
            capacity_bytes: of all outputs; each begins at a multiple of 256.
            wait_timeout_s: bound of a wait for a peer.

        Raises:
            InputError: on every rank, if the capacity is not the same on all ranks, if there is no room, or if the
                ranks do not reach each other's memory.
        """
        self._group, self._capacity = group, capacity_bytes
        self._rank, self._world_size = group.rank(), group.size()
        require_alike(f"PeerCollectives(capacity_bytes={capacity_bytes})", group, "PeerCollectives: ")
        try:
            check_whole(group, device)
            self._arena = open_arena(regions(self._world_size, capacity_bytes), group, device)
        except InputError as error:
            raise InputError(f"PeerCollectives(capacity_bytes={capacity_bytes}): {error}") from None
        self._memory = self._arena.local("memory")
        self._base, self._used, self.device = self._memory.data_ptr(), 0, self._memory.device
        self._flow = self._open_flow(wait_timeout_s)
        self._agreed: set[Call] = set()
        """on all ranks, each of which has made them once"""
        self._known: set[tuple[Call, Place]] = set()
        """of this rank: prepared, and need no check"""
        self._work: Work | None = None
        """of the last call"""
        self._closed = False

    def _open_flow(self, timeout_s: float) -> "HostFlow | DeviceFlow":
        if self.device.type == "cuda":
            from dlrm_overlap.comm.device_flow import DeviceFlow  # needs Triton, which a CPU does not

            return DeviceFlow(self._arena, timeout_s)
        return HostFlow(self._arena, timeout_s)

    def empty(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that the peers can write to, uninitialised; views of it may be outputs, too.

        All ranks call this alike. The memory is given back by `close` alone.

        Raises:
            InputError: on every rank, if the outputs need more than the capacity, or ranks ask for unlike tensors.
        """
        self._check_open("empty")
        size = torch.Size(shape)
        begin = -(-self._used // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        end = begin + size.numel() * dtype.itemsize

        require_alike(f"empty({tuple(size)}, {dtype})", self._group, "PeerCollectives: ")
        if end > self._capacity:
            raise InputError(
                f"PeerCollectives.empty: {tuple(size)} {dtype} after {begin} bytes ends at {end}, but there are "
                f"{self._capacity}; make it with a capacity_bytes of {end} or more"
            )
        self._used = end
        return self._memory[begin:end].view(dtype).view(size)

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, way: Way = "auto", beside: Beside = "nothing"
    ) -> Work:
        """Begin to send row w of `input` to row r of rank w's `output`, r being this rank, for every w.

        All ranks make the same calls in the same order, with the same shapes and the same place of `output`; at the
        first call of a kind the host asks all ranks whether theirs is alike.

        Args:
            output: [W, n..], contiguous, from `empty`; it may be read after `Work.wait`, up to the next call that is
                given it. The caller orders readers on other streams before that call.
            input: [W, n..], contiguous; it may be changed after `Work.wait`. May not overlap `output`.
            way: auto | dma | stores, see the module; auto goes by the size, by `beside`, and by whether it is captured.
            beside: nothing | compute: whether kernels that fill the GPU run at the same time.

        Raises:
            InputError: if these are not such tensors, or not alike on all ranks: on every rank where the call is the
                first of its kind, else on the rank whose tensors they are; if the call before has not been waited for;
                in a capture, if it is the first call of its kind.
        """
        return self._begin("all_to_all", output, input, way, beside)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, way: Way = "auto", beside: Beside = "nothing"
    ) -> Work:
        """Begin to send `input` [n..] to row r of every rank's `output` [W, n..], r being this rank.

        `input` may be `output[r]` itself, which then need not be copied, but no other part of it. All else, errors too,
        is as for `all_to_all`.
        """
        return self._begin("all_gather", output, input, way, beside)

    def _begin(self, name: str, output: torch.Tensor, input: torch.Tensor, way: str, beside: str) -> Work:
        self._check_open(name)
        if self._work is not None and not self._work.waited_for:
            raise InputError(
                f"PeerCollectives.{name}: the call before has not been waited for; call its Work.wait first, or, if it "
                f"has failed, close this on all ranks"
            )
        row_bytes = input.numel() * input.dtype.itemsize // (self._world_size if name == "all_to_all" else 1)
        offset = output.data_ptr() - self._base if output.numel() else 0  # a tensor of nothing has no address
        call = Call(name, offset, tuple(output.shape), tuple(input.shape), output.dtype, input.dtype, way, beside)
        row_offset = offset + self._rank * row_bytes
        place = Place(
            gcd(16, offset, input.data_ptr(), row_bytes),
            self._placed(output, input, row_offset),
            output.is_contiguous() and input.is_contiguous(),
            output.device == input.device == self.device,
        )

        def transfer() -> Transfer:
            return Transfer(
                source=input.detach().view(-1).view(torch.uint8),
                stride=row_bytes if name == "all_to_all" else 0,
                row_bytes=row_bytes,
                offset=row_offset,
                in_place=place.placed == "in place",
                way=fastest_way(row_bytes, beside, self._captured) if way == "auto" else way,
            )

        if (call, place) not in self._known:
            self._admit(call, place, lambda: self._flow.prepare(transfer()))
            self._known.add((call, place))
        made = transfer()
        # Before it begins: where that fails, peers would take a later call's rows for its own.
        self._work = Work(partial(self._flow.wait, made))
        self._flow.begin(made)
        return self._work

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise InputError(f"PeerCollectives.{name}: after close, which gave the memory back; make another one")

    @property
    def _captured(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _placed(self, output: torch.Tensor, input: torch.Tensor, row_offset: int) -> str:
        """Return how `input` lies to `output`: apart, in place (the row that this rank sends to itself) or across."""
        first, last = input.data_ptr(), input.data_ptr() + input.numel() * input.dtype.itemsize
        begin, end = output.data_ptr(), output.data_ptr() + output.numel() * output.dtype.itemsize
        if last <= begin or end <= first:
            return "apart"
        return "in place" if first == self._base + row_offset else "across"

    def _admit(self, call: Call, place: Place, prepare: Callable[[], None]) -> None:
        """Check a call that this rank has not made so before, and `prepare` it: on all ranks, if it is new to them.

        One that all have made asks none of them: where the tensors lie is this rank's affair, and the others, whose own
        may lie as before, would not answer.

        Raises:
            InputError: naming the fault; on every rank, if the call is new.
        """
        if self._captured:
            raise InputError(
                f"PeerCollectives: {call}, rows at multiples of {place.alignment} bytes, is the first of its kind and "
                f"within a capture, where nothing can be prepared, nor the ranks asked whether theirs are alike; make "
                f"one such call before the capture"
            )

        def check() -> None:
            if fault := call.fault(place, self._world_size, self._used):
                raise InputError(f"PeerCollectives.{call.name}: {fault}")
            prepare()

        if call in self._agreed:
            check()
            return
        on_every_rank(check, self._group)
        require_alike(call, self._group, "PeerCollectives: ")
        self._agreed.add(call)

    def check(self) -> None:
        """Raise the error that a wait on the GPU has recorded, without waiting. On CPUs the calls raise it.

        Raises:
            ExchangeTimeoutError: if a peer has not come in time, naming both ranks.
        """
        if not self._closed:
            self._flow.check()

    def close(self) -> None:
        """Give the memory back once all that was issued is done. All ranks call this; again, it does nothing.

        An output that somebody still has keeps the memory of all of them.

        Raises:
            ExchangeTimeoutError: if a wait on the GPU had expired.
        """
        if self._closed:
            return
        settle(self._group, self.device, self.check)
        self._work, self._closed = None, True
        self._memory = torch.empty(0, device="cpu")
        del self._flow  # which has views of all ranks' memory
        self._arena.close()
