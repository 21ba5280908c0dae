"""Computations that run beside a communication and have nothing to do with it: products, lookups, optimizer passes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import nn

from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.optimizer import FlatOptimizer

_ADAGRAD_BYTES = 5 * 4 + 2  # an element: weight, gradient and state are read, weight, state and bf16 shadow written
_ID_BYTES = 8
_GEMMS = {
    "cuda": {
        "gemm_8192": (8192, 8192, 8192),
        "gemm_4096": (4096, 4096, 4096),
        "gemm_dlrm_wide": (8192, 3456, 1024),
        "gemm_dlrm": (16384, 1024, 1024),
        "gemm_thin": (16, 16384, 16384),
    },
    "cpu": {"gemm": (256, 256, 256)},
}
_LOOKUPS = {"cuda": (8, 1_000_000, 128, 4096, 32), "cpu": (2, 1000, 16, 64, 4)}
_PARAMETERS = {"cuda": 16 << 20, "cpu": 64 << 10}


@dataclass(frozen=True)
class Computation:
    """Kernels of one call, and their least work."""

    name: str
    kind: str
    """gemm | lookup | elementwise"""
    shape: str
    """for the reader of a row"""
    flop: float
    """of matrix products in bf16 in a call; 0 where there are none"""
    hbm_bytes: float
    """that a call reads and writes, each operand once"""
    call: Callable[[], object]
    """issues a call on the current stream"""


def make_computations(device: torch.device) -> dict[str, Computation]:
    """Return the computations by name: those of a GPU, or toys of the same kinds for a CPU."""
    made = [make_product(name, *shape, device) for name, shape in _GEMMS[device.type].items()]
    made += [_lookup(*_LOOKUPS[device.type], device), _optimizer(_PARAMETERS[device.type], device)]
    return {computation.name: computation for computation in made}


def make_product(name: str, rows: int, inner: int, columns: int, device: torch.device) -> Computation:
    """Return the product [rows, inner] x [inner, columns] in bf16."""
    generator = torch.Generator(device).manual_seed(0)
    make = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    left, right = make(rows, inner), make(inner, columns)
    out = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
    hbm_bytes = 2 * (rows * inner + inner * columns + rows * columns)
    call = partial(torch.mm, left, right, out=out)
    return Computation(name, "gemm", f"{rows} x {inner} x {columns}", 2.0 * rows * inner * columns, hbm_bytes, call)


def _lookup(tables: int, rows: int, dim: int, bags: int, hot: int, device: torch.device) -> Computation:
    """Return FBGEMM's lookup of `bags` bags of `hot` ids, drawn evenly, in each table; rows are float32."""
    location = EmbeddingLocation.DEVICE if device.type == "cuda" else EmbeddingLocation.HOST
    kind = ComputeDevice.CUDA if device.type == "cuda" else ComputeDevice.CPU
    lookup = SplitTableBatchedEmbeddingBagsCodegen([(rows, dim, location, kind)] * tables, device=device)
    lookup.init_embedding_weights_uniform(-1.0, 1.0)
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(rows, (tables * bags * hot,), generator=generator, device=device)
    offsets = torch.arange(0, ids.numel() + 1, hot, device=device)
    hbm_bytes = ids.numel() * (4 * dim + _ID_BYTES) + offsets.numel() * _ID_BYTES + tables * bags * dim * 4
    shape = f"{tables} tables x {rows} x {dim}, {bags} bags of {hot}"
    return Computation("lookup", "lookup", shape, 0.0, hbm_bytes, partial(lookup, ids, offsets))


def _optimizer(elements: int, device: torch.device) -> Computation:
    """Return the dense optimizer's pass: Adagrad, with a bf16 shadow, over one flat parameter."""
    flat = FlatParameters({"weight": nn.Parameter(torch.zeros(elements, device=device))})
    optimizer = FlatOptimizer(flat, "adagrad", lr=0.01, shadow_dtype=torch.bfloat16)
    return Computation(
        "optimizer", "elementwise", f"{elements} parameters", 0.0, elements * _ADAGRAD_BYTES, optimizer.step
    )
