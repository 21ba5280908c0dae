"""The numbers of the rows' optimizers in device memory, where kernels read them."""

from collections.abc import Sequence

import torch

from dlrm_overlap.embedding.protocol.cache import StepCache
from dlrm_overlap.embedding.protocol.step import UpdateRule


class DeviceRules:
    """Learning rate and epsilon of each fused lookup, [2] float32 on the device.

    An eager step has numbers of its own, made when they change and never overwritten: a step that is under way keeps
    those of its forward. Captured steps read the same memory in every replay. So once `keep_in_place` has been called,
    every step reads numbers that `keep_in_place` overwrites, and it is called before each step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_value = StepCache[tuple[float, float], torch.Tensor]()
        self._in_place: list[tuple[tuple[float, float], torch.Tensor]] = []

    def numbers(self, rules: Sequence[UpdateRule], lookup: int) -> torch.Tensor:
        """Return the numbers of a lookup whose rules are `rules`."""
        if self._in_place:
            return self._in_place[lookup][1]
        value = _value_of(rules[lookup])
        return self._by_value.get(value, self._make, value)

    def keep_in_place(self, rules: Sequence[UpdateRule]) -> None:
        """Overwrite the numbers that differ from `rules`, behind what is issued on the current stream."""
        if not self._in_place:
            self._in_place = [(value, self._make(value)) for value in map(_value_of, rules)]
        for lookup, value in enumerate(map(_value_of, rules)):
            before, numbers = self._in_place[lookup]
            if value != before:
                self._write(numbers, value)
                self._in_place[lookup] = value, numbers

    def _make(self, value: tuple[float, float]) -> torch.Tensor:
        numbers = torch.empty(2, device=self._device)
        self._write(numbers, value)
        return numbers

    @staticmethod
    def _write(numbers: torch.Tensor, value: tuple[float, float]) -> None:
        for place, number in zip(numbers.split(1), value, strict=True):
            place.fill_(number)  # by a kernel: a copy from the host would wait for the stream


def _value_of(rule: UpdateRule) -> tuple[float, float]:
    return rule.lr, rule.arguments.eps
