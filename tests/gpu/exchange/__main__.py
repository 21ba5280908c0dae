"""The command: `python -m tests.gpu.exchange --nproc 4 --output outcomes.json [NAME ..]`."""

import argparse
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch

from tests.gpu.exchange.checks import CHECKS
from tests.gpu.exchange.ranks import Outcome, default_world, run_all, runnable


def _line(name: str, outcome: Outcome) -> str:
    return f"{name:40} {outcome.seconds:6.1f} s  {outcome.text.splitlines()[0]}"


def _tell(name: str, outcome: Outcome) -> None:
    print(_line(name, outcome), file=sys.stderr, flush=True)


def main() -> int:
    """Run the checks, print a table, and return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.exchange", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names: run only the checks that hold one")
    parser.add_argument("--nproc", type=int, default=default_world(), help="ranks, a GPU each where there are any")
    parser.add_argument("--output", type=Path, help="JSON file to write: name -> ok, or what went wrong")
    parser.add_argument("--folder", type=Path, help="new folder that keeps logs and traces; else they are removed")
    parser.add_argument("--budget_s", type=float, default=540.0, help="time for all")
    options = parser.parse_args()
    at_once = 3 if torch.cuda.is_available() else 1
    with nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as folder:
        checks = runnable(CHECKS, options.names)
        outcomes = run_all(checks, options.nproc, Path(folder), options.budget_s, at_once, _tell)
    if options.output:
        options.output.write_text(json.dumps({name: outcome.text for name, outcome in outcomes.items()}, indent=1))
    failed = {name: outcome for name, outcome in outcomes.items() if outcome.text != "ok"}
    for name, outcome in failed.items():
        print(f"--- {name}\n{outcome.text}\n")
    for name, outcome in outcomes.items():
        print(_line(name, outcome))
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} checks hold on {options.nproc} ranks")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
