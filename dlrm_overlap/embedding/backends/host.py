"""The backward of the embedding stage: what every way to run it shares, and the way between processes of one host."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torchrec.distributed.comm_ops import get_gradient_division

from dlrm_overlap.comm.arena import Arena, HostArena
from dlrm_overlap.embedding.backends.base import Side, Step, lengths_and_ids
from dlrm_overlap.embedding.protocol.gradients import GRADIENT_FLAGS, GRADIENT_WINDOWS, GradientLayout
from dlrm_overlap.embedding.protocol.layout import FeatureShard
from dlrm_overlap.embedding.row_update import RowUpdate, bags_of
from dlrm_overlap.kernels import reference

BACKWARDS = ("collective", "push", "atomic")


def gradient_scale(world_size: int) -> float:
    """Return the factor of the gradients. As TorchRec: the loss is a mean over a rank's samples, not over all."""
    return 1.0 / world_size if get_gradient_division() else 1.0


class Backward(Side, ABC):
    """One rank's side of the backward: of each step `follow`, `send`, then `update`, alike on every rank.

    Rows are updated in the order of the sends. A step may be sent before the one before has been updated.
    """

    @property
    def scale(self) -> float:
        """Factor of the gradients, see `gradient_scale`."""
        return gradient_scale(self.world_size)

    def follow(self, step: Step) -> None:
        """Note, for a step that will have a backward, what holds now that its forward has just been launched."""
        step.rules = self.tables.rules()

    def prepare(self, step: Step) -> None:
        """Do what needs the ids alone; else `send` does."""

    @abstractmethod
    def send(self, step: Step, gradient: torch.Tensor) -> None:
        """Start to send the gradient [b, D_total] of this rank's samples to the owners of the rows."""

    @abstractmethod
    def update(self, step: Step) -> None:
        """Make what follows see this rank's rows updated by the step."""


class WindowBackward(Backward):
    """What reads gradients out of this rank's window."""

    def __init__(self, *args: Any, gradients: GradientLayout, arena: Arena) -> None:
        """Take the layout and the arena of the windows."""
        super().__init__(*args)
        self.gradients, self._arena, self._epoch = gradients, arena, 0
        self._groups = self.layout.groups(self.rank)

    def _gradient(self, window: torch.Tensor, shard: FeatureShard, samples: int) -> torch.Tensor:
        """Return the gradient [B, D] of a shard of this rank, where it lies in `window`."""
        start = self.gradients.starts[shard] * samples
        return window[start : start + samples * shard.dim].view(samples, shard.dim)

    def _update_by_fbgemm(self, step: Step, window: torch.Tensor) -> None:
        """Update the rows of those fused lookups whose rule FBGEMM's operator alone knows, by it."""
        for group in self._groups:
            if (rule := step.rules[group.number]).only_fbgemm:
                ids, samples = bags_of(group, step.inputs), step.batch.total
                gradient = torch.cat([self._gradient(window, shard, samples) for shard in group.shards], dim=1).float()
                RowUpdate(self.tables.lookups[group.number]).apply(gradient, ids.values(), ids.offsets(), rule)


class HostPush(WindowBackward):
    """Between processes of one host: the kernels' layout and protocol, the reference's maths."""

    _arena: HostArena

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert isinstance(self._arena, HostArena)
        self._sent: Step | None = None

    @property
    def _window(self) -> str:
        return GRADIENT_WINDOWS[self._epoch % 2]

    def send(self, step: Step, gradient: torch.Tensor) -> None:
        """Store each shard's gradient at its owner, part by part, and raise the part's flag."""
        if self._sent is not None:  # peers may write its window anew once they see this step's flags
            self.update(self._sent)
        self._sent = step
        self._epoch += 1
        gradient = gradient.float() * self.scale
        batch = step.batch
        first = batch.first_sample[self.rank]
        for part, by_owner in enumerate(self.gradients.shards):
            for turn in range(self.world_size):
                owner = (self.rank + 1 + turn) % self.world_size
                window = self._arena.view(self._window, owner)
                for shard in by_owner[owner]:
                    column = self.layout.column(shard)
                    rows = self._gradient(window, shard, batch.total)
                    rows[first : first + gradient.shape[0]] = gradient[:, column : column + shard.dim]
                self._arena.raise_flag(GRADIENT_FLAGS, owner, part, self._epoch)

    def update(self, step: Step) -> None:
        """Wait for all gradients and update the rows, table by table, unless the next `send` has done so."""
        if step is not self._sent:
            return
        self._sent = None
        counts = torch.full((self.world_size,), self.gradients.parts, dtype=torch.int32)
        self._arena.wait(GRADIENT_FLAGS, counts, self._epoch, self.options.wait_timeout_s, "part")
        window = self._arena.local(self._window)
        self._update_by_fbgemm(step, window)
        for shards in self.layout.tables(self.rank):
            if not step.rules[shards[0].group].only_fbgemm:
                self._update_table(shards, step, window)

    def _update_table(self, shards: list[FeatureShard], step: Step, window: torch.Tensor) -> None:
        samples = step.batch.total
        values, gradients = [], []
        for shard in shards:
            bag = shard.position * samples
            lengths, ids = lengths_and_ids(step.inputs[shard.source], bag, bag + samples)
            rows = self._gradient(window, shard, samples).float()
            if shard.mean:
                rows = rows / lengths.clamp(min=1)[:, None]
            values.append(ids)
            gradients.append(rows.repeat_interleave(lengths, dim=0))
        weight, state = self.tables.weight(shards[0]), self.tables.state(shards[0])
        optimizer, rule = self.tables.optimizer(shards[0]), step.rules[shards[0].group]
        reference.update_rows(
            weight, state, torch.cat(values).long(), torch.cat(gradients), optimizer, rule.lr, rule.arguments.eps
        )
