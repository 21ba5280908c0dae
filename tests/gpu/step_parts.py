"""The time of a captured step that the sort of ids and the update of rows take, and the GPU's clock meanwhile.

    torchrun --nproc-per-node 2 -m tests.gpu.step_parts --config configs/bench/step_mlperf.yaml --output parts.csv

It times three variants of `pgas_graph` of `bench step` at each number of `--samples`: whole; with the rows of each step
updated by the ids of one batch that was sorted before (`no_sort`); and also without an update of rows (`no_update`).
The last two update wrong rows or none. Each runs for `--seconds`, since a power limit may lower the clock only after a
while. Meanwhile rank 0 queries nvidia-smi for its GPU's clock and power.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.bench.figures.step import build, contender_configs, describe_run
from dlrm_overlap.bench.harness.clocks import sampled
from dlrm_overlap.bench.harness.training_runs import TrainingRun, read_batches
from dlrm_overlap.bench.harness.workload import collect_garbage
from dlrm_overlap.bench.rows import append_rows, print_table
from dlrm_overlap.config import Config, PositiveFloat, PositiveInt
from dlrm_overlap.embedding.backends.push import Push
from dlrm_overlap.launching.parsing import Parser
from dlrm_overlap.observe.metrics import quantile
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from dlrm_overlap.train.ranks import Ranks, run_on_ranks
from tests.gpu.one_gpu import torchrun_line

_CONTENDER, _BATCHES, _FIRST_STEPS = "pgas_graph", 8, 20
_SHOWN = ("variant", "global_batch", "steps", "p10_ms", "median_ms", "p90_ms", "sm_mhz", "power_w", "capped_fraction")


def time_variant(run: TrainingRun, name: str, seconds: float) -> dict[str, Any]:
    """Return the row of a variant, with steps captured with the current methods of `Push`."""
    pipeline = run.trainer.pipeline
    assert isinstance(pipeline, GraphTrainPipeline), "steps are captured"
    pipeline._release_graphs()
    first_ms = torch.tensor(quantile(run.time(_FIRST_STEPS)[0], 0.5))
    dist.broadcast(first_ms := first_ms.to(run.trainer.device), 0)
    steps = max(_FIRST_STEPS, round(seconds * 1e3 / float(first_ms)))
    time.sleep(1.0)  # all variants begin with an idle GPU
    columns: dict[str, Any] = {}
    with sampled(run.trainer.device, columns):
        ms, _ = run.time(steps)
    times = {f"p{round(100 * q)}_ms" if q != 0.5 else "median_ms": quantile(ms, q) for q in (0.1, 0.5, 0.9)}
    return {"kind": "parts", "variant": name} | describe_run(run, _BATCHES) | {"steps": steps} | times | columns


def time_variants(ranks: Ranks, config: Config, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each variant of a configuration."""
    torch._dynamo.reset()  # or a second number of samples would be compiled with dynamic shapes
    trainer = build(ranks, _CONTENDER, config)
    run = TrainingRun(_CONTENDER, trainer, read_batches(trainer, _BATCHES))
    run.losses(1)  # the first step opens the pipeline
    sort, update = Push.sort, Push.update_range
    sorted_once: dict[int, Any] = {}

    def sort_once(push: Push, pending: Any) -> Any:
        if id(push) not in sorted_once:
            sorted_once[id(push)] = sort(push, pending)
        return sorted_once[id(push)]

    changes: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
        "whole": (sort, update), "no_sort": (sort_once, update), "no_update": (sort_once, lambda *_: None)
    }  # fmt: skip
    rows = []
    for name, methods in changes.items():
        Push.sort, Push.update_range = methods  # type: ignore[method-assign]
        rows.append(time_variant(run, name, seconds))
    Push.sort, Push.update_range = sort, update  # type: ignore[method-assign]
    trainer.close()
    return rows


def work(ranks: Ranks) -> int:
    """Time all variants at each number of samples; rank 0 prints and appends their rows."""
    config, rows = contender_configs(ranks, [_CONTENDER])[_CONTENDER], []
    for samples in ranks.values.samples:
        train = replace(config.train, batch_size=samples, global_batch_size=None)
        rows += time_variants(ranks, replace(config, train=train), ranks.values.seconds)
        collect_garbage(ranks.device)
    if ranks.world.rank == 0:
        print_table(rows, _SHOWN)
        append_rows(Path(ranks.values.output), rows, torchrun_line("tests.gpu.step_parts"))
    return 0


def add_options(parser: Parser) -> None:
    parser.add_argument("--samples", type=PositiveInt, nargs="+", default=[8192, 16384], help="samples of a rank")
    parser.add_argument("--seconds", type=PositiveFloat, default=2.0, help="that each variant runs")
    parser.add_argument("--output", default="parts.csv", help="the rows are appended to this file")


if __name__ == "__main__":
    raise SystemExit(run_on_ranks(["train"], __doc__ or "", sys.argv[1:], work, add_options))
