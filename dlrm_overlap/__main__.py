"""`python -m dlrm_overlap` is `dlrm-overlap`: the command line."""

import os
import signal
import sys

from dlrm_overlap.launching import lifetime, streams


def run() -> None:
    """Load the command line and run it; see `cli.run`."""
    # OpenMP's threads wait for one another in each operation on the CPU. Where they spin meanwhile, as they do unasked,
    # and another program keeps a core busy, a thread that has work waits for one that spins: in the quickstart on two
    # cores a step took 300 to 800 ms and not 7. With little else running sleeping costs a third more: 7.4 ms, not 5.4.
    # Beside another program 300 to 3000 turns of spinning were slower than none. Read when torch is loaded, later.
    if sys.argv[1:2] != ["profile"]:  # whose program runs in this environment
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    lifetime.block_signals()
    lifetime.interrupt_imports()
    streams.open_streams()
    try:
        from dlrm_overlap import cli
    except KeyboardInterrupt:
        lifetime.say("dlrm-overlap: interrupted")
        os._exit(128 + signal.SIGINT)
    except ModuleNotFoundError as error:
        if not lifetime.report_missing(error):
            raise
        os._exit(2)
    cli.run()


if __name__ == "__main__":
    run()
