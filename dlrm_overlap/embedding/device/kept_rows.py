"""A copy of a rank's rows as they are behind one step, spread over the steps that follow."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dlrm_overlap.embedding.device.row_ranges import InputRows
from dlrm_overlap.kernels.backward.keep_rows import KeptPlaces, copy_rows, keep_rows
from dlrm_overlap.kernels.backward.optimizers import RowRange
from dlrm_overlap.kernels.backward.row_runs import PreparedRuns

_PROGRAMS_PER_SM = 16  # as many as there is room for: FBGEMM's update waits for its rows to be put by


@dataclass(frozen=True)
class _KeptRange:
    """One range of an input's rows, and where they are put by."""

    number: int
    """of the input"""
    rows: RowRange
    first_key: int
    end_key: int
    kept: KeptPlaces

    @property
    def row_bytes(self) -> int:
        """Bytes of a row and its state."""
        return self.rows.dim * self.rows.weights.element_size() + self._state_bytes

    @property
    def _state_bytes(self) -> int:
        return {"sgd": 0, "adagrad": 4 * self.rows.dim, "rowwise_adagrad": 4}[self.rows.optimizer]

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return where `tensor`, which is dense, is put by, if all of it is among these rows or their states."""
        rows, count = self.rows, self.end_key - self.first_key
        row = rows.dim * rows.weights.element_size()
        first_row = 4 * rows.weights.element_size() * rows.weight_at + self.first_key * row
        first_state = 4 * (1 if rows.optimizer == "rowwise_adagrad" else 4) * rows.state_at
        first_state += self.first_key * self._state_bytes
        for source, kept, first, size in (
            (rows.weights, self.kept.weights, first_row, row),
            (rows.states, self.kept.states, first_state, self._state_bytes),
        ):
            begin = tensor.data_ptr() - source.data_ptr()
            if first <= begin and begin + tensor.nbytes <= first + count * size:
                return kept.as_strided(tensor.shape, tensor.stride(), begin // kept.element_size())
        return None


class KeptRows:
    """Puts the rows of one exchange by. It makes room for them when the first step finds out which they are.

    `begin`, then `advance` behind every step until it returns True. In each step the update puts rows by at `places`,
    or `keep` comes before it. All of it is issued on streams that wait for each other, so that a row is never read and
    written at once.
    """

    def __init__(self, device: torch.device) -> None:
        """Take the device of the rows: a GPU, or a CPU under Triton's interpreter."""
        self._device = device
        on_gpu = device.type == "cuda"
        processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
        self._programs = _PROGRAMS_PER_SM * processors
        self._ranges: list[_KeptRange] = []
        self._control: list[torch.Tensor] = []
        self._rooms: dict[int, torch.Tensor] = {}
        self._copies = 0
        self._at: tuple[int, int] | None = None

    def follow(self, inputs: Sequence[InputRows]) -> None:
        """Make room for the rows that these inputs name; not while a copy is under way."""
        assert self._at is None, "rows have moved while they were copied"
        self._ranges, self._control = [], []  # rows stay where they are put by, though windows may be made anew
        for number, rows in enumerate(inputs):
            boundaries = rows.input_features.boundaries.tolist()
            marks = torch.zeros(boundaries[-1], dtype=torch.int32, device=self._device)
            control = torch.zeros(2, dtype=torch.int64, device=self._device)
            self._control.append(control)
            for index, updated in enumerate(rows.ranges):
                kept = KeptPlaces(self._room(updated.rows.weights), self._room(updated.rows.states), marks, control)
                each = _KeptRange(number, updated.rows, boundaries[index], boundaries[index + 1], kept)
                self._ranges.append(each)
                copy_rows(each.first_key, each.end_key, each.rows, kept)  # is loaded by it, and finds nothing to copy

    def _room(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in self._rooms:
            self._rooms[tensor.data_ptr()] = torch.empty_like(tensor)
        return self._rooms[tensor.data_ptr()]

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return where what `tensor` shows of the rows or their states is put by, of its shape; None for any other."""
        return next((found for each in self._ranges if (found := each.of(tensor)) is not None), None)

    def places(self, number: int, rows: RowRange) -> KeptPlaces:
        """Return where the rows of a range of input `number` are put by."""
        return next(each.kept for each in self._ranges if (each.number, each.rows.index) == (number, rows.index))

    def keep(self, number: int, rows: RowRange, runs: PreparedRuns) -> None:
        """Put by what a step with these runs of input `number` is about to update of a range, on the current stream."""
        keep_rows(self._programs, runs, rows, self.places(number, rows))

    def begin(self) -> None:
        """Begin a copy of all rows as they are behind what is issued on the current stream."""
        assert self._at is None, "one copy at a time"
        self._copies += 1
        self._at = 0, 0
        for control in self._control:
            control[0].fill_(self._copies)

    def advance(self, most_bytes: int) -> bool:
        """Copy about so many bytes more on the current stream, and return whether the copy is complete."""
        while self._at is not None and most_bytes > 0:
            index, key = self._at
            if index == len(self._ranges):
                for control in self._control:
                    control.zero_()
                self._at = None
                break
            at = self._ranges[index]
            first = max(key, at.first_key)
            end = min(at.end_key, first + max(1, most_bytes // at.row_bytes))
            copy_rows(first, end, at.rows, at.kept)
            at.kept.control[1].fill_(end)
            most_bytes -= (end - first) * at.row_bytes
            self._at = (index, end) if end < at.end_key else (index + 1, 0)
        return self._at is None
