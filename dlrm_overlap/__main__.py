"""`python -m dlrm_overlap` is the command line `dlrm-overlap`."""

import os
import signal
import sys


def run() -> None:
    if not hasattr(signal, "SIGUSR1"):  # the modules below need it
        print(f"dlrm-overlap: {sys.platform} has no POSIX signals; use Linux, or WSL 2 under Windows", file=sys.stderr)
        sys.exit(2)
    from dlrm_overlap.launching import lifetime, streams

    # By default, waiting OpenMP threads spin. If another program keeps a core busy, threads with work then wait for
    # those that spin: a quickstart step on two cores took 300 to 800 ms instead of 7. On an idle machine sleeping is
    # slower, 7.4 ms instead of 5.4. The variable is read when torch is imported.
    if sys.argv[1:2] != ["profile"]:  # profile runs a user's program in this environment
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
