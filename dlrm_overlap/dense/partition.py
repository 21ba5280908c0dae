"""Multiprocessors that cuBLAS's products leave to what runs beside them."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from dlrm_overlap.config import InputError

LEFT = 16
"""multiprocessors that are left: as products take them in clusters, fewer do not always have room for a kernel"""


def all_but_some(device: torch.device) -> int:
    """Return how many multiprocessors products may take where they leave LEFT."""
    return torch.cuda.get_device_properties(device).multi_processor_count - LEFT


@contextmanager
def products_on(multiprocessors: int | None) -> Iterator[None]:
    """Let cuBLAS's products that this thread issues meanwhile take so many multiprocessors, or all of them if None.

    A product takes one program a multiprocessor, all at once. Where a kernel holds some, the product's last programs
    start when the first end, and it takes twice as long; told of fewer, it is cut for these. On an H200 the gradient of
    three weights of [3456, 512] from 8192 samples takes 121 us alone, 217 beside 11 programs that copy, and 142 on 116
    of 132 multiprocessors beside them. Can be captured. Source: resource partitioning, ConCCL (Agrawal et al., ISPASS).

    Raises:
        InputError: if there is no cuBLAS that takes such a number.
    """
    if multiprocessors is None:
        yield
        return
    _set(multiprocessors)
    try:
        yield
    finally:
        _set(0)  # all


def _set(multiprocessors: int) -> None:
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    status = _library().cublasSetSmCountTarget(handle, ctypes.c_int(multiprocessors))
    if status != 0:
        raise InputError(f"train.overlap: partition, but cuBLAS returned {status} for {multiprocessors}; take stores")


@lru_cache
def _library() -> ctypes.CDLL:
    """Return the cuBLAS that torch has loaded."""
    name = f"libcublas.so.{(torch.version.cuda or '').partition('.')[0]}"
    try:
        library = ctypes.CDLL(name)
        library.cublasSetSmCountTarget  # noqa: B018  it is looked up when it is named
    except (OSError, AttributeError) as error:
        raise InputError(f"train.overlap: partition, but {error}; take stores") from None
    return library
