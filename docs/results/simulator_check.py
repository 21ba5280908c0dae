"""Print what rows on one and two GPUs tell of a GPU, and how far the simulator is off other rows, as Markdown.

Run it as `python docs/results/simulator_check.py [--rows]`. The first part is the section `gpu` of
`configs/simulate/h200.yaml`, the second the table of `docs/simulator.md`. `--rows` prints every row as well.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from dlrm_overlap.simulate.calibrate import Prediction, read_rows
from dlrm_overlap.simulate.measured import (
    calibrate_from,
    predict_four,
    predict_held_out,
    predict_parts,
    predict_products,
)

FOLDER = Path(__file__).parent
HEAD = ["| rows | number | within 10% | least and greatest error |", "|---|---|---|---|"]
WITHIN = 0.1


def predictions() -> dict[str, list[Prediction]]:
    """Return all predictions, by what they are of."""
    gpu, calibration = calibrate_from(FOLDER), FOLDER / "calibration"
    found: dict[str, list[Prediction]] = {}
    for name, rows in predict_held_out(FOLDER, gpu).items():
        for each in rows:
            found.setdefault(f"held out: {name}.csv, {each.name.partition(',')[0]}", []).append(each)
    found |= {f"four GPUs: {kind}": rows for kind, rows in predict_four(FOLDER, gpu).items()}
    for name in ("cut", "parts", "clock"):
        found[f"two GPUs: step, {name}.csv"] = predict_parts(read_rows(calibration / f"{name}.csv"), gpu)
    found["four GPUs: reduce-scatter, gemm.csv"] = predict_products(read_rows(FOLDER / "gemm.csv"), gpu)
    return found


def within(rows: Sequence[Prediction]) -> int:
    """Return how many are within 10%."""
    return sum(abs(each.error) <= WITHIN for each in rows)


def table(found: Mapping[str, Sequence[Prediction]]) -> list[str]:
    """Return a line for each kind of rows."""
    lines = list(HEAD)
    for name, rows in found.items():
        errors = [100 * each.error for each in rows]
        lines.append(f"| {name} | {len(rows)} | {within(rows)} | {min(errors):+.0f}%, {max(errors):+.0f}% |")
    return lines


def main(every_row: bool) -> None:
    """Print all parts."""
    print(yaml.safe_dump({"gpu": dataclasses.asdict(calibrate_from(FOLDER))}, sort_keys=False))
    found = predictions()
    print("\n".join(table(found)))
    for name, rows in found.items() if every_row else ():
        print(f"\n{name}")
        for each in rows:
            print(
                f"{each.name}: {each.measured_ms:.3f} ms, {each.simulated_ms:.3f} simulated, {100 * each.error:+.1f}%"
            )


if __name__ == "__main__":
    main("--rows" in sys.argv[1:])
