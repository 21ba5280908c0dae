"""Times of samples: int64 microseconds since 1970 in UTC. A time without a zone is taken as UTC."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

import numpy as np

Window = Literal["hour", "day", "week"]

PER_SECOND = 10**6
_LENGTH_US = {"hour": 3600 * PER_SECOND, "day": 86400 * PER_SECOND, "week": 7 * 86400 * PER_SECOND}
_START_US = {"week": 4 * 86400 * PER_SECOND}  # 1970-01-01 was a Thursday, and weeks begin on Mondays
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST_US, _LAST_US = -62135596800 * PER_SECOND, 253402300799 * PER_SECOND  # the years 1 and 9999
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
NO_TIME = _LAST_US + 1


def time_of(text: str) -> int:
    """Return the time that `text` names in ISO 8601, such as 2026-11-20 or 2026-11-20T18:00+01:00, or a ValueError."""
    found = datetime.fromisoformat(text)
    found = found if found.tzinfo else found.replace(tzinfo=UTC)
    return (found - _EPOCH) // timedelta(microseconds=1)


def text_of(time_us: int, window: Window | None = None) -> str:
    """Return a time as 2026-11-20 18:00:05, or at midnight as 2026-11-20, unless it begins an hour's window."""
    found = _EPOCH + timedelta(microseconds=int(time_us))
    is_day = found.time() == _EPOCH.time() and window != "hour"
    return f"{found:%Y-%m-%d}" if is_day else f"{found:%Y-%m-%d %H:%M:%S}"


def in_microseconds(numbers: np.ndarray, unit: str) -> np.ndarray:
    """Return Unix times [n], int64 or float64, in microseconds [n] int64.

    They are `NO_TIME` outside the years 1 to 9999, and for seconds that are dates of the years 1900 to 2099, written
    like 20261120.
    """
    scale = PER_SECOND / _PER_SECOND[unit]
    within = (numbers >= _FIRST_US / scale) & (numbers <= _LAST_US / scale)
    if unit == "s":
        within &= ~_are_dates(numbers)
    numbers = np.where(within, numbers, 0)
    if numbers.dtype == np.float64:
        times = np.rint(numbers * scale).astype(np.int64)
    else:
        times = numbers * int(scale) if scale >= 1 else numbers // int(1 / scale)
    return np.where(within, times, NO_TIME)


def _are_dates(numbers: np.ndarray) -> np.ndarray:
    years, months, days = numbers // 10**4, numbers // 100 % 100, numbers % 100
    in_years = (years >= 1900) & (years < 2100)
    return in_years & (months >= 1) & (months <= 12) & (days >= 1) & (days <= 31) & (days % 1 == 0)


def are_times(times_us: np.ndarray) -> np.ndarray:
    return (times_us >= _FIRST_US) & (times_us <= _LAST_US)


class Windowed(NamedTuple):
    begin_us: int
    samples: np.ndarray
    """[n] int64, indices of the window's samples"""


def windows(times_us: np.ndarray, window: Window) -> Sequence[Windowed]:
    """Group samples by the hour, the day or the week (from Monday on) of their times [n]; in order, none is empty."""
    length, start = _LENGTH_US[window], _START_US.get(window, 0)
    numbers = (times_us - start) // length
    order = np.argsort(numbers, kind="stable")
    found, first = np.unique(numbers[order], return_index=True)
    groups = np.split(order, first[1:])
    return [Windowed(int(each) * length + start, group) for each, group in zip(found, groups, strict=True)]
