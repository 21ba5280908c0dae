"""The ablation `atomic` on GPUs: gradients pushed as by `push`, rows updated id by id.

Source: Chen et al. 2024, where it is future work.
"""

import torch

from dlrm_overlap.embedding.backends.push import Push
from dlrm_overlap.embedding.device.row_ranges import InputRows, UpdateRange
from dlrm_overlap.embedding.protocol.step import Step
from dlrm_overlap.kernels.backward.add_to_rows import add_to_rows


class AtomicPush(Push):
    """SGD by atomic additions, in whatever order they come: not deterministic. The ids need no sort."""

    def prepare(self, step: Step) -> None:
        """Nothing needs the ids alone."""

    def update_range(
        self, step: Step, number: int, rows: InputRows, updated: UpdateRange, window: torch.Tensor
    ) -> None:
        """Add the gradients in this rank's `window` to the rows of one range."""
        ids = step.inputs[rows.input]
        features, rule = (rows.input_features, updated.first, updated.end), self.rule(step, updated)
        add_to_rows(ids.values(), ids.offsets(), step.batch.total, *features, updated.rows, window, rule)
