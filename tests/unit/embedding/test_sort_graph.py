"""The sort of ids as a CUDA graph: which calls are eager, and what a graph reads; the graph is made up."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.backends.sort_graph import SortGraph
from tests.agreement import assert_same


class Rows:
    """Sorts ids, and remembers what it was given; its result is what it has read."""

    def __init__(self) -> None:
        self.given: list[KeyedJaggedTensor] = []

    def sort(self, ids: KeyedJaggedTensor, _: int) -> Any:
        self.given.append(ids)
        return ids


class Graph:
    made = 0
    replayed = 0

    def __init__(self) -> None:
        Graph.made += 1

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"

    def capture_end(self) -> None: ...

    def replay(self) -> None:
        Graph.replayed += 1


def _ids(first: int, count: int = 6, weights: torch.Tensor | None = None) -> KeyedJaggedTensor:
    offsets = torch.tensor([0, first % 2, 3, count])
    return KeyedJaggedTensor(["f"], torch.arange(first, first + count), weights, offsets=offsets, stride=3)


@pytest.fixture
def rows() -> Any:
    Graph.made = Graph.replayed = 0
    with patch.object(torch.cuda, "CUDAGraph", Graph), patch.object(torch.cuda, "synchronize", lambda _: None):
        yield Rows()


def test_ids_of_the_same_sizes_are_copied_to_what_the_graph_reads(rows: Rows) -> None:
    sort = SortGraph(rows)  # type: ignore[arg-type]
    for step in range(3):
        assert sort(given := _ids(step), 3) is given
    for step in range(3, 6):
        found: Any = sort(given := _ids(step), 3)
        assert found is not given
        assert_same(found.values(), given.values(), "values")
        assert_same(found.offsets(), given.offsets(), "offsets")
    assert (len(rows.given), Graph.made, Graph.replayed) == (4, 1, 3)


def test_ids_of_other_sizes_or_with_weights_are_sorted_eagerly(rows: Rows) -> None:
    sort = SortGraph(rows)  # type: ignore[arg-type]
    for step in range(4):
        sort(_ids(step), 3)
    weighted = _ids(0, weights=torch.ones(6))
    assert sort(weighted, 3) is weighted
    for step in range(4):
        given = _ids(step, count=7)
        assert (sort(given, 3) is given) == (step < 3)
    assert (Graph.made, Graph.replayed) == (2, 2)
