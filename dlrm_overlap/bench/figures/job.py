"""`bench job`: what does a whole training job take, with its evaluations, saves and log?

The trainer runs the configuration from its first step on, in a folder beside `--output`. The file has one row for a
run: `step_ms`, the median of training alone, and `all_ms`, the time of the whole run over its steps; the seconds of
evaluations and of saves, as far as training waited for them; and samples a second and GPU by both times. Building the
model and the plan is left out.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrm_overlap.bench.harness.limits import describe_tables
from dlrm_overlap.bench.rows import report
from dlrm_overlap.train.ranks import Ranks
from dlrm_overlap.train.trainer import Trainer

_SHOWN = (
    "step_ms", "all_ms", "samples_per_s_per_gpu", "all_samples_per_s_per_gpu", "evaluations_s", "saves_s", "total_s",
    "eval_auroc",
)  # fmt: skip


def run(kind: str, ranks: Ranks) -> int:
    """Measure the figure on all ranks, which all call this, and return the exit code 0."""
    output = Path(ranks.values.output)
    log = replace(ranks.config.log, dir=str(output.with_suffix("")), replace=True)
    config = replace(ranks.config, log=log, checkpoint=replace(ranks.config.checkpoint, resume="never"))
    trainer = ranks.trainer(config)
    row = {"kind": kind} | _measure(trainer)
    trainer.close()
    if ranks.world.rank == 0:
        report([row], [], output, _SHOWN)
    return 0


def _measure(trainer: Trainer) -> dict[str, Any]:
    config, seconds = trainer.config, {"evaluations_s": 0.0, "saves_s": 0.0}

    def timed(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began, before_s = time.perf_counter(), seconds[name]
            try:
                return part(*args, **kwargs)
            finally:  # a save finishes the one before, which is within its time
                seconds[name] = before_s + time.perf_counter() - began

        return call

    # Each leaves the device idle, or a copy that the next step waits for.
    trainer.evaluate = timed("evaluations_s", trainer.evaluate)  # type: ignore[method-assign]
    trainer.save = timed("saves_s", trainer.save)  # type: ignore[method-assign]
    trainer.saves.finish = timed("saves_s", trainer.saves.finish)  # type: ignore[method-assign]
    began = time.perf_counter()
    summary = trainer.fit()
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
