"""Finds the fastest way for a problem by measuring all candidates, and keeps it in a file of this machine.

    products = parallel_products(None, device)
    tune(products, [Problem("all_gather", 32768, 1024, 4096, torch.bfloat16, False, "none", keep=True)])

Each candidate is captured in a CUDA graph, as a training step is, and candidates are replayed in turns, see
`comm.turns`: neither the host nor a rank that comes later is counted. A candidate's time is the greatest of the ranks'
medians.
"""

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.comm.every_rank import on_every_rank
from dlrm_overlap.comm.turns import Turns
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.gemm.choose import Choice, check_own, key, read_tuned
from dlrm_overlap.dense.gemm.linear import Layer
from dlrm_overlap.dense.gemm.products import ParallelProducts
from dlrm_overlap.dense.gemm.ways import Problem
from dlrm_overlap.launching.files import hold_folder, replacing

log = logging.getLogger("dlrm_overlap")

_ROUNDS, _LEAST_GAIN = 12, 1.01


def tune(
    products: ParallelProducts, problems: Iterable[Problem], path: Path | None = None, rounds: int = _ROUNDS
) -> dict[str, dict[str, float]]:
    """Measure every way of each problem, keep the fastest in the file, and let `auto` take it from now on.

    All ranks call this alike, when nothing else runs on their GPUs, not within a capture. What has been found is in the
    file before the next problem is measured, so who is killed loses one. A way for whose memory there is no room is
    left out, and the log says so.

    Args:
        products: of a group and a device.
        problems: what to measure.
        path: the file; `products.tuned_file` if None. Entries of other problems stay, also those that another process
            writes meanwhile.
        rounds: turns of all candidates.

    Returns:
        Problem, as the file names it -> candidate -> us, the fastest first.

    Raises:
        InputError: on every rank, if a file cannot be read or written.
    """
    path = path or products.tuned_file
    found: dict[str, dict[str, float]] = {}
    for problem in problems:
        times = measure(products, problem, rounds)
        name = key(problem)
        found[name] = dict(sorted(times.items(), key=lambda item: item[1]))
        _keep_on_rank_0(products.group, path, name, found[name])
    products.use_tuned(path)
    return found


def entry(times: dict[str, float]) -> dict[str, Any]:
    """Return what the file keeps of a problem: serial, unless another way gains a hundredth.

    Example: serial/1 100 us, copies/4 99.5 us: serial, 1 part.
    """
    fastest = min(times, key=lambda name: times[name])
    if times.get("serial/1", float("inf")) < times[fastest] * _LEAST_GAIN:
        fastest = "serial/1"
    way, _, parts = fastest.partition("/")
    return {"way": way, "parts": int(parts), "us": {name: round(us, 1) for name, us in times.items()}}


def _keep_on_rank_0(group: dist.ProcessGroup, path: Path, name: str, times: dict[str, float]) -> None:
    on_every_rank(lambda: _keep(path, name, times) if group.rank() == 0 else None, group)


def _keep(path: Path, name: str, times: dict[str, float]) -> None:
    """Write the entry of a problem to the file, whole or not at all, while no other process does."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own(path)
        with hold_folder(path.parent, "the file of choices"):
            entries = read_tuned(path) | {name: entry(times)}
            with replacing(path) as stream:
                stream.write((json.dumps(entries, indent=1) + "\n").encode())
    except OSError as error:
        raise InputError(f"{path}: {error}; tune with another path") from None


def measure(products: ParallelProducts, problem: Problem, rounds: int = _ROUNDS) -> dict[str, float]:
    """Return candidate -> us of one call; the median of `rounds` turns, the greatest of the ranks.

    The operands are random numbers, since a GPU multiplies zeros faster.

    Raises:
        InputError: on every rank, if not even serial can run the problem.
    """
    stream = torch.cuda.Stream(products.device)  # the default one cannot be captured
    stream.wait_stream(torch.cuda.current_stream(products.device))
    with torch.cuda.stream(stream):
        times = _measured(products, problem, rounds)
    torch.cuda.current_stream(products.device).wait_stream(stream)
    return times


def _measured(products: ParallelProducts, problem: Problem, rounds: int) -> dict[str, float]:
    device, ranks = products.device, products.group.size()
    generator = torch.Generator(device).manual_seed(products.group.rank())

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(problem.dtype)

    gathers = problem.operator == "all_gather"
    x = drawn(problem.rows // ranks if gathers else problem.rows, problem.inner)
    weight = drawn(problem.columns, problem.inner)
    calls: dict[str, Callable[[], None]] = {}
    memory = torch.cuda.graph_pool_handle()  # nobody reads what a call returns, so all calls share it
    for choice in products.candidates(problem):
        try:
            calls[str(choice)] = _captured(_call(products, problem, choice, x, weight), device, memory)
        except InputError as error:  # on every rank alike
            if choice.way == "serial":
                raise
            log.warning("%s: %s is not measured, since %s", problem, choice, error)
    timed = Turns(products.group, device).time(list(calls.values()), rounds)
    return {name: each.median_ms * 1e3 for name, each in zip(calls, timed, strict=True)}


def _call(
    products: ParallelProducts, problem: Problem, choice: Choice, x: torch.Tensor, weight: torch.Tensor
) -> Callable[[], None]:
    way = str(choice)
    if problem.operator == "all_gather":
        return lambda: (products.all_gather_matmul(x, Layer(weight), way, problem.keep), None)[1]
    return lambda: (products.begin_reduce_scatter(x, Layer(weight), way)(), None)[1]


def _captured(call: Callable[[], None], device: torch.device, memory: Any) -> Callable[[], None]:
    for _ in range(2):
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream(device)
    with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
        call()
    return graph.replay
