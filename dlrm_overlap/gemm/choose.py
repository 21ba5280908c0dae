"""Which way suits a product: what was measured on this machine, or else a roofline.

The file of measured choices is written by `tuner.tune`, and read here once for a group and device; a training step
never measures anything. It is JSON, one entry a problem:

    {"all_gather M 32768 N 1024 K 4096 torch.bfloat16": {"way": "copies", "parts": 4, "us": {"copies/4": 575, ..}}}
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dlrm_overlap.config import InputError
from dlrm_overlap.gemm.ways import Problem

# Rates of H200s, four of them over NVLink (docs/results/collectives.md for the links').
_PRODUCT_FLOP_PER_US, _MEMORY_BYTES_PER_US = 780e6, 4.2e6
_LINK_BYTES_PER_US, _NCCL_BYTES_PER_US, _NCCL_US = 385e3, 300e3, 20.0
_CALL_US, _PART_US = 15.0, 3.0  # to begin and end a call; each part's own


class Choice(NamedTuple):
    """A way, and into how many parts it cuts a rank's rows."""

    way: str
    parts: int = 1

    def __str__(self) -> str:
        """Return it as the operators' argument `way` takes it."""
        return f"{self.way}/{self.parts}"


def key(problem: Problem) -> str:
    """Return what the file calls a problem: bias and activation cost every way the same."""
    return f"{problem.operator} M {problem.rows} N {problem.columns} K {problem.inner} {problem.dtype}"


def tuned_file(device: torch.device, world_size: int) -> Path:
    """Return where the choices of machines like this one are kept, by the GPU's name and the number of ranks."""
    name = re.sub(r"\W+", "-", torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"
    return Path.home() / ".cache" / "dlrm_overlap" / f"gemm-{name}-{world_size}.json"


def read_tuned(path: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of a file of choices; none if there is no such file.

    Raises:
        InputError: if it cannot be read.
    """
    try:
        entries = json.loads(path.read_text())
        for entry in entries.values():
            Choice(str(entry["way"]), int(entry["parts"]))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path}: {error!r}, but it must hold choices of ways; remove it, and tune again") from None
    return entries


def choose(
    problem: Problem, world_size: int, candidates: Iterable[Choice], entries: Mapping[str, Mapping[str, Any]]
) -> Choice:
    """Return the candidate that was measured to be the fastest, or, without an entry, the one predicted to be.

    Args:
        problem: what is to be run.
        world_size: ranks.
        candidates: what can run it, serial among them.
        entries: from `read_tuned`.
    """
    able = list(candidates)
    if entry := entries.get(key(problem)):
        chosen = Choice(entry["way"], entry["parts"])
        if chosen in able:
            return chosen
    return min(able, key=lambda choice: predicted_us(problem, world_size, choice))


def predicted_us(problem: Problem, world_size: int, choice: Choice) -> float:
    """Return how long a call takes by a simple roofline.

    Serial: the product, then the collective. Otherwise the longer of both, and what nothing hides: where links bound,
    the product of one part, and for a reduce-scatter the sum of one; where the product does, the whole sum.

    Example: 4 ranks, an all-gather of 32768 rows of 4096 bfloat16: 201 MB arrive, 523 us at 385 GB/s. The product with
    N 1024 takes 352 us. Serial: 352 + 20 + 671 = 1043 us. In 4 parts: 523 + 352 / 16 + 15 + 8 x 3 = 584 us.
    """
    travelling = problem.columns if problem.operator == "reduce_scatter" else problem.inner
    elements = problem.rows * (problem.inner + problem.columns) + problem.inner * problem.columns
    product = max(
        2.0 * problem.rows * problem.inner * problem.columns / _PRODUCT_FLOP_PER_US,
        elements * problem.dtype.itemsize / _MEMORY_BYTES_PER_US,
    )
    sent = (world_size - 1) / world_size * problem.rows * travelling * problem.dtype.itemsize
    nccl = _NCCL_US + sent / _NCCL_BYTES_PER_US
    if choice.way == "serial":
        return product + nccl
    pieces = max(1, choice.parts)
    products = world_size + pieces if choice.parts else world_size.bit_length()
    part, overhead = product / world_size / pieces, _CALL_US + _PART_US * products
    if choice.way == "chunks":  # NCCL's kernels hold multiprocessors
        return max(product, nccl) + min(product, nccl) / pieces + overhead + pieces * _NCCL_US
    link = sent / _LINK_BYTES_PER_US
    total = max(product, link + part) + overhead
    if problem.operator == "reduce_scatter":
        summed = problem.rows * problem.columns * problem.dtype.itemsize * (1 + 1 / world_size) / _MEMORY_BYTES_PER_US
        total += summed if product > link else summed / pieces
    return total
