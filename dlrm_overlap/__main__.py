"""`python -m dlrm_overlap` is `dlrm-overlap`: the command line; no signal that comes while it is loaded is lost."""

import os
import signal
import sys


def run() -> None:
    """Load the command line and run it; see `cli.run`."""
    try:
        from dlrm_overlap.launching import lifetime

        lifetime.open_streams()
        lifetime.hold_asks()
        lifetime.interrupt_imports()
        from dlrm_overlap import cli
    except KeyboardInterrupt:
        print("dlrm-overlap: interrupted", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGINT)
    cli.run()


if __name__ == "__main__":
    run()
