"""A rank's device, and its process group."""

import os
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.launcher import World, is_loopback
from dlrm_overlap.launching.resources import lacks_threads
from dlrm_overlap.launching.watch import Progress, Watch

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

# The timeout of collectives: LAST_RESORT * wait_timeout_s + _LAST_RESORT_S seconds.
LAST_RESORT, _LAST_RESORT_S = 10.0, 5.0
_MAX_SHOWN = 60  # characters of a value
_RESOLVE_S = 20.0  # a machine's name may be registered only after its container has started
_RELEASE_S = 0.05  # far more than gloo's threads need to release the last collective's tensors


def find_device(kind: str, local_rank: int, source: str = "nproc", local_ranks: int = 1) -> "torch.device":
    """Return a rank's device: the CPU, or the GPU of its local rank.

    If only one GPU is visible, it is taken if the launcher (Slurm, MPI, a script) may have selected it for this rank.
    If there are fewer GPUs than `local_ranks`, every rank raises `InputError`, as only rank 0's error is shown.
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
    import torch

    return torch.cuda.device_count() if kind != "cpu" else 0


def init_process_group(
    world: World, device: "torch.device", timeout_s: float = 600.0, wait_timeout_s: float = 600.0
) -> None:
    """Create the default process group: gloo for CPU tensors, and NCCL, connected at once, for a GPU; a collective.

    Also sets the current CUDA device, and a current stream of priority -1, which is higher than the default stream's
    priority. Ranks that meet at a loopback address listen only there. The timeout of collectives is longer than
    `wait_timeout_s` (embedding.wait_timeout_s), so that errors that name rank and step come first.

    Raises:
        InputError: if the ranks do not meet within `timeout_s`.
    """
    import torch
    import torch.distributed as dist

    # Device, stream and network interface.
    backend, device_id = "gloo", None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # collectives must not wait for low-priority kernels
        backend, device_id = "cpu:gloo,cuda:nccl", device
    if is_loopback(world.master_addr):  # otherwise gloo and NCCL take the interface of the machine's name
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    # Meet the other ranks.
    collective_timeout = timedelta(seconds=LAST_RESORT * wait_timeout_s + _LAST_RESORT_S)
    try:
        if world.world_size == 1:
            store: Store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        else:
            store = _open_store(world, timeout_s)
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=collective_timeout,
            device_id=device_id,
        )
    except dist.DistBackendError:  # by NCCL, unrelated to the rendezvous
        raise
    except (OSError, RuntimeError) as error:  # by sockets, the store and gloo
        if lacks_threads(error):
            raise
        raise InputError(
            f"{world.source} launch: {world.world_size} ranks do not meet at {world.rendezvous} within "
            f"{timeout_s:g} s ({str(error).splitlines()[0]}); start all ranks, with MASTER_ADDR and MASTER_PORT a "
            f"machine and a free port that all reach, and GLOO_SOCKET_IFNAME on each machine the interface by which "
            f"the others reach it"
        ) from error


def _open_store(world: World, timeout_s: float) -> "Store":
    """Return the store of all ranks, which rank 0 serves unless torchrun's agent does.

    A `TCPStore` listens on all interfaces, so on a loopback address rank 0 opens the port itself.
    """
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    where = world.master_addr, world.master_port, world.world_size
    address = _resolve(world, min(_RESOLVE_S, timeout_s))
    timeout = timedelta(seconds=timeout_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it still has the addresses of ranks that have failed
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"attempt_{attempt}", TCPStore(*where, is_master=False, timeout=timeout))
    serves = world.rank == 0
    if not (serves and is_loopback(world.master_addr)):
        return TCPStore(*where, is_master=serves, timeout=timeout)
    family, _, _, _, endpoint = address
    listener = socket.create_server(endpoint[:2], family=family, backlog=1024)
    return TCPStore(*where, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


def _resolve(world: World, timeout_s: float) -> tuple[Any, ...]:
    """Return the first address of rank 0's machine; its name must be resolved within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.getaddrinfo(world.master_addr, world.master_port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            if time.monotonic() > deadline:
                raise InputError(
                    f"{world.source} launch: {world.master_addr}, the machine of rank 0, has no address "
                    f"({error.strerror}); set MASTER_ADDR to a name or an address that all ranks can look up"
                ) from None
        time.sleep(min(1.0, timeout_s))


def check_identical(facts: Mapping[str, Any], group: "dist.ProcessGroup") -> None:
    """Raise an `InputError` on all ranks, with the names of the `facts` in which ranks differ; a collective."""
    from dlrm_overlap.comm.every_rank import gathered

    first, *others = gathered(dict(facts), group)
    for rank, theirs in enumerate(others, 1):
        keys = sorted(key for key in theirs.keys() | first if theirs.get(key) != first.get(key))
        if keys:
            found = [f"{key} is {_shown(theirs.get(key))}, not {_shown(first.get(key))}" for key in keys]
            raise InputError(
                f"rank {rank} differs from rank 0: {', '.join(found)}; start all ranks of a run by one command, with "
                f"the same files on every machine"
            )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}.."


def watch_ranks(world: World, timeout_s: float, progress: Progress) -> Watch | None:
    """Start to watch this thread's progress and the other ranks' progress; return None if there is one rank."""
    if world.world_size == 1:
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue] # the original may be in a wait
    return Watch(store, world.rank, world.world_size, timeout_s, progress)


def shutdown() -> None:
    """Destroy the process group and finalize MPI, unless an exception propagates: both may wait for failed ranks."""
    if sys.exc_info()[0] is not None:
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
        # If something still refers to the group, gloo's threads live on. The last collective's thread takes the GIL to
        # release its tensors, and would abort the process if the interpreter ended first.
        time.sleep(_RELEASE_S)
    finalise_mpi()


def finalise_mpi() -> None:
    """Finalize MPI if it runs; a collective. mpirun considers a rank that ends without it failed."""
    if mpi := _running_mpi():
        mpi.Finalize()


def abandon(code: int) -> None:
    """Have MPI, if it runs, abort all ranks."""
    if mpi := _running_mpi():
        mpi.COMM_WORLD.Abort(code)


def _running_mpi() -> Any:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi and mpi.Is_initialized() and not mpi.Is_finalized() else None
