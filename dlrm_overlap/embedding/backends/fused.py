"""`fused` on GPUs: one persistent kernel pools, and puts each slice as soon as it is done (arXiv 2305.06942)."""

from collections.abc import Sequence

import torch

from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.backends.pgas import ZeroCopyForward
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions
from dlrm_overlap.embedding.steps import BatchSizes, Step, tensors_of
from dlrm_overlap.embedding.windows import PairFlags, WindowPair, flags_among
from dlrm_overlap.kernels.bags import Bags, FeatureTable, Windows
from dlrm_overlap.kernels.forward.put_slices import SlicedPut, Slices, SliceState
from dlrm_overlap.kernels.launches import Launch, launches_of, prepared
from dlrm_overlap.kernels.tuning import Tuning, has_short_bags, tuning_for

_MANY_BAGS = 1 << 17  # so many give each of some 4,000 resident programs several tasks of 4 or 8
_FEWEST_SHORT_BAGS = 1 << 15  # fewer are cut as long ones


def persistent_tuning(table: FeatureTable, samples: int, slice_bags: int, short: bool = False) -> Tuning:
    """Return how to cut a persistent launch for the bags of `samples` samples, in slices of `slice_bags` bags.

    A program pays for each task, so it takes one of twice as many bags where there are many, if slices have so many. Of
    `short` bags, see `has_short_bags`, it takes four times as many: all programs draw their tasks from one ticket,
    which gives out one in 1.1 to 1.3 ns at best (H200; docs/lab.md), and otherwise decides.
    """
    bags = table.entries.shape[0] * samples
    short = short and bags >= _FEWEST_SHORT_BAGS
    for groups in (4, 2) if short else (2,) if bags >= _MANY_BAGS else ():
        tuning = tuning_for(table.dim, table.weight_dtype.itemsize, groups, short)
        if tuning.task_bags <= slice_bags:
            return tuning
    return tuning_for(table.dim, table.weight_dtype.itemsize, short=short)


class SlicedForward(ZeroCopyForward):
    """Persistent kernels, one for each kind of shards; the last returns when all flags have been raised.

    The option `put` says how rows get into the peers' windows: straight, or by way of staging memory of this GPU.
    A rank that has nothing to pool does as `pgas`: it only raises its flag, and awaits the others' in `finish`.
    """

    ends_with_wait = True
    """whether the last kernel returns when all flags have been raised; else `finish` awaits them"""

    @classmethod
    def slices(cls, options: ExchangeOptions, samples: int) -> int:
        """Return how many slices a shard's bags for `samples` samples make; none in place, where none has a flag."""
        return -(-samples // options.slice_bags) if options.put == "staged" else 0

    def __init__(self, context: ExchangeContext, windows: WindowPair) -> None:
        super().__init__(context, windows)
        self._in_place = self.options.put == "direct"
        self._states: dict[int, SliceState] = {}
        self._programs: dict[tuple[int, Tuning], int] = {}

    def _has_slices(self, step: Step) -> bool:
        return bool(self.lookup.pooled_together) and step.batch.most > 0

    def start(self, step: Step) -> None:
        """Launch the kernels."""
        if not self._has_slices(step):
            super().start(step)
            return
        flags, tables = self.flags_of(step), self.prepare(step)
        epoch = self.begin(step)
        windows = self.peers[epoch % 2]
        for i, table in enumerate(tables):
            tensors = tensors_of(step.inputs[self.lookup.pooled_together[i][0].input])
            short = has_short_bags(table, *tensors[:2])
            launch = self._put_launch(tensors, i, table, windows, flags, step.batch, short)
            with self.order:  # its programs raise flags and await them
                launch(*tensors, self.windows.counter.argument)

    @prepared
    def _put_launch(
        self,
        tensors: Sequence[torch.Tensor],
        i: int,
        table: FeatureTable,
        windows: Windows,
        flags: PairFlags,
        batch: BatchSizes,
        short: bool,
    ) -> Launch:
        """Return the launch of kernel i; it is called with ids like `tensors`, and the epoch."""
        bags = self.lookup.bags(tensors, batch, self.reached)
        last = i == len(self.lookup.pooled_together) - 1
        tuning = persistent_tuning(table, bags.samples, self.options.slice_bags, short)
        options = self.lookup.pooling_options(tuning)
        before = sum(map(len, self.lookup.pooled_together[:i]))
        first_slot = before * self.slices(self.options, bags.samples_per_rank)
        put = SlicedPut(
            bags=bags,
            features=table,
            windows=windows,
            flags=flags_among(flags.flags, self.reached),
            state=self.state(i, bags, table, tuning),
            # The kernel knows the ranks reached alone.
            options=options._replace(rank=self.reached.index(self.rank)),
            slices=Slices(self.options.slice_bags, first_slot, self._in_place, last, self.ends_with_wait and last),
        )
        return put.launch(self.grid(i, put))

    def finish(self, step: Step, copy: bool = False) -> torch.Tensor:
        """Lend the window, or copy it: the stream comes after the kernel that has awaited the flags, if one has."""
        if not (self.ends_with_wait and self._has_slices(step)):
            return super().finish(step, copy)
        self.join_stream()
        return self.output(step, copy)

    def state(self, i: int, bags: Bags, table: FeatureTable, tuning: Tuning) -> SliceState:
        """Return the memory that the programs of kernel i share, for the largest batch so far."""
        here = self.world_size * table.entries.shape[0]
        slices = here * -(-bags.samples_per_rank // self.options.slice_bags)
        tasks = here * -(-bags.samples_per_rank // tuning.task_bags)
        staged = 0 if self._in_place else tasks * tuning.task_bags * table.dim
        state = self._states.get(i)
        if state is None or state.staging.numel() < staged or state.done.numel() < slices:
            state = self._states[i] = SliceState(
                staging=torch.empty(staged, dtype=self.options.wire_dtype, device=self.device),
                done=torch.zeros(slices, dtype=torch.int32, device=self.device),
                ticket=torch.zeros(3, dtype=torch.int32, device=self.device),
            )
            launches_of(self).forget()
        return state

    def grid(self, i: int, put: SlicedPut) -> int:
        """Return the programs of kernel i's grid: as many as fit at once, or as many as the options ask for.

        Raises:
            InputError: if more are asked for than fit.
        """
        key = i, put.options.tuning
        if key not in self._programs:
            fit, asked = put.resident_programs(), self.options.programs_per_sm
            if asked is not None and asked > fit:
                raise InputError(
                    f"embedding.programs_per_sm: {asked}, but a multiprocessor holds {fit} of these programs at once; "
                    f"take at most {fit}, or null for as many as fit"
                )
            multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
            self._programs[key] = multiprocessors * (asked or fit)
        return self._programs[key]
