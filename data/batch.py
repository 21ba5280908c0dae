"""A batch, and what every data set promises."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


def table_keys(tables: int) -> list[str]:
    """Return the feature names of T tables, in the model's order: `t_00`, `t_01`, ..."""
    width = max(2, len(str(tables - 1)))
    return [f"t_{t:0{width}}" for t in range(tables)]


@dataclass
class Batch(Pipelineable):
    """The samples of one rank and step.

    dense: [b, F] float32. sparse: T keys of b bags each, lengths int32, values int32 or int64, table after table
    (all of a table's bags, sample by sample, then the next table's). labels: [b] float32, each 0 or 1.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor

    @classmethod
    def from_tensors(
        cls, dense: torch.Tensor, lengths: torch.Tensor, values: torch.Tensor, labels: torch.Tensor
    ) -> "Batch":
        """Build a batch from dense [b, F], lengths [T*b] and values [sum of lengths] in table order, labels [b]."""
        keys = table_keys(lengths.numel() // labels.numel())
        return cls(dense, KeyedJaggedTensor(keys, values=values, lengths=lengths), labels)

    def __reduce__(self) -> tuple:
        """Cross process borders as four tensors, which travel in shared memory."""
        return Batch.from_tensors, (self.dense, self.sparse.lengths(), self.sparse.values(), self.labels)

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Return the batch on `device`."""
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors' memory until `stream` has used them."""
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory, from which copies to a GPU run in the background."""
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory())


class Dataset(Protocol):
    """A stream of samples in a fixed order, read by position.

    A global batch is the samples [step * B, (step + 1) * B), and rank r's part the r-th of its W equal pieces: so it
    depends on the step and B alone, however many ranks share it.
    """

    rows: Sequence[int]
    """rows of each table"""

    pooling: Sequence[float]
    """mean number of ids in a bag, per table"""

    num_samples: int | None
    """samples there are; None: endless"""

    def read(self, first: int, count: int) -> Batch:
        """Return the samples [first, first + count), on the CPU.

        Raises:
            InputError: if a sample breaks a rule (label not 0 or 1, NaN, id out of range), naming the place.
        """
        ...
