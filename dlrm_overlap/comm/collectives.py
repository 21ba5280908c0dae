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
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dlrm_overlap.comm.arena import open_arena
from dlrm_overlap.comm.calls import Beside, Way, fastest_way
from dlrm_overlap.comm.flows import HostFlow, Transfer, regions
from dlrm_overlap.comm.reach import check_whole
from dlrm_overlap.comm.record import settle

if TYPE_CHECKING:
    from dlrm_overlap.comm.device_flow import DeviceFlow

_ALIGNMENT_BYTES = 256


class Work:
    """A collective under way."""

    def __init__(self, wait: Callable[[], None]) -> None:
        """Take the wait of a call, which also keeps the call's tensors alive."""
        self._wait: Callable[[], None] | None = wait

    @property
    def is_done(self) -> bool:
        """Whether `wait` has returned."""
        return self._wait is None

    def wait(self) -> None:
        """Make the current stream wait until all rows of the output are here and the input has been read.

        To be called once for every call, on its stream or on one that is ordered after it. On a CPU it is the host that
        waits.

        Raises:
            ExchangeTimeoutError: on a CPU, if a peer's rows have not come in time. A GPU records that and stops, see
                `PeerCollectives.check`.
        """
        assert self._wait is not None, "a call is waited for once"
        self._wait()
        self._wait = None  # it keeps the peers' memory alive


class PeerCollectives:
    """Collectives on tensors, between ranks that reach each other's memory; see the module.

    Between processes on CPUs the same calls copy in shared memory, by the host, whatever the way. All ranks make the
    same calls in the same order, with tensors alike.

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
            InputError: on every rank, if there is no room, or if the ranks do not reach each other's memory.
        """
        self._group, self._capacity = group, capacity_bytes
        self._rank, self._world_size = group.rank(), group.size()
        check_whole(group, device)
        self._arena = open_arena(regions(self._world_size, capacity_bytes), group, device)
        self._memory = self._arena.local("memory")
        self._base, self._used, self.device = self._memory.data_ptr(), 0, self._memory.device
        self._flow = self._open_flow(wait_timeout_s)
        self._prepared: set[tuple[int, ...]] = set()
        """kinds of calls whose kernels are loaded"""
        self._work: Work | None = None
        """of the last call"""

    def _open_flow(self, timeout_s: float) -> "HostFlow | DeviceFlow":
        if self.device.type == "cuda":
            from dlrm_overlap.comm.device_flow import DeviceFlow  # needs Triton, which a CPU does not

            return DeviceFlow(self._arena, timeout_s)
        return HostFlow(self._arena, timeout_s)

    def empty(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that the peers can write to, uninitialised; views of it may be outputs, too.

        All ranks call this alike. The memory is given back by `close` alone.
        """
        size = torch.Size(shape)
        begin = -(-self._used // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._used = begin + size.numel() * dtype.itemsize
        assert self._used <= self._capacity, f"{size} {dtype} after {begin} bytes: the capacity is {self._capacity}"
        return self._memory[begin : self._used].view(dtype).view(size)

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, way: Way = "auto", beside: Beside = "nothing"
    ) -> Work:
        """Begin to send row w of `input` to row r of rank w's `output`, r being this rank, for every w.

        The call before must have been waited for. The first call of a kind loads a kernel, so it may not be in a
        capture.

        Args:
            output: [W, n..], contiguous, from `empty`; it may be read after `Work.wait`, up to the next call that is
                given it. The caller orders readers on other streams before that call.
            input: [W, n..], contiguous; it may be changed after `Work.wait`. May not overlap `output`.
            way: auto | dma | stores, see the module; auto goes by the size, by `beside`, and by whether it is captured.
            beside: nothing | compute: whether kernels that fill the GPU run at the same time.
        """
        return self._begin(output, input, input.numel() // self._world_size, way, beside)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, way: Way = "auto", beside: Beside = "nothing"
    ) -> Work:
        """Begin to send `input` [n..] to row r of every rank's `output` [W, n..], r being this rank.

        `input` may be `output[r]` itself, which then need not be copied, but no other part of it. All else is as for
        `all_to_all`.
        """
        return self._begin(output, input, input.numel(), way, beside)

    def _begin(self, output: torch.Tensor, input: torch.Tensor, elements: int, way: Way, beside: Beside) -> Work:
        assert self._work is None or self._work.is_done, "peers would take this call's rows for those of the one before"
        assert all(each.is_contiguous() for each in (output, input)), "rows are sent as bytes"
        assert output.dtype == input.dtype, f"output {output.dtype}, input {input.dtype}"
        row_bytes = elements * input.dtype.itemsize
        assert output.numel() == self._world_size * elements, f"output {output.shape}, input {input.shape}"
        offset = output.data_ptr() - self._base if output.numel() else 0  # a tensor of nothing has no address
        assert 0 <= offset <= offset + output.nbytes <= self._used, "an output is from `empty`"
        captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        row_offset = offset + self._rank * row_bytes
        transfer = Transfer(
            source=input.detach().view(-1).view(torch.uint8),
            stride=row_bytes if input.numel() > elements else 0,
            row_bytes=row_bytes,
            offset=row_offset,
            in_place=input.data_ptr() == self._base + row_offset,
            way=fastest_way(row_bytes, beside, captured) if way == "auto" else way,
        )
        kind = transfer.stride, row_bytes, row_offset, input.data_ptr() % 16, int(transfer.in_place)
        if kind not in self._prepared:
            assert not captured, "a capture loads no kernel: make one such call before"
            self._flow.prepare(transfer)
            self._prepared.add(kind)
        # Before it begins: where that fails, peers would take a later call's rows for its own.
        self._work = Work(partial(self._flow.wait, transfer))
        self._flow.begin(transfer)
        return self._work

    def check(self) -> None:
        """Raise the error that a wait on the GPU has recorded, without waiting. On CPUs the calls raise it.

        Raises:
            ExchangeTimeoutError: if a peer has not come in time, naming both ranks.
        """
        self._flow.check()

    def close(self) -> None:
        """Give the memory back once all that was issued is done. All ranks call this, once.

        An output that somebody still has keeps the memory of all of them.

        Raises:
            ExchangeTimeoutError: if a wait on the GPU had expired.
        """
        settle(self._group, self.device, self.check)
        self._work = None
        self._memory = torch.empty(0, device="cpu")
        del self._flow  # which has views of all ranks' memory
        self._arena.close()
