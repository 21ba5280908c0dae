"""The forward on GPUs: `pgas` stores into the peers' windows as it pools, `fused` puts slices as they are done."""

from collections.abc import Mapping
from functools import lru_cache
from math import gcd
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode

from dlrm_overlap.comm.arena import ExchangeTimeoutError, Record
from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.backends.base import BatchSizes, Forward, Step, WindowForward, bad_id_message
from dlrm_overlap.embedding.protocol.layout import FeatureShard
from dlrm_overlap.embedding.protocol.windows import WINDOWS
from dlrm_overlap.kernels.arguments import Bags, FeatureTable, PoolingOptions, Tuning, Windows, tuning_for
from dlrm_overlap.kernels.flags import Flags, raise_flags, wait_flags
from dlrm_overlap.kernels.forward.put_slices import TRACE_COLUMNS, SlicedPut, Slices, SliceState
from dlrm_overlap.kernels.forward.store_pooled import store_pooled

_MANY_BAGS = 1 << 17  # so many give each of some 4,000 resident programs several tasks of 4


class DeviceLookup:
    """This rank's launches: what each pools, and where each finds its rows."""

    def __init__(self, forward: Forward, columns: Mapping[FeatureShard, int]) -> None:
        """Place each local shard at `columns`' element of a window's row."""
        self.forward, self.columns = forward, columns
        self.launches = list(forward.layout.launches(forward.rank).values())
        self.record = Record(forward.device)
        self._storage: tuple[int, ...] | None = None
        self._tables: list[FeatureTable] = []

    def tables(self) -> list[FeatureTable]:
        """Return a feature table a launch, made anew when the rows have moved."""
        if (storage := self.forward.tables.storage()) != self._storage:
            self._tables = [self._table(shards) for shards in self.launches]
            self._storage = storage
        return self._tables

    def _table(self, shards: list[FeatureShard]) -> FeatureTable:
        weights = [self.forward.tables.weight(shard) for shard in shards]
        entries = [
            [weight.data_ptr(), weight.shape[0], self.columns[shard], shard.position, int(shard.mean)]
            for shard, weight in zip(shards, weights, strict=True)
        ]
        dim, dtype = shards[0].dim, shards[0].dtype
        return FeatureTable(
            entries=torch.tensor(entries, dtype=torch.int64, device=self.forward.device),
            dim=dim,
            weight_dtype=dtype,
            alignment=gcd(16, dim * dtype.itemsize, *(weight.data_ptr() for weight in weights)),
            column_alignment=gcd(16, *(self.columns[shard] for shard in shards)),
        )

    def bags(self, shards: list[FeatureShard], step: Step) -> Bags:
        """Return the ids of a launch."""
        ids = step.inputs[shards[0].source]
        return Bags(
            values=ids.values(),
            offsets=ids.offsets(),
            first_sample=first_samples(step.batch, self.forward.device),
            samples=step.batch.total,
            samples_per_rank=step.batch.most,
        )

    def launch(self, tuning: Tuning) -> PoolingOptions:
        """Return what a kernel is told beside its tensors."""
        check = self.forward.bounds_check != BoundsCheckMode.NONE
        return PoolingOptions(self.forward.rank, self.forward.schedule, tuning, check)

    def parts(self, send: torch.Tensor, step: Step) -> Windows:
        """Return the parts [b_w, D_local] of a send buffer [B, D_local] as the windows of its destinations."""
        row_bytes = send.shape[1] * send.dtype.itemsize
        first = first_samples(step.batch, self.forward.device)[:-1]
        return Windows(send.data_ptr() + first.long() * row_bytes, send.shape[1], send.dtype, gcd(16, row_bytes))

    def store(self, windows: Windows, step: Step, tables: list[FeatureTable]) -> None:
        """Pool every bag into its owner's window, by the zero-copy kernel; `tables` are `tables()`."""
        for shards, table in zip(self.launches, tables, strict=True):
            bags = self.bags(shards, step)
            store_pooled(bags, table, windows, self.record.status, self.launch(tuning_for(table.dim)))

    def check(self) -> None:
        """Raise what a kernel has recorded, or log an id outside its table, under bounds check WARNING.

        Raises:
            ExchangeTimeoutError: if a wait for a peer has expired.
            ValueError: if an id lay outside its table, under bounds check FATAL.
        """
        if self.record.empty:
            return
        if expired := self.record.expired():
            raise ExchangeTimeoutError(expired, self.forward.options.wait_timeout_s)
        if (bad := self.record.bad_id()) and self.forward.bounds_check != BoundsCheckMode.IGNORE:
            position, sample, rows = bad
            shards = self.forward.layout.by_owner[self.forward.rank]
            names = " or ".join(shard.name for shard in shards if shard.position == position)
            message = f"sample {sample} of the global batch: {bad_id_message(names, None, rows)}"
            if self.forward.bounds_check == BoundsCheckMode.FATAL:
                raise ValueError(message)
            self.forward.warn_of_bad_id(message)


