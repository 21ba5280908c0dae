"""What a checkpoint that is saved beside training costs the steps: `torchrun --nproc-per-node 4 -m tests.gpu.saving`.

It trains with the options of `dlrm-overlap train`, MLPerf's shape by default, and saves once, behind half of the steps
or behind step `--checkpoint.every`, to a folder in memory where there is room. It prints, of rank 0, the times of the
steps before the save, of those beside which the state was copied, and of those beside which the copy was written; and,
of every rank, what held up its host longest. A step behind a log line waits for the host, as `behind log lines` shows:
a save behind one, such as step 1550 of 3000, is to be held against these. `--verify true` compares what is saved with a
copy that is made at once, behind the last step, when the steps and the thread that writes have had all their time to
spoil it. `--copies host` keeps it in page-locked memory, as where the GPU has no room.
"""

import gc
import json
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from dlrm_overlap.checkpoint import saving
from dlrm_overlap.checkpoint.checkpoint import Checkpointer, extents_to_store
from dlrm_overlap.checkpoint.storage.save import gather
from dlrm_overlap.launching import launcher
from dlrm_overlap.launching.parsing import Parser
from dlrm_overlap.observe.metrics import quantile
from dlrm_overlap.observe.run_log import RunLog
from dlrm_overlap.train.ranks import Ranks, run_on_ranks
from dlrm_overlap.train.trainer import Trainer

_WARMUP_STEPS = 10  # whose times are left out
_MLPERF = ["--config", "configs/bench/step_mlperf.yaml", "--embedding.backend", "pgas", "--train.compile_dense", "true"]
_ROOM_BYTES = 60e9
_LOG_EVERY = 50  # steps


class Moments:
    """When the save was begun and done, by the step that the host was issuing then, and what held up the host."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self.bytes = 0
        self.expected: dict[str, torch.Tensor] = {}
        self.saved: dict[str, torch.Tensor] = {}
        self.step_ms: list[float] = []
        """times of the steps on the device"""
        self.gaps: list[tuple[float, int]] = []
        """of each step the ms from its issue to that of the next, and its number"""
        self.collections: list[tuple[float, int, str]] = []
        """of each collection of Python's: its ms, the step, and the thread"""

    def note(self, ranks: Ranks, verify: bool) -> None:
        """Have the save of this process note its moments, and what it holds that was not so behind its step."""
        begin, write = saving.Saves._begin, Checkpointer.write

        def noting_begin(saves: Any, snapshot: Any, step: int, metrics: Any) -> None:
            if verify:
                extents = extents_to_store(saves._model, saves._optimizer)
                self.expected = {extent.key: extent.tensor.detach().clone() for extent in extents}
            at = time.perf_counter()
            begin(saves, snapshot, step, metrics)
            self.found |= {"behind_step": step, "issued_ms": (time.perf_counter() - at) * 1e3}

        def noting_write(*args: Any, **named: Any) -> Path:
            at = time.perf_counter()
            self.found |= {"copied_in_step": ranks.progress.step}
            self.bytes = sum(extent.tensor.nbytes for extent in args[2])
            self.saved = {extent.key: extent.tensor for extent in args[2]}
            path = write(*args, **named)
            self.found |= {"done_in_step": ranks.progress.step, "written_s": time.perf_counter() - at}
            return path

        take_step, last = Trainer.step, time.perf_counter()

        def noting_step(*args: Any) -> Any:
            nonlocal last
            now = time.perf_counter()
            self.gaps.append(((now - last) * 1e3, ranks.progress.step - 1))
            last = now
            return take_step(*args)

        summarise = RunLog.summary

        def noting_summary(run_log: RunLog, *args: Any) -> Any:
            self.step_ms = run_log.step_ms[_WARMUP_STEPS:]
            return summarise(run_log, *args)

        begun = 0.0

        def note_collection(phase: str, _: Any) -> None:
            nonlocal begun
            if phase == "start":
                begun = time.perf_counter()
            else:
                ms = (time.perf_counter() - begun) * 1e3
                self.collections.append((ms, ranks.progress.step, threading.current_thread().name))

        gc.callbacks.append(note_collection)
        setattr(Trainer, "step", noting_step)  # noqa: B010
        setattr(RunLog, "summary", noting_summary)  # noqa: B010
        setattr(saving.Saves, "_begin", noting_begin)  # noqa: B010
        setattr(Checkpointer, "write", noting_write)  # noqa: B010

    def unlike(self) -> list[str]:
        """Return the names of the tensors that were saved otherwise than they were behind the step."""
        if not self.expected:
            return []
        assert self.saved.keys() == self.expected.keys()
        return [
            f"{key}: {int((tensor != self.expected[key]).sum())} of {tensor.numel()} elements"
            for key, tensor in self.saved.items()
            if not torch.equal(tensor, self.expected[key])
        ]


def _describe(times: list[float]) -> dict[str, float]:
    if not times:
        return {"steps": 0}
    about = {f"p{percent}_ms": quantile(times, percent / 100) for percent in (50, 95, 99)}
    return {"steps": len(times), "mean_ms": sum(times) / len(times), **about, "max_ms": max(times)}


def work(ranks: Ranks) -> int:
    """Train, and print what the save has cost."""
    if ranks.values.copies == "host":
        saving.device_of_copy = lambda *_: torch.device("cpu")
    moments = Moments()
    moments.note(ranks, ranks.values.verify)
    trainer = ranks.trainer()
    trainer.fit()
    slow = [gap for gap in moments.gaps if gap[1] > _WARMUP_STEPS]
    held = (moments.bytes / 1e9, sorted(slow)[-4:], sorted(moments.collections)[-4:], moments.unlike())
    everywhere = gather(held)
    trainer.close()
    if ranks.world.rank:
        return 0
    for rank, (gigabytes, gaps, collections, unlike) in enumerate(everywhere):
        if ranks.values.verify:
            print(f"rank {rank}: {len(unlike)} of {len(moments.expected)} tensors differ from a copy at once: {unlike}")
        print(f"rank {rank}: stores {gigabytes:.2f} GB; longest host gaps (ms, step): {gaps}")
        print(f"rank {rank}: longest collections (ms, step, thread): {collections}")
    times, found = moments.step_ms, moments.found
    at = ("behind_step", "copied_in_step", "done_in_step")
    first, copied, last = (int(found[name]) - _WARMUP_STEPS for name in at)
    parts = {"before": times[:first], "copied beside": times[first:copied], "written beside": times[copied:last]}
    parts |= {"both": times[first:last], "after": times[last:]}
    parts["behind log lines"] = times[_LOG_EVERY - _WARMUP_STEPS : first : _LOG_EVERY]
    rows = {name: _describe(each) for name, each in parts.items()}
    ratios = {key: rows["both"][key] / rows["before"][key] for key in rows["before"]}
    slowest = sorted(((ms, index) for index, ms in enumerate(times[first:last])), reverse=True)[:8]
    print("slowest beside the save (ms, step counted from the save):", [(round(ms, 3), i) for ms, i in slowest])
    print("first steps beside the save, ms:", [round(ms, 3) for ms in times[first : first + 12]])
    for name, row in (rows | {"save": found, "both over before": ratios}).items():
        print(name, json.dumps({key: round(value, 4) for key, value in row.items()}), flush=True)
    return 0


def _add_options(parser: Parser) -> None:
    parser.add_argument("--verify", type=bool, default=False, help="compare the copy with one that is made at once")
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
