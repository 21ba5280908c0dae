"""How many multiprocessors cuBLAS's products take."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def limited_products(multiprocessors: int | None) -> Iterator[None]:
    """In the context, let this thread's cuBLAS products on the current GPU use about `multiprocessors`; None: all.

    cuBLAS may then choose another kernel, whose sums are rounded differently. A captured product keeps its choice.

    Raises:
        RuntimeError: if cuBLAS refuses the number.
    """
    if multiprocessors is None:
        yield
        return
    _set_target(multiprocessors)
    try:
        yield
    finally:
        _set_target(0)  # all


def _set_target(multiprocessors: int) -> None:
    version = torch.version.cuda
    assert version is not None, "this build of torch has no cuBLAS"
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    # torch has loaded this library.
    status = ctypes.CDLL(f"libcublas.so.{version.split('.')[0]}").cublasSetSmCountTarget(handle, multiprocessors)
    if status != 0:
        raise RuntimeError(
            f"multiprocessors: cuBLAS refused {multiprocessors} with status {status}; give 1 up to the GPU's number"
        )
