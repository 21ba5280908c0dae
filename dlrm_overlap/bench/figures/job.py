"""`bench job`: times a whole training job with its evaluations, saves and logs, without building the model.

`step_ms` is the median of training alone. The run's folder is next to `--output`.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrm_overlap.bench.harness.workload import describe, with_keys
from dlrm_overlap.bench.rows import folder_of_runs, report
from dlrm_overlap.train.ranks import Ranks

_SHOWN = ("step_ms", "samples_per_s_per_gpu", "evaluations_s", "total_s", "eval_auroc")


def run(kind: str, ranks: Ranks) -> int:
    output, world_size = Path(ranks.values.output), ranks.world.world_size
    fresh = {"log.dir": str(folder_of_runs(output)), "log.overwrite": True, "checkpoint.resume": "never"}
    config = with_keys(ranks.config, fresh)
    trainer = ranks.trainer(config)
    evaluate, evaluations_s = trainer.evaluate, list[float]()

    def timed_evaluate(ends: Callable[[], bool]) -> dict[str, float]:
        began = time.perf_counter()
        values = evaluate(ends)
        evaluations_s.append(time.perf_counter() - began)
        return values

    trainer.evaluate = timed_evaluate  # type: ignore[method-assign]
    began = time.perf_counter()
    summary = trainer.fit()
    total_s = time.perf_counter() - began
    trainer.close()
    row: dict[str, Any] = {
        "kind": kind,
        "backend": trainer.embedding.backend,
        **describe(replace(config, embedding=trainer.embedding), world_size),
        "eval_samples": trainer.held_out_data.num_samples,
        "step_ms": summary["step_ms_p50"],
        "samples_per_s_per_gpu": trainer.samples_per_rank / summary["step_ms_p50"] * 1e3,
        "evaluations_s": sum(evaluations_s),
        "total_s": total_s,
        **{name: summary[name] for name in ("steps", "input_wait_ms", "peak_memory_bytes", "eval_loss", "eval_auroc")},
    }
    if ranks.world.rank == 0:
        report([row], [], output, _SHOWN)
    return 0
