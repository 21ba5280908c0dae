"""Functions that `torch.compile` leaves as they are."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def uncompiled(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Keep a function out of compiled graphs: it does what no graph of tensors holds, and must do it in every step."""
    disabled = torch.compiler.disable(function)

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        # Asked for first, since calling a disabled function takes half a microsecond more.
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)  # type: ignore[return-value]

    return run
