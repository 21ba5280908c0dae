"""The folder of a run. Only rank 0 reads it for decisions, since machines may have different folders of one name."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from dlrm_overlap.comm.every_rank import on_every_rank
from dlrm_overlap.config import InputError
from dlrm_overlap.launching.files import hold_folder, make_folder, remove_temporaries

T = TypeVar("T")


def from_rank_0(find: Callable[[], T]) -> T:
    """Call `find` on rank 0 and return its result on all ranks; a collective.

    If `find` raises an InputError, all ranks raise it. If it raises another error, the other ranks raise a PeerError.
    """
    group = dist.group.WORLD
    assert group is not None
    answer = [on_every_rank(lambda: find() if dist.get_rank() == 0 else None, group)]
    dist.broadcast_object_list(answer, 0)
    return cast("T", answer[0])


@contextmanager
def hold_run_folder(folder: Path) -> Iterator[None]:
    """On rank 0, create `folder`, hold its lock in the context, and remove a killed run's temporary files.

    Entering is a collective. It raises an InputError on all ranks if the folder is not writable, or if another process
    holds its lock.
    """

    def hold() -> None:
        make_folder(folder)
        try:
            if stack.enter_context(hold_folder(folder, "log.dir")):
                remove_temporaries(folder)
        except OSError as error:
            raise InputError(
                f"log.dir: {error.filename or folder} cannot be written to ({error.strerror}); give a writable folder, "
                f"or remove this file if another user's run has left it"
            ) from None

    with ExitStack() as stack:
        from_rank_0(hold)
        yield
