"""Names of earlier versions still work, with a warning."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import dlrm_overlap
from dlrm_overlap import BatchCapacity, OverlapEmbeddingBagCollectionSharder
from dlrm_overlap.embedding import windows
from tests.distributed.foreign import Plain, Program, train


def test_public_names() -> None:
    with pytest.warns(FutureWarning, match="BatchBound is deprecated; use BatchCapacity"):
        assert dlrm_overlap.BatchBound is BatchCapacity
    with pytest.warns(FutureWarning, match="WindowHeldError is deprecated; use BufferInUseError"):
        assert windows.WindowHeldError is windows.BufferInUseError


def test_arguments_of_the_sharder(caplog: pytest.LogCaptureFixture) -> None:
    given: Any = {"put": "stores", "hosts": 1, "between_hosts": "puts"}
    options = OverlapEmbeddingBagCollectionSharder(**given).options
    assert (options.put, options.nodes, options.internode) == ("staged", 1, "puts")
    assert len(caplog.messages) == 3


def test_the_capacity_of_the_pipeline(world_of_one: dist.ProcessGroup) -> None:
    bound = BatchCapacity(6, {"f": (1, 1), "g": (0, 2), "h": (0, 5), "k": (0, 3)})
    program = Program(Plain, arguments=lambda _: {"bound": bound})
    with pytest.warns(FutureWarning, match="bound is deprecated; use capacity"):
        renamed = train(program, True, world_of_one, torch.device("cpu"))
    program = Program(Plain, arguments=lambda _: {"capacity": bound})
    expected = train(program, True, world_of_one, torch.device("cpu"))
    assert all(torch.equal(renamed[name], tensor) for name, tensor in expected.items())
