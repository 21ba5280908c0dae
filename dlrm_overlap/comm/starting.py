"""A start that needs all ranks, of a library that waits for them without a bound: what keeps one rank is told to all.

Each rank makes the start in a thread, which adds to a count in the ranks' store when it is through, and writes there
what has failed. The other ranks' threads then wait for it within the library, for ever. Rank 0 looks at the count and
at the failure, and writes the verdict, which all take: so they go on alike, with the library or without it, whatever
the moment.

The store answers one rank after the other, so all ranks together look at the verdict `_LOOKS_PER_S` times a second at
most. They look, instead of letting the store answer when there is one, since their thread needs the store meanwhile.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from dlrm_overlap.config import InputError, in_one_line

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

_POLL_S = 0.02
_LOOKS_PER_S = 1000
_SLACK_S = 5.0  # for the verdict to come, once it was due
_ANSWER = timedelta(seconds=_SLACK_S)  # of a store that has what is asked for


def start_together(
    start: Callable[[], str], name: str, store: "Store", rank: int, world_size: int, timeout_s: float
) -> str:
    """Start on all ranks and return an empty string, or what kept a rank, alike on all of them; a collective.

    The thread of a start that never returns is left behind, where it waits.

    Args:
        start: returns an empty string, or why this rank cannot; so is the text of an exception taken.
        name: of what is started, for people.
        store: of these ranks, with no key that an earlier call has left.
        rank: this one.
        world_size: number of ranks, W.
        timeout_s: bound for all of it.

    Raises:
        InputError: if rank 0 gives no verdict in time: it is stopped or gone.
    """

    def run() -> None:
        try:
            told = start()
        except Exception as error:
            told = f"{name} does not start ({in_one_line(error):.200})"
        if told:
            store.set("failed", f"{told} (rank {rank})")
            return
        store.set(f"rank_{rank}", "started")
        store.add("started", 1)

    threading.Thread(target=run, name=f"start of {name}", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    try:
        if rank == 0:
            verdict = _judge(store, name, world_size, deadline, timeout_s)
            store.set("verdict", verdict or "started")
            return verdict
        while not store.check(["verdict"]) and time.monotonic() < deadline + _SLACK_S:
            time.sleep(max(_POLL_S, world_size / _LOOKS_PER_S))
        store.wait(["verdict"], _ANSWER)
        verdict = store.get("verdict").decode()
    except RuntimeError:  # of torch's kinds; the store's server went with rank 0, or has nothing
        raise InputError(
            f"{name}: rank 0 does not say within {timeout_s:g} s whether all ranks have started it; see that rank's log"
        ) from None
    return "" if verdict == "started" else verdict


def _judge(store: "Store", name: str, world_size: int, deadline: float, timeout_s: float) -> str:
    """Return what a rank that fails has written; empty if all have started, or which have not in time."""
    while store.add("started", 0) < world_size:
        if store.check(["failed"]):
            return store.get("failed").decode()
        if time.monotonic() > deadline:
            silent = [rank for rank in range(world_size) if not store.check([f"rank_{rank}"])]
            more = f" and {len(silent) - 1} more" if silent[1:] else ""
            return f"{name} has not started within {timeout_s:g} s on rank {silent[0]}{more}" if silent else ""
        time.sleep(_POLL_S)
    return ""
