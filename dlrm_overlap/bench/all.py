"""`dlrm-overlap bench all`: measures the figures of the documentation, README's first (docs/results/figures.md)."""

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dlrm_overlap.bench.options import FIGURES
from dlrm_overlap.config import FullPath, InputError, PositiveFloat, PositiveInt
from dlrm_overlap.launching.environment import commit
from dlrm_overlap.launching.files import make_folder
from dlrm_overlap.launching.launcher import LAUNCHER_PID
from dlrm_overlap.launching.lifetime import DISAGREEMENT
from dlrm_overlap.launching.parsing import Parser
from dlrm_overlap.launching.process_group import visible_gpus

_STRONGEST = "--contenders torchrec drop_in drop_in_graph strongest pgas_graph_default_plan pgas_graph"
# `_LARGE` has the fastest of the group at half the batch size; `_SEQUENCE`, the ones that support histories.
_NEAREST = "--contenders torchrec torchrec_strongest torchrec_strongest_{0} torchrec_strongest_{1} pgas_graph"
_LARGE, _SEQUENCE = _NEAREST.format("table_wise", "default_plan"), _NEAREST.format("index_dedup", "bf16_index_dedup")
_SHAPES = {
    "dim128": "--config bench/dim128 --tables_per_rank 26",
    "weak": "--config bench/weak --tables_per_rank 64",
    "strong": "--config bench/strong",
    "one_id": "--config bench/one_id --tables_per_rank 64",
    "small_batch": "--config bench/small_batch --tables_per_rank 16",
}
_SWEPT = "--tables_per_rank 16 --dims 128 32 512 256 --global_batches 2048 16384 --pooling_factors 1 8 32 128"
MEASUREMENTS = {
    "step_mlperf": f"step --config bench/step_mlperf {_STRONGEST}",
    **{f"stage_{name}": f"stage {shape}" for name, shape in _SHAPES.items()},
    **{f"backward_{name}": f"backward {shape} --iterations 40" for name, shape in [*_SHAPES.items()][:4]},
    "backward_mlperf": "backward --config bench/mlperf --iterations 40",
    "step_dot": f"step --config bench/step_dot {_STRONGEST}",
    "step_sequence": f"step --config bench/step_sequence {_SEQUENCE}",
    "step_mlperf_16384": f"step --config bench/step_mlperf --train.batch_size 16384 {_LARGE}",
    "quickstart": "step --config quickstart --contenders torchrec torchrec_strongest pgas_graph --nproc 1",
    "wide": "step --config wide_mlp --model.top_parallel data --contenders pgas_graph pgas_graph_tensor",
    "ablation": "step --config bench/step_mlperf --contenders torchrec ablation pgas_graph",
    "sweep": f"sweep --config bench/sweep {_SWEPT}",
    **{f"{name}_{n}": f"stage {_SHAPES[name]} --nproc {n}" for name in ("weak", "strong") for n in (2, 1)},
    "collectives": "collectives --config bench/tiny",
    "gemm": "gemm --config bench/tiny --repetitions 8",
}
"""name -> arguments of `dlrm-overlap bench`; measurements that README shows come first"""


def words_of(name: str, nproc: int, output: Path) -> list[str]:
    words = ["bench", *MEASUREMENTS[name].split(), "--output", str(output)]
    if "--nproc" not in words:
        words += ["--nproc", str(nproc)]
    if words[1] == "step":
        words += ["--at_once", str(min(nproc + 1, 6)), "--resume", "true"]  # the models that fit in 80 GB per GPU
    return words


def run(argv: Sequence[str]) -> int:
    """Run the measurements that have no rows yet, each as a command; return 1 if one failed or was stopped early."""
    names = list(MEASUREMENTS)
    parser = Parser("dlrm-overlap bench all", "Measure the figures of the documentation, README's first.")
    parser.add_argument(
        "--minutes", type=PositiveFloat, default=25.0, help="time limit; a running measurement is ended"
    )
    text = "folder for the rows, where a later call resumes (default: one per commit)"
    parser.add_argument("--output", type=FullPath, help=text)
    parser.add_argument("--nproc", type=PositiveInt, help="number of ranks (default: one per GPU)")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names, help=", ".join(names))
    values = parser.read(argv)
    if not (gpus := visible_gpus("auto")):
        raise InputError("bench all: no GPU found; try a figure on CPUs, for example: bench stage --config bench/tiny")
    nproc = values.nproc or gpus
    folder = Path(values.output or f"runs/bench/{commit() or 'all'}_{nproc}_gpus")
    make_folder(folder, "--output")
    end, failed, left = time.monotonic() + 60 * values.minutes, False, list[list[str]]()
    for name in names:
        # Skip measurements that are complete, and name those that need more ranks.
        part, complete = folder / f"{name}.part", folder / f"{name}.csv"
        words = words_of(name, nproc, part)
        ranks, least = int(words[words.index("--nproc") + 1]), 2 if FIGURES[words[1]].needs_peers else 1
        if name not in values.only or complete.exists():
            continue
        if (needed := max(least, ranks)) > nproc:
            print(f"{name}: left out, since it needs {needed} ranks, and there are {nproc}")
            continue
        # Run the command in the time that is left.
        if (left_s := end - time.monotonic()) > 0:
            if "--resume" not in words:
                part.unlink(missing_ok=True)  # left by a call that was cut off
            print(f"{name}: dlrm-overlap {shlex.join(words)}", flush=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                command = [sys.executable, "-m", "dlrm_overlap", *words]
                environ = os.environ | {LAUNCHER_PID: str(os.getpid())}  # it ends if this process is killed
                code = subprocess.run(command, env=environ, timeout=left_s, check=False).returncode
                if code in (0, DISAGREEMENT) and part.exists():  # rows show which contenders disagree
                    part.rename(complete)
                    continue
            failed = True
        left.append(words)
    for words in left:
        print(f"left: dlrm-overlap {shlex.join(words)}")
    return int(failed)
