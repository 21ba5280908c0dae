"""The sort of ids as a CUDA graph, for eager steps: it has some 20 kernels, which the CPU issues in 0.4 ms."""

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.comm.order import no_collection
from dlrm_overlap.embedding.backends.rows import InputRows
from dlrm_overlap.kernels.backward.row_runs import PreparedRuns

_EAGER_SORTS = 3  # of ids of the same sizes, after which the next is captured


class SortGraph:
    """Sorts the ids of one step after the other, on one stream; a result is valid until the next call.

    The first sorts are eager. Then ids are copied to fixed addresses, and a graph sorts them, until their sizes change.
    """

    def __init__(self, rows: InputRows) -> None:
        self._rows = rows
        self._sizes: tuple[object, ...] = ()
        self._sorts = 0  # of these sizes
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[torch.Tensor, torch.Tensor] | None = None
        """values and offsets that the graph reads"""
        self._runs: PreparedRuns | None = None
        """what it writes"""

    def __call__(self, ids: KeyedJaggedTensor, samples: int) -> PreparedRuns | None:
        """Return `InputRows.sort` of the ids, on the current stream, which is the same in every call."""
        values, offsets = ids.values(), ids.offsets()
        if values.numel() == 0 or ids.weights_or_none() is not None:
            return self._rows.sort(ids, samples)
        sizes = samples, values.shape, offsets.shape, values.dtype, offsets.dtype
        if sizes != self._sizes:
            self.forget()
            self._sizes = sizes
        self._sorts += 1
        if self._sorts <= _EAGER_SORTS:
            return self._rows.sort(ids, samples)
        if self._graph is None:
            self._capture(ids, samples)
        assert self._graph is not None
        assert self._inputs is not None
        for fixed, given in zip(self._inputs, (values, offsets), strict=True):
            fixed.copy_(given)
        self._graph.replay()
        return self._runs

    def _capture(self, ids: KeyedJaggedTensor, samples: int) -> None:
        self._inputs = torch.empty_like(ids.values()), torch.empty_like(ids.offsets())
        fixed = KeyedJaggedTensor(ids.keys(), self._inputs[0], offsets=self._inputs[1], stride=samples)
        graph = torch.cuda.CUDAGraph()
        with no_collection():
            # Thread-local, since other threads use the device meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._runs = self._rows.sort(fixed, samples)
            finally:
                graph.capture_end()
        self._graph = graph

    def forget(self) -> None:
        """Release the graph, if there is one, after its last launch, which uses its memory, has ended."""
        if self._inputs is not None:
            torch.cuda.synchronize(self._inputs[0].device)
        self._graph, self._inputs, self._runs, self._sorts = None, None, None, 0
