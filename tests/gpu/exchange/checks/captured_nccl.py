"""Captured NCCL collectives beside eager work for which the host waits.

PyTorch's issue 196133 (open) reports stalls: captured all-reduces are replayed while `torch.unique` and `item` wait for
another stream, copies to the host run on a third one, and other processes use the same GPUs.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from dlrm_overlap.data.batch import Batch
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from dlrm_overlap.train.trainer import Trainer
from tests.agreement import assert_all_near
from tests.gpu.exchange.checks.graphs import graph_config
from tests.gpu.exchange.checks.training import SAMPLES, make_trainer, rows_of
from tests.gpu.exchange.place import Check, Place, every

STEPS = 400 if torch.cuda.is_available() else 24
_EAGER_EVERY = 5  # a batch of fewer samples, which is not captured
_EVALUATE_EVERY = 60 if torch.cuda.is_available() else 12
# Creates a CUDA context, multiplies, and ends, again and again.
_CONTENDER = """
import subprocess, sys
burst = "import torch; x = torch.ones(2048, 2048, device='cuda'); [x @ x for _ in range(200)]; torch.cuda.synchronize()"
while True:
    subprocess.run([sys.executable, "-c", burst], check=False)
"""


@contextmanager
def _contended(place: Place) -> Iterator[None]:
    """Let another process use this rank's GPU."""
    if not place.on_gpu:
        yield
        return
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": f"GPU-{torch.cuda.get_device_properties(place.device).uuid}"}
    process = subprocess.Popen([sys.executable, "-c", _CONTENDER], env=environment, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, 9)
        process.wait()


class _Waits:
    """Eager work between steps: waits on the caller's stream, and copies to the host on another one."""

    def __init__(self, place: Place) -> None:
        self._place, self._source = place, random.Random(place.rank)
        self._copies = torch.cuda.Stream(place.device) if place.on_gpu else None
        self._host = torch.empty(1 << 20, pin_memory=place.on_gpu)

    def run(self, loss: torch.Tensor, batch: Batch) -> None:
        if not self._place.on_gpu:
            loss.item()
            return
        ids = batch.sparse.values().to(self._place.device, non_blocking=True)
        current = torch.cuda.current_stream(self._place.device)
        assert self._copies is not None
        self._copies.wait_stream(current)
        with torch.cuda.stream(self._copies):
            source = torch.zeros_like(self._host, device=self._place.device)
            self._host.copy_(source, non_blocking=True)
        torch.cuda._sleep(self._source.choice([1, 1, 100_000, 1_000_000]))
        torch.unique(ids)
        loss.item()
        time.sleep(self._source.choice([0, 0, 1e-4, 1e-3]))
        (ids + 1).cpu()


def _train(place: Place, trainer: Trainer, waits: _Waits | None) -> tuple[list[float], int]:
    """Return the losses, and how many steps were replays."""
    total = place.world_size * SAMPLES
    batches = [
        trainer.train_data.read(step * total + place.rank * SAMPLES, SAMPLES - (step % _EAGER_EVERY == 1))
        for step in range(STEPS)
    ]
    pipeline = trainer.pipeline
    assert isinstance(pipeline, GraphTrainPipeline)
    taken, losses, replays, before = iter(batches), list[torch.Tensor](), 0, 0
    for step, batch in enumerate(batches):
        trainer.learning_rate.set(step)
        losses.append(trainer.step(taken).detach().clone())
        replays += pipeline._replays > before
        before = pipeline._replays
        if waits is not None:
            waits.run(losses[-1], batch)
        if step % _EVALUATE_EVERY == _EVALUATE_EVERY - 1:
            losses.append(torch.tensor(trainer.evaluate()["loss"], device=place.device))
            pipeline.reset()  # batches that were read ahead are read again
            taken = iter(batches[step + 1 :])
    values = torch.stack([loss.float() for loss in losses])
    dist.all_reduce(values, group=place.group)
    return values.tolist(), replays


def _check(place: Place, backend: str) -> None:
    """Steps with captured collectives end, with the same bits, whatever the host waits for in between."""
    config = graph_config(place, backend, "rowwise_adagrad", known=False)
    config = replace(config, train=replace(config.train, dense_reduce="collective"))
    results = []
    for disturbed in (False, True):
        trainer = make_trainer(place, config)
        if disturbed:
            with _contended(place):
                losses, replays = _train(place, trainer, _Waits(place))
        else:
            losses, replays = _train(place, trainer, None)
        assert not place.on_gpu or replays > STEPS // 2, f"{replays} of {STEPS} steps were replays"
        trainer.check()
        results.append((losses, rows_of(trainer)))
        place.close(trainer)
    (expected, expected_rows), (found, rows) = results
    assert found == expected, f"losses {found}, not {expected}"
    assert_all_near(rows, expected_rows, 0.0, "rows:")


CHECKS: dict[str, Check] = every("captured_nccl_beside_waits", _check, backend=["pgas", "fused"], timeout_s=180.0)
