"""Who started this process, as which rank of how many: the only file that knows launchers.

`detect` tells, without a process group; `init_process_group` makes one.
"""

import logging
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from dlrm_overlap.config import InputError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
NPROC_MARKER = "DLRM_OVERLAP_NPROC"  # set by `spawn` in its workers
_RESOLVE_S = 20.0  # the name of a container's host may become known a moment after the container starts
_SLURM_PORTS = range(20000, 32000)  # below the ports that Linux hands out itself


@dataclass(frozen=True)
class World:
    """This process's place among all ranks.

    Raises:
        InputError: if a rank is not below its world size, or an address or port is missing that several ranks need.
    """

    rank: int
    """0 .. world_size - 1"""
    local_rank: int
    """rank among the processes of this host; the GPU to use"""
    world_size: int
    """processes in all, W"""
    local_world_size: int
    """processes on this host"""
    master_addr: str
    """host of rank 0"""
    master_port: int
    """port there for the rendezvous; 0 where a world of one needs none"""
    source: str
    """who started it: nproc | torchrun | mpi | slurm | environment | single"""

    def __post_init__(self) -> None:
        for rank, size, prefix in (
            (self.rank, self.world_size, ""),
            (self.local_rank, self.local_world_size, "LOCAL_"),
        ):
            if not 0 <= rank < size:
                raise InputError(
                    f"{self.source} launch: {prefix}RANK {rank} must lie in 0 .. {prefix}WORLD_SIZE - 1, and "
                    f"{prefix}WORLD_SIZE is {size}; correct what starts the ranks"
                )
        if self.local_world_size > self.world_size:
            raise InputError(
                f"{self.source} launch: LOCAL_WORLD_SIZE {self.local_world_size} exceeds WORLD_SIZE "
                f"{self.world_size}; correct what starts the ranks"
            )
        if self.world_size > 1 and not (self.master_addr and 0 < self.master_port < 1 << 16):
            raise InputError(
                f"{self.source} launch: {self.world_size} ranks cannot meet at {self.master_addr or 'no host'}:"
                f"{self.master_port}; set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port, 1 .. 65535"
            )

    def describe(self) -> str:
        """Return one line for the log."""
        place = f"rank {self.rank} of {self.world_size}, local rank {self.local_rank} of {self.local_world_size}"
        meet = f", rendezvous {self.master_addr}:{self.master_port}" if self.world_size > 1 else ""
        return f"launch: {self.source}, {place}{meet}"


def detect(environ: Mapping[str, str] = os.environ) -> World:
    """Tell from the environment who started this process. No process group is made; under MPI, MPI is initialised.

    The first that is found wins:

    | source | found by | rendezvous |
    |---|---|---|
    | nproc | the mark that `spawn` leaves | this host |
    | torchrun | TORCHELASTIC_RUN_ID | MASTER_ADDR, MASTER_PORT |
    | mpi | OMPI_COMM_WORLD_SIZE, or PMI_SIZE if not Slurm's own | told by rank 0 through mpi4py |
    | slurm | SLURM_STEP_ID (srun) | first node of the step, port from job and step id |
    | environment | RANK and WORLD_SIZE | MASTER_ADDR, MASTER_PORT |
    | single | none of these | none |

    What else may be found beside it:

    | leftover | verdict |
    |---|---|
    | torchrun in an srun or mpirun of as many tasks as agents | harmless: one agent a task, the way across hosts |
    | torchrun in an srun or mpirun of another number of tasks | contradiction: each agent thinks it is all |
    | RANK or WORLD_SIZE that agree with MPI or Slurm | harmless |
    | RANK or WORLD_SIZE that differ from MPI's or Slurm's | contradiction: stale, or started twice |
    | RANK and WORLD_SIZE in an srun of one task | they win: that step is a shell |
    | RANK without WORLD_SIZE, WORLD_SIZE without RANK | contradiction |
    | MASTER_ADDR, MASTER_PORT under MPI or Slurm | taken for the rendezvous |
    | LOCAL_RANK, MASTER_ADDR, MASTER_PORT alone | ignored |
    | SLURM_PROCID and the like without SLURM_STEP_ID | ignored: an sbatch script outside srun is one process |

    Raises:
        InputError: on a contradiction, a variable that is missing or no number, or an MPI that mpi4py cannot use.
    """
    mpi, step = mpi_task(environ), slurm_task(environ)
    bare = "RANK" in environ or "WORLD_SIZE" in environ
    if NPROC_MARKER in environ:
        return _from_variables(environ, "nproc")
    if "TORCHELASTIC_RUN_ID" in environ:
        agents = _integer(environ, "GROUP_WORLD_SIZE", "torchrun")
        for outer, task in (("mpirun", mpi), ("srun", step)):
            if task and task[1] != agents:
                raise InputError(
                    f"torchrun of {agents} agents inside {outer} of {task[1]} tasks: both would start the ranks; start "
                    f"one torchrun a host with --nnodes {task[1]}, or {outer} python -m dlrm_overlap without torchrun"
                )
        return _from_variables(environ, "torchrun")
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
    if not re.fullmatch(r"-?\d+", value := environ.get(name, "")):
        raise InputError(
            f"{source} launch: {name} is {value!r}, not a number; set it, or unset what another launch left behind"
        )
    return int(value)


