"""This rank's device, and its process group: made from the `World` that a launcher has given, destroyed at the end."""

import os
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.launcher import World, is_loopback
from dlrm_overlap.launching.watch import Progress, Watch

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

LAST_RESORT, _LAST_RESORT_S = 10.0, 5.0  # a collective gives up after so many wait_timeout_s, and so many seconds more
_SHOWN = 60  # characters of a value
_RESOLVE_S = 20.0  # the name of a container's node may become known a moment after the container has started
_LET_GO_S = 0.05  # far more than gloo's threads need to let go of the last collective's tensors


def find_device(kind: str, local_rank: int, source: str = "nproc", local_ranks: int = 1) -> "torch.device":
    """Return the device of a rank: the CPU, or the GPU of its local rank.

    A rank that sees a single GPU takes that one where its launcher (Slurm, MPI, a script) may have chosen it.

    Args:
        kind: train.device; auto takes the GPUs if there are any.
        local_rank: the rank's number among those of this node.
        source: who started them, `World.source`.
        local_ranks: processes on this node. Every rank checks that all of them have a GPU, so that rank 0, whose
            message is the one shown, finds it too.

    Raises:
        InputError: if there is no GPU for each rank of this node.
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


def init_process_group(
    world: World, device: "torch.device", timeout_s: float = 600.0, wait_timeout_s: float = 600.0
) -> None:
    """Make the default process group: gloo for CPU tensors, and NCCL, connected at once, where `device` is a GPU.

    Sets the current CUDA device, and makes a stream of priority -1 the current one: the default stream has the lowest
    priority there is, so no kernel could give way to it. A world of one needs no address. Where the ranks meet at a
    loopback address, the store, gloo and NCCL listen there alone.

    Args:
        world: the rank, and where all ranks meet.
        device: of this rank.
        timeout_s: bounds the rendezvous: ranks may start at very different times.
        wait_timeout_s: embedding.wait_timeout_s. It bounds every collective, with a margin in which the `Watch`, which
            knows the rank and the step, or an exchange's own wait speaks first.

    Raises:
        InputError: if the ranks do not meet.
    """
    import torch
    import torch.distributed as dist

    backend, device_id = "gloo", None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # nor may collectives wait for kernels that give way
        backend, device_id = "cpu:gloo,cuda:nccl", device
    if is_loopback(world.master_addr):  # else gloo and NCCL would take the interface of the host's name
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    bound = timedelta(seconds=LAST_RESORT * wait_timeout_s + _LAST_RESORT_S)
    try:
        if world.world_size == 1:
            store: Store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        else:
            store = _open_store(world, timeout_s)
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.world_size, timeout=bound, device_id=device_id
        )
    except dist.DistBackendError:  # NCCL's, which is no matter of where the ranks meet
        raise
    except (OSError, RuntimeError) as error:  # of sockets, the store and gloo
        raise InputError(
            f"{world.source} launch: {world.world_size} ranks do not meet at {world.rendezvous} within "
            f"{timeout_s:g} s ({str(error).splitlines()[0]}); start all ranks, with MASTER_ADDR and MASTER_PORT a node "
            f"and a free port that all reach, and GLOO_SOCKET_IFNAME on each node the interface by which the others "
            f"reach it"
        ) from error


def _open_store(world: World, timeout_s: float) -> "Store":
    """Return the store of all ranks. Rank 0 serves it, unless torchrun's agent does.

    On a loopback address, rank 0 opens the port itself: a `TCPStore` always listens on all interfaces.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    where = world.master_addr, world.master_port, world.world_size
    address = _resolve(world, min(_RESOLVE_S, timeout_s))
    serves = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=timeout_s)
    if not (serves and is_loopback(world.master_addr)):
        return TCPStore(*where, is_master=serves, timeout=timeout)
    family, _, _, _, place = address
    listener = socket.create_server(place[:2], family=family, backlog=1024)
    return TCPStore(*where, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


def _resolve(world: World, patience_s: float) -> tuple[Any, ...]:
    """Return the first address of rank 0's node. A `TCPStore` would look for one until its own timeout.

    Raises:
        InputError: if the node has no address.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return socket.getaddrinfo(world.master_addr, world.master_port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            if time.monotonic() > deadline:
                raise InputError(
                    f"{world.source} launch: {world.master_addr}, the node of rank 0, has no address "
                    f"({error.strerror}); set MASTER_ADDR to a name or an address that all ranks can look up"
                ) from None
        time.sleep(min(1.0, patience_s))


def check_alike(facts: Mapping[str, Any], group: "dist.ProcessGroup") -> None:
    """Check that `facts`, key -> value, are the same on all ranks of `group`; a collective.

    Raises:
        InputError: on all ranks, with the keys, if those of a rank are not those of rank 0.
    """
    from dlrm_overlap.comm.every_rank import gathered

    first, *others = gathered(dict(facts), group)
    for rank, theirs in enumerate(others, 1):
        keys = sorted(key for key in theirs.keys() | first if theirs.get(key) != first.get(key))
        if keys:
            found = [f"{key} is {_shown(theirs.get(key))}, not {_shown(first.get(key))}" for key in keys]
            raise InputError(
                f"rank {rank} differs from rank 0: {', '.join(found)}; start all ranks of a run by one command, with "
                f"the same files on every node"
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}.."


def watch_ranks(world: World, timeout_s: float, progress: Progress) -> Watch | None:
    """Watch this thread's progress together with the other ranks; None in a world of one. The process group exists."""
    if world.world_size == 1:
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue] # the other one may be in a wait
    return Watch(store, world.rank, world.world_size, timeout_s, progress)


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
        # A group that is still referred to keeps gloo's threads. The one of the last collective takes the interpreter's
        # lock to let go of its tensors, and would abort the process if the interpreter ended first.
        time.sleep(_LET_GO_S)
    finalise_mpi()


def finalise_mpi() -> None:
    """Finalise MPI, if it runs; a collective. A rank that ends without it has failed for mpirun."""
    if mpi := _running_mpi():
        mpi.Finalize()


def abandon(code: int) -> None:
    """Have MPI, if it runs, end the other ranks: not every mpirun does so when a rank ends without MPI_Finalize."""
    if mpi := _running_mpi():
        mpi.COMM_WORLD.Abort(code)


def _running_mpi() -> Any:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi and mpi.Is_initialized() and not mpi.Is_finalized() else None
