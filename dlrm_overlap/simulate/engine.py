"""A deterministic event engine: activities with dependencies, which share resources by max-min fairness.

    engine = Engine(np.array([10.0]))  # one link of 10 bytes a second
    first = engine.add("a", {0: 20.0}, size=20)
    second = engine.add("b", {0: 40.0}, size=40)
    timeline = engine.run()  # a ends at 4 s, b at 6 s

An activity demands an amount of each of some resources, all in proportion: half done, it has taken half of every
amount. That describes a copy over several links, an all-to-all of one rank, and a kernel that reads memory while it
stores over a link. A rate is the fraction of an activity that is done in a second.

Rates are those of progressive filling: the rates of all running activities rise together, each in proportion to
1 / size, until a resource is full. The activities that use it keep their rates, and the others rise on. Those of a
higher priority rise first, as if alone, and the others share what they leave. Between two events, which are starts and
ends, rates are constant. Activities that begin or end together make one event.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dlrm_overlap.config import InputError

_MOST_SECONDS = 1e12  # of an activity
_TOGETHER = 1e-9  # relative: times, or levels, that differ by less are one


@dataclass(frozen=True)
class Activity:
    """Something that takes time."""

    name: str
    rank: int
    lane: str
    """of the rank, in a trace"""
    resources: np.ndarray
    """[N] int64"""
    amounts: np.ndarray
    """[N] float64, of each resource, in the unit of its capacity times seconds"""
    size: float
    """activities that share a resource get rates in proportion to 1 / size; for a transfer its bytes"""
    delay_s: float
    """between the end of its predecessors and its start"""
    least_s: float
    """it takes no less time, be resources ever so free"""
    priority: int
    """those of a greater number get their rates first"""


@dataclass(frozen=True)
class Timeline:
    """When each activity began and ended, in seconds, and how much the resources carried."""

    activities: Sequence[Activity]
    start_s: np.ndarray
    end_s: np.ndarray
    carried: np.ndarray
    """[R] of each resource the amount that was taken: the integral of the rates"""
    events: int
    capacities: np.ndarray
    """[R] of each resource"""

    @property
    def seconds(self) -> float:
        """When the last activity ended."""
        return float(self.end_s.max(initial=0.0))


class _Running(NamedTuple):
    """The activities that run, in the order of their numbers, and their entries of resources one after the other."""

    numbers: np.ndarray
    entry_of: np.ndarray
    """of each entry the place of its activity in the other arrays"""
    resources: np.ndarray
    amounts: np.ndarray
    weights: np.ndarray
    caps: np.ndarray
    """greatest rates"""
    priorities: np.ndarray


@dataclass
class Engine:
    """Activities and the resources that they share; `run` finds out when each begins and ends."""

    capacities: np.ndarray
    """[R] float64, a second: bytes for a link, 1 for products, memory and puts, which are counted in seconds"""
    activities: list[Activity] = field(default_factory=list)
    _after: list[set[int]] = field(default_factory=list)

    def add(
        self,
        name: str,
        demands: Mapping[int, float] | tuple[np.ndarray, np.ndarray],
        size: float = 1.0,
        after: Sequence[int] = (),
        *,
        rank: int = 0,
        lane: str = "",
        delay_s: float = 0.0,
        least_s: float = 0.0,
        priority: int = 0,
    ) -> int:
        """Add an activity that begins `delay_s` after all of `after` have ended; return its number.

        Raises:
            InputError: if it would take 1e12 s or more, as with a rate that is next to 0.
        """
        if isinstance(demands, Mapping):
            demands = np.fromiter(demands.keys(), np.int64), np.fromiter(demands.values(), np.float64)
        resources, amounts = demands
        with np.errstate(over="ignore", divide="ignore"):
            seconds = max(float((amounts / self.capacities[resources]).max(initial=0.0)), delay_s, least_s)
        if not seconds <= _MOST_SECONDS:  # NaN is no less, either
            raise InputError(
                f"{name}: {seconds:.3g} s are more than the simulator takes, {_MOST_SECONDS:.0e}; some rate is too "
                f"small, or some size too great"
            )
        used, number = amounts > 0, len(self.activities)
        assert all(each < number for each in after), "an activity comes after earlier ones"
        assert size > 0, "an activity has a size"
        self.activities.append(
            Activity(name, rank, lane, resources[used], amounts[used], size, delay_s, least_s, priority)
        )
        self._after.append(set(after))
        return number

    def run(self) -> Timeline:
        """Run all activities."""
        count = len(self.activities)
        waits, following = [len(after) for after in self._after], [[] for _ in range(count)]
        for number, after in enumerate(self._after):
            for each in after:
                following[each].append(number)
        start, end = np.full(count, np.nan), np.full(count, np.nan)
        carried = np.zeros(len(self.capacities))
        due = [(self.activities[n].delay_s, n) for n in range(count) if not waits[n]]
        heapq.heapify(due)
        running, left, rates = self._running(np.empty(0, np.int64)), np.empty(0), np.empty(0)
        now, events = 0.0, 0
        while due or len(running.numbers):
            with np.errstate(divide="ignore"):  # one that others of a higher priority leave nothing
                next_end = float((left / rates).min()) + now if len(rates) else np.inf
            later = min(next_end, due[0][0]) if due else next_end
            done = rates * (later - now)
            carried += np.bincount(
                running.resources, running.amounts * done[running.entry_of], minlength=len(self.capacities)
            )
            left, now, events = left - done, later, events + 1
            over = left <= _TOGETHER * np.maximum(1.0, rates * now)
            begun: list[int] = []
            finished: list[int] = running.numbers[over].tolist()
            while finished or (due and due[0][0] <= now * (1 + _TOGETHER)):
                for n in finished:
                    end[n] = now
                    for after in following[n]:
                        waits[after] -= 1
                        if not waits[after]:
                            heapq.heappush(due, (now + self.activities[after].delay_s, after))
                finished = []
                while due and due[0][0] <= now * (1 + _TOGETHER):
                    n = heapq.heappop(due)[1]
                    start[n] = now
                    takes_time = len(self.activities[n].resources) or self.activities[n].least_s
                    (begun if takes_time else finished).append(n)
            numbers = np.concatenate([running.numbers[~over], np.array(begun, np.int64)])
            order = np.argsort(numbers)
            running = self._running(numbers[order])
            left = np.concatenate([left[~over], np.ones(len(begun))])[order]
            rates = self._rates(running)
        assert not np.isnan(end).any(), "every activity has ended"
        return Timeline(self.activities, start, end, carried, events, self.capacities)

    def _running(self, numbers: np.ndarray) -> _Running:
        """Return the numbers from which the rates of these activities are found."""
        chosen = [self.activities[number] for number in numbers.tolist()]
        with np.errstate(divide="ignore"):
            caps = 1.0 / np.array([each.least_s for each in chosen])
        return _Running(
            numbers=numbers,
            entry_of=np.repeat(np.arange(len(chosen)), [len(each.resources) for each in chosen]),
            resources=np.concatenate([np.empty(0, np.int64), *(each.resources for each in chosen)]),
            amounts=np.concatenate([np.empty(0), *(each.amounts for each in chosen)]),
            weights=1.0 / np.array([each.size for each in chosen]),
            caps=caps,
            priorities=np.array([each.priority for each in chosen], np.int64),
        )

    def _rates(self, running: _Running) -> np.ndarray:
        """Return the rate of each running activity, from the highest priority on."""
        rates = np.zeros(len(running.numbers))
        free = self.capacities.astype(np.float64).copy()
        for priority in sorted(set(running.priorities.tolist()), reverse=True):
            self._fill(running, running.priorities == priority, rates, free)
        return rates

    def _fill(self, running: _Running, rising: np.ndarray, rates: np.ndarray, free: np.ndarray) -> None:
        """Set the rates of the activities that are `rising` by progressive filling, and take them from `free`."""
        resources = len(self.capacities)
        chosen = rising[running.entry_of]
        entry_of, of, amounts = running.entry_of[chosen], running.resources[chosen], running.amounts[chosen]
        levels = running.caps / running.weights  # at which an activity has its greatest rate
        while rising.any():
            slopes = np.bincount(of, amounts * running.weights[entry_of], minlength=resources)
            used = slopes > 0
            full = np.full(resources, np.inf)
            full[used] = np.maximum(free[used], 0.0) / slopes[used]
            level = min(float(full.min(initial=np.inf)), float(levels[rising].min()))
            fixed = rising & (levels <= level * (1 + _TOGETHER))
            fixed[entry_of[full[of] <= level * (1 + _TOGETHER)]] = True
            fixed &= rising
            rates[fixed] = level * running.weights[fixed]
            rising = rising & ~fixed
            taken = fixed[entry_of]
            free -= np.bincount(of[taken], amounts[taken] * rates[entry_of[taken]], minlength=resources)
            entry_of, of, amounts = entry_of[~taken], of[~taken], amounts[~taken]
