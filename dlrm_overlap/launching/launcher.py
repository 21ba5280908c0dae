"""Who started this process, and as which rank. Imports no torch."""

import contextlib
import ipaddress
import os
import random
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.lifetime import end_with_parent, say

LOOPBACK = "127.0.0.1"
# Variables that `spawn` sets for its ranks.
NPROC_MARKER, LAUNCHER_PID = "DLRM_OVERLAP_NPROC", "DLRM_OVERLAP_LAUNCHER_PID"
_VARIABLES = re.compile(  # of launchers
    rf"(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_RUN_ID|(OMPI_COMM_WORLD|PMI)_(RANK|SIZE)"
    rf"|SLURM_(STEP_.*|JOB_ID|PROCID|LOCALID|NODEID)|{NPROC_MARKER}|{LAUNCHER_PID}"
)
_MAX_RANKS = 1 << 20
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")  # tasks of consecutive nodes: 2, or 4(x2) for 4, 4
_PORTS = range(20000, 32000)  # below Linux's ephemeral ports, which any connection may take


@dataclass(frozen=True)
class World:
    """This process's rank, and where all ranks meet; raises an `InputError` if the fields contradict each other."""

    rank: int
    local_rank: int
    """rank on this machine, which selects the GPU"""
    world_size: int
    local_world_size: int
    master_addr: str
    """address of rank 0's machine; an IPv6 address has no brackets"""
    master_port: int
    """0 for a single rank"""
    source: str
    """nproc | torchrun | mpi | slurm | environment | single"""

    def __post_init__(self) -> None:
        for rank, size, prefix in (
            (self.rank, self.world_size, ""),
            (self.local_rank, self.local_world_size, "LOCAL_"),
        ):
            if not 0 <= rank < size:
                raise InputError(
                    f"{self.source} launch: {prefix}RANK {rank} must be in 0 .. {prefix}WORLD_SIZE - 1, and "
                    f"{prefix}WORLD_SIZE is {size}; correct what starts the ranks"
                )
            if size > _MAX_RANKS:
                raise InputError(
                    f"{self.source} launch: {prefix}WORLD_SIZE {size} is above {_MAX_RANKS}; correct what starts the "
                    f"ranks"
                )
        if self.world_size > 1 and not (_is_address(self.master_addr) and 0 < self.master_port < 1 << 16):
            raise InputError(
                f"{self.source} launch: {self.world_size} ranks cannot meet at {self.master_addr!r}, port "
                f"{self.master_port}; set MASTER_ADDR to the name or IP address of rank 0's machine, without a port, "
                f"and MASTER_PORT to a free port, 1 .. 65535"
            )

    @property
    def rendezvous(self) -> str:
        """HOST:PORT."""
        return f"{f'[{self.master_addr}]' if ':' in self.master_addr else self.master_addr}:{self.master_port}"

    def describe(self) -> str:
        rank = f"rank {self.rank} of {self.world_size}, local rank {self.local_rank} of {self.local_world_size}"
        meet = f", rendezvous {self.rendezvous}" if self.world_size > 1 else ""
        return f"launch: {self.source}, {rank}{meet}"


def unset_empty(environ: MutableMapping[str, str] = os.environ) -> None:
    """Unset the variables of launchers that are empty, which the libraries would read as numbers, too."""
    for name in [name for name, value in environ.items() if not value and _VARIABLES.fullmatch(name)]:
        del environ[name]


def detect(environ: Mapping[str, str] = os.environ) -> World:
    """Return this process's rank, from its launcher's environment variables; initializes MPI under mpirun.

    The first launcher found counts (launch/README.md). An srun of one task with RANK or WORLD_SIZE counts as no
    launcher. Raises `InputError` if variables are missing, not numbers or contradict each other, or if mpi4py cannot
    use this MPI.
    """
    for mark, source in ((NPROC_MARKER, "nproc"), ("TORCHELASTIC_RUN_ID", "torchrun")):
        if mark in environ:
            return _from_variables(environ, source)
    mpi, step = _mpi_task(environ), _slurm_task(environ)
    bare = "RANK" in environ or "WORLD_SIZE" in environ
    if mpi:
        _check_agreement(environ, "mpirun", *mpi)
        return _from_mpi(environ, mpi[1])
    if step and not (bare and step[1] == 1):
        _check_agreement(environ, "srun", *step)
        return _from_slurm(environ, *step)
    if bare:
        return _from_variables(environ, "environment")
    return World(0, 0, 1, 1, LOOPBACK, 0, "single")


def _integer(environ: Mapping[str, str], name: str, source: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value := environ.get(name, "")):  # \d would match digits of all scripts
        raise InputError(
            f"{source} launch: {name} is {value!r}, not a number from 0 on; set it, or unset variables that another "
            f"launch has left"
        )
    return int(value)


def _mpi_task(environ: Mapping[str, str]) -> tuple[int, int] | None:
    for prefix in ("OMPI_COMM_WORLD_", "PMI_"):
        if prefix + "SIZE" in environ:
            task = _integer(environ, prefix + "RANK", "mpirun"), _integer(environ, prefix + "SIZE", "mpirun")
            # srun with its PMI plugin also sets PMI_*: then Slurm's variables are used, which need no mpi4py.
            return None if prefix == "PMI_" and task == _slurm_task(environ) else task
    return None


def _slurm_task(environ: Mapping[str, str]) -> tuple[int, int] | None:
    if "SLURM_STEP_ID" not in environ:
        return None
    return _integer(environ, "SLURM_PROCID", "srun"), _integer(environ, "SLURM_STEP_NUM_TASKS", "srun")


