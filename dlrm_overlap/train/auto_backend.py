"""Chooses a backend for `embedding.backend: auto`: pgas where it works, else torchrec."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from dlrm_overlap.comm.arena import Region, open_arena
from dlrm_overlap.comm.every_rank import faults
from dlrm_overlap.comm.reach import Reach, find_reach
from dlrm_overlap.config import AUTO, EmbeddingConfig, InputError, in_one_line
from dlrm_overlap.embedding.configured_sharders import fused_params_of
from dlrm_overlap.torchrec_private.check import check_private_api
from dlrm_overlap.train.explain import explain

log = logging.getLogger("dlrm_overlap")

Sharders = list[ModuleSharder[Any]]
PlanFor = Callable[[EmbeddingConfig], tuple[Sharders, ShardingPlan]]


def plan_by_backend(
    config: EmbeddingConfig, plan_for: PlanFor, model: nn.Module, group: dist.ProcessGroup, device: torch.device
) -> tuple[EmbeddingConfig, Sharders, ShardingPlan]:
    """Return `config` with the backend in use, and its sharders and plan; the same backend on every rank. A collective.

    Only `auto` is replaced, and rank 0 logs by what and why.

    Args:
        plan_for: returns the sharders and the plan of a backend, and is a collective.
        model: not sharded yet.

    Raises:
        InputError: if `embedding.nodes` does not fit the ranks, whatever backend `auto` would take.
    """
    if config.backend != AUTO:
        return config, *plan_for(config)
    reach = find_reach(group, device, config.nodes)
    reason = why_not_pgas(reach, group, device, is_emulated=config.nodes != AUTO)
    if reason is None:
        chosen = replace(config, backend="pgas")
        sharders, plan = plan_for(chosen)
        reason = why_nothing_is_exchanged(model, plan, chosen)
        if reason is None:
            if group.rank() == 0:
                log.info("backend auto: pgas, which works here: %s", reach.summary())
            return chosen, sharders, plan
    if group.rank() == 0:
        log.warning("backend auto: torchrec, not pgas: %s", reason)
    chosen = replace(config, backend="torchrec")
    return chosen, *plan_for(chosen)


def why_not_pgas(reach: Reach, group: dist.ProcessGroup, device: torch.device, is_emulated: bool) -> str | None:
    """Return why auto does not take pgas on these ranks, or None; not None on every rank or on none. A collective."""
    if not reach.is_one_node and not is_emulated:
        return f"{reach.summary()}, and messages between nodes were tested on emulated nodes only"
    if found := faults(_fault_of_rank(device), group):
        return found[0]
    try:
        open_arena({"trial": Region((1,), torch.int64)}, group, device, reach).close()
    except InputError as error:  # on every rank
        return _without_cure(error)
    return None


def _fault_of_rank(device: torch.device) -> str | None:
    try:
        check_private_api()
    except InputError as error:
        return _without_cure(error)
    return kernel_fault(device) if device.type == "cuda" else None


def _without_cure(error: InputError) -> str:
    return str(error).removeprefix("embedding.backend: ").partition("; ")[0]


def kernel_fault(device: torch.device) -> str | None:
    """Return why a kernel cannot be compiled or run on `device`, such as a missing compiler, or None."""
    try:
        from dlrm_overlap.kernels.flags import Flags, signal_flags  # needs Triton

        flag, zero = (torch.zeros(1, 1, dtype=torch.int64, device=device) for _ in range(2))
        addresses = torch.tensor([flag.data_ptr()], device=device)
        counts = torch.ones(1, dtype=torch.int32, device=device)
        signal_flags(Flags(addresses, zero[0], flag, counts, timeout=1, status=zero[0]), rank=0, slot=0, epoch=1)
        seen = flag.item()
    except Exception as error:  # by Python's imports, Triton, its compilers and CUDA
        return f"kernels do not run on {device} ({type(error).__name__}: {in_one_line(error):.200})"
    return None if seen == 1 else f"a kernel on {device} stored {seen} instead of 1"


def why_nothing_is_exchanged(model: nn.Module, plan: ShardingPlan, config: EmbeddingConfig) -> str | None:
    """Return why `plan` leaves every table of `model`, which is not sharded yet, to TorchRec; None if it does not."""
    tables = explain(model, plan, fused_params=fused_params_of(config)).tables
    if any(table.exchanged for table in tables):
        return None
    return f"all tables would stay with TorchRec: {tables[0].why_not}"
