"""The same two ranks, started by each launcher for real: they find each other, and one's failure ends the other."""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dlrm_overlap

RANK = """\
import os, sys, time
import torch
import torch.distributed as dist
from dlrm_overlap.launching import launcher, process_group

world = launcher.detect(os.environ)
process_group.init_process_group(world, torch.device("cpu"), timeout_s=60)
if "fail" in sys.argv:
    if world.rank == 1:
        process_group.abandon(2)
        sys.exit(2)
    time.sleep(60)
total = torch.tensor([world.rank + 1.0])
dist.all_reduce(total)
with open(f"{sys.argv[-1]}.{world.rank}", "w") as file:
    file.write(f"{world.source} {world.world_size} {world.local_world_size} {total.item()}")
process_group.shutdown()
assert not dist.is_initialized()
sys.stdout.flush()
os._exit(0)
"""
MPI_AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # two ranks also on a machine of one core: Open MPI 4 and 5
    "OMPI_MCA_rmaps_base_oversubscribe": "true",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "rank.py"
    path.write_text(f"#!{sys.executable}\n{RANK}")
    path.chmod(0o755)
    return path


def command(launcher: str, program: Path, *arguments: str) -> list[str]:
    if launcher == "single":
        return [sys.executable, str(program), *arguments]
    if launcher == "nproc":  # with the program in place of `python -m dlrm_overlap`
        start = f"import sys; from dlrm_overlap.launching.spawn import spawn; sys.executable = {str(program)!r}; "
        return [sys.executable, "-c", f"{start}sys.exit(spawn({list(arguments)!r}, 2))"]
    if launcher == "torchrun":
        agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return [sys.executable, *agent, str(program), *arguments]
    if not shutil.which("mpirun") or not importlib.util.find_spec("mpi4py"):
        pytest.skip("needs mpirun and mpi4py: pip install mpi4py; apt-get install openmpi-bin")
    return ["mpirun", "-n", "2", "--bind-to", "none", sys.executable, str(program), *arguments]


def start(launcher: str, program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI_"))}
    environ = clean | MPI_AS_ROOT | {"PYTHONPATH": str(Path(dlrm_overlap.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    argv = command(launcher, program, *arguments)
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize(
    ("launcher", "source", "size", "total"),
    [
        ("single", "single", 1, 1.0),
        ("nproc", "nproc", 2, 3.0),
        pytest.param("torchrun", "torchrun", 2, 3.0, marks=pytest.mark.slow),
        ("mpirun", "mpi", 2, 3.0),
    ],
)
def test_ranks_meet(program: Path, tmp_path: Path, launcher: str, source: str, size: int, total: float) -> None:
    done = start(launcher, program, str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    written = [path.read_text() for path in sorted(tmp_path.glob("out.*"))]
    assert written == [f"{source} {size} {size} {total}"] * size


@pytest.mark.parametrize("launcher", ["nproc", "mpirun"])
def test_one_failing_rank_ends_the_run(program: Path, tmp_path: Path, launcher: str) -> None:
    begin = time.monotonic()
    done = start(launcher, program, "fail", str(tmp_path / "out"))
    assert done.returncode == 2, done.stderr
    assert time.monotonic() - begin < 45, "the other rank slept to its end"
    assert not list(tmp_path.glob("out.*"))
