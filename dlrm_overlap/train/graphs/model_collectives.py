"""Whether a user's model calls collectives itself, such as those of SyncBatchNorm or of negatives from all ranks."""

import sys
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_NONE = ("wait_tensor", "_wrap_tensor_autograd")  # operators that only return what a collective gave


class ModelCollectives(TorchDispatchMode):
    """Within it, the collectives that a model calls itself, in its forward or its backward, are found.

    No captured step holds them: NCCL's, captured beside our kernels, have ended processes (torch 2.11).
    """

    called = ""
    """the last one, and where it was called, as in "allgather at two_tower.py:49"; empty if there was none"""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: within other modes torch.compile compiles nothing."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in _NONE and (caller := _caller()):
            self.called = f"{func._opname.strip('_')} at {caller.f_code.co_filename}:{caller.f_lineno}"
        return func(*args, **(kwargs or {}))


def _caller() -> FrameType | None:
    """Return the frame of the model that has called a collective, or None if it is this package's, or TorchRec's."""
    frame, through = sys._getframe(2), set[str]()
    while frame.f_back is not None and _package(frame) in ("torch", "torchrec"):
        through.add(_package(frame))
        frame = frame.f_back
    # On a GPU autograd's own thread has no caller: TorchRec's collectives there are those of `TorchRecTables`.
    in_backward = _package(frame) == "torch" and "torchrec" in through
    return None if in_backward or _package(frame) == __name__.partition(".")[0] else frame


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
