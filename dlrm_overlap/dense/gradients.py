"""The mean over the ranks of the flat gradient, in buckets that travel while the backward goes on."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NoReturn

import torch
import torch.distributed as dist

from dlrm_overlap.comm.counters import Counters
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.functions import StoreOptions
from dlrm_overlap.kernels.dense.arguments import BLOCK


class CollectiveReduction:
    """Replaces ranges of the flat gradient by their mean over the ranks, by the group's all-reduce: NCCL's or gloo's.

    Every step reduces all ranges, in their order. `StoreReduction` (`dense.stores`) does the same by kernels.
    """

    counters: Sequence[Counters] = ()

    def __init__(
        self, flat: FlatParameters, group: dist.ProcessGroup, dtype: torch.dtype, ranges: Sequence[tuple[int, int]]
    ) -> None:
        """Reduce `ranges` of the gradient of `flat`, which is sent and added up in `dtype`, float32 or bfloat16."""
        self._gradients, self._group, self._ranges = flat.gradients.tensor[: flat.shared_end], group, ranges
        self._ranks = dist.get_world_size(group)
        self._sent = None if dtype == torch.float32 else torch.empty_like(self._gradients, dtype=dtype)

    @torch.no_grad()
    def reduce(self, number: int) -> None:
        """Replace range `number` of the gradient by its mean over the ranks, on the current stream."""
        begin, end = self._ranges[number]
        gradient = self._gradients[begin:end]
        if self._sent is None and gradient.is_cuda:
            dist.all_reduce(gradient, dist.ReduceOp.AVG, group=self._group)  # gloo has no mean
        elif self._sent is None:
            gradient.div_(self._ranks)
            dist.all_reduce(gradient, group=self._group)
        else:
            sent = self._sent[begin:end]
            torch.mul(gradient, 1 / self._ranks, out=sent)  # one kernel, which divides in float32
            dist.all_reduce(sent, group=self._group)
            gradient.copy_(sent)

    def arrivals(self, stream: torch.cuda.Stream | None) -> Iterator[int]:
        """Make the current stream wait for `stream`, on which `reduce` was called; yield how many elements arrived."""
        if stream is not None:
            torch.cuda.current_stream(self._gradients.device).wait_stream(stream)
        yield self._gradients.numel()

    def check(self) -> None:
        """Do nothing: collectives record no fault."""

    def close(self) -> None:
        """Do nothing: there is no memory that peers see."""


@dataclass
class _Bucket:
    """A contiguous part of the flat gradient that is reduced at once."""

    names: tuple[str, ...]
    begin: int
    end: int
    waiting: set[str] = field(default_factory=set)
    """parameters whose gradient this backward has not completed yet"""


class GradientBuckets:
    """Replaces the flat gradient by its mean over the ranks, bucket by bucket, each as soon as it is complete.

    A bucket is reduced on a stream of its own, once a hook of autograd has seen the last of its gradients. All ranks
    reduce the buckets in one order, that of the layout: a bucket that is complete waits for those before it, and
    `finish` reduces those that are incomplete when the backward has ended. The first `finish` finds out which
    parameters get a gradient, and every later backward must give one to the same. As under DDP, a gradient on some of
    the ranks becomes the mean over all of them, and one on no rank stays None (`FlatParameters.idle`).

    Shards (`FlatParameters.shards`) are never reduced: their gradients are whole where they are, and divided by the
    number of ranks already if they are to be a mean.

    Backward and `finish` may be captured in a CUDA graph, as long as both are in it: the hooks run at the capture, and
    the streams meet in `finish`. With one rank nothing is sent.

    Example of a step:
        optimizer.zero_grad()
        loss.backward()
        buckets.finish()
        optimizer.step()

    Or, with an update of gradients that have arrived while the rest travels, in place of the last two lines:
        take_steps([steps], buckets.finish_in_ranges())     # of `flat_steps`
    """

    def __init__(
        self,
        flat: FlatParameters,
        group: dist.ProcessGroup,
        dtype: torch.dtype = torch.float32,
        bucket_bytes: int = 16 << 20,
        order: AbstractContextManager[object] | None = None,
        stores: StoreOptions | None = None,
    ) -> None:
        """Hook into the backward of the parameters of `flat`, until `close`; a collective.

        Args:
            flat: the same parameters on all ranks.
            group: its backend reduces tensors on the parameters' device.
            dtype: in which gradients are sent and added up, float32 or bfloat16.
            bucket_bytes: least size of a bucket, but for the last.
            order: entered around each reduction, to order it among all that the ranks exchange.
            stores: reduce by stores to the memory of peers, which all ranks of the group reach; None leaves it to the
                group's own all-reduce.

        Raises:
            InputError: if there is no room for memory that peers see, or the ranks do not reach it.
        """
        self._flat, self._group, self._ranks = flat, group, dist.get_world_size(group)
        self._buckets = self._cut(-(-bucket_bytes // dtype.itemsize))
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self.ranges = [(bucket.begin, bucket.end) for bucket in self._buckets]
        """first element of each bucket in the flat gradient, and the one after its last, in the order of reduction"""
        if stores is None or self._ranks == 1:
            self._reduction = CollectiveReduction(flat, group, dtype, self.ranges)
        else:
            from dlrm_overlap.dense.stores import StoreReduction  # a CPU needs no Triton

            self._reduction = StoreReduction(flat, group, dtype, self.ranges, stores)
        self.counters = self._reduction.counters
        """the counters that a captured step advances"""
        self._order = order or nullcontext()
        on_gpu = flat.device.type == "cuda" and self._ranks > 1
        # As urgent as the exchange's stores (embedding/backends/push.py): the step waits for the last of them all.
        self._stream = torch.cuda.Stream(flat.device, priority=-2) if on_gpu else None
        self._filled_on: set[torch.cuda.Stream] = set()
        self._adopted: list[torch.Tensor] = []
        """gradients that the stream copies, until the current one has waited for it"""
        self._without: set[str] | None = None
        """parameters that got no gradient on this rank in the first step, of those that autograd gives one"""
        self._begin()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.complete(name))
            for name, parameter in flat.parameters.items()
        ]

    def _cut(self, least: int) -> list[_Bucket]:
        """Cut the parameters that are no shards, in the order of the layout, into buckets of `least` elements each."""
        buckets, names, begin = list[_Bucket](), list[str](), 0
        shared = [(name, place.end) for name, place in self._flat.places.items() if name not in self._flat.shards]
        for name, end in shared:
            names.append(name)
            if end - begin >= least or name == shared[-1][0]:
                buckets.append(_Bucket(tuple(names), begin, end))
                names, begin = [], end
        return buckets

    def finish(self) -> None:
        """Reduce the buckets that the backward left, then make the current stream wait for the whole flat gradient.

        Comes once after each backward, on all ranks; a second backward before it is an error. The first one is a
        collective on the CPU, too.

        Raises:
            InputError: if other parameters got a gradient on this rank than in the first step.
        """
        for _ in self.finish_in_ranges():
            pass

    def finish_in_ranges(self) -> Iterator[tuple[int, int]]:
        """Do as `finish`, range by range: make the current stream wait until the range that is yielded is reduced.

        Returns:
            An iterator over ranges: first element in the flat gradient, and the one after the last, multiples of
            `BLOCK`. They cover all of it: first the shards, which wait for no other rank, then the rest in order.
            Whoever takes one takes all.
        """
        self._note_stream()
        waiting = self._waiting()
        if self._without is None:
            self._find_idle(waiting)
            self._without = waiting - self._flat.idle
        elif waiting != self._without:
            self._refuse(waiting - self._without, self._without - waiting)
        for number in range(self._next, len(self._buckets)):
            self._reduce(number)
        self._adopted += self._flat.adopt_gradients()  # all of one rank; of several, those of shards
        self._begin()
        return self._arriving()

    def _arriving(self) -> Iterator[tuple[int, int]]:
        first, end = 0, self._flat.shared_end
        if self._flat.shards:
            yield end, self._flat.gradients.tensor.numel()
        if self._ranks > 1:
            for arrived in self._reduction.arrivals(self._stream):
                whole = end if arrived >= self._buckets[-1].end else arrived // BLOCK * BLOCK
                if first < whole:
                    yield first, whole
                    first = whole
            with self._order:  # later communication comes after its waits
                pass
        self._adopted.clear()
        if first < end:
            yield first, end

    def check(self) -> None:
        """Raise the error that a kernel has recorded, such as of an expired wait; never waits for the device."""
        self._reduction.check()

    def close(self) -> None:
        """Let go of the parameters: backwards are as they were before. No rank may be in a step."""
        for hook in self._hooks:
            hook.remove()
        self._reduction.close()

    def complete(self, name: str) -> None:
        """Take note that the gradient of a parameter is complete, on the stream that wrote it.

        Autograd's hook does so. Who writes a gradient without autograd's knowledge calls this, once a backward.
        """
        if name in self._flat.shards:
            return
        if name in self._flat.idle:
            self._refuse(set(), {name})
        bucket = self._bucket_of[name]
        if name not in bucket.waiting:
            raise RuntimeError(
                f"gradient of {name}: a second one came before the first was reduced with its bucket; call finish() "
                f"after each backward"
            )
        self._note_stream()
        bucket.waiting.remove(name)
        while self._without is not None and self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._reduce(self._next)
            self._next += 1

    def _note_stream(self) -> None:
        """Remember the current stream: autograd may run the nodes that fill a bucket on several."""
        if self._stream is not None:
            self._filled_on.add(torch.cuda.current_stream(self._flat.device))

    def _reduce(self, number: int) -> None:
        if self._ranks == 1:
            return
        with self._after_gradients():
            self._adopted += self._flat.adopt_gradients(self._buckets[number].names)
            with self._order:
                self._reduction.reduce(number)

    def _after_gradients(self) -> AbstractContextManager[object]:
        """Return a context whose stream waits for the gradients that are complete by now."""
        if self._stream is None:
            return nullcontext()
        for stream in self._filled_on:
            self._stream.wait_stream(stream)
        return torch.cuda.stream(self._stream)

    def _waiting(self) -> set[str]:
        """Return the parameters whose gradient autograd has not completed on this rank, of those that may get one."""
        return set().union(*(bucket.waiting for bucket in self._buckets)) - self._flat.unseen

    def _refuse(self, lost: set[str], gained: set[str]) -> NoReturn:
        names, (now, then) = ", ".join(sorted(lost or gained)), ("no", "one") if lost else ("a", "none")
        raise InputError(
            f"dense gradients: {names} got {now} gradient in this step, but {then} in the first, and captured steps "
            f"are all alike; let the loss depend on the same parameters in every step"
        )

    def _begin(self) -> None:
        """Begin a step: every bucket waits for all of its gradients again."""
        self._next = 0
        """index of the first bucket that is not reduced"""
        self._filled_on.clear()
        for bucket in self._buckets:
            bucket.waiting = set(bucket.names) - self._flat.idle

    def _find_idle(self, without: set[str]) -> None:
        """Find the parameters that are `without` a gradient on every rank; a collective."""
        names = list(self._bucket_of)
        idle = torch.tensor([name in without for name in names], dtype=torch.int32, device=self._flat.device)
        if self._ranks > 1:
            dist.all_reduce(idle, dist.ReduceOp.MIN, group=self._group)
        self._flat.adopt_gradients()
        self._flat.idle = frozenset(name for name, is_idle in zip(names, idle.tolist(), strict=True) if is_idle)
        self._flat.show_gradients(self._flat.idle)
