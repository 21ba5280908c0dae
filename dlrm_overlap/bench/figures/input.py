"""`bench input`: does the input keep up with training?

Contenders: the training step fed by the loader, and the same step on one batch that stays in memory. The file has one
row for a run; its columns are this figure's own.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from dlrm_overlap.bench.harness.timing import counted, slowest_rank
from dlrm_overlap.bench.report.rows import append_rows
from dlrm_overlap.bench.request import InputRequest
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.observe.metrics import StepTimer
from dlrm_overlap.train.ranks import Ranks
from dlrm_overlap.train.trainer import Trainer

_ROUNDS = 4  # cached and loaded steps take turns, so that a drift of the machine slows both
_WARMUP_STEPS = 10


def run(request: InputRequest, ranks: Ranks) -> int:
    """Measure the figure on all ranks, which all call this, and return the exit code 0."""
    trainer = ranks.trainer()
    _measure(trainer, request.steps, request.output)
    trainer.close()
    return 0


def _measure(trainer: Trainer, steps: int, output: Path) -> None:
    """Time `steps` training steps of each kind, print the comparison on rank 0 and append it to the CSV `output`."""
    per_round = max(1, steps // _ROUNDS)
    cached_ms: list[float] = []
    loaded_ms: list[float] = []
    waited_s = 0.0
    with trainer.loader(trainer.train_data, 0, sys.maxsize) as loader:
        batches = iter(loader)
        loader_warmup = _WARMUP_STEPS + loader.read_ahead  # after these, no batch was read while the cached steps ran
        cached = next(batches).clone()  # its own memory: the loader's is lent
        if trainer.device.type == "cuda":
            cached = cached.pin_memory()
        for _ in counted("rounds", range(_ROUNDS)):
            cached_ms += _time_steps(trainer, itertools.repeat(cached), per_round, _WARMUP_STEPS)
            waited_s -= loader.wait_s
            loaded_ms += _time_steps(trainer, batches, per_round, loader_warmup)
            waited_s += loader.wait_s
    waited_ms = waited_s * 1e3 / (_ROUNDS * (per_round + loader_warmup))
    cached_times = slowest_rank(cached_ms, trainer.device)
    loaded_times = slowest_rank(loaded_ms, trainer.device)
    if dist.get_rank():
        return
    data = trainer.config.data
    row = {
        "backend": trainer.config.embedding.backend,
        "data": data.kind,
        "distinct_steps": data.distinct_steps,
        "workers": data.workers,
        "world_size": trainer.world.world_size,
        "samples_per_rank": trainer.samples_per_rank,
        "arch": trainer.config.model.arch,
        "precision": trainer.config.train.precision,
        "graph_dense": trainer.config.train.graph_dense,
        "ids_per_sample": sum(trainer.train_data.pooling),
        "steps": len(loaded_ms),
        **{f"cached_{key}": value for key, value in vars(cached_times).items()},
        **{f"loaded_{key}": value for key, value in vars(loaded_times).items()},
        "loaded_to_cached": loaded_times.mean_ms / cached_times.mean_ms,
        "input_wait_ms": waited_ms,
        "samples_per_s": trainer.global_batch * 1e3 / loaded_times.median_ms,
    }
    append_rows(output, [row])
    print(
        f"step on one cached batch {cached_times.median_ms:.2f} ms, fed by the loader {loaded_times.median_ms:.2f} ms "
        f"(medians); means {row['loaded_to_cached']:.3f}x, {waited_ms:.2f} ms input wait a step; row in {output}"
    )


def _time_steps(trainer: Trainer, batches: Iterator[Batch], steps: int, warmup: int) -> list[float]:
    """Return the times of `steps` steps in ms, after `warmup` steps that also refill the pipeline."""
    segment = itertools.islice(batches, steps + warmup)
    trainer.pipeline.reset()
    for _ in range(warmup):
        trainer.step(segment)
    timer = StepTimer(trainer.device)
    timer.mark()
    for _ in range(steps):
        trainer.step(segment)
        timer.mark()
    return timer.take_ms()
