"""The same two ranks, started by each launcher for real: they find each other, and one's failure ends the other."""

import os
import runpy
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from dlrm_overlap.launching.launcher import free_port
from dlrm_overlap.launching.spawn import spawn
from tests import warm
from tests.conftest import PYTHON_PATH, ROOT
from tests.distributed.launchers import MPI_AS_ROOT, NO_MPI, find_mpirun, mpi_is_here

FOR_RANKS = {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
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
if world.source in ("nproc", "environment"):
    from tests.conftest import listening_on
    nodes = {node for node, _ in listening_on(os.getpid())}
    assert nodes and nodes <= {"127.0.0.1", "::1"}, f"other machines can connect to {nodes}"
with open(f"{sys.argv[-1]}.{world.rank}", "w") as file:
    file.write(f"{world.source} {world.world_size} {world.local_world_size} {total.item()}")
process_group.shutdown()
assert not dist.is_initialized()
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "rank.py"
    path.write_text(f"#!{sys.executable}\n{RANK}")
    path.chmod(0o755)
    return path


def _spawn_two() -> None:
    sys.exit(spawn(sys.argv[1:], 2))


def start_forked(program: Path, argv: list[str], errors: Path, is_rank: bool, **environ: str) -> warm.Command:
    """Start the program, or what starts two ranks that run it, from a process that need not import torch."""
    run = partial(runpy.run_path, str(program), run_name="__main__")
    streams = errors.with_suffix(".out"), errors
    main = run if is_rank else _spawn_two
    return warm.Command(argv, ROOT, os.environ | FOR_RANKS | environ, streams, rank_main=run, main=main)


def start(launcher: str, program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    if launcher == "mpirun" and not mpi_is_here():
        pytest.skip(NO_MPI)
    # `spawn` with the program in place of `python -m dlrm_overlap`.
    spawn = f"import sys; from dlrm_overlap.launching.spawn import spawn; sys.executable = {str(program)!r}; "
    argv = {
        "single": [sys.executable, str(program), *arguments],
        "nproc": [sys.executable, "-c", f"{spawn}sys.exit(spawn({list(arguments)!r}, 2))"],
        "torchrun": [*TORCHRUN, "--standalone", "--nproc-per-node", "2", str(program), *arguments],
        "mpirun": [find_mpirun() or "", "-n", "2", "--bind-to", "none", sys.executable, str(program), *arguments],
    }[launcher]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI_"))}
    environ = clean | MPI_AS_ROOT | FOR_RANKS
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize(
    ("launcher", "source", "size", "total"),
    [
        ("single", "single", 1, 1.0),
        ("nproc", "nproc", 2, 3.0),
        pytest.param("torchrun", "torchrun", 2, 3.0, marks=pytest.mark.slow),
        pytest.param("mpirun", "mpi", 2, 3.0, marks=pytest.mark.slow),
    ],
)
def test_ranks_meet(program: Path, tmp_path: Path, launcher: str, source: str, size: int, total: float) -> None:
    done = start(launcher, program, str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    written = [path.read_text() for path in sorted(tmp_path.glob("out.*"))]
    assert written == [f"{source} {size} {size} {total}"] * size


def test_ranks_meet_at_an_ipv6_address(program: Path, tmp_path: Path) -> None:
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "[::1]", "MASTER_PORT": str(free_port())}
    errors = [tmp_path / f"stderr.{rank}" for rank in range(2)]
    ranks = [
        start_forked(program, [str(tmp_path / "out")], path, is_rank=True, RANK=str(rank), **meet)
        for rank, path in enumerate(errors)
    ]
    assert [rank.wait(50) for rank in ranks] == [0, 0], [path.read_text() for path in errors]
    written = [path.read_text() for path in sorted(tmp_path.glob("out.*"))]
    assert written == ["environment 2 2 3.0"] * 2


@pytest.mark.parametrize(
    "launcher", ["forked", *(pytest.param(each, marks=pytest.mark.slow) for each in ("nproc", "mpirun"))]
)
def test_one_failing_rank_ends_the_run(program: Path, tmp_path: Path, launcher: str) -> None:
    begin, arguments = time.monotonic(), ["fail", str(tmp_path / "out")]
    if launcher == "forked":
        code = start_forked(program, arguments, errors := tmp_path / "stderr", is_rank=False).wait(50)
        said = errors.read_text()
    else:
        done = start(launcher, program, *arguments)
        code, said = done.returncode, done.stderr
    assert code == 2, said
    assert time.monotonic() - begin < 45, "the other rank slept to its end"
    assert not list(tmp_path.glob("out.*"))


@pytest.mark.slow
def test_a_node_whose_configuration_differs_is_refused_on_both(tmp_path: Path) -> None:
    """Two agents of torchrun with a rank each; the second has other options."""
    port = free_port()
    train = ["-m", "dlrm_overlap", "train", "--config", "configs/quickstart.yaml", "--train.device", "cpu"]
    train += ["--log.dir", str(tmp_path), "--train.steps", "2"]
    agents = []
    for node, more in enumerate(([], ["--embedding.lr", "0.3", "--train.optimizer", "adam"])):
        meet = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        command, environ = [*TORCHRUN, *meet, "--nproc-per-node", "1", *train, *more], os.environ | FOR_RANKS
        agents.append(subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True))
    said = [agent.communicate(timeout=120)[1] for agent in agents]
    assert 0 not in [agent.returncode for agent in agents]
    for each in said:
        assert "rank 1 differs from rank 0: embedding.lr is 0.3, not 0.1, train.optimizer is 'adam', not" in each, each
    assert not list(tmp_path.glob("*/*.jsonl")), "something was trained"
