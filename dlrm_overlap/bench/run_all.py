"""`bench all`: the figures of the pages, those of README first, as many as the minutes and the GPUs allow.

Each measurement is a command of its own, whose rows go to `NAME.part` in the folder, and get the name `NAME.csv` when
they are whole: so the same command goes on where an earlier one stopped.

Loads no torch but to count GPUs.
"""

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dlrm_overlap.bench.report.measured import read_measured
from dlrm_overlap.bench.request import FIGURES, StepRequest, check_committed
from dlrm_overlap.config import InputError, PositiveFloat, PositiveInt
from dlrm_overlap.launching.environment import commit
from dlrm_overlap.launching.files import hold_folder, make_folder
from dlrm_overlap.launching.parsing import Parser
from dlrm_overlap.launching.process_group import visible_gpus


class Measurement(NamedTuple):
    """A command of `bench`."""

    name: str
    """of its file of rows"""
    minutes: float
    """it takes, compilation included; of one that can go on with the contenders that are left, the least useful"""
    kind: str
    config: str
    shape: str = ""
    """further options that give the shape, which a rehearsal on CPUs replaces"""
    options: str = ""
    alone: bool = False
    """whether it takes one GPU"""

    def command(self, nproc: int, output: Path, rehearsed: bool = False) -> list[str]:
        """Return the words after `dlrm-overlap`."""
        figure, words = FIGURES[self.kind], ["bench", self.kind]
        options = self.options.split()
        if rehearsed:
            words += ["--config", "bench/tiny", *options, "--train.device", "cpu", *_REHEARSED.get(self.kind, ())]
        else:
            words += ["--config", self.config, *self.shape.split(), *options]
        words += ["--output", str(output), "--nproc", str(1 if self.alone else nproc)]
        if issubclass(figure, StepRequest):
            words += ["--at_once", str(min(nproc + 1, 6)), "--resume", "true"]  # so many models fit 80 GB a GPU
        return words

    def is_possible(self, nproc: int) -> bool:
        """Whether so many ranks can run it."""
        return nproc > 1 or not FIGURES[self.kind].needs_peers


_REHEARSED = {
    "step": ("--train.batch_size", "32", "--steps", "4", "--batches", "2"),
    "stage": ("--iterations", "2"),
    "backward": ("--iterations", "2"),
    "sweep": ("--iterations", "1", "--dims", "8", "16", "--pooling_factors", "1", "4"),
    "weak": ("--iterations", "2", "--tables_per_rank", "2"),
    "strong": ("--iterations", "2"),
    "collectives": ("--iterations", "2"),
    "gemm": ("--repetitions", "2"),
}
_STRONGEST = "--contenders torchrec drop_in drop_in_graph strongest pgas_graph_default_plan pgas_graph"
# Of the group, those that came nearest with half the batch; and those that can with histories.
_NEAREST = "--contenders torchrec torchrec_strongest torchrec_strongest_{0} torchrec_strongest_{1} pgas_graph"
_LARGE, _SEQUENCE = _NEAREST.format("table_wise", "default_plan"), _NEAREST.format("index_dedup", "bf16_index_dedup")
_SHAPES = (
    ("dim128", "--tables_per_rank 26"),
    ("weak", "--tables_per_rank 64"),
    ("strong", ""),
    ("one_id", "--tables_per_rank 64"),
    ("small_batch", "--tables_per_rank 16"),
)
_SWEPT = "--tables_per_rank 16 --dims 128 32 512 256 --global_batches 2048 16384 --pooling_factors 1 8 32 128"
MEASUREMENTS = (
    Measurement("step_mlperf", 2.5, "step", "bench/step_mlperf", options=_STRONGEST),
    *(Measurement(f"stage_{name}", 1, "stage", f"bench/{name}", shape) for name, shape in _SHAPES),
    *(
        Measurement(f"backward_{name}", 1, "backward", f"bench/{name}", shape, "--iterations 40")
        for name, shape in (*_SHAPES[:4], ("mlperf", ""))
    ),
    Measurement("step_dot", 4, "step", "bench/step_dot", options=_STRONGEST),
    Measurement("step_sequence", 1.5, "step", "bench/step_sequence", options=_SEQUENCE),
    Measurement("step_mlperf_16384", 1.5, "step", "bench/step_mlperf", "--train.batch_size 16384", _LARGE),
    Measurement("quickstart", 0.5, "step", "quickstart", options="--contenders torchrec pgas_graph", alone=True),
    Measurement(
        "wide", 3, "step", "wide_mlp", "--model.top_parallel data", "--contenders pgas_graph pgas_graph_tensor"
    ),
    Measurement("ablation", 3, "step", "bench/step_mlperf", options="--contenders torchrec ablation pgas_graph"),
    Measurement("sweep", 7, "sweep", "bench/sweep", _SWEPT),
    Measurement("weak", 3, "weak", "bench/weak", "--tables_per_rank 64"),
    Measurement("strong", 3, "strong", "bench/strong"),
    Measurement("collectives", 4, "collectives", "bench/tiny", options="--operations all_to_all all_gather"),
    Measurement("gemm", 6, "gemm", "bench/tiny", options="--repetitions 8"),
)
"""In the order of README's needs."""


