"""`python -m dlrm_overlap` is `dlrm-overlap`."""

from dlrm_overlap.cli import run

if __name__ == "__main__":
    run()
