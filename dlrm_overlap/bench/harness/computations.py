"""Computations that run beside a communication and have nothing to do with it: products, lookups, optimizer passes."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

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


class Computation(NamedTuple):
    """Kernels of one call, which `call` issues on the current stream."""

    call: Callable[[], object]
    hbm_bytes: float
    """that a call reads and writes, each operand once"""


def make_computations(device: torch.device) -> dict[str, Computation]:
    """Return the computations by name: those of a GPU, or toys of the same kinds for a CPU."""
    made = {name: make_product(*shape, device) for name, shape in _GEMMS[device.type].items()}
    made["lookup"] = _lookup(*_LOOKUPS[device.type], device)
    # The dense optimizer's pass: Adagrad, with a bf16 shadow, over one flat parameter.
    elements = _PARAMETERS[device.type]
    flat = FlatParameters({"weight": nn.Parameter(torch.zeros(elements, device=device))})
    optimizer = FlatOptimizer(flat, "adagrad", lr=0.01, shadow_dtype=torch.bfloat16)
    return made | {"optimizer": Computation(optimizer.step, elements * _ADAGRAD_BYTES)}


def make_product(rows: int, inner: int, columns: int, device: torch.device) -> Computation:
    """Return the product [rows, inner] x [inner, columns] in bf16."""
    generator = torch.Generator(device).manual_seed(0)
    make = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    left, right = make(rows, inner), make(inner, columns)
    out = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
    return Computation(partial(torch.mm, left, right, out=out), 2 * (left.numel() + right.numel() + out.numel()))


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
    return Computation(partial(lookup, ids, offsets), hbm_bytes)
