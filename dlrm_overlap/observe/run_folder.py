"""The folder of a run, whose lock rank 0 holds.

Ranks may see other folders of the same name, as where `log.dir` is on each host's own disk. So rank 0 alone reads the
files that decide the course of the run, and broadcasts.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.files import hold_folder, make_folder

T = TypeVar("T")


def from_rank_0(find: Callable[[], T]) -> T:
    """Call `find` on rank 0, and return its result on all ranks; a collective.

    Raises:
        InputError: on all ranks, if `find` raises one on rank 0. Any other error is raised on rank 0 as it is, and as a
            RuntimeError with its text on the others.
    """
    answer: list[Any] = [None, None, False]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = find()
        except Exception as raised:
            error = raised
            answer[1:] = str(raised), isinstance(raised, InputError)
    dist.broadcast_object_list(answer, 0)
    found, text, is_users = answer
    if error is not None:
        raise error
    if text is not None:
        raise InputError(text) if is_users else RuntimeError(f"rank 0: {text}")
    return found


@contextmanager
def hold_run_folder(folder: Path) -> Iterator[None]:
    """Have rank 0 make `folder` and hold its lock while the block runs; a collective at the beginning.

    Raises:
        InputError: on all ranks, if the folder cannot be made or written to, or another process that is alive holds
            the lock.
    """

    def hold() -> None:
        make_folder(folder)
        try:
            stack.enter_context(hold_folder(folder, "log.dir"))
        except OSError as error:
            raise InputError(
                f"log.dir: {folder} cannot be written to ({error.strerror}); give a folder that is yours"
            ) from None

    with ExitStack() as stack:
        from_rank_0(hold)
        yield
