"""`bench job`: how long does a whole training job take, with its evaluations, saves and logs?

The trainer runs the configuration from the first step, in a folder next to `--output`. Each run appends one row:
`step_ms`, the median of training alone, and the samples per second and GPU that follow; the seconds of the whole run
and of its evaluations. Building the model and plan is not included.
"""

import time
from pathlib import Path
from typing import Any

from dlrm_overlap.bench.harness.workload import describe, with_keys
from dlrm_overlap.bench.rows import report
from dlrm_overlap.train.ranks import Ranks

_SHOWN = ("step_ms", "samples_per_s_per_gpu", "evaluations_s", "total_s", "eval_auroc")


def run(kind: str, ranks: Ranks) -> int:
    """Measure the figure and return exit code 0; a collective."""
    output, world_size = Path(ranks.values.output), ranks.world.world_size
    fresh = {"log.dir": str(output.with_suffix("")), "log.overwrite": True, "checkpoint.resume": "never"}
    config = with_keys(ranks.config, fresh)
    trainer = ranks.trainer(config)
    evaluate, evaluations_s = trainer.evaluate, list[float]()

    def timed_evaluate() -> dict[str, float]:
        began = time.perf_counter()
        values = evaluate()
        evaluations_s.append(time.perf_counter() - began)
        return values

    trainer.evaluate = timed_evaluate  # type: ignore[method-assign]
    began = time.perf_counter()
    summary = trainer.fit()
    total_s = time.perf_counter() - began
    trainer.close()
    row: dict[str, Any] = {
        "kind": kind,
        **describe(config, world_size),
        "eval_samples": config.data.eval_samples,
        "step_ms": summary["step_ms_p50"],
        "samples_per_s_per_gpu": trainer.samples_per_rank / summary["step_ms_p50"] * 1e3,
        "evaluations_s": sum(evaluations_s),
        "total_s": total_s,
        **{name: summary[name] for name in ("steps", "input_wait_ms", "peak_memory_bytes", "eval_loss", "eval_auroc")},
    }
    if ranks.world.rank == 0:
        report([row], [], output, _SHOWN)
    return 0
