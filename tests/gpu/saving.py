"""What a checkpoint that is saved beside training costs the steps: `torchrun --nproc-per-node 4 -m tests.gpu.saving`.

It trains with the options of `dlrm-overlap train`, MLPerf's shape by default, and saves once, behind half of the steps
or behind step `--checkpoint.every`, to a folder in memory where there is room. It prints, of rank 0, the times of the
steps before the save, of those beside which the state was copied, and of those beside which the copy was written. A
step behind a log line waits for the host, as `behind log lines` shows: a save behind one, such as step 1550 of 3000, is
to be held against these. `--copies host` keeps the copy in page-locked memory, as where the GPU has no room.
"""

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dlrm_overlap.checkpoint import saving
from dlrm_overlap.checkpoint.checkpoint import Checkpointer
from dlrm_overlap.launching import launcher
from dlrm_overlap.launching.parsing import Parser
from dlrm_overlap.observe.metrics import quantile
from dlrm_overlap.observe.run_log import RunLog
from dlrm_overlap.train.ranks import Ranks, run_on_ranks

_WARMUP_STEPS = 10  # whose times are left out
_MLPERF = ["--config", "configs/bench/step_mlperf.yaml", "--embedding.backend", "pgas", "--train.compile_dense", "true"]
_ROOM_BYTES = 60e9
_LOG_EVERY = 50  # steps


def _note(ranks: Ranks, found: dict[str, float], step_ms: list[float]) -> None:
    """Have the save of this process note when it began and was done, by the step that the host was issuing then."""
    begin, write, summarise = saving.Saves._begin, Checkpointer.write, RunLog.summary

    def noting_begin(saves: Any, snapshot: Any, step: int, metrics: Any) -> None:
        at = time.perf_counter()
        begin(saves, snapshot, step, metrics)
        found.update(behind_step=step, issued_ms=(time.perf_counter() - at) * 1e3)

    def noting_write(*args: Any, **named: Any) -> Path:
        at, nbytes = time.perf_counter(), sum(extent.tensor.nbytes for extent in args[2])
        found.update(copied_in_step=ranks.progress.step, gigabytes=nbytes / 1e9)
        path = write(*args, **named)
        found.update(done_in_step=ranks.progress.step, written_s=time.perf_counter() - at)
        return path

    def noting_summary(run_log: RunLog, *args: Any) -> Any:
        step_ms.extend(run_log.step_ms[_WARMUP_STEPS:])
        return summarise(run_log, *args)

    setattr(RunLog, "summary", noting_summary)  # noqa: B010
    setattr(saving.Saves, "_begin", noting_begin)  # noqa: B010
    setattr(Checkpointer, "write", noting_write)  # noqa: B010


def _describe(times: list[float]) -> dict[str, float]:
    if not times:
        return {"steps": 0}
    about = {f"p{percent}_ms": quantile(times, percent / 100) for percent in (50, 95, 99)}
    return {"steps": len(times), "mean_ms": sum(times) / len(times), **about, "max_ms": max(times)}


def work(ranks: Ranks) -> int:
    """Train, and print what the save has cost."""
    if ranks.values.copies == "host":
        saving.device_of_copy = lambda *_: torch.device("cpu")
    found, times = dict[str, float](), list[float]()
    _note(ranks, found, times)
    trainer = ranks.trainer()
    trainer.fit()
    trainer.close()
    if ranks.world.rank:
        return 0
    at = ("behind_step", "copied_in_step", "done_in_step")
    first, copied, last = (int(found[name]) - _WARMUP_STEPS for name in at)
    parts = {"before": times[:first], "copied beside": times[first:copied], "written beside": times[copied:last]}
    parts |= {"both": times[first:last], "after": times[last:]}
    parts["behind log lines"] = times[_LOG_EVERY - _WARMUP_STEPS : first : _LOG_EVERY]
    rows = {name: _describe(each) for name, each in parts.items()}
    ratios = {key: rows["both"][key] / rows["before"][key] for key in rows["before"]}
    print("first steps beside the save, ms:", [round(ms, 3) for ms in times[first : first + 12]])
    for name, row in (rows | {"save": found, "both over before": ratios}).items():
        print(name, json.dumps({key: round(value, 4) for key, value in row.items()}), flush=True)
    return 0


def _add_options(parser: Parser) -> None:
    parser.add_argument("--copies", choices=["auto", "host"], default="auto", help="how copies are made")


def main() -> int:
    """Add what every such run has to the options of the command line."""
    options = sys.argv[1:] if "--config" in sys.argv else [*_MLPERF, *sys.argv[1:]]
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > _ROOM_BYTES
    folder = Path(tempfile.gettempdir() if not roomy else shared) / "dlrm_overlap_saving"
    steps = int(options[options.index("--train.steps") + 1]) if "--train.steps" in options else 9000
    if "--checkpoint.every" not in options:
        options += ["--checkpoint.every", str(steps // 2 + 1)]
    options += ["--train.steps", str(steps), "--checkpoint.keep", "1"]
    options += ["--checkpoint.asynchronous", "true", "--checkpoint.last", "false", "--checkpoint.resume", "never"]
    options += ["--log.dir", str(folder), "--log.name", str(time.time_ns() // 10**11), "--log.every", str(_LOG_EVERY)]
    options += ["--log.tensorboard", "false"]
    try:
        return run_on_ranks(["train"], __doc__ or "", options, work, _add_options)
    finally:
        if launcher.detect().rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
