"""`bench input`: what its timed steps include."""

import itertools
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from dlrm_overlap.bench.figures.input import take_turn


def test_every_timed_step_reads_a_batch() -> None:
    ready, read_by_step = deque[int](), list[int]()

    def step(segment: Iterator[int]) -> None:  # as TorchRec's pipeline, which has three batches in flight
        read = list(itertools.islice(segment, 3 - len(ready)))
        ready.extend(read)
        read_by_step.append(len(read))
        ready.popleft()

    trainer: Any = SimpleNamespace(
        step=step, device=torch.device("cpu"), pipeline=SimpleNamespace(reset=lambda: ready.clear())
    )
    batches: Any = itertools.count()
    for _ in range(2):  # turns
        step_ms, _ = take_turn(trainer, batches, 2, 5)
        assert len(step_ms) == 5
        assert read_by_step == [3, 1, *[1] * 5, 0, 0]
        read_by_step.clear()
        assert not ready, "no batch of a turn is left for the next one"
