"""The output of an unpooled collection: jagged tensors by name, made of the rows of all ids."""

from collections.abc import Callable, Sequence

import torch
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from dlrm_overlap.embedding.distinct import DistinctIds


def to_sequences(
    distinct: DistinctIds, features: KeyedJaggedTensor, rooms: Sequence[int], need_indices: bool, rows: torch.Tensor
) -> dict[str, JaggedTensor]:
    """Return the output by name, of the rows [P, D] of all ids of a batch.

    Args:
        distinct: that found the batch's distinct ids.
        features: the batch.
        rooms: for the ids of each sequence, P in all.
        need_indices: whether ids are given, too, as the weights of the jagged tensors.
        rows: with room behind those of each sequence.
    """
    keys = features.keys()
    lengths = features.lengths().view(len(keys), features.stride())
    ids: Sequence[torch.Tensor | None] = [None] * len(rooms)
    if need_indices:
        ids = distinct.padded(features, rooms).split(list(rooms))
    # The backward of a split copies gradients to one tensor, which that of a single sequence is.
    each = rows.split(list(rooms)) if len(rooms) > 1 else [rows]
    parts = zip(distinct.sequences, each, ids, strict=True)
    return {
        sequence.name: JaggedTensor(values, weights, lengths=lengths[keys.index(sequence.feature)])
        for sequence, values, weights in parts
    }


class SequencesAwaitable(LazyAwaitable[dict[str, JaggedTensor]]):
    """The output of an unpooled collection: a jagged tensor of rows by name.

    `rows` waits for those of exchanged tables, of which `make` makes their output; `order` has the names of all tables.
    """

    def __init__(
        self,
        rows: Callable[[], torch.Tensor],
        make: Callable[[torch.Tensor], dict[str, JaggedTensor]],
        others: Awaitable[dict[str, JaggedTensor]] | None,
        order: Sequence[str],
    ) -> None:
        super().__init__()
        self._rows, self._make, self._others, self._order = rows, make, others, order

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        found = self._make(self._rows())
        if self._others is not None:
            found |= self._others.wait()
        return {name: found[name] for name in self._order}
