"""The mean over the ranks of the flat gradient, in buckets that travel while the backward goes on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from dlrm_overlap.comm.counters import Counters
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.reduction import CollectiveReduction, StoreOptions
from dlrm_overlap.kernels.dense.arguments import BLOCK


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
    `finish` reduces those that are incomplete when the backward has ended. So buckets travel early only if the layout
    has the order in which gradients are completed, about the reverse of the forward's, which `learn` finds out. It also
    finds out which parameters get a gradient, and every later backward must give one to the same. As under DDP, a
    gradient on some of the ranks becomes the mean over all of them, and one on no rank stays None
    (`FlatParameters.idle`).

    Shards (`FlatParameters.shards`) are never reduced: their gradients are whole where they are, and divided by the
    number of ranks already if they are to be a mean.

    Backward and `finish` may be captured in a CUDA graph, as long as both are in it: the hooks run at the capture, and
    the streams meet in `finish`. With one rank nothing is sent.

    Example of a step:
        optimizer.zero_grad()
        loss.backward()     # under `with buckets.learn():` in the first step
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
        """Hook into the backward of the parameters of `flat`, until `close`.

        Args:
            flat: the same parameters on all ranks.
            group: its backend reduces tensors on the parameters' device.
            dtype: in which gradients are sent and added up, float32 or bfloat16.
            bucket_bytes: least size of a bucket, but for the last.
            order: entered around each reduction, to order it among all that the ranks exchange.
            stores: reduce by stores to the memory of peers, which all ranks of the group reach; None leaves it to the
                group's own all-reduce.
        """
        assert dtype in (torch.float32, torch.bfloat16), f"gradients are sent as float32 or bfloat16, not as {dtype}"
        self._flat, self._group, self._ranks = flat, group, dist.get_world_size(group)
        self._least = -(-bucket_bytes // dtype.itemsize)
        if stores is None or self._ranks == 1:
            self._reduction = CollectiveReduction(flat, group, dtype)
        else:
            from dlrm_overlap.dense.stores import StoreReduction  # a CPU needs no Triton

            self._reduction = StoreReduction(flat, group, dtype, stores)
        self._order = order or nullcontext()
        on_gpu = flat.device.type == "cuda" and self._ranks > 1
        # As urgent as the exchange's stores (embedding/backends/push.py): the step waits for the last of them all.
        self._stream = torch.cuda.Stream(flat.device, priority=-2) if on_gpu else None
        self._filled_on: set[torch.cuda.Stream] = set()
        self._adopted: list[torch.Tensor] = []
        """gradients that the stream copies, until the current one has waited for it"""
        self._completed: list[str] | None = None  # in the order of `learn`'s backward
        self._without: set[str] | None = None  # parameters that got no gradient here then
        shared = self._shared()
        self._cut(shared, len(shared))
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_call, self.complete, name))
            for name, parameter in flat.parameters.items()
        ]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """First element of each bucket in the flat gradient, and the one after its last, in the order of reduction."""
        return [(bucket.begin, bucket.end) for bucket in self._buckets]

    @property
    def counters(self) -> Sequence[Counters]:
        """The counters that a captured step advances."""
        return self._reduction.counters

    @contextmanager
    def learn(self) -> Iterator[None]:
        """Note in which order a backward within completes the gradients, and lay the parameters out in this order.

        Ends with a collective: all ranks take rank 0's order. Parameters without a gradient on any rank come last, join
        the last bucket and are idle from now on, but for those whose gradients are `FlatParameters.unseen`. Nothing has
        been reduced yet when it ends; `finish` then reduces all of it.
        """
        self._completed = []
        try:
            yield
            completed = list(dict.fromkeys(self._completed))
        finally:
            self._completed = None
        order, live = self._agree(completed)
        self._flat.adopt_gradients()
        self._flat.idle = frozenset(order[live:]) - self._flat.unseen
        self._flat.show_gradients(self._flat.idle)
        self._flat.lay_out([*order, *(name for name in self._flat.places if name in self._flat.shards)])
        self._cut(order, live)
        for name in completed:
            self._bucket_of[name].waiting.remove(name)
        self._without = self._waiting()

    def finish(self) -> None:
        """Reduce the buckets that the backward left, then make the current stream wait for the whole flat gradient.

        Comes once after each backward, on all ranks; a second backward before it is an error.

        Raises:
            InputError: if other parameters got a gradient on this rank than under `learn`.
        """
        for _ in self.finish_in_ranges():
            pass

    def finish_in_ranges(self) -> Iterator[tuple[int, int]]:
        """Do as `finish`, range by range: make the current stream wait until the range that is yielded is reduced.

        Yields:
            First element of the range in the flat gradient, and the one after its last: multiples of `BLOCK`. The
            ranges cover all of it: first the shards, which wait for no other rank, then the rest in order. Whoever
            takes one takes all.
        """
        self._note_stream()
        if self._without is not None and self._waiting() != self._without:
            self._refuse(self._waiting() - self._without, self._without - self._waiting())
        for number in range(self._next, len(self._buckets)):
            self._reduce(number)
        self._adopted += self._flat.adopt_gradients()  # all of one rank; of several, those of shards
        self._begin()
        first, end = 0, self._flat.shared_end
        if self._flat.shards:
            yield end, self._flat.gradients.tensor.numel()
        for arrived in self._reduction.arrivals(self._stream) if self._ranks > 1 else ():
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
        if self._completed is not None:
            self._completed.append(name)
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
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
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

    def _shared(self) -> list[str]:
        """Return the names of the parameters that are no shards, in the order of the layout."""
        return [name for name in self._flat.places if name not in self._flat.shards]

    def _agree(self, completed: Sequence[str]) -> tuple[list[str], int]:
        """Return the order of the parameters that are no shards, and how many of them got a gradient on some rank.

        First those that rank 0 has completed, in its order, then those of other ranks alone, then the rest.
        """
        names = self._shared()
        place = {name: index for index, name in enumerate(completed)}
        places = torch.tensor([place.get(name, len(names)) for name in names], device=self._flat.device)
        idle = (places == len(names)).int()
        if self._ranks > 1:
            dist.all_reduce(idle, dist.ReduceOp.MIN, group=self._group)
            dist.broadcast(places, group=self._group, group_src=0)
        keys = dict(zip(names, zip(idle.tolist(), places.tolist(), strict=True), strict=True))
        return sorted(names, key=keys.__getitem__), len(names) - int(idle.sum())

    def _cut(self, order: Sequence[str], live: int) -> None:
        """Cut the layout into buckets; none begins with a parameter after the first `live` ones."""
        places, self._buckets = self._flat.places, list[_Bucket]()
        first = 0
        for index, name in enumerate(order):
            size, last = places[name].end - places[order[first]].begin, index == len(order) - 1
            if last or (size >= self._least and index + 1 < live):
                names = tuple(order[first : index + 1])
                self._buckets.append(_Bucket(names, places[names[0]].begin, places[name].end))
                first = index + 1
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._reduction.cut(self.ranges)
        self._begin()


def _call(complete: Callable[[str], None], name: str, _: nn.Parameter) -> None:
    complete(name)
