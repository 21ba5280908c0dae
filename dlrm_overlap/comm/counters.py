"""Numbers that rise by one a step: counted on the host, and on the device where a captured step is replayed.

A CUDA graph replays the arguments that its kernels were captured with, so a number that changes from step to step must
lie in device memory. A kernel is therefore given two things, `argument` and `word`, and adds them up. Eager steps count
in the argument; captured steps count in the word, which their first kernel advances, and the argument stays as it was
captured.

Example: a step is captured as the 4th, after 3 eager ones: `argument` 3 is captured, since the capture advances the
word to 1. Replayed, it is the 4th step, then the 5th with the word at 2. An eager step that follows is the 6th: it is
given the argument 4, and finds the word at 2.
"""

import torch


class Counter:
    """One number, see the module."""

    def __init__(self, word: torch.Tensor) -> None:
        """Take the word."""
        self.word = word
        """[1] int64 on the device, which kernels add to `argument`"""
        self.value = 0
        """the number, as the host has counted it"""
        self.on_device = 0
        """the value of `word` when all that has been issued is done"""

    @property
    def argument(self) -> int:
        """The number that a kernel, launched now, adds to `word`."""
        return self.value - self.on_device


class Counters:
    """Several counters, advanced together by one kernel."""

    def __init__(self, device: torch.device, count: int) -> None:
        # Two words each, of which one is read: kernels are compiled for tensors that begin at multiples of 16.
        self._words = torch.zeros(count, 2, dtype=torch.int64, device=device)
        self.each = [Counter(words[:1]) for words in self._words]

    def advance(self) -> None:
        """Raise every word by one on the current stream, at the beginning of a step that is captured or replayed."""
        self._words.add_(1)
        for counter in self.each:
            counter.on_device += 1

    def count_step(self) -> None:
        """Count a step that is replayed, in which every number and every word rises by one."""
        for counter in self.each:
            counter.value += 1
            counter.on_device += 1

    def set_arguments(self, arguments: list[int]) -> None:
        """Set the words so that every counter's argument becomes the one that was captured.

        All that reads the words must be ordered before this on the current stream.
        """
        words = [counter.value - argument for counter, argument in zip(self.each, arguments, strict=True)]
        for counter, word in zip(self.each, words, strict=True):
            if counter.on_device != word:
                counter.word.fill_(word)
                counter.on_device = word
