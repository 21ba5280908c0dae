"""Time limits of waits."""

import time


class Deadline:
    """The time limit of a wait that polls. Time while this process was stopped (Ctrl-Z) does not count."""

    def __init__(self, timeout_s: float, longest_s: float = 1.0) -> None:
        """Between two polls at most `longest_s` seconds count."""
        self.waited_s = 0.0
        self._timeout_s, self._longest_s = timeout_s, longest_s
        self._polled = time.monotonic()

    def is_over(self) -> bool:
        now = time.monotonic()
        self.waited_s += min(now - self._polled, self._longest_s)
        self._polled = now
        return self.waited_s > self._timeout_s