def _check_agreement(environ: Mapping[str, str], launcher: str, rank: int, size: int) -> None:
    for name, truth in (("RANK", rank), ("WORLD_SIZE", size)):
        if environ.get(name, str(truth)) != str(truth):
            raise InputError(
                f"{name} is {environ[name]!r}, but {launcher} says {truth}: left over, or two launchers at once; "
                f"unset RANK WORLD_SIZE LOCAL_RANK, or start without {launcher}"
            )


def _from_variables(environ: Mapping[str, str], source: str) -> World:
    rank, size = _integer(environ, "RANK", source), _integer(environ, "WORLD_SIZE", source)
    address = _master_addr(environ)
    port = _integer(environ, "MASTER_PORT", source) if size > 1 else 0
    if size == 1 or is_loopback(address):  # one machine: local ranks equal ranks
        environ = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), **environ}
    local, local_size = _integer(environ, "LOCAL_RANK", source), _integer(environ, "LOCAL_WORLD_SIZE", source)
    return World(rank, local, size, local_size, LOOPBACK if size == 1 else address, port, source)


def _from_mpi(environ: Mapping[str, str], announced: int) -> World:
    """Get the ranks from MPI, and broadcast rank 0's address.

    A finalize at every exit would wait for failed ranks, so `process_group.shutdown` finalizes MPI.
    """
    try:
        import mpi4py

        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py without libmpi
        raise InputError(
            f"mpirun of {announced} ranks, but mpi4py does not load ({str(error).splitlines()[0]}); "
            f"pip install mpi4py, or use --nproc"
        ) from None
    comm = MPI.COMM_WORLD
    if comm.size != announced:
        raise InputError(
            f"mpirun started {announced} ranks, but mpi4py sees {comm.size}: they belong to different MPI libraries; "
            f"use the mpirun of {MPI.get_vendor()[0]}, or pip install --no-binary mpi4py mpi4py"
        )
    local = comm.Split_type(MPI.COMM_TYPE_SHARED)
    address = _master_addr(environ) or (LOOPBACK if local.size == comm.size else socket.gethostname())
    port = _integer(environ, "MASTER_PORT", "mpirun") if "MASTER_PORT" in environ else free_port()
    address, port = comm.bcast((address, port))
    return World(comm.rank, local.rank, comm.size, local.size, address, port, "mpi")


def _from_slurm(environ: Mapping[str, str], rank: int, size: int) -> World:
    nodes, local_size = _slurm_nodes(environ, size)
    # "gpu[03-05,9],login1" stands for gpu03, gpu04, gpu05, gpu9, login1
    first = re.sub(r"\[([0-9]+)[^]]*\]", r"\1", environ.get("SLURM_STEP_NODELIST", "")).split(",")[0]
    address = _master_addr(environ) or (LOOPBACK if nodes == 1 else first)
    if "MASTER_PORT" in environ:
        port = _integer(environ, "MASTER_PORT", "srun")
    else:  # the same on every rank, different for steps of a job and jobs of a day
        job, step = _integer(environ, "SLURM_JOB_ID", "srun"), _integer(environ, "SLURM_STEP_ID", "srun")
        port = _PORTS[(16 * job + step) % len(_PORTS)]
    return World(rank, _integer(environ, "SLURM_LOCALID", "srun"), size, local_size, address, port, "slurm")


def _slurm_nodes(environ: Mapping[str, str], size: int) -> tuple[int, int]:
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", str(size))
    node = _integer(environ, "SLURM_NODEID", "srun")
    nodes, here = 0, None
    for part in text.split(","):
        if not (found := _TASKS.fullmatch(part)):
            raise InputError(
                f"srun launch: SLURM_STEP_TASKS_PER_NODE is {text!r}, not numbers of tasks such as '4(x2),2'; leave it "
                f"as srun sets it, or unset it"
            )
        count, repeat = found.groups(default="1")
        if nodes <= node < nodes + int(repeat):
            here = int(count)
        nodes += int(repeat)
    if here is None:
        raise InputError(
            f"srun launch: SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE, {text}, has {nodes} nodes; leave "
            f"both as srun sets them"
        )
    return nodes, here


def announced_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank from the first rank variable of a launcher that is set, without checking it, or None."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", *["SLURM_PROCID"] * ("SLURM_STEP_ID" in environ)):
        if re.fullmatch(r"[0-9]{1,18}", environ.get(name, "")):
            return int(environ[name])
    return None


def is_loopback(host: str) -> bool:
    """Return whether `host` is localhost or a loopback address; names are not looked up."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback


def _master_addr(environ: Mapping[str, str]) -> str:
    """Return MASTER_ADDR without an IPv6 address's brackets, "" if unset."""
    given = environ.get("MASTER_ADDR", "")
    try:
        address = ipaddress.IPv6Address(given[1:-1] if given == f"[{given[1:-1]}]" else given)
    except ValueError:
        return given
    return str(address.ipv4_mapped or address)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9._-]{1,253}", text) is not None
    return True


def end_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """End this process together with the launcher of `--nproc`, if there is one."""
    if LAUNCHER_PID not in environ:
        return
    if os.getppid() != (launcher := _integer(environ, LAUNCHER_PID, "nproc")):
        say(
            f"dlrm-overlap: the launcher of this rank, process {launcher} ({LAUNCHER_PID}), has ended, so the rank ends"
        )
    end_with_parent(launcher)


def free_port() -> int:
    """Return a TCP port that no process of this machine has; rank 0 binds it seconds later."""
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise InputError(f"all ports from {_PORTS[0]} to {_PORTS[-1]} are taken on this machine; end some processes")
