"""The mean of the flat gradient over the ranks, in buckets that are reduced during the backward."""

from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from dlrm_overlap.comm.counters import Counters
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.flat_steps import FlatSteps
from dlrm_overlap.dense.functions import StoreOptions
from dlrm_overlap.kernels.dense.arguments import BLOCK

if TYPE_CHECKING:
    from dlrm_overlap.dense.owner_updates import DeferredRange, OwnerUpdates


class OwnedSteps(NamedTuple):
    """The optimizer's steps that the owners of the gradients' shares take."""

    steps: FlatSteps
    in_float32: Set[str]
    """names of parameters that the model reads in float32"""
    defers_last: bool = False
    """True updates the last bucket in the next step (`owner_updates.DeferredRange`), if there are several buckets and
    the model reads none of its parameters in float32"""


class CollectiveReduction:
    """Averages ranges of the flat gradient by the group's all-reduce. Every step must `reduce` all ranges, in order."""

    counters: Sequence[Counters] = ()

    def __init__(
        self, flat: FlatParameters, group: dist.ProcessGroup, dtype: torch.dtype, ranges: Sequence[tuple[int, int]]
    ) -> None:
        """Take the ranges that `reduce` averages.

        Args:
            dtype: float32 or bfloat16, in which the collective sends and adds gradients; the mean is float32.
            ranges: [begin, end) of each range, in elements of the flat gradient.
        """
        self._gradients, self._group, self._ranges = flat.gradients.tensor[: flat.shared_end], group, ranges
        self._ranks = dist.get_world_size(group)
        self._sent = None if dtype == torch.float32 else torch.empty_like(self._gradients, dtype=dtype)

    @torch.no_grad()
    def reduce(self, number: int) -> None:
        begin, end = self._ranges[number]
        gradient = self._gradients[begin:end]
        if self._sent is None and gradient.is_cuda:
            dist.all_reduce(gradient, dist.ReduceOp.AVG, group=self._group)  # not supported by gloo
        elif self._sent is None:
            gradient.div_(self._ranks)
            dist.all_reduce(gradient, group=self._group)
        else:
            sent = self._sent[begin:end]
            torch.mul(gradient, 1 / self._ranks, out=sent)  # one kernel, which divides in float32
            dist.all_reduce(sent, group=self._group)
            gradient.copy_(sent)

    def arrivals(self, stream: torch.cuda.Stream | None) -> Iterator[int]:
        """Make the current stream wait for `stream`, on which `reduce` ran, then yield the number of elements once."""
        if stream is not None:
            torch.cuda.current_stream(self._gradients.device).wait_stream(stream)
        yield self._gradients.numel()

    def check(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@dataclass
class _Bucket:
    names: tuple[str, ...]
    begin: int
    end: int
    waiting: set[str] = field(default_factory=set)
    """names of parameters without a complete gradient in this backward"""


class GradientBuckets:
    """Replaces the flat gradient by its mean over the ranks, bucket by bucket, during the backward.

    Autograd hooks find complete buckets, which a separate stream reduces in order; `finish` reduces the rest. Every
    backward must give a gradient to the same parameters. As under DDP, a parameter with a gradient on only some ranks
    gets the mean over all ranks, and the gradient of a parameter without one on any rank stays None
    (`FlatParameters.idle`). Shards are not reduced: their gradients are already means. Backward and `finish` may be
    captured in one CUDA graph.
    """

    def __init__(
        self,
        flat: FlatParameters,
        group: dist.ProcessGroup,
        dtype: torch.dtype = torch.float32,
        bucket_bytes: int = 16 << 20,
        order: AbstractContextManager[object] | None = None,
        stores: StoreOptions | None = None,
        owned: OwnedSteps | None = None,
    ) -> None:
        """Hook into the backward of the parameters of `flat`; a collective, with the errors of `StoreReduction`.

        Args:
            dtype: float32 or bfloat16, in which gradients are sent and added up.
            bucket_bytes: minimum size of a bucket except the last.
            order: context of each reduction, to order it among all communication.
            stores: reduce by stores to peers' memory, which all ranks must reach; None uses the group's all-reduce.
            owned: also update the weights except for shards (`dense.owner_updates`), and leave the gradients as they
                are; needs `stores` and several ranks.
        """
        self._flat, self._group, self._ranks = flat, group, dist.get_world_size(group)
        self._buckets = self._cut(-(-bucket_bytes // dtype.itemsize))
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self.ranges = [(bucket.begin, bucket.end) for bucket in self._buckets]
        """[first, end) of each bucket in elements, in the order of reduction"""
        self.owners: OwnerUpdates | None = None
        """updates the weights, if `owned` is given"""
        if stores is None or self._ranks == 1:
            assert owned is None, "owners store to several ranks"
            self._reduction = CollectiveReduction(flat, group, dtype, self.ranges)
        elif owned is not None:
            from dlrm_overlap.dense import owner_updates  # imports Triton, which CPUs may not have

            about = flat, group, dtype, self.ranges, stores, owned.steps, owned.in_float32
            self._reduction = self.owners = owner_updates.OwnerUpdates(*about)
        else:
            from dlrm_overlap.dense.stores import StoreReduction  # imports Triton, which CPUs may not have

            self._reduction = StoreReduction(flat, group, dtype, self.ranges, stores)
        self.counters = self._reduction.counters
        self._order = order or nullcontext()
        on_gpu = flat.device.type == "cuda" and self._ranks > 1
        # Same priority as the exchange's stores (embedding/backends/push.py), as the step waits for both.
        self._stream = torch.cuda.Stream(flat.device, priority=-2) if on_gpu else None
        self.deferred: DeferredRange | None = None
        """the last bucket, if its owners update it in the next step"""
        if owned is not None and owned.defers_last and len(self._buckets) > 1:
            assert self.owners is not None
            if not owned.in_float32 & set(self._buckets[-1].names):
                self.deferred = owner_updates.DeferredRange(self.owners, self.ranges, self._stream, self._order)
        self._filled_on: set[torch.cuda.Stream] = set()
        self._adopted: list[torch.Tensor] = []
        """gradients that `_stream` copies, kept until the current stream has waited for `_stream`"""
        self._without: set[str] | None = None
        """names of parameters, not idle, without a gradient on this rank in the first step"""
        self._begin()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.complete(name))
            for name, parameter in flat.parameters.items()
        ]

    def _cut(self, min_elements: int) -> list[_Bucket]:
        buckets, names, begin = list[_Bucket](), list[str](), 0
        shared = [
            (name, position.end) for name, position in self._flat.positions.items() if name not in self._flat.shards
        ]
        for name, end in shared:
            names.append(name)
            if end - begin >= min_elements or name == shared[-1][0]:
                buckets.append(_Bucket(tuple(names), begin, end))
                names, begin = [], end
        return buckets

    def finish(self) -> None:
        """Reduce the remaining buckets, and make the current stream wait for the whole flat gradient.

        Call it once after each backward, on all ranks; in the first call the host waits for all ranks. Raises
        `InputError` if other parameters got a gradient than in the first step.
        """
        for _ in self.finish_in_ranges():
            pass

    def finish_in_ranges(self) -> Iterator[tuple[int, int]]:
        """Do what `finish` does, but make the current stream wait for one range of the flat gradient at a time.

        A range is [first, end) in elements, multiples of `BLOCK`; its gradients may be read once it is yielded, or its
        weights if owners have updated them, except for a deferred bucket. Exhaust the iterator: its ranges cover all
        elements, first the shards, then the other parameters in order.
        """
        if self.deferred is not None:
            self.deferred.wait()
        self._note_stream()
        waiting = self._waiting()
        if self._without is None:
            self._find_idle(waiting)
            self._without = waiting - self._flat.idle
        elif waiting != self._without:
            self._refuse(waiting - self._without, self._without - waiting)
        for number in range(self._next, self._reduced_here):
            self._reduce(number)
        self._adopted += self._flat.adopt_gradients()  # with one rank all gradients, else those of shards
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
            with self._order:  # later communication comes after these waits
                pass
        self._adopted.clear()
        if first < end:
            yield first, end

    def check(self) -> None:
        """Raise `ExchangeTimeoutError` if a wait on the device has expired, without waiting for the device."""
        self._reduction.check()

    def close(self) -> None:
        """Remove the hooks and free shared memory; no rank may be in a step any more."""
        for hook in self._hooks:
            hook.remove()
        self._reduction.close()

    def complete(self, name: str) -> None:
        """Note that a parameter's gradient is complete on the current stream.

        Code that writes gradients without autograd calls this once per step. With `owned`, the step must not read the
        parameter any more, except in work that the current stream has waited for.
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
        while self._without is not None and self._next < self._reduced_here and not self._buckets[self._next].waiting:
            self._reduce(self._next)
            self._next += 1

    @property
    def _reduced_here(self) -> int:
        """Number of buckets that the step reduces itself."""
        return len(self._buckets) - (self.deferred is not None and self.deferred.is_begun)

    def _note_stream(self) -> None:
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
        if self._stream is None:
            return nullcontext()
        for stream in self._filled_on:
            self._stream.wait_stream(stream)
        return torch.cuda.stream(self._stream)

    def _waiting(self) -> set[str]:
        return set().union(*(bucket.waiting for bucket in self._buckets)) - self._flat.unseen

    def _refuse(self, lost: set[str], gained: set[str]) -> NoReturn:
        names, (now, then) = ", ".join(sorted(lost or gained)), ("no", "one") if lost else ("a", "none")
        raise InputError(
            f"dense gradients: {names} got {now} gradient in this step, but {then} in the first, and captured steps "
            f"are all the same; let the loss depend on the same parameters in every step"
        )

    def _begin(self) -> None:
        self._next = 0
        """first bucket that is not reduced"""
        self._filled_on.clear()
        for bucket in self._buckets:
            bucket.waiting = set(bucket.names) - self._flat.idle

    def _find_idle(self, without: set[str]) -> None:
        """Find the parameters without a gradient on any rank; a collective for which the host waits."""
        names = list(self._bucket_of)
        idle = torch.tensor([name in without for name in names], dtype=torch.int32, device=self._flat.device)
        if self._ranks > 1:
            dist.all_reduce(idle, dist.ReduceOp.MIN, group=self._group)
        self._flat.adopt_gradients()
        self._flat.idle = frozenset(name for name, is_idle in zip(names, idle.tolist(), strict=True) if is_idle)
        self._flat.show_gradients(self._flat.idle)
