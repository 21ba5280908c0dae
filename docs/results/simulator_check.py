"""Print what rows on one and two GPUs tell of a GPU, and what the simulator says to the rows on four, as Markdown.

Run it as `python docs/results/simulator_check.py [FOLDER]`; by default it reads the rows beside this file. The first
part is the section `gpu` of `configs/simulate/h200.yaml`, the second the table of `docs/simulator.md`. Where there are
rows of `bench gemm`, a third tells what the simulator says to them.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from dlrm_overlap.simulate.calibrate import Prediction, fit_backward, read_rows
from dlrm_overlap.simulate.measured import calibrate_from, predict_all, predict_products


def main(folder: str | Path = Path(__file__).parent) -> None:
    """Print both for the rows in `folder`."""
    gpu = calibrate_from(Path(folder))
    print(yaml.safe_dump({"gpu": dataclasses.asdict(gpu)}, sort_keys=False))
    unskewed = fit_backward(read_rows(Path(folder) / "calibration" / "backward.csv"), gpu)
    for name, rates in {"push": unskewed.update, "baseline": unskewed.baseline_update}.items():
        sgd, adagrad = rates.sgd_gb_per_s, rates.adagrad_gb_per_s
        print(f"updates without skew, {name}: {sgd:g} GB/s under sgd, {adagrad:g} under rowwise_adagrad")
    print(f"a sort takes {unskewed.sort_ns:g} ns an id\n")
    _print(predict_all(Path(folder), gpu))
    products = Path(folder) / "gemm.csv"
    if products.exists():
        print()
        _print(predict_products(read_rows(products), gpu))


def _print(predictions: Sequence[Prediction]) -> None:
    print("| row | measured, ms | simulated, ms | error |\n|---|---|---|---|")
    for each in predictions:
        print(f"| {each.name} | {each.measured_ms:.3f} | {each.simulated_ms:.3f} | {100 * each.error:+.1f}% |")


if __name__ == "__main__":
    main(*sys.argv[1:])
