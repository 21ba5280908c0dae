"""`bench job`: what does a whole training job take, with its evaluations, saves and log?

The trainer runs the configuration from its first step on, in a folder beside `--output`. The file has one row for a
run: `step_ms`, the median of training alone, and `all_ms`, the time of the whole run over its steps; the seconds of
evaluations and of saves, as far as training waited for them; and samples a second and GPU by both times. Below it stand
public records of MLPerf's DLRM-DCNv2, training alone, with what differs. Building the model and the plan is left out.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from dlrm_overlap.bench.harness.limits import describe_tables
from dlrm_overlap.bench.report.rows import print_table, report
from dlrm_overlap.bench.request import JobRequest
from dlrm_overlap.config import Config
from dlrm_overlap.train.ranks import Ranks
from dlrm_overlap.train.trainer import Trainer

_EVALUATED = 89_137_319  # samples of MLPerf's evaluation
_SHOWN = (
    "step_ms", "all_ms", "samples_per_s_per_gpu", "all_samples_per_s_per_gpu", "evaluations_s", "saves_s", "total_s",
    "eval_auroc",
)  # fmt: skip


class Record(NamedTuple):
    """A result of HugeCTR in MLPerf Training's `dlrm_dcnv2`, by its log (mlcommons/training_results_VERSION)."""

    name: str
    gpus: int
    global_batch: int
    step_ms: float
    """of training alone"""


RECORDS = (
    Record("4 x H200 NVL, Dell, v5.0", 4, 32_768, 3.957),
    Record("8 x H200, HPE, v5.0", 8, 65_536, 3.710),
    Record("8 x H100, v4.0", 8, 55_296, 3.505),
    Record("8 x B200, v5.1", 8, 55_296, 2.13),
)


def run(request: JobRequest, ranks: Ranks) -> int:
    """Measure the figure on all ranks, which all call this, and return the exit code 0."""
    config = replace(ranks.config, log=replace(ranks.config.log, dir=str(request.output.with_suffix(""))))
    trainer = ranks.trainer(config)
    row = {"kind": request.kind} | _measure(trainer)
    trainer.close()
    if ranks.world.rank == 0:
        report([row], [], request.output, _SHOWN)
        print_table(list(_beside(row, config)), ("record", "step_ms", "samples_per_s_per_gpu", "differs from this run"))
    return 0


def _measure(trainer: Trainer) -> dict[str, Any]:
    config, seconds = trainer.config, {"evaluations_s": 0.0, "saves_s": 0.0}

    def timed(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return part(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - began

        return call

    # Each leaves the device idle, or a copy that the next step waits for.
    trainer.evaluate = timed("evaluations_s", trainer.evaluate)  # type: ignore[method-assign]
    trainer.save = timed("saves_s", trainer.save)  # type: ignore[method-assign]
    trainer._finish_save = timed("saves_s", trainer._finish_save)  # type: ignore[method-assign]
    began = time.perf_counter()
    summary = trainer.fit(replace=True)
    total_s = time.perf_counter() - began
    steps, world_size = summary["steps"], trainer.world.world_size
    step_ms, all_ms = summary["step_ms_p50"], total_s * 1e3 / steps
    return {
        "backend": config.embedding.backend,
        "pipeline": config.train.pipeline,
        "arch": config.model.arch,
        "precision": config.train.precision,
        "world_size": world_size,
        **describe_tables(config),
        "global_batch": trainer.global_batch,
        "data": config.data.kind,
        "steps": steps,
        "eval_samples": config.data.eval_samples,
        "step_ms": step_ms,
        "all_ms": all_ms,
        "samples_per_s_per_gpu": trainer.global_batch / world_size / step_ms * 1e3,
        "all_samples_per_s_per_gpu": trainer.global_batch / world_size / all_ms * 1e3,
        **seconds,
        "total_s": total_s,
        "input_wait_ms": summary["input_wait_ms"],
        "peak_memory_bytes": summary["peak_memory_bytes"],
        **{key: summary[key] for key in ("eval_loss", "eval_auroc")},
    }


def _beside(row: dict[str, Any], config: Config) -> Iterator[dict[str, Any]]:
    """Yield a line for each record, with what it has that this run has not."""
    tables, evaluated = config.data.tables, row["eval_samples"]
    everywhere = [
        *(["rows up to 40 million"] if tables.max_rows is not None and tables.max_rows < 40_000_000 else []),
        *(["Criteo's samples"] if config.data.kind == "synthetic" else []),
        *([f"evaluations of {_EVALUATED} samples, not of {evaluated}"] if evaluated != _EVALUATED else []),
        "fp16" if config.train.precision != "fp32" else "fp16, not fp32",
        "training up to an AUROC of 0.80275",
    ]
    for each in RECORDS:
        batch = [f"a batch of {each.global_batch}"] if each.global_batch != row["global_batch"] else []
        yield {
            "record": f"HugeCTR, {each.name}",
            "step_ms": each.step_ms,
            "samples_per_s_per_gpu": each.global_batch / each.gpus / each.step_ms * 1e3,
            "differs from this run": "; ".join([*batch, *everywhere]),
        }