@lru_cache(maxsize=64)
def first_samples(batch: BatchSizes, device: torch.device) -> torch.Tensor:
    """Return [W + 1] int32 on the device: the first sample of each rank, and B."""
    return torch.tensor(batch.first_sample, dtype=torch.int32, device=device)


class DeviceForward(WindowForward):
    """Kernels that store into the peers' windows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lookup = DeviceLookup(self, {p: self.layout.column(p) for p in self.layout.by_owner[self.rank]})
        columns, wire = self.layout.total_dim, self.options.wire_dtype
        self._peers = [Windows(self.windows.arena.addresses(name), columns, wire) for name in WINDOWS]
        self._flags: dict[int, Flags] = {}
        self._states: dict[int, SliceState] = {}
        self._programs: dict[tuple[int, Tuning], int] = {}
        self.traces: dict[int, torch.Tensor] = {}

    def _puts(self, step: Step) -> bool:
        """Return whether this rank has slices to put; with nothing to pool it only raises a flag."""
        return bool(self.lookup.launches) and step.batch.most > 0

    def _flags_of(self, step: Step) -> Flags:
        slices = self._slices(step.batch.most)
        if slices not in self._flags:
            arena = self.windows.arena
            self._flags[slices] = Flags(
                addresses=arena.addresses("ready"),
                local=arena.local("ready"),
                counts=self._awaited(step).to(self.device),
                timeout=int(self.options.wait_timeout_s * 1e9),
                status=self.lookup.record.status,
            )
        return self._flags[slices]

    def launch(self, step: Step) -> None:
        """Launch the kernels; under `fused` the last ends when all flags are there."""
        self.check()
        flags, tables = self._flags_of(step), self.lookup.tables()  # which may fail: before the step has begun
        epoch = self.windows.begin()
        self.join_stream()
        window = self._peers[epoch % 2]
        if not self._fused or not self._puts(step):
            self.lookup.store(window, step, tables)
            raise_flags(flags, self.rank, 0, epoch)
            return
        first_slot, last = 0, len(self.lookup.launches) - 1
        for i, (shards, table) in enumerate(zip(self.lookup.launches, tables, strict=True)):
            bags = self.lookup.bags(shards, step)
            launch = self.lookup.launch(self._tuning(table, bags))
            slices = Slices(self.options.slice_bags, first_slot, end_wait=i == last)
            put = SlicedPut(bags, table, window, flags, self._state(i, bags, table, launch), launch, slices)
            put.launch_kernel(epoch, self._grid((i, launch.tuning), put))
            first_slot += len(shards) * self._slices(bags.samples_per_rank)

    def collect(self, step: Step, copy: bool = False) -> torch.Tensor:
        """Make the stream wait for the flags, where the kernels have not, and lend the window, or copy it."""
        self.join_stream()
        if not self._fused or not self._puts(step):
            wait_flags(self._flags_of(step), self.rank, self.windows.epoch)
        return self._output(step, copy)

    def _tuning(self, table: FeatureTable, bags: Bags) -> Tuning:
        """Return how to cut a persistent launch: a program pays for each task, so it takes larger ones of many."""
        many = table.entries.shape[0] * bags.samples >= _MANY_BAGS
        return tuning_for(table.dim, groups=2 if many else 1)

    def _state(self, i: int, bags: Bags, table: FeatureTable, launch: PoolingOptions) -> SliceState:
        """Return what launch i's programs share, for the largest batch so far."""
        here = self.world_size * table.entries.shape[0]
        tasks = here * -(-bags.samples_per_rank // launch.tuning.task_bags)
        staged = tasks * launch.tuning.task_bags * table.dim
        state = self._states.get(i)
        if state is None or state.staging.numel() < staged or len(self.traces.get(i, ())) < tasks * self.options.trace:
            if self.options.trace:
                self.traces[i] = torch.zeros(tasks, len(TRACE_COLUMNS), dtype=torch.int64, device=self.device)
            state = SliceState(
                staging=torch.empty(staged, dtype=self.options.wire_dtype, device=self.device),
                done=torch.zeros(here * self._slices(bags.samples_per_rank), dtype=torch.int32, device=self.device),
                ticket=torch.zeros(2, dtype=torch.int32, device=self.device),
                trace=self.traces.get(i),
            )
            self._states[i] = state
        return state

    def _grid(self, key: tuple[int, Tuning], put: SlicedPut) -> int:
        """Return the programs of a persistent grid: as many as fit at once, unless told otherwise.

        Raises:
            InputError: if more are asked for than fit.
        """
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

    def check(self) -> None:
        """Raise what a kernel has recorded, see `DeviceLookup.check`."""
        self.lookup.check()

    def close(self) -> None:
        """Give back the windows and what else is as large; nothing may keep a view of them."""
        self._flags, self._states, self.traces = {}, {}, {}
        super().close()
