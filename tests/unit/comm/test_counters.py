"""Numbers that rise by one a step, as kernels find them: in eager steps, captured ones, and after either."""

from collections.abc import Sequence

import torch

from dlrm_overlap.comm.counters import Counters

CPU = torch.device("cpu")
FIRST, SECOND = 0, 1


class Steps:
    """Takes steps, and returns the numbers that a kernel in each of them finds: argument plus word."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self.captured: list[int] = []

    def _kernel(self, arguments: Sequence[int]) -> list[int]:
        return [int(each.word) + argument for each, argument in zip(self.counters.each, arguments, strict=True)]

    def _count(self) -> list[int]:
        for each in self.counters.each:
            each.value += 1
        return [each.argument for each in self.counters.each]

    def eager(self) -> list[int]:
        return self._kernel(self._count())

    def capture(self) -> None:
        """Capture a step as CapturedStep does: the kernels do not run, so the words stay."""
        words = [each.word.clone() for each in self.counters.each]
        self.counters.advance()
        self.captured = self._count()
        for each, word in zip(self.counters.each, words, strict=True):
            each.word.copy_(word)

    def launch(self) -> list[int]:
        """Replay the step that was captured last, which is counted already: words as the host knows them afterwards."""
        for each in self.counters.each:
            each.word += 1
        assert [int(each.word) for each in self.counters.each] == [each.on_device for each in self.counters.each]
        return self._kernel(self.captured)

    def replay(self) -> list[int]:
        self.counters.count_step()
        return self.launch()


def test_captured_steps_go_on_after_eager_ones_with_the_arguments_that_were_captured() -> None:
    steps = Steps(Counters(CPU, 2))
    steps.counters.each[SECOND].value = 10
    steps.eager()
    steps.capture()
    assert steps.captured == [1, 11]
    assert steps.launch() == [2, 12]
    steps.eager()
    steps.counters.each[FIRST].value += 2  # unknown to the second one
    steps.counters.set_arguments(steps.captured)
    assert [each.argument for each in steps.counters.each] == [1, 11]
    assert steps.replay() == [6, 14]
    assert steps.replay() == [7, 15]
    assert steps.eager() == [8, 16]
