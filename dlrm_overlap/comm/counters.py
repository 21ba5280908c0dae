"""Step counters that stay right when captured and eager steps follow each other.

A CUDA graph replays its kernels with the same arguments. So a kernel computes the step's number as the sum of an
`argument`, which eager steps increase, and a `word` in device memory, which captured steps increase.

Example: a step is captured as the 4th. The capture advances the word to 1, so argument 3 is captured. The next replay
is the 5th step, with word 2. An eager 6th step has argument 4 and word 2.
"""

import torch


class Counter:
    def __init__(self, word: torch.Tensor) -> None:
        self.word = word
        """[1] int64 on the device"""
        self.value = 0
        self.on_device = 0
        """value of `word` once all issued work is done"""

    @property
    def argument(self) -> int:
        return self.value - self.on_device


class Counters:
    """Counters that one kernel advances together."""

    def __init__(self, device: torch.device, count: int) -> None:
        # Two words each, the second unused: kernels are compiled for tensors aligned to 16 bytes.
        self._words = torch.zeros(count, 2, dtype=torch.int64, device=device)
        self.each = [Counter(words[:1]) for words in self._words]

    def advance(self) -> None:
        """Increase every word, at the start of a captured or replayed step."""
        self._words.add_(1)
        for counter in self.each:
            counter.on_device += 1

    def count_step(self) -> None:
        """Count a step that is replayed next: its graph increases the words."""
        for counter in self.each:
            counter.value += 1
            counter.on_device += 1

    def set_arguments(self, arguments: list[int]) -> None:
        """Set the words on the current stream so that each counter's argument equals its item of `arguments`.

        Captured steps need the arguments with which they were captured. Kernels that read the words earlier must come
        before on the stream.
        """
        words = [counter.value - argument for counter, argument in zip(self.each, arguments, strict=True)]
        for counter, word in zip(self.each, words, strict=True):
            if counter.on_device != word:
                counter.word.fill_(word)
                counter.on_device = word
