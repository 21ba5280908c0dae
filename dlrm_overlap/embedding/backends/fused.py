"""`fused` on GPUs: a persistent kernel pools, and stores each slice once it is ready (arXiv 2305.06942)."""

from collections.abc import Sequence

import torch

from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.backends.lookup import DeviceLookup, Platform
from dlrm_overlap.embedding.backends.pgas import ZeroCopyForward, ZeroCopyState
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions
from dlrm_overlap.embedding.steps import BatchSizes, Step, tensors_of
from dlrm_overlap.embedding.windows import DeviceSignals, Signals, WindowPair, flags_among
from dlrm_overlap.kernels.bags import Bags, FeatureTable, Windows
from dlrm_overlap.kernels.forward.put_slices import SlicedPut, Slices, SliceState
from dlrm_overlap.kernels.launches import Launch, launches_of, prepared
from dlrm_overlap.kernels.tuning import Tuning, has_short_bags, tuning_for

_MANY_BAGS = 1 << 17  # enough for several tasks of 4 or 8 bags for each of some 4,000 resident programs
_FEWEST_SHORT_BAGS = 1 << 15  # fewer short bags are cut as long ones


def persistent_tuning(table: FeatureTable, samples: int, slice_bags: int, short: bool = False) -> Tuning:
    """Return the tuning of a persistent kernel for `samples` samples and slices of `slice_bags` bags.

    Each task has a fixed cost, so if there are many bags, a task has twice as many. If bags are `short`, see
    `has_short_bags`, it has four times as many, because the shared task counter is the limit (docs/results/lab.md).
    """
    bags = table.entries.shape[0] * samples
    short = short and bags >= _FEWEST_SHORT_BAGS
    for groups in (4, 2) if short else (2,) if bags >= _MANY_BAGS else ():
        tuning = tuning_for(table.dim, table.weight_dtype.itemsize, groups, short)
        if tuning.task_bags <= slice_bags:
            return tuning
    return tuning_for(table.dim, table.weight_dtype.itemsize, short=short)


class SlicedForward(ZeroCopyForward[Windows]):
    """Launches a persistent kernel for each kind of shards; the last one returns when all flags are set.

    `finish` waits for the flags instead if this rank has nothing to pool, and on several nodes, where waiting programs
    would occupy the multiprocessors that messages need.
    """

    lookup: DeviceLookup

    @classmethod
    def slices(cls, options: ExchangeOptions, samples: int) -> int:
        """Return the number of slices, each with a flag, of a shard's bags; 0 with put `direct`."""
        return -(-samples // options.slice_bags) if options.put == "staged" else 0

    def __init__(self, context: ExchangeContext, windows: WindowPair, platform: Platform[Windows]) -> None:
        super().__init__(context, windows, platform)
        if torch.version.hip is not None:
            raise InputError(
                "embedding.backend: fused on AMD GPUs, but CUDA is asked how many of its programs fit; take pgas"
            )
        self._in_place = self.options.put == "direct"
        self._states: dict[int, SliceState] = {}
        self._programs: dict[tuple[int, Tuning], int] = {}

    def start(self, step: Step) -> ZeroCopyState:
        if not self.lookup.pooled_together or step.batch.most == 0:
            return super().start(step)
        signals = self.signals_of(step)
        windows = self.begin(step, signals)
        for i, table in enumerate(self.lookup.tables):
            tensors = tensors_of(step.inputs[self.lookup.pooled_together[i][0].input])
            short = has_short_bags(table, *tensors[:2])
            launch = self._put_launch(tensors, i, table, windows, signals, step.batch, short)
            with self.order:  # its programs signal and wait
                launch(*tensors, self.windows.counter.argument)
        return ZeroCopyState(step, signals if self.transport is not None else None)

    @prepared
    def _put_launch(
        self,
        tensors: Sequence[torch.Tensor],
        i: int,
        table: FeatureTable,
        windows: Windows,
        signals: Signals,
        batch: BatchSizes,
        short: bool,
    ) -> Launch:
        """Return the launch of kernel i; call it with ids like `tensors`, and the epoch."""
        assert isinstance(signals, DeviceSignals)
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
            flags=flags_among(signals.flags, self.reached),
            state=self.state(i, bags, table, tuning),
            # The kernel knows only the ranks reached.
            options=options._replace(rank=self.reached.index(self.rank)),
            slices=Slices(self.options.slice_bags, first_slot, self._in_place, last, self.transport is None and last),
        )
        return put.launch(self.grid(i, put))

    def state(self, i: int, bags: Bags, table: FeatureTable, tuning: Tuning) -> SliceState:
        """Return the memory that the programs of kernel i share; it grows with the largest batch."""
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
        """Return the number of programs of kernel i: `programs_per_sm`, or all that are resident at once."""
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
