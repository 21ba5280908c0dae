"""This rank's device, and its process group: made from the `World` that a launcher has given, destroyed at the end."""

import contextlib
import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.environment import code_digest
from dlrm_overlap.launching.launcher import LOOPBACKS, World
from dlrm_overlap.launching.watch import Progress, Watch

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

LAST_RESORT, _LAST_RESORT_S = 10.0, 5.0  # a collective gives up after so many wait_timeout_s, and so many seconds more
_LOOPBACK_INTERFACE = "lo"
_READ_S = 5.0  # for the other ranks to read why the run is refused
_SHOWN = 60  # characters of a value
_LET_GO_S = 0.05  # far more than gloo's threads need to let go of the last collective's tensors


def find_device(kind: str, local_rank: int, source: str = "nproc", local_ranks: int = 1) -> "torch.device":
    """Return the device of a rank: the CPU, or the GPU of its local rank.

    A rank that sees a single GPU takes that one where its launcher (Slurm, MPI, a script) may have chosen it.

    Args:
        kind: train.device; auto takes the GPUs if there are any.
        local_rank: the rank's number among those of this host.
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


def init_process_group(
    world: World,
    device: "torch.device",
    timeout_s: float = 600.0,
    wait_timeout_s: float = 600.0,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Make the default process group: gloo for CPU tensors, and NCCL, connected at once, where `device` is a GPU.

    Before ranks connect they compare `facts`, their number and this package's code. Sets the current CUDA
    device, and makes a stream of priority -1 the current one: the default stream has the lowest priority there is, so
    no kernel could give way to it. A world of one needs no address. Where the ranks meet at a loopback address, all
    that listens does so there.

    Args:
        world: the rank, and where all ranks meet.
        device: of this rank.
        timeout_s: bounds the rendezvous: ranks may start at very different times.
        wait_timeout_s: embedding.wait_timeout_s. It bounds every collective, with a margin in which the `Watch`, which
            knows the rank and the step, or an exchange's own wait speaks first.
        facts: key -> value, which JSON can hold, of all that must be the same on all ranks.

    Raises:
        InputError: if the ranks do not meet; on all ranks, with the keys, if a rank's facts are not those of rank 0.
    """
    import torch
    import torch.distributed as dist

    backend, device_id = "gloo", None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # nor may collectives wait for kernels that give way
        backend, device_id = "cpu:gloo,cuda:nccl", device
    timeout = timedelta(seconds=LAST_RESORT * wait_timeout_s + _LAST_RESORT_S)
    with _naming_the_cure(world, timeout_s):
        if world.world_size == 1:
            store: Store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        else:
            _choose_interface(world)
            store = _open_store(world, timeout_s)
            _compare(store, world, dict(facts or {}))
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
            device_id=device_id,
        )


def _compare(store: "Store", world: World, facts: dict[str, Any]) -> None:
    """Compare this rank's facts with those of rank 0, by the store alone: nothing else connects ranks of two runs.

    Rank 0 writes its facts, each other rank where its own differ, and rank 0 the verdict that all ranks read.

    Raises:
        InputError: on all ranks of the run, if one differs; and on a second process that is the same rank.
    """
    facts |= {"WORLD_SIZE": world.world_size, "code": code_digest()}
    rank, others = world.rank, range(1, world.world_size)
    if store.add(f"meet/came/{rank}", 1) > 1:
        raise InputError(
            f"{world.source} launch: another process is rank {rank} at {world.master_addr}:{world.master_port} "
            f"already; give each run a MASTER_PORT of its own, and each rank a number"
        )
    if rank:
        expected = json.loads(store.get("meet/facts"))
        keys = sorted(key for key in facts.keys() | expected if facts.get(key) != expected.get(key))
        found = [f"{key} is {_shown(facts.get(key))}, not {_shown(expected.get(key))}" for key in keys]
        differs = f"rank {rank} (on {socket.gethostname()}) differs from rank 0: {', '.join(found)}" if found else ""
        store.set(f"meet/differs/{rank}", differs)
        if differs and rank >= expected["WORLD_SIZE"]:
            raise _unlike(differs)  # rank 0 does not ask for this rank
    else:
        store.set("meet/facts", json.dumps(facts))
        unlike = [each for other in others if (each := store.get(f"meet/differs/{other}").decode())]
        more = f" ({len(unlike)} ranks do)" if len(unlike) > 1 else ""
        store.set("meet/verdict", unlike[0] + more if unlike else "")
    verdict = store.get("meet/verdict").decode()
    if verdict and rank:
        store.add("meet/read", 1)
    elif verdict:  # the store ends with rank 0
        deadline = time.monotonic() + _READ_S
        while store.add("meet/read", 0) < len(others) and time.monotonic() < deadline:
            time.sleep(_READ_S / 100)
    if verdict:
        raise _unlike(verdict)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}.."


