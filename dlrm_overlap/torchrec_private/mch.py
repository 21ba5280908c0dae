"""The state of TorchRec's MCH module, for steps that record and map ids without the host."""

from collections.abc import Callable

import torch
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

_POLICIES = DistanceLFU_EvictionPolicy, LFU_EvictionPolicy, LRU_EvictionPolicy


class MchMap:
    """The ids and the history of a module, which has the rows from `first_row` on of a table."""

    history: torch.Tensor
    """[H + 1] int64: ids of the interval; the last element is for ids that have no room"""
    times: torch.Tensor | None = None
    """[H + 1] int64: steps of the ids, if the policy needs them"""
    now: torch.Tensor
    """[1] int64: training steps taken; unlike `steps`, it goes on if a state is loaded, as in TorchRec"""

    def __init__(self, module: MCHManagedCollisionModule, first_row: int) -> None:
        self._module, self.first_row = module, first_row
        self.is_open = False

    @property
    def ids(self) -> torch.Tensor:
        """[rows] int64, sorted, at a fixed address; the last one is no id."""
        return self._module._mch_sorted_raw_ids

    @property
    def rows(self) -> torch.Tensor:
        """[rows] int64: the rows of `ids`, numbered in the whole table."""
        return self._module._mch_remapped_ids_mapping

    @property
    def steps(self) -> torch.Tensor:
        """[1] int64: training steps taken."""
        return self._module._current_iter_tensor  # type: ignore[return-value]

    @property
    def recorded(self) -> int:
        """Ids in the history that TorchRec has recorded."""
        return self._module._current_history_buffer_offset

    def open_history(self, count: Callable[[], int]) -> None:
        """Make the history if there is none; TorchRec sizes it by the number of ids of the first step."""
        module = self._module
        if module._input_history_buffer_size == -1:
            ids = torch.empty(count(), dtype=torch.int64, device=module.device)
            module._init_history_buffers({"": JaggedTensor(ids, lengths=torch.tensor([ids.numel()]))})
        self.history = _longer(module._history_accumulator)
        module._history_accumulator = self.history[:-1]
        for name, column in module._history_metadata.items():
            self.times = _longer(column)
            module._history_metadata[name] = self.times[:-1]
            setattr(module, f"_history_{name}", self.times[:-1])
        self.now = (
            torch.full_like(self.steps, module._current_iter) if module._current_iter != -1 else self.steps.clone()
        )
        self.is_open = True

    def begin_step(self) -> bool:
        """Count a training step, and return whether it ends an interval."""
        module = self._module
        if module._current_iter == -1:
            module._current_iter = module._last_eviction_iter = int(self.steps)
            self.now.copy_(self.steps)
        module._current_iter += 1
        self.steps.add_(1)
        self.now.add_(1)
        return module._current_iter - module._last_eviction_iter == module._eviction_interval

    def evict(self, recorded: int) -> None:
        """Let the first `recorded` ids of the history get rows, by TorchRec's rules; may wait for the device."""
        module = self._module
        module._current_history_buffer_offset = recorded
        module._coalesce_history()
        module._last_eviction_iter = module._current_iter


def _longer(column: torch.Tensor) -> torch.Tensor:
    return torch.cat([column, column.new_zeros(1)])


def why_host_records(module: MCHManagedCollisionModule) -> str | None:
    """Return why a module's steps need the host, if they do."""
    if module._input_hash_func is not None:
        return "an input_hash_func"
    if type(module._eviction_policy) not in _POLICIES:
        return f"eviction policy {type(module._eviction_policy).__name__}"
    return None
