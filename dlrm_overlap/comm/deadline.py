"""The bound of a wait on the host. Loads no torch."""

import time


class Deadline:
    """The bound of a wait that polls. Time in which this process itself stood still, as under Ctrl-Z, does not count.

    Between two polls counts `longest_s` at most: whoever is stopped does not poll, and its peers may be stopped, too.
    """

    def __init__(self, bound_s: float, longest_s: float = 1.0) -> None:
        """Begin to wait, for `bound_s` seconds in all; `longest_s` is far more than from one poll to the next."""
        self.waited_s = 0.0
        self._bound_s, self._longest_s = bound_s, longest_s
        self._polled = time.monotonic()

    def is_over(self) -> bool:
        """Count the time since the last poll, and return whether the bound is passed."""
        now = time.monotonic()
        self.waited_s += min(now - self._polled, self._longest_s)
        self._polled = now
        return self.waited_s > self._bound_s
