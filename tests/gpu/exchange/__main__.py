"""The command: `python -m tests.gpu.exchange --nproc 4 --output outcomes.json [NAME ..]`."""

import argparse
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch

from tests.gpu.exchange.checks import CHECKS
from tests.gpu.exchange.ranks import Outcome, default_world, run_all, runnable, skipped


def _line(name: str, outcome: Outcome) -> str:
    return f"{name:40} {outcome.seconds:6.1f} s  {outcome.text.splitlines()[0]}"


def _tell(name: str, outcome: Outcome) -> None:
    print(_line(name, outcome), file=sys.stderr, flush=True)


def main() -> int:
    """Run the checks, print a table, and return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.exchange", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names: run only the checks that hold one")
    parser.add_argument("--nproc", type=int, help="ranks, a GPU each where there are any")
    parser.add_argument("--ranks_per_gpu", type=int, default=1, help="ranks that share a GPU, which times nothing")
    parser.add_argument("--output", type=Path, help="JSON file to write: name -> ok, or what went wrong")
    parser.add_argument("--folder", type=Path, help="new folder that keeps logs and traces; else they are removed")
    parser.add_argument("--budget_s", type=float, default=540.0, help="time for all")
    options = parser.parse_args()
    sharing: int = options.ranks_per_gpu
    nproc: int = options.nproc or default_world(max(1, sharing))
    if sharing < 1 or nproc % sharing:
        parser.error(f"--ranks_per_gpu: {sharing} must divide the ranks, which are {nproc}; give --nproc, too")
    at_once = 3 if torch.cuda.is_available() else 1
    with nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as folder:
        checks = runnable(CHECKS, options.names)
        left_out = skipped(checks, sharing)
        run = {name: check for name, check in checks.items() if name not in left_out}
        outcomes = run_all(run, nproc, Path(folder), options.budget_s, at_once, _tell, sharing)
    if options.output:
        options.output.write_text(
            json.dumps({name: outcome.text for name, outcome in (left_out | outcomes).items()}, indent=1)
        )
    failed = {name: outcome for name, outcome in outcomes.items() if outcome.text != "ok"}
    for name, outcome in failed.items():
        print(f"--- {name}\n{outcome.text}\n")
    for name, outcome in (left_out | outcomes).items():
        print(_line(name, outcome))
    shared = f", {sharing} a GPU" if sharing > 1 else ""
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} checks hold on {nproc} ranks{shared}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
