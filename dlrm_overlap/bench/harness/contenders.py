"""The contenders of the forward, over the same rows and ids: the baseline, TorchRec's own path, and our exchanges."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.bench.harness.workload import Ids, Workload
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.options import ExchangeOptions


class Contender(ABC):
    """One way to run the embedding stage, forward or backward. All ranks take the same steps."""

    def __init__(self, name: str, workload: Workload) -> None:
        self.name, self.workload = name, workload

    def columns(self) -> dict[str, Any]:
        """Return the columns in which contenders of the same name differ."""
        return {}

    @abstractmethod
    def step(self, batch: Any) -> Any:
        """Run the stage on `batch`, one of the batches.

        A contender of the forward takes `Ids` and returns the pooled embeddings [b, D_total] float32 of this rank's
        samples, in the model's feature order. They are valid until the next step. A contender of the backward takes a
        `GradientBatch` and returns nothing.
        """

    def cycle(self, batches: Sequence[Any]) -> Callable[[], object]:
        """Return a function that takes the next step, on one of `batches` after the other."""
        following = itertools.cycle(batches)
        return lambda: self.step(next(following))

    def close(self) -> None:  # noqa: B027  most have nothing to free
        """Free the memory that outlives Python references. Every rank must have finished its steps."""


def close_all(contenders: Sequence[Contender], workload: Workload) -> None:
    """Close the contenders once every rank has finished its steps. All ranks call this."""
    dist.barrier(workload.group)
    for contender in contenders:
        contender.close()


class Baseline(Contender):
    """FBGEMM's lookup, `all_to_all_single`, then unpacking (Chen et al. 2024). A rank alone only looks up."""

    def __init__(self, workload: Workload) -> None:
        super().__init__("baseline", workload)
        layout, rank = workload.layout, workload.rank
        assert layout.sent_in_order, "owners hold their tables in the model's order"
        (self._lookup,) = workload.tables.lookups
        self._samples = workload.batch_sizes[rank]
        self._send_sizes = [size * layout.owner_dims[rank] for size in workload.batch_sizes]
        self._receive_sizes = [self._samples * dim for dim in layout.owner_dims]

    def step(self, batch: Ids, mark: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Run the stage, and call `mark` after the lookup and after the All-to-All."""
        bags = batch.inputs[0]
        pooled = self._lookup(bags.values(), bags.offsets()).to(self.workload.wire_dtype)
        mark()
        if len(self._receive_sizes) == 1:
            mark()
            return pooled.to(self.workload.output_dtype)
        received = pooled.new_empty(sum(self._receive_sizes))
        sizes = self._receive_sizes, self._send_sizes
        work = dist.all_to_all_single(received, pooled.view(-1), *sizes, group=self.workload.group, async_op=True)
        assert work is not None
        work.wait()
        mark()
        parts = [part.view(self._samples, -1) for part in received.split(self._receive_sizes)]
        return torch.cat(parts, dim=1).to(self.workload.output_dtype)


class TorchRec(Contender):
    """TorchRec's sharded module, called as its train pipeline calls it. A step waits for the output."""

    def __init__(self, workload: Workload) -> None:
        super().__init__("torchrec", workload)
        assert workload.module._embedding_names == workload.layout.names

    def step(self, batch: Ids) -> torch.Tensor:
        """Run the stage."""
        pooled = self.workload.module.compute_and_output_dist(batch.context, batch.inputs).wait().values()
        return pooled.to(self.workload.output_dtype)


class Overlap(Contender):
    """One of our exchanges, named for its backend.

    The name goes on with the put if that is not in place, and with `copied` if the output is a copy of the window.
    """

    def __init__(self, workload: Workload, options: ExchangeOptions) -> None:
        has_slices = BACKENDS[options.backend].has_slices
        put = f"_{options.put}" if has_slices and options.put != "in_place" else ""
        super().__init__(options.backend + put + "_copied" * options.copy_output, workload)
        self.options = options
        forward = replace(options, backward="collective")  # another backward would hold windows that nothing uses
        self._exchange = Exchange(workload.layout, workload.tables, forward, workload.group, workload.device)

    def columns(self) -> dict[str, Any]:
        """Return the schedule, and for a backend that has slices their put, their size and the programs."""
        names = ("schedule", "put", "slice_bags", "programs_per_sm")
        has_slices = BACKENDS[self.options.backend].has_slices
        return {name: getattr(self.options, name) for name in names[: None if has_slices else 1]}

    def step(self, batch: Ids) -> torch.Tensor:
        """Run the stage."""
        return self._exchange.start(list(batch.inputs), self.workload.batch_sizes).wait()

    def close(self) -> None:
        """Free the exchange's windows."""
        self._exchange.close()
