"""What a process of tests does first where there is no GPU."""

import os
from contextlib import suppress

import torch


def interpret_kernels() -> None:
    """Have Triton's interpreter run kernels on CPU tensors, unless there is a GPU; call it before they are imported."""
    if torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    # Otherwise each rank that compiles starts processes for it, and g++ reads the headers of vector instructions: in an
    # empty cache a process' first `torch.compile` takes twice as many seconds of a core.
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    torch.set_num_threads(1)  # tensors are small: more threads wait longer than they compute
    # With more ranks than cores, a rank that is woken displaces the one that woke it, which may hold a lock that gloo's
    # thread asks for without pause. Under this policy it waits, which saves a fifth of the ranks' CPU time.
    with suppress(OSError):  # where the policy is not allowed
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    from tests.interpreter import quicken

    quicken()
