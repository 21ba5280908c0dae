"""`bench all`: the figures of the pages, those of README first, as many as the minutes and the GPUs allow.

Each measurement is a command of its own, whose rows go to `NAME.csv` in the folder. It is done once `NAME.done` is
there, so the same command goes on where an earlier one stopped. One that failed or was cut off (`NAME.tried`) comes
last when the command is given again. In the end the rows are drawn, and `pending.md` lists the commands that are left.

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
from dlrm_overlap.launching.text_table import markdown_table
from dlrm_overlap.observe.result_files import write_atomically

_GRACE_S = 20.0  # for ranks that are asked to end


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
            words += ["--at_once", str(min(nproc + 1, 4)), "--resume", "true"]  # so many models fit 80 GB a GPU
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
    "concurrent": ("--repetitions", "1"),
    "gemm": ("--repetitions", "2"),
}
_STRONGEST = "--contenders torchrec drop_in drop_in_graph strongest pgas_graph"
_SHAPES = (
    ("dim128", "--tables_per_rank 26"),
    ("weak", "--tables_per_rank 64"),
    ("strong", ""),
    ("one_id", "--tables_per_rank 64"),
    ("small_batch", "--tables_per_rank 16"),
)
_SWEPT = "--tables_per_rank 16 --dims 128 32 512 256 --global_batches 2048 16384 --pooling_factors 1 8 32 128"
MEASUREMENTS = (
    Measurement("step_mlperf", 3, "step", "bench/step_mlperf", options=_STRONGEST),
    *(Measurement(f"stage_{name}", 1.5, "stage", f"bench/{name}", shape) for name, shape in _SHAPES),
    *(
        Measurement(f"backward_{name}", 2, "backward", f"bench/{name}", shape, "--iterations 40")
        for name, shape in (*_SHAPES[:4], ("mlperf", ""))
    ),
    Measurement("step_dot", 3, "step", "bench/step_dot", options=_STRONGEST),
    Measurement("step_sequence", 4, "step", "bench/step_sequence", options=_STRONGEST),
    Measurement("step_mlperf_16384", 3, "step", "bench/step_mlperf", "--train.batch_size 16384", _STRONGEST),
    Measurement("quickstart", 1.5, "step", "quickstart", options="--contenders torchrec pgas_graph", alone=True),
    Measurement(
        "wide", 3, "step", "wide_mlp", "--model.top_parallel data", "--contenders pgas_graph pgas_graph_tensor"
    ),
    Measurement("ablation", 3, "step", "bench/step_mlperf", options="--contenders torchrec ablation pgas_graph"),
    Measurement("sweep", 7, "sweep", "bench/sweep", _SWEPT),
    Measurement("weak", 3, "weak", "bench/weak", "--tables_per_rank 64"),
    Measurement("strong", 3, "strong", "bench/strong"),
    Measurement("collectives", 4, "collectives", "bench/tiny", options="--operations all_to_all all_gather"),
    Measurement("gemm", 6, "gemm", "bench/tiny", options="--repetitions 8"),
    Measurement("concurrent", 8, "concurrent", "quickstart"),
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
    with hold_folder(folder, "--output"):
        _check_commit(folder)
        chosen = [each for each in MEASUREMENTS if each.name in values.only and each.is_possible(nproc)]
        campaign = _Campaign(folder, nproc, rehearsed=not gpus, uncommitted=values.uncommitted)
        end = time.monotonic() + 60 * values.minutes
        left = [each for each in chosen if not campaign.is_done(each)]
        for each in sorted(left, key=lambda each: campaign.tried(each) is not None):
            minutes = (end - time.monotonic()) / 60
            if minutes < each.minutes and not (campaign.rehearsed and minutes > 0):
                continue
            campaign.measure(each, end)
        return campaign.report(chosen)


def _check_commit(folder: Path) -> None:
    ours = commit() or ""
    for path in folder.glob("*.csv"):
        theirs = read_measured(path).rows[0].get("commit", "")
        if theirs != ours:
            raise InputError(
                f"--output: {path} has rows of commit {theirs or 'unknown'}, but this is {ours or 'unknown'}; "
                f"give another folder"
            )


class _Campaign:
    """The files of a folder, and the measurements that are run for it."""

    def __init__(self, folder: Path, nproc: int, rehearsed: bool, uncommitted: bool) -> None:
        self._folder, self._nproc, self.rehearsed, self._uncommitted = folder, nproc, rehearsed, uncommitted

    def _file(self, each: Measurement, suffix: str) -> Path:
        return self._folder / f"{each.name}.{suffix}"

    def is_done(self, each: Measurement) -> bool:
        return self._file(each, "done").exists()

    def tried(self, each: Measurement) -> str | None:
        """Return why an earlier try has not ended well, if there was one."""
        path = self._file(each, "tried")
        return path.read_text().strip() if path.exists() else None

    def command(self, each: Measurement) -> list[str]:
        words = each.command(self._nproc, self._file(each, "csv"), self.rehearsed)
        return [*words, "--uncommitted", "true"] if self._uncommitted else words

    def measure(self, each: Measurement, end: float) -> None:
        """Run a measurement until it has ended, or until the moment `end` of the monotonic clock."""
        rows, log = self._file(each, "csv"), self._file(each, "log")
        command = self.command(each)
        if "--resume" not in command:
            rows.unlink(missing_ok=True)  # of a try that was cut off
        before = rows.stat().st_size if rows.exists() else 0
        began = time.monotonic()
        print(f"{each.name}: dlrm-overlap {shlex.join(command)}", flush=True)
        with log.open("w") as file:
            started = subprocess.Popen(
                [sys.executable, "-m", "dlrm_overlap", *command], stdout=file, stderr=subprocess.STDOUT
            )
            try:
                code = started.wait(max(0.0, end - began))
                reason = "" if code == 0 else f"ended with code {code}"
            except subprocess.TimeoutExpired:
                code, reason = -1, f"cut off after {(time.monotonic() - began) / 60:.1f} minutes"
                started.terminate()
            finally:
                try:
                    started.wait(_GRACE_S)
                except subprocess.TimeoutExpired:
                    started.kill()
                    started.wait()
        minutes = f"{(time.monotonic() - began) / 60:.1f} minutes"
        if code in (0, 1) and rows.exists():  # 1: contenders disagree, which their rows say
            self._file(each, "done").touch()
            self._file(each, "tried").unlink(missing_ok=True)
            print(f"{each.name}: {minutes}, rows in {rows}{f'; {reason}, see {log}' if reason else ''}", flush=True)
        elif code == -1 and rows.exists() and rows.stat().st_size > before:
            print(f"{each.name}: {reason}; rows of some contenders are in {rows}", flush=True)
        else:
            write_atomically(self._file(each, "tried"), reason + "\n")
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
            print(f"{each.name}: {reason}; the end of {log}:\n{tail}", flush=True)

    def report(self, chosen: Sequence[Measurement]) -> int:
        """Draw the rows, write `pending.md`, and print both; return 1 if something was tried in vain."""
        left = [each for each in chosen if not self.is_done(each)]
        lines = [["what", "command", "minutes, or why not"]]
        for each in left:
            command = f"`dlrm-overlap {shlex.join(each.command(self._nproc, self._file(each, 'csv')))}`"
            lines.append([each.name, command, self.tried(each) or f"{each.minutes:g}"])
        pending = self._folder / "pending.md"
        write_atomically(pending, markdown_table(lines) + "\n")
        if any(self._folder.glob("*.csv")):
            from dlrm_overlap.bench.report.plots import write_plots

            try:
                write_plots(self._folder, self._folder / "report")
                print(f"plots: {self._folder / 'report'}")
            except InputError as error:  # of rows that are no whole figure yet
                print(f"no plots: {error}")
        print(
            f"{len(chosen) - len(left)} of {len(chosen)} measurements are done; {pending} has {len(left)} that are left"
        )
        return int(any(self.tried(each) for each in left))
