"""How long the host takes to issue an eager step of the exchange: `python -m tests.gpu.host_time --nproc 2`.

The shape of `configs/bench/small_batch.yaml`: 16 tables a rank of dim 256, 256 samples a rank. Forward by `pgas`, by
`fused`, and by `pgas` with a copy of its output; and a training step, forward and backward. The GPUs are drained every
few steps, so the host never waits for room in a queue. Medians of rank 0 in microseconds, one a round, since hosts that
others share differ from minute to minute.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.launching.launcher import World
from dlrm_overlap.observe.metrics import quantile
from tests.gpu.exchange.place import Place
from tests.gpu.exchange.stage_by_hand import Batch, Stage, Table
from tests.gpu.measuring import Say, measure_on_gpus

_TABLES, _DIM, _SAMPLES = 16, 256, 256  # of a rank
_BATCHES, _ROUNDS, _STEPS, _DRAINED = 4, 3, 400, 8
_PARTS = ("start", "wait", "backward")
_CONTENDERS = {
    "pgas": ExchangeOptions(backend="pgas", backward="collective"),
    "fused": ExchangeOptions(backend="fused", backward="collective"),
    "pgas, copied": ExchangeOptions(backend="pgas", backward="collective", copy_output=True),
    "pgas, training": ExchangeOptions(backend="pgas", backward="push"),
}


def _measure(world: World, device: torch.device, say: Say) -> None:
    assert dist.group.WORLD is not None
    place, ranks = Place(world, dist.group.WORLD, device, Path()), range(world.world_size)
    tables = [Table(100_000, _DIM, owner, longest=10) for owner in ranks for _ in range(_TABLES)]
    stage, sizes = Stage(place, tables, lr=0.001), (_SAMPLES,) * world.world_size
    batches = [stage.inputs(Batch(place, tables, sizes, seed, torch.int64)) for seed in range(_BATCHES)]
    gradient = torch.ones(_SAMPLES, len(tables) * _DIM, device=device)
    exchanges = {name: stage.exchange(options) for name, options in _CONTENDERS.items()}
    for name, exchange in exchanges.items():
        backward = gradient if _CONTENDERS[name].backward == "push" else None
        for number in range(1 + _ROUNDS):
            place.meet()
            parts = _issue(exchange, batches, sizes, backward)
            if number > 0:
                medians = [f"{quantile(times, 0.5):.1f}" for times in parts if times]
                whole = quantile([sum(step) for step in zip(*filter(None, parts), strict=True)], 0.5)
                told = ", ".join(f"{part} {median}" for part, median in zip(_PARTS, medians, strict=False))
                say(f"{name}: {whole:.1f} us a step: {told}")
    place.meet()
    for exchange in exchanges.values():
        exchange.close()


def _issue(
    exchange: Exchange, batches: list, sizes: tuple[int, ...], gradient: torch.Tensor | None
) -> tuple[list[float], ...]:
    """Issue steps, with a backward of `gradient` if there is one; return each part's times in microseconds."""
    parts: tuple[list[float], ...] = ([], [], [])
    with torch.set_grad_enabled(gradient is not None):
        for number in range(_STEPS):
            moments = [time.perf_counter_ns()]
            waiting = exchange.start(batches[number % len(batches)], sizes)
            moments.append(time.perf_counter_ns())
            pooled = waiting.wait()
            moments.append(time.perf_counter_ns())
            if gradient is not None:
                pooled.backward(gradient)
                moments.append(time.perf_counter_ns())
            del waiting, pooled
            for times, begin, end in zip(parts, moments, moments[1:], strict=False):
                times.append((end - begin) / 1e3)
            if number % _DRAINED == _DRAINED - 1 and exchange.device.type == "cuda":
                torch.cuda.synchronize(exchange.device)
    return parts


if __name__ == "__main__":
    sys.exit(measure_on_gpus("tests.gpu.host_time", __doc__, _measure))
