"""A block on another stream comes back to the one before, and the current stream's object is kept while it is it."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from dlrm_overlap.comm.order import CurrentStream, OnStream

GPU = torch.device("cuda", 1)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the id of the current stream of GPU 1, as its only element."""
    streams = [5]

    def set_stream(stream: int, device: int, kind: int) -> None:
        assert (device, kind) == (1, 20)
        streams[0] = stream

    fakes = {
        "_cuda_getCurrentStream": lambda device: (streams[0], device, 20),
        "_cuda_getCurrentRawStream": lambda device: 100 * device + streams[0],
        "_cuda_setStream": set_stream,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch._C, name, fake, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(stream_id=streams[0]))
    return streams


def _stream(number: int) -> OnStream:
    stream = SimpleNamespace(stream_id=number, device_index=1, device_type=20)
    return OnStream(stream)  # type: ignore[arg-type]  # a CPU has none


def test_a_block_comes_back_to_the_stream_before(current: list[int]) -> None:
    with _stream(7):
        assert current == [7]
        with suppress(ValueError), _stream(8):
            assert current == [8]
            raise ValueError
        assert current == [7]
    assert current == [5]


def test_the_current_stream_is_kept_while_it_is_the_same(current: list[int]) -> None:
    of = CurrentStream(GPU)
    first = of()
    assert of() is first
    with _stream(7):
        assert of().stream_id == 7
    assert of().stream_id == 5
