"""Device functions that put bytes into the memory of a rank of another node and then signal it.

A *heap* is memory of the same size and layout on every rank; an address in this rank's heap also names the same
position in any other's. A *put* copies bytes to a peer's heap, then stores a number at a *signal*, a word of that heap.
`FORM` is `nvshmem`, or `stores` under the interpreter and between GPUs that reach each other.

NVSHMEM's wait, which has no time limit, is called only after the signal has arrived, to make the bytes visible.

Source: arXiv 2305.06942, section 3.2, and Chen et al. 2024, both between nodes by NVSHMEM.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language import core

from dlrm_overlap.kernels.primitives import signal_flag

_SET = tl.constexpr(9)  # NVSHMEM_SIGNAL_SET
AT_LEAST = tl.constexpr(5)  # NVSHMEM_CMP_GE
_WORDS = tl.constexpr(512)  # words of 8 bytes that a program stores at a time


class Network(NamedTuple):
    """How the kernels of one rank reach the heaps of the others."""

    form: str
    """nvshmem | stores"""
    heaps: torch.Tensor
    """[W] int64: address of each rank's heap, a multiple of 16; nvshmem reads only this rank's"""
    rank: int
    library: str | None = None
    """nvshmem: path of libnvshmem_device.bc"""
    prepare: Callable[[int], None] | None = None
    """nvshmem: called with a module's handle before its first launch, to register this rank's heap"""

    def options(self) -> dict[str, Any]:
        if self.library is None:
            return {}
        return {"libraries": (("libnvshmem_device", self.library),), "prepare": self.prepare}


@core.extern
def _put_signal_block(target, source, size_bytes, signal, value, op, peer, _semantic=None):  # type: ignore[no-untyped-def]
    """Call NVSHMEM's put with signal by all threads of the program; it does not wait."""
    kinds = ("int64", "int64", "int64", "int64", "int64", "int32", "int32")
    return core.extern_elementwise(
        "",
        "",
        [target, source, size_bytes, signal, value, op, peer],
        {tuple(core.dtype(kind) for kind in kinds): ("nvshmemx_putmem_signal_nbi_block", core.dtype("int32"))},
        is_pure=False,
        _semantic=_semantic,
    )


@core.extern
def signal_wait(signal, comparison, value, _semantic=None):  # type: ignore[no-untyped-def]
    """Call NVSHMEM's wait for a signal, by each thread."""
    kinds = ("int64", "int32", "int64")
    return core.extern_elementwise(
        "",
        "",
        [signal, comparison, value],
        {tuple(core.dtype(kind) for kind in kinds): ("nvshmem_signal_wait_until", core.dtype("int64"))},
        is_pure=False,
        _semantic=_semantic,
    )


@triton.jit
def put_signal(heaps, rank, peer, source, target, size_bytes, signal, value, FORM: tl.constexpr):
    """Put bytes from this rank's heap into the heap of `peer`, then store `value` at a signal; all threads call it.

    Memory: `source`, `target` and `signal` are int64 addresses in this rank's heap; the latter two name positions in
    the peer's. `source` and `target` are multiples of 16, `size_bytes` int64 of 8; 0 stores only the signal. `source`
    must not change before `peer` has seen the signal.

    Order: a barrier comes first, so the put covers all that the program's threads have stored or acquired. The signal
    is stored after the bytes: a rank that acquires it sees them.
    """
    if FORM == "nvshmem":
        # NVSHMEM's put of a block begins and ends with a barrier.
        _put_signal_block(target, source, size_bytes, signal, value, _SET, peer)
    else:
        tl.debug_barrier()  # the put comes after the stores of all threads
        away = tl.load(heaps + peer) - tl.load(heaps + rank)
        words = size_bytes // 8
        into = (target + away).to(tl.pointer_type(tl.int64))
        out_of = source.to(tl.pointer_type(tl.int64))
        for first in range(0, words, _WORDS):
            at = first + tl.arange(0, _WORDS).to(tl.int64)
            tl.store(into + at, tl.load(out_of + at, mask=at < words, other=0), mask=at < words)
        # A barrier, then a release at system scope: the signal comes after the bytes.
        signal_flag((signal + away).to(tl.pointer_type(tl.int64)), value)
