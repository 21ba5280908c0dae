"""The order of a launch's tasks, which `primitives.task_at` computes on the device, and the order of a rank's peers.

A task is `task_bags` consecutive bags of one feature for one destination rank. A rank that pools F features has F *
ceil(b / task_bags) tasks for each destination, feature after feature.

Example: rank 1 of 3, two tasks, a and b, for each destination; 2a is the first task for rank 2:
    linear        0a 0b 1a 1b 2a 2b     the same on every rank: all write to rank 0 first
    remote_first  2a 2b 0a 0b 1a 1b     rank + 1, rank + 2, .., itself last (arXiv 2305.06942, section 3)
    balanced      2a 0a 1a 2b 0b 1b     destinations take turns: links and memory are busy for the whole kernel
"""

SCHEDULES = ("linear", "remote_first", "balanced")


def staggered_peers(rank: int, world_size: int) -> list[int]:
    """Return the other ranks, beginning with the next: at each turn no two ranks send to the same peer."""
    return [(rank + turn) % world_size for turn in range(1, world_size)]
