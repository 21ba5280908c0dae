"""Reads batches two steps ahead, and plans with all ranks which steps are captured."""

import logging
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch

from dlrm_overlap.comm.order import Streams
from dlrm_overlap.embedding.capacity import CapacityTracker, PendingResult, ended
from dlrm_overlap.train.graphs.model_ids import ModelIds
from dlrm_overlap.train.graphs.static_batch import BatchTensors, StaticBatch, on_device, with_even_batches_of

log = logging.getLogger("dlrm_overlap")


class StepKind(Enum):
    """Kind of the next step, the same on all ranks."""

    CAPTURED = "captured"
    """every rank's batch fits a captured step; warm-up steps before the capture are issued kernel by kernel"""
    EAGER = "eager"
    """the batch of some rank is uncapturable"""
    END = "end"
    """no step is taken, since a rank has no batch left"""


class PlannedStep(NamedTuple):
    """A step that all ranks take together."""

    kind: StepKind
    buffer_index: int
    """0 or 1, in turn: which buffers and windows the step uses"""
    is_first: bool = False
    """True if no batch had been read ahead for this step"""
    read: BatchTensors | None = None
    """the batch as the loader returned it; None if it was copied to `staging`"""
    staging: StaticBatch | None = None
    """buffer that the batch is copied to, if captured steps can take it"""
    active_buffer: StaticBatch | None = None
    """buffer that the step reads, to which `staging` is copied; unused if `read` is read. None without a batch"""
    sizes: np.ndarray = np.empty(0, np.int64)
    """greatest sizes of the batch over all ranks, see `CapacityTracker`"""

    @property
    def active(self) -> StaticBatch:
        assert self.active_buffer is not None
        return self.active_buffer

    def batch(self, device: torch.device, exact: bool = True) -> Any:
        """Return the batch on the device.

        If `exact`, ids are unpadded, as eager steps read them, which may wait for the device. Otherwise the ids of a
        captured step are padded, and its tensors have fixed addresses.
        """
        if self.kind is StepKind.EAGER:
            if self.read is not None:
                return on_device(self.read.batch, device)
            assert self.staging is not None
            # The output may refer to the batch, and a later batch is staged before the caller reads the output.
            self.active.copy_from(self.staging)
        return self.active.exact() if exact else self.active.batch


_END = PlannedStep(StepKind.END, 0), PlannedStep(StepKind.END, 1)


class PrefetchedBatch(NamedTuple):
    read: BatchTensors | None
    """the batch; None if it was copied to `staging`, or if this rank has no batch left"""
    staging: StaticBatch | None
    """the buffer for the batch; None if this rank has no batch left"""
    sizes: PendingResult
    """greatest sizes of the batch over all ranks"""


