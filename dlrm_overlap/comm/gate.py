"""A gate in front of timed work on GPUs: behind it all ranks begin together, and no host time counts."""

import torch
import torch.distributed as dist

_CYCLES_PER_MS = 2_000_000  # of the fastest clocks there are; slower ones make gates longer


def begin_together(group: dist.ProcessGroup, device: torch.device, lead_ms: float) -> None:
    """Let what this rank issues next on the current stream begin together with the other ranks'. They all call this.

    On a GPU the stream first runs a kernel that does nothing for `lead_ms`, in which the host issues the work behind
    the gate, and then a collective of one number. The collective comes last, since the kernel counts cycles, and GPUs'
    clocks differ: behind a collective and then 3 ms of that kernel, one of two H200s waited 12 us for the other within
    what was timed. On a CPU the host waits for the other ranks.

    Args:
        group: the ranks.
        device: of this rank.
        lead_ms: as long as the host takes to issue a collective and what comes behind it, or longer.
    """
    number = torch.zeros(1, device=device)  # before the kernel, so that filling it takes none of its time
    if device.type == "cuda":
        torch.cuda._sleep(int(lead_ms * _CYCLES_PER_MS))
    dist.all_reduce(number, group=group)
