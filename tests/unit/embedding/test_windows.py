"""Windows take turns, and no step begins while the output of an earlier one is in use."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm.arena import Region, open_arena
from dlrm_overlap.comm.counters import Counters
from dlrm_overlap.embedding.windows import WindowPair, WindowSpec


@pytest.fixture
def windows(world_of_one: dist.ProcessGroup) -> Iterator[WindowPair]:
    spec = WindowSpec("window", Region((4, 6), torch.float32), slots=3)
    arena = open_arena(spec.regions(1), world_of_one, torch.device("cpu"))
    windows = WindowPair(spec, arena, Counters(torch.device("cpu"), 1).each[0])
    yield windows
    arena.close()


def _produce(windows: WindowPair) -> torch.Tensor:
    """Take a step whose output is its epoch."""
    epoch = windows.begin()
    windows.local.fill_(epoch)
    return windows.acquire(3)


def test_steps_count_up_and_windows_take_turns(windows: WindowPair) -> None:
    assert windows.epoch == 0
    names = []
    for epoch in (1, 2, 3, 4):
        lent = _produce(windows)
        assert windows.epoch == epoch
        assert (tuple(lent.shape), lent.dtype) == ((3, 6), torch.float32)
        assert (lent == epoch).all()
        names.append(windows.name)
        del lent
    assert names == ["window1", "window0"] * 2
    assert (windows.arena.local("window0") == 4).all()
    assert (windows.arena.local("window1") == 3).all()
    assert tuple(windows.arena.local("window_ready").shape) == (1, 3)


def test_garbage_in_a_cycle_does_not_hold(windows: WindowPair) -> None:
    cycle: dict[str, object] = {"lent": _produce(windows)}
    cycle["self"] = cycle
    del cycle
    assert windows.begin() == 2


def test_a_window_that_was_lent_in_inference_is_lent_to_training(windows: WindowPair) -> None:
    with torch.inference_mode():
        for _ in windows.names:
            _produce(windows)
    lent = _produce(windows)
    assert not lent.is_inference(), "no backward could save it"