class InputPrefetcher:
    """Copies batches to the buffers of the steps while earlier steps run, and plans the steps.

    Batch i and step i use buffer i mod 2. Each buffer has two parts on the device, with fixed addresses:

        staging     batch i + 2 is copied here from the host, once step i has been issued
        active      batch i + 2 is copied here from staging during step i + 1, which sends its ids, or at the start of
                    step i + 2 if that is eager; step i + 2 reads it
    """

    def __init__(self, device: torch.device, capacity: CapacityTracker, streams: Streams, ids: ModelIds) -> None:
        self._device, self._capacity, self._streams, self._ids = device, capacity, streams, ids
        self._staging: list[StaticBatch] = []
        self._active: list[StaticBatch] = []
        self._index = 0
        self._reported: set[str] = set()
        """paths of mismatches that were logged"""
        self.reset()

    def reset(self) -> None:
        self._steps: list[PrefetchedBatch | PlannedStep] = [*_END]
        self._is_exhausted = False
        """True if this rank has read its last batch"""
        self._ids.forget()

    def plan(self, batches: Iterator[Any]) -> PlannedStep:
        """Return the next step; reads batches if none was read ahead, and may wait for the other ranks."""
        step = self._plan(self._index)
        if step.kind is StepKind.END:
            self.reset()
            self._stage(batches, self._index)
            self._stage(batches, 1 - self._index)
            step = self._plan(self._index)._replace(is_first=True)
        if step.kind is StepKind.CAPTURED:
            # The graph also reads the next batch. If a GPU counted its ids, it is only copied once all ranks have it.
            following = self._steps[1 - self._index]
            if isinstance(following, PrefetchedBatch) and following.read is not None:
                self.plan_following()
        return step

    def plan_following(self) -> PlannedStep:
        """Return the step after the next one; may wait for the other ranks."""
        return self._plan(1 - self._index)

    def _plan(self, index: int) -> PlannedStep:
        held = self._steps[index]
        if isinstance(held, PlannedStep):
            return held
        sizes = held.sizes.wait()
        if ended(sizes):
            step = _END[index]
            if held.staging is not None:
                log.warning("train pipeline: a batch is left out, since another rank has no more")
        else:
            assert held.staging is not None
            kind = StepKind.CAPTURED if self._capacity.are_captured(sizes) else StepKind.EAGER
            step = PlannedStep(kind, index, False, held.read, held.staging, self._active[index], sizes)
            if kind is StepKind.CAPTURED and held.read is not None:
                with self._streams.copies(index, later=True):
                    held.staging.fill(held.read)
        self._steps[index] = step
        return step

    def activate(self, step: PlannedStep) -> None:
        """Copy the batch of `step` from its staging to its active buffer, during the previous step or `step` itself."""
        assert step.staging is not None
        step.active.copy_from(step.staging)
        if step.buffer_index == self._index:
            self._streams.step_is_issued(1 - self._index)

    def finish(self, batches: Iterator[Any]) -> None:
        """Note that the planned step was issued, and read the batch two steps later into its staging buffer."""
        index = self._index
        self._streams.step_is_issued(index)
        if self._plan(index).kind is StepKind.EAGER:  # has read its staging buffer
            self._streams.step_is_issued(1 - index)
        self._index = 1 - index
        if self._is_exhausted:
            self._ids.forget()
        self._stage(batches, index)

    def _stage(self, batches: Iterator[Any], index: int) -> None:
        with self._streams.copies(index):
            # The batch of the step is freed here, where the copies follow the step: it may be in memory of a loader's
            # stream, which the loader reuses once the current stream, for which it has recorded the batch, is done.
            self._steps[index] = _END[index]
            given = None if self._is_exhausted else next(batches, None)
            self._is_exhausted = given is None
            batch = None if given is None else with_even_batches_of(given, self._ids.unpooled_features)
            if not self._staging and not self._make_buffers(batch):
                self._is_exhausted = True
                return
            if batch is None:
                self._steps[index] = PrefetchedBatch(None, None, self._capacity.ask(None))
                return
            staging = self._staging[index]
            mismatch, described = staging.mismatch(batch), self._capacity.describe(batch)
            is_staged = mismatch is None and self._capacity.is_within(described)
            if is_staged:
                staging.fill(batch)
            sizes = self._capacity.ask(
                described,
                [each.tensor for each in staging.ids.values()] if is_staged else batch.ids,
                is_mismatch=mismatch is not None,
            )
            if not is_staged and not (mismatch is None and described.are_pending):
                batch = batch.snapshot()  # its step is eager
            self._steps[index] = PrefetchedBatch(None if is_staged else batch, staging, sizes)
            if mismatch is not None and mismatch.should_warn and mismatch.path not in self._reported:
                self._reported.add(mismatch.path)
                log.warning("train pipeline: the step of such a batch is eager: %s", mismatch.reason)

    def _make_buffers(self, example: BatchTensors | None) -> bool:
        """Make buffers like `example`, unless a rank has no batch; return whether they were made. A collective."""
        if not self._capacity.learn(example) or example is None:
            return False
        self.make_windows()
        static = [StaticBatch(example.batch, self._device, self._capacity.capacity) for _ in range(4)]
        self._staging, self._active = static[:2], static[2:]
        for sender in self._ids.senders:
            sender.begin_steady()
        return True

    def drop_buffers(self) -> None:
        """Drop the buffers: the next batch makes new ones, and the steps of batches that were read become eager.

        All ranks call it after the same step.
        """
        for index in range(2):
            if (step := self._plan(index)).kind is not StepKind.END:
                self._steps[index] = step._replace(kind=StepKind.EAGER)
        self._staging, self._active = [], []
        self._ids.forget()
        self._ids.forget_memory()

    def grow(self, sizes: np.ndarray) -> None:
        """Drop the buffers, grow the capacity to `sizes` (`CapacityTracker`) and make its windows; a collective."""
        self.drop_buffers()
        self._capacity.grow(sizes)
        self.make_windows()

    def make_windows(self) -> None:
        """Make windows of the capacity, unless the present ones have it; a collective."""
        capacity = self._capacity.capacity
        if all(sender.capacity == capacity for sender in self._ids.senders):
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._capacity.consensus.any_is(False)  # no rank frees its windows while another reads them
        for sender in self._ids.senders:
            sender.set_capacity(capacity)
