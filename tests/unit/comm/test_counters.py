"""Numbers that rise by one a step, as kernels find them: in eager steps, captured ones, and after either."""

from collections.abc import Sequence

import torch

from dlrm_overlap.comm.counters import Counters

CPU = torch.device("cpu")
FIRST, SECOND = 0, 1


class Steps:
    """Takes steps, and returns the counters' numbers that a kernel within each finds: argument and word, added up."""

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
        """Replay the step that was captured last, which is counted already: words as the host has them afterwards."""
        for each in self.counters.each:
            each.word += 1
        assert [int(each.word) for each in self.counters.each] == [each.on_device for each in self.counters.each]
        return self._kernel(self.captured)

    def replay(self) -> list[int]:
        self.counters.count_step()
        return self.launch()


def test_the_worked_example() -> None:
    steps = Steps(Counters(CPU, 1))
    (counter,) = steps.counters.each
    assert [steps.eager() for _ in range(3)] == [[1], [2], [3]]
    steps.capture()
    assert steps.captured == [3]
    assert steps.launch() == [4]
    assert steps.replay() == [5]
    assert steps.eager() == [6]
    assert (counter.argument, int(counter.word), counter.value) == (4, 2, 6)


def test_captured_steps_go_on_after_eager_ones_with_the_arguments_that_were_captured() -> None:
    steps = Steps(Counters(CPU, 2))
    steps.counters.each[SECOND].value = 10
    steps.eager()
    steps.capture()
    assert steps.captured == [1, 11]
    assert steps.launch() == [2, 12]
    steps.eager()
    steps.counters.each[FIRST].value += 2  # of which the second one knows nothing
    steps.counters.set_arguments(steps.captured)
    assert [each.argument for each in steps.counters.each] == [1, 11]
    assert steps.replay() == [6, 14]
    assert steps.replay() == [7, 15]
    assert steps.eager() == [8, 16]


def test_the_number_is_whole_on_the_device_in_captured_steps_and_where_it_has_been_settled() -> None:
    steps = Steps(Counters(CPU, 1))
    (counter,) = steps.counters.each
    steps.eager()
    steps.eager()
    assert int(counter.number) == 0, "eager steps that copy nothing write nothing"
    counter.settle()
    assert int(counter.number) == 2
    number = counter.number.clone()
    steps.capture()
    counter.number.copy_(number)  # kernels that are captured do not run
    for expected in (3, 4, 5):
        steps.replay() if expected > 3 else steps.launch()
        counter.number.add_(1)  # as the graph's first kernel does
        assert (int(counter.number), counter.value) == (expected, expected)
    steps.eager()
    steps.counters.settle()
    assert int(counter.number) == 6