def mpi_task(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return (rank, size) as mpirun announces them, or None outside mpirun."""
    for prefix in ("OMPI_COMM_WORLD_", "PMI_"):
        if prefix + "SIZE" in environ:
            task = _integer(environ, prefix + "RANK", "mpirun"), _integer(environ, prefix + "SIZE", "mpirun")
            # srun with its PMI plugin sets PMI_* for its tasks too: then Slurm tells all, and mpi4py is not needed.
            return None if prefix == "PMI_" and task == slurm_task(environ) else task
    return None


def slurm_task(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return (rank, size) in the Slurm step, or None outside srun."""
    if "SLURM_STEP_ID" not in environ:
        return None
    return _integer(environ, "SLURM_PROCID", "srun"), _integer(environ, "SLURM_STEP_NUM_TASKS", "srun")


def _check_agreement(environ: Mapping[str, str], launcher: str, rank: int, size: int) -> None:
    for name, truth in (("RANK", rank), ("WORLD_SIZE", size)):
        if environ.get(name, str(truth)) != str(truth):
            raise InputError(
                f"{name} is {environ[name]}, but {launcher} says {truth}: left over, or two launchers at once; "
                f"unset RANK WORLD_SIZE LOCAL_RANK, or start without {launcher}"
            )


def _from_variables(environ: Mapping[str, str], source: str) -> World:
    rank, size = _integer(environ, "RANK", source), _integer(environ, "WORLD_SIZE", source)
    address = environ.get("MASTER_ADDR", "")
    port = _integer(environ, "MASTER_PORT", source) if size > 1 else 0
    if size == 1 or address in (LOOPBACK, "localhost", "::1"):  # one host: the local ranks are the ranks
        environ = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size), **environ}
    local, local_size = _integer(environ, "LOCAL_RANK", source), _integer(environ, "LOCAL_WORLD_SIZE", source)
    return World(rank, local, size, local_size, address or LOOPBACK, port, source)


def _from_mpi(environ: Mapping[str, str], announced: int) -> World:
    """Let MPI number the ranks and carry rank 0's address; everything after that goes through torch.

    MPI_Finalize is left to `shutdown`: to any mpirun a rank that ends without it has failed, so an exception or an
    exit on one rank ends the others, where a finalize at exit would wait for them for ever.
    """
    try:
        import mpi4py

        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, libmpi is not
        raise InputError(
            f"mpirun of {announced} ranks, but mpi4py does not load ({str(error).splitlines()[0]}); "
            f"pip install mpi4py, or use --nproc"
        ) from None
    world = MPI.COMM_WORLD
    if world.size != announced:
        raise InputError(
            f"mpirun started {announced} ranks, but mpi4py sees {world.size}: they belong to different MPI libraries; "
            f"use the mpirun of {MPI.get_vendor()[0]}, or pip install --no-binary mpi4py mpi4py"
        )
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    address = environ.get("MASTER_ADDR") or (LOOPBACK if local.size == world.size else socket.gethostname())
    port = _integer(environ, "MASTER_PORT", "mpirun") if "MASTER_PORT" in environ else free_port()
    address, port = world.bcast((address, port))
    return World(world.rank, local.rank, world.size, local.size, address, port, "mpi")


def _from_slurm(environ: Mapping[str, str], rank: int, size: int) -> World:
    # Tasks of each node, "2(x3),1" for 2, 2, 2, 1; nodes, "gpu[03-05,9],login1" for gpu03, ..
    tasks = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", str(size))):
        tasks += [int(count)] * int(repeat or 1)
    first = re.sub(r"\[(\d+)[^]]*\]", r"\1", environ.get("SLURM_STEP_NODELIST", "")).split(",")[0]
    address = environ.get("MASTER_ADDR") or (LOOPBACK if len(tasks) == 1 else first)
    if "MASTER_PORT" in environ:
        port = _integer(environ, "MASTER_PORT", "srun")
    else:  # every rank must find the same: steps of one job and jobs of one day get different ports
        job, step = _integer(environ, "SLURM_JOB_ID", "srun"), _integer(environ, "SLURM_STEP_ID", "srun")
        port = _SLURM_PORTS[(16 * job + step) % len(_SLURM_PORTS)]
    node, local = _integer(environ, "SLURM_NODEID", "srun"), _integer(environ, "SLURM_LOCALID", "srun")
    return World(rank, local, size, tasks[node], address, port, "slurm")