def _unlike(differs: str) -> InputError:
    return InputError(f"{differs}; start all ranks of a run by one command, with the same files on every host")


def _choose_interface(world: World) -> None:
    """Have gloo listen where this host reaches rank 0, and gloo and NCCL on loopback alone if the ranks meet there."""
    if _is_loopback(world):
        if any(name == _LOOPBACK_INTERFACE for _, name in socket.if_nameindex()):
            for library in ("GLOO", "NCCL"):  # which would take the interface of the host's name
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", _LOOPBACK_INTERFACE)
    elif interface := _interface_to(world):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


@contextlib.contextmanager
def _naming_the_cure(world: World, timeout_s: float) -> Iterator[None]:
    """Raise an InputError that names address and cure, where ranks do not meet or cannot connect."""
    import torch.distributed as dist

    address = f"[{world.master_addr}]" if ":" in world.master_addr else world.master_addr
    try:
        yield
    except (OSError, dist.DistNetworkError, dist.DistStoreError) as error:
        if "address already in use" in str(error).lower():
            raise InputError(
                f"{world.source} launch: port {world.master_port} of {address} is in use by another program; set "
                f"MASTER_PORT to a free one on all ranks"
            ) from None
        raise InputError(
            f"{world.source} launch: no rendezvous of {world.world_size} ranks at {address}:{world.master_port} within "
            f"{timeout_s:g} s ({str(error).splitlines()[0]}); start all ranks, and set MASTER_ADDR and MASTER_PORT to "
            f"a host and a free port that all reach"
        ) from None
    except RuntimeError as error:
        if not any(text in str(error) for text in ("Unable to find address for", "connectFullMesh")):
            raise
        named = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
        raise InputError(
            f"{world.source} launch: gloo cannot connect the ranks ({str(error).splitlines()[0]}); GLOO_SOCKET_IFNAME "
            f"is {named}: set it on each host to the interface by which the others reach it, of "
            f"{', '.join(name for _, name in socket.if_nameindex())} here"
        ) from None


def watch_ranks(world: World, timeout_s: float, progress: Progress) -> Watch | None:
    """Watch this thread's progress together with the other ranks; None in a world of one. The process group exists."""
    if world.world_size == 1:
        return None
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore(world.master_addr, world.master_port, is_master=False, wait_for_workers=False)
    return Watch(_of_this_start(store), world.rank, world.world_size, timeout_s, progress)


def _open_store(world: World, timeout_s: float) -> "Store":
    """Return the store of all ranks, which rank 0 serves unless torchrun's agent does already."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    serves, listener = world.rank == 0 and not _is_agents(), None
    if serves and _is_loopback(world):
        family, _, _, _, address = _addresses(world)[0]
        listener = socket.create_server(address[:2], family=family, backlog=1024).detach()  # the store takes it over
    # Ranks wait for each other in `_compare`, where those of another number of ranks are named.
    store = TCPStore(
        world.master_addr,
        world.master_port,
        world.world_size,
        is_master=serves,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    return _of_this_start(store)


def _is_agents() -> bool:
    """Return whether torchrun's agent serves the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _of_this_start(store: "Store") -> "Store":
    """Return a view of `store` without the keys of ranks before a restart, if an agent serves it."""
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    return PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store) if _is_agents() else store


def _addresses(world: World) -> list[tuple[Any, ...]]:
    return socket.getaddrinfo(world.master_addr, world.master_port, type=socket.SOCK_STREAM)


def _is_loopback(world: World) -> bool:
    """Return whether the ranks meet on loopback: not if one of several hosts alone has its own name there."""
    if world.local_world_size < world.world_size and world.master_addr not in LOOPBACKS:
        return False
    return all(ipaddress.ip_address(found[4][0]).is_loopback for found in _addresses(world))


def _interface_to(world: World) -> str | None:
    """Return the interface by which this host reaches rank 0's, or None where none but loopback's is found."""
    import psutil

    family, _, _, _, address = _addresses(world)[0]
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # chooses a way, and sends nothing
        here = probe.getsockname()[0].partition("%")[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.family == family and each.address.partition("%")[0] == here for each in addresses):
                return name if name != _LOOPBACK_INTERFACE else None
    return None


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
