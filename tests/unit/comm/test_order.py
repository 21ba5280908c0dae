"""What waits for what while a step is captured: all that is between ranks, one after the other, whatever its stream."""

import pytest
import torch

from dlrm_overlap.comm.order import CommunicationOrder


class Stream:
    """Writes to `log` which streams wait for which events; an event is named by its stream and number there."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.events = name, log, 0

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.events += 1
        return f"{self.name}{self.events}"


class Device:
    """A device whose current stream is `current`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams = {name: Stream(name, self.log) for name in ("ids", "main", "push")}
        self.current = "main"

    def take(self, order: CommunicationOrder, stream: str) -> None:
        """Do something between ranks on a stream."""
        self.current = stream
        with order:
            self.log.append(f"{stream} runs")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device.streams[device.current])
    return device


def test_each_waits_for_the_one_before(device: Device) -> None:
    order = CommunicationOrder()
    order.begin()
    for stream in ("ids", "main", "push", "main"):
        device.take(order, stream)
    expected = ["ids runs", "main waits for ids1", "main runs", "push waits for main1", "push runs"]
    assert device.log == [*expected, "main waits for push1", "main runs"]


def test_a_capture_waits_for_nothing_of_the_one_before(device: Device) -> None:
    order = CommunicationOrder()
    for stream in ("ids", "push"):
        order.begin()
        device.take(order, stream)
        order.end()
    assert device.log == ["ids runs", "push runs"]
    order.begin()
    device.take(order, "main")
    order.begin()  # the capture before failed
    device.take(order, "ids")
    assert device.log[2:] == ["main runs", "ids runs"]
