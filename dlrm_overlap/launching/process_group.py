"""This rank's device, and its process group: made from the `World` that a launcher has given, destroyed at the end."""

import os
import socket
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.launcher import World

if TYPE_CHECKING:
    import torch

_RESOLVE_S = 20.0  # the name of a container's host may become known a moment after the container starts


def find_device(kind: str, local_rank: int, source: str = "nproc", local_ranks: int = 1) -> "torch.device":
    """Return the device of a rank: the CPU, or the GPU of its local rank.

    A rank that sees a single GPU takes that one where its launcher (Slurm, MPI, a script) may have chosen it.

    Args:
        kind: train.device; auto takes the GPUs if there are any.
        local_rank: the rank's place among those of this host.
        source: who started them, `World.source`.
        local_ranks: processes on this host. Every rank checks that all of them have a GPU, so that rank 0, whose
            message is the one shown, finds it too.

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

    Sets the current CUDA device, and makes a stream of priority -1 the current one: the default stream has the lowest
    priority there is, so no kernel could give way to it. A world of one needs no address. `timeout_s` bounds the
    rendezvous and every collective.

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
    """Wait up to `patience_s` for rank 0's host to have an address; the rendezvous would wait for its whole timeout."""
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

    While an exception is on its way out it does nothing, since both may wait for other ranks that never come. The
    launcher sees the exit code, under MPI the missing finalize, and ends the other ranks.
    """
    if sys.exc_info()[0] is not None:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and not mpi.Is_finalized():
        mpi.Finalize()
