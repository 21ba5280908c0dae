"""Finds collectives that a user's model calls itself, as SyncBatchNorm does."""

import sys
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")  # operators of c10d that only return a result


class ModelCollectives(TorchDispatchMode):
    """A context that finds collectives which a model calls itself, in its forward or backward.

    Collectives of NCCL crashed processes when they were captured together with our kernels (torch 2.11).
    """

    called = ""
    """the last collective and its caller, such as "allgather at two_tower.py:49"; empty if there was none"""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: with False, torch.compile would compile nothing in this context."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func.namespace in ("c10d", "_c10d_functional")
            and func._opname not in _NO_COLLECTIVES
            and (caller := _caller())
        ):
            self.called = f"{func._opname.strip('_')} at {caller.f_code.co_filename}:{caller.f_lineno}"
        return func(*args, **(kwargs or {}))


def _caller() -> FrameType | None:
    """Return the frame that called a collective; None if this package or TorchRec called it."""
    frame, through = sys._getframe(2), set[str]()
    while frame.f_back is not None and _package(frame) in ("torch", "torchrec"):
        through.add(_package(frame))
        frame = frame.f_back
    # In autograd's thread for a GPU there is no caller. TorchRec's collectives there are called by `TorchRecTables`.
    in_backward = _package(frame) == "torch" and "torchrec" in through
    return None if in_backward or _package(frame) == __name__.partition(".")[0] else frame


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
