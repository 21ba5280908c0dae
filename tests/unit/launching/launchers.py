"""The variables that each launcher sets, and a stand-in for mpi4py."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

HERE = "127.0.0.1"


def bare(rank: int, size: int, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", **more}


def torchrun(rank: int, size: int, agents: int = 1, **more: str) -> dict[str, str]:
    local = size // agents
    local_names = {"LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local), "GROUP_WORLD_SIZE": str(agents)}
    return bare(rank, size, **local_names, TORCHELASTIC_RUN_ID="none", **more)


def srun(rank: int, size: int, **more: str) -> dict[str, str]:
    """Variables as Slurm 22.05 sets them, one node unless `more` says otherwise."""
    names = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "2", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size)}
    local = {"SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": str(size)}
    return {**names, **local, "SLURM_STEP_NODELIST": "gpu01", **more}


def openmpi(rank: int, size: int, **more: str) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size), **more}


def hydra(rank: int, size: int, **more: str) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": str(size), **more}


class FakeWorld:
    """COMM_WORLD of a rank on a node that holds `local` ranks; rank 0's broadcast is what it says itself."""

    def __init__(self, rank: int, size: int, local: int) -> None:
        self.rank, self.size, self.local = rank, size, local

    def Split_type(self, kind: int) -> SimpleNamespace:  # noqa: N802 - MPI's name
        return SimpleNamespace(rank=self.rank % self.local, size=self.local)

    def bcast(self, value: tuple[str, int]) -> tuple[str, int]:
        return value if self.rank == 0 else ("node0", 4321)


def install_mpi4py(monkeypatch: pytest.MonkeyPatch, world: FakeWorld) -> SimpleNamespace:
    mpi = SimpleNamespace(COMM_WORLD=world, COMM_TYPE_SHARED=1, get_vendor=lambda: ("Open MPI", (5, 0, 0)))
    package = ModuleType("mpi4py")
    vars(package).update(rc=SimpleNamespace(finalize=None), MPI=mpi)
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    return mpi