def run(argv: Sequence[str]) -> int:
    """Run the measurements that are left, each as a command, and report; return 1 if one has failed.

    Raises:
        InputError: for a mistake in `argv`, or if the folder has rows of another commit or is in use.
    """
    names = [each.name for each in MEASUREMENTS]
    parser = Parser("dlrm-overlap bench all", "Run the figures of the pages, those of README first.")
    text = "start nothing that would not end by then, and cut off what runs longer"
    parser.add_argument("--minutes", type=PositiveFloat, default=25.0, help=text)
    parser.add_argument("--output", help="folder of the rows, in which an earlier call's are gone on with")
    parser.add_argument("--nproc", type=PositiveInt, help="ranks; none: one a GPU, or two on the CPU, as a rehearsal")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names, help=", ".join(names))
    parser.add_argument("--uncommitted", type=bool, default=False, help="measure a checkout with uncommitted changes")
    values = parser.read(argv)
    gpus = visible_gpus("auto")
    check_committed("cuda" if gpus else "cpu", values.uncommitted)
    nproc = values.nproc or gpus or 2
    folder = Path(values.output or f"runs/bench/all_{nproc}_{'gpus' if gpus else 'cpu_ranks'}")
    make_folder(folder)
    end, failed = time.monotonic() + 60 * values.minutes, False
    with hold_folder(folder, "--output"):
        _check_commit(folder)
        chosen = [each for each in MEASUREMENTS if each.name in values.only and each.is_possible(nproc)]
        for each in chosen:
            minutes = (end - time.monotonic()) / 60
            if not _rows(folder, each).exists() and minutes >= (each.minutes if gpus else 0):
                words = each.command(nproc, _part(folder, each), rehearsed=not gpus)
                words += ["--uncommitted", "true"] * values.uncommitted
                failed |= not _measure(each, words, folder, end)
    left = [each for each in chosen if not _rows(folder, each).exists()]
    print(f"{len(chosen) - len(left)} of {len(chosen)} measurements are done; draw them by `dlrm-overlap bench report`")
    for each in left:
        print(f"left: dlrm-overlap {shlex.join(each.command(nproc, _rows(folder, each)))}")
    return int(failed)


def _rows(folder: Path, each: Measurement) -> Path:
    return folder / f"{each.name}.csv"


def _part(folder: Path, each: Measurement) -> Path:
    return folder / f"{each.name}.part"


def _check_commit(folder: Path) -> None:
    ours = commit() or ""
    for path in (*folder.glob("*.csv"), *folder.glob("*.part")):
        theirs = read_measured(path).rows[0].get("commit", "")
        if theirs != ours:
            raise InputError(
                f"--output: {path} has rows of commit {theirs or 'unknown'}, but this is {ours or 'unknown'}; "
                f"give another folder"
            )


def _measure(each: Measurement, words: list[str], folder: Path, end: float) -> bool:
    """Run a measurement until the moment `end` of the monotonic clock at most; return whether its rows are whole."""
    part, log = _part(folder, each), folder / f"{each.name}.log"
    if "--resume" not in words:
        part.unlink(missing_ok=True)  # of a try that was cut off
    print(f"{each.name}: dlrm-overlap {shlex.join(words)}", flush=True)
    command, left_s = [sys.executable, "-m", "dlrm_overlap", *words], max(0.0, end - time.monotonic())
    with log.open("w") as file:
        try:
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=left_s, check=False
            ).returncode
            how = f"ended with code {code}"
        except subprocess.TimeoutExpired:
            code, how = -1, "cut off"
    if code in (0, 1) and part.exists():  # 1: contenders disagree, which their rows say
        part.rename(_rows(folder, each))
        return True
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    print(f"{each.name}: {how}; the end of {log}:\n{tail}", flush=True)
    return False
