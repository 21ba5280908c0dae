"""Windows of TorchRec's pipelines are freed, whatever kernels have recorded."""

import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.window_input_dist import ByTorchRec, WindowInput, WindowInputDist
from tests.distributed.tiny_stage import Stage

FEATURE = "rank0_0"


@pytest.fixture
def exchange(world_of_one: dist.ProcessGroup) -> Iterator[Exchange]:
    exchange = Stage([([8], [])], rank=0).exchange(world_of_one, "pgas")
    yield exchange
    exchange.close()


def _not_by_torchrec() -> ByTorchRec:
    raise AssertionError("ids are sent through windows")


def _send(windows: WindowInputDist, ids: int = 2) -> WindowInput:
    """Send a batch of two bags, of `ids` ids each."""
    features = KeyedJaggedTensor([FEATURE], torch.arange(2 * ids), lengths=torch.tensor([ids, ids]))
    requested = windows.request(features, _not_by_torchrec)
    assert requested is not None
    return requested.wait().wait()


def _fails(windows: WindowInputDist, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next checks raise, as if a kernel had recorded an error."""

    def check() -> None:
        raise ValueError("a wait has expired")

    monkeypatch.setattr(windows._ids, "check", check)


def _memory(windows: WindowInputDist) -> "weakref.ref[torch.Tensor]":
    """Refer to the memory of the windows, but do not hold it."""
    assert windows._arena is not None
    return weakref.ref(windows._arena._memory[0])


@pytest.mark.parametrize("recorded", [False, True])
def test_close_frees_the_windows_and_can_be_called_again(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    windows = WindowInputDist(exchange)
    _send(windows)
    ids, memory = windows._ids, _memory(windows)
    assert ids is not None
    if recorded:
        _fails(windows, monkeypatch)
        with pytest.raises(ValueError, match="a wait has expired"):
            windows.close()
    else:
        windows.close()
    assert memory() is None
    assert not ids._pulls, "they refer to the memory, too"
    windows.close()  # which has nothing left to do
    assert _send(windows).arrived is not None, "in new windows"
    windows.close()


def test_windows_that_grow_tell_of_errors_in_the_former_ones_and_are_freed(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = WindowInputDist(exchange)
    _send(windows)
    former = _memory(windows)
    _fails(windows, monkeypatch)
    with pytest.raises(ValueError, match="a wait has expired"):
        _send(windows, ids=200)
    assert former() is None
    grown = _memory(windows)
    with pytest.raises(RuntimeError, match="end all ranks"):
        _send(windows)
    windows.close()
    assert grown() is None
