"""The backward of the embedding stage: what every way to run it shares, and the way between processes of one host."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torchrec.distributed.comm_ops import get_gradient_division

from dlrm_overlap.comm.arena import Arena, HostArena
from dlrm_overlap.embedding.forward import Side, Step, lengths_and_ids
from dlrm_overlap.embedding.gradients import GRADIENT_FLAGS, GRADIENT_WINDOWS, GradientLayout
from dlrm_overlap.embedding.layout import Piece
from dlrm_overlap.kernels import reference

BACKWARDS = ("collective", "push", "atomic")


def gradient_scale(world_size: int) -> float:
    """Return the factor of the gradients. As TorchRec: the loss is a mean over a rank's samples, not over all."""
    return 1.0 / world_size if get_gradient_division() else 1.0


class Backward(Side, ABC):
    """One rank's side of the backward. `send` and `update` take turns, the same steps on every rank."""

    @property
    def scale(self) -> float:
        """Factor of the gradients, see `gradient_scale`."""
        return gradient_scale(self.world_size)

    def follow(self, step: Step) -> None:
        """Note that the forward has just been launched of a step that will have a backward."""

    def prepare(self, step: Step) -> None:
        """Do what needs the ids alone; else `send` does."""

    @abstractmethod
    def send(self, step: Step, gradient: torch.Tensor) -> None:
        """Start to send the gradient [b, D_total] of this rank's samples to the owners of the rows."""

    @abstractmethod
    def update(self, step: Step) -> None:
        """Let what follows see this rank's rows updated."""


class HostPush(Backward):
    """Between processes of one host: the kernels' layout and protocol, the reference's maths."""

    def __init__(self, *args: Any, gradients: GradientLayout, arena: Arena) -> None:
        """Take the layout and the arena of the windows."""
        super().__init__(*args)
        assert isinstance(arena, HostArena)
        self._gradients, self._arena, self._epoch = gradients, arena, 0

    @property
    def _window(self) -> str:
        return GRADIENT_WINDOWS[self._epoch % 2]

    def send(self, step: Step, gradient: torch.Tensor) -> None:
        """Store each piece's gradient at its owner, part by part, and raise the part's flag."""
        self._epoch += 1
        gradient = gradient.float() * self.scale
        batch = step.batch
        first = batch.first_sample[self.rank]
        for part, by_owner in enumerate(self._gradients.pieces):
            for turn in range(self.world_size):
                owner = (self.rank + 1 + turn) % self.world_size
                window = self._arena.view(self._window, owner)
                for piece in by_owner[owner]:
                    column = self.layout.column(piece)
                    rows = self._rows(window, piece, batch.total)
                    rows[first : first + gradient.shape[0]] = gradient[:, column : column + piece.dim]
                self._arena.raise_flag(GRADIENT_FLAGS, owner, part, self._epoch)

    def _rows(self, window: torch.Tensor, piece: Piece, samples: int) -> torch.Tensor:
        start = self._gradients.starts[piece] * samples
        return window[start : start + samples * piece.dim].view(samples, piece.dim)

    def update(self, step: Step) -> None:
        """Wait for all gradients and update the rows, table by table."""
        counts = torch.full((self.world_size,), self._gradients.parts, dtype=torch.int32)
        self._arena.wait(GRADIENT_FLAGS, counts, self._epoch, self.options.wait_timeout_s, "part")
        for pieces in self.layout.tables(self.rank):
            self._update_table(pieces, step)

    def _update_table(self, pieces: list[Piece], step: Step) -> None:
        window, samples = self._arena.local(self._window), step.batch.total
        values, gradients = [], []
        for piece in pieces:
            bag = piece.position * samples
            lengths, ids = lengths_and_ids(step.inputs[piece.source], bag, bag + samples)
            rows = self._rows(window, piece, samples).float()
            if piece.mean:
                rows = rows / lengths.clamp(min=1)[:, None]
            values.append(ids)
            gradients.append(rows.repeat_interleave(lengths, dim=0))
        weight, state = self.tables.weight(pieces[0]), self.tables.state(pieces[0])
        optimizer = self.tables.optimizer(pieces[0])
        reference.update_rows(weight, state, torch.cat(values).long(), torch.cat(gradients), *optimizer)
