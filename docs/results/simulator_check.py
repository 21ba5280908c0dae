"""Print what rows on one and two GPUs tell of a GPU, and what the simulator says to the rows on four, as Markdown.

Run it as `python docs/results/simulator_check.py [--write]`. The first part is the section `gpu` of
`configs/simulate/h200.yaml`. Then come the tables of `docs/simulator.md`: of the rows on four GPUs, of steps on two
with a table that is cut, of steps without some of their parts (twice: of another machine with the GPU's clock), and of
the rows of `bench gemm`. `--write` puts them there.
"""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from dlrm_overlap.simulate.calibrate import Prediction, read_rows
from dlrm_overlap.simulate.calibrate_updates import fit_backward
from dlrm_overlap.simulate.measured import calibrate_from, predict_all, predict_cut, predict_parts, predict_products

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "simulator.md"
HEAD = "| row | measured, ms | simulated, ms | error |\n|---|---|---|---|\n"


def main(write: bool) -> None:
    """Print all parts; put the tables on the page if `write`."""
    gpu = calibrate_from(FOLDER)
    print(yaml.safe_dump({"gpu": dataclasses.asdict(gpu)}, sort_keys=False))
    unskewed = fit_backward(read_rows(FOLDER / "calibration" / "backward.csv"), gpu)
    for name, rates in {"push": unskewed.update, "baseline": unskewed.baseline_update}.items():
        sgd, adagrad = rates.sgd_gb_per_s, rates.adagrad_gb_per_s
        print(f"updates without skew, {name}: {sgd:g} GB/s under sgd, {adagrad:g} under rowwise_adagrad")
    print(f"a sort takes {unskewed.update.sort_ns:g} ns an id\n")
    tables = [
        make_table(predict_all(FOLDER, gpu)),
        make_table(predict_cut(read_rows(FOLDER / "calibration" / "cut.csv"), gpu)),
        make_table(predict_parts(read_rows(FOLDER / "calibration" / "parts.csv"), gpu)),
        make_table(predict_parts(read_rows(FOLDER / "calibration" / "clock.csv"), gpu)),
        make_table(predict_products(read_rows(FOLDER / "gemm.csv"), gpu)),
    ]
    if write:
        texts = iter(tables)
        PAGE.write_text(re.sub(re.escape(HEAD) + r"(\|.*\n)*", lambda _: next(texts), PAGE.read_text(), count=5))


def make_table(predictions: Sequence[Prediction]) -> str:
    """Return a line for each prediction; print them, and how many are within 10%."""
    lines = [
        f"| {e.name} | {e.measured_ms:.3f} | {e.simulated_ms:.3f} | {100 * e.error:+.1f}% |\n" for e in predictions
    ]
    print(f"{sum(abs(e.error) <= 0.1 for e in predictions)} of {len(predictions)} rows within 10%\n")
    print(HEAD + "".join(lines))
    return HEAD + "".join(lines)


if __name__ == "__main__":
    main("--write" in sys.argv[1:])