def announced_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank as the first launcher's mark tells it, unchecked, or None for a process on its own."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", *["SLURM_PROCID"] * ("SLURM_STEP_ID" in environ)):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return None


def free_port() -> int:
    """Return a TCP port that was free on this host a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def find_device(kind: str, local_rank: int, source: str = "nproc", local_ranks: int = 1) -> "torch.device":
    """Return the device of the rank: `kind` is train.device, auto takes the GPUs if there are any.

    A rank that sees a single GPU takes that one, if its launcher (Slurm, MPI, a script) may have chosen it for it.

    Args:
        kind: train.device.
        local_rank: the rank's place among those of this host.
        source: who started them.
        local_ranks: processes on this host: each finds out whether all have a GPU, so that rank 0 can tell.

    Raises:
        InputError: if there is no GPU for each rank of this host.
    """
    import torch

    count = visible_gpus(kind)
    if kind == "cpu" or (kind == "auto" and count == 0):
        return torch.device("cpu")
    if count == 1 and source in ("slurm", "mpi", "environment"):
        return torch.device("cuda", 0)
    if (last := max(local_rank, local_ranks - 1)) < count:
        return torch.device("cuda", local_rank)
    raise InputError(
        f"train.device: {kind}, but local rank {last} has no GPU of its own, {count} visible; start at most one a GPU "
        f"(--nproc auto), or set train.device cpu (dlrm-overlap doctor shows the GPUs)"
    )


def visible_gpus(kind: str) -> int:
    """Return the number of GPUs that a run with train.device `kind` sees."""
    import torch

    return torch.cuda.device_count() if kind != "cpu" else 0


def init_process_group(world: World, device: "torch.device", timeout_s: float = 600.0) -> None:
    """Make the default process group: gloo for CPU tensors, and NCCL, connected at once, where `device` is a GPU.

    Sets the current CUDA device and stream. The default stream has the lowest priority there is; the current one's is
    above it, so that kernels on a stream of its own can give way to it. A world of one needs no address. `timeout_s`
    bounds the rendezvous and every collective.

    Raises:
        InputError: if the ranks do not meet.
    """
    import torch
    import torch.distributed as dist

    backend, device_id = "gloo", None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # nor may collectives wait for what gives way
        backend, device_id = "cpu:gloo,cuda:nccl", device
    timeout = timedelta(seconds=timeout_s)
    if world.world_size == 1:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=device_id)
        return
    _resolve(world, min(_RESOLVE_S, timeout_s))
    host = f"[{world.master_addr}]" if ":" in world.master_addr else world.master_addr
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{host}:{world.master_port}",
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
            device_id=device_id,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "address already in use" in str(error):
            raise InputError(
                f"{world.source} launch: port {world.master_port} of {host} is in use by another program; set "
                f"MASTER_PORT to a free one on all ranks"
            ) from None
        raise InputError(
            f"{world.source} launch: no rendezvous of {world.world_size} ranks at {host}:{world.master_port} within "
            f"{timeout_s:g} s ({str(error).splitlines()[0]}); start all ranks, and set MASTER_ADDR and MASTER_PORT to "
            f"a host and a free port that all reach"
        ) from None


def _resolve(world: World, patience_s: float) -> None:
    """Check that rank 0's host has an address, which the rendezvous itself would wait for to its end."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            socket.getaddrinfo(world.master_addr, world.master_port)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise InputError(
                    f"{world.source} launch: {world.master_addr}, the host of rank 0, has no address "
                    f"({error.strerror}); set MASTER_ADDR to one that all ranks resolve"
                ) from None
        time.sleep(min(1.0, patience_s))


def shutdown() -> None:
    """Destroy the process group and finalise MPI, at the end of a run that went well.

    On the way out of an exception it does nothing: both may wait for the other ranks, which do not come. The launcher
    sees the exit code, and under MPI the missing finalize, and ends them.
    """
    if sys.exc_info()[0] is not None:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and not mpi.Is_finalized():
        mpi.Finalize()
