"""What every kernel needs on every target, held to `resources.csv`: `python -m tests.kernels.resources [--write]`.

Compiles each specialisation that `launched` finds, and says which kernels need more registers, spills or shared memory
than the table. `--write` rewrites the table. Must run without TRITON_INTERPRET; needs no GPU. It shows that kernels
compile, not that they run.

A cell is registers/spills/shared memory: registers of a thread, bytes that a thread spills, and bytes of a program. On
gfx942 registers are vector registers, and spills are counted in these. An empty cell is a kernel that the project does
not launch on the target (`_TARGETS_OF`).
"""

import argparse
import csv
import multiprocessing
import pkgutil
import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import triton

from dlrm_overlap import kernels
from tests.kernels.compiling import TARGETS, compile_for
from tests.kernels.launched import NAMES, REQUIRED, Launched, launched, quiet
from tests.kernels.specialisations import Specialisation

TABLE = Path(__file__).parent / "resources.csv"
TRITON = "3.8.0"
"""release that the table was made with; with another one, kernels are only compiled"""
# Most bytes of shared memory that a program can have.
_SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
_RULES = "backward.optimizers"  # device functions that `_update_rows` takes as a constant
_TARGETS_OF = {"gemm.tiles.tile_product": ("sm_90", "sm_100")}
_KEY = ("kernel", "constants", "types")
_HEADER = (*_KEY, "launched by", *TARGETS)
Row = dict[str, str]


def targets_of(specialisation: Specialisation) -> Sequence[str]:
    return _TARGETS_OF.get(specialisation.name, tuple(TARGETS))


def tasks_of(found: dict[str, Launched], targets: Collection[str], quick: bool = False) -> list[tuple[str, str]]:
    """Return which of `found` to compile, and for which target: all for `targets`, one of each kernel for the others.

    If `quick`, for `targets` alone one of each kernel, and all that the steps `REQUIRED` launch.
    """
    tasks = [(text, target) for text, each in found.items() for target in targets_of(each.specialisation)]
    required = {text for text, each in found.items() if set(each.steps) & set(REQUIRED)}
    one_of = {found[text].specialisation.name: text for text in sorted(found, key=lambda text: text in required)}
    wanted = {(text, target) for text in one_of.values() for target in (targets if quick else TARGETS)}
    wanted |= {(text, target) for text in (required if quick else found) for target in targets}
    return [task for task in tasks if task in wanted]


_END_OF_PARAMETERS = re.compile(r"\):.*\n")
_WITHOUT_TRITON = "dense.cross_product"  # needs an extra to be imported


def unlaunched(names: Iterable[str]) -> list[str]:
    """Return the kernels that are not in `names`: jitted functions that no other one calls."""
    found: dict[str, set[str]] = {}  # name -> words of the body
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        name = module.name.removeprefix(f"{kernels.__name__}.")
        if name == _WITHOUT_TRITON:
            continue
        for value in vars(import_module(module.name)).values():
            if isinstance(value, triton.JITFunction) and value.fn.__module__ == module.name and name != _RULES:
                found[f"{name}.{value.fn.__name__}"] = set(
                    re.findall(r"\w+", _END_OF_PARAMETERS.split(value.src, 1)[1])
                )
    called = {
        name for name in found for other, words in found.items() if other != name and name.split(".")[-1] in words
    }
    return sorted(found.keys() - called - set(names))


_found: dict[str, Launched] = {}  # set before the processes are forked


def _compile(task: tuple[str, str]) -> tuple[str, str, str, str]:
    """Return the task, the resources and the error."""
    text, target = task
    try:
        resources = compile_for(_found[text].specialisation, target)[1]
        limit = _SHARED_BYTES[target]
        assert resources.shared <= limit, f"{resources.shared} bytes of shared memory, where a program has {limit}"
        return text, target, str(resources), ""
    except Exception as error:
        return text, target, "", f"{type(error).__name__}: {error}"


def measured(
    found: dict[str, Launched], tasks: Sequence[tuple[str, str]], processes: int
) -> tuple[list[Row], list[str]]:
    """Return the table's rows, whose other cells than those of `tasks` are empty, and the errors of the compiler."""
    _found.update(found)
    cells: dict[tuple[str, str], str] = {}
    faults = []
    cache: Any = triton.knobs.cache  # pyright: ignore[reportAttributeAccessIssue]
    with tempfile.TemporaryDirectory() as folder, cache.scope():
        cache.dir = folder
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            for text, target, needed, error in pool.imap_unordered(_compile, tasks):
                cells[text, target] = needed
                faults += [f"{text} does not compile for {target}: {error}"] if error else []
    rows = []
    for text in sorted({text for text, _ in tasks}):
        each = found[text]
        row = dict(zip(_KEY, text.split(" | "), strict=True)) | {"launched by": " ".join(each.steps)}
        rows.append(row | {target: cells.get((text, target), "") for target in TARGETS})
    return rows, faults


def differences(rows: Sequence[Row], table: Sequence[Row], is_whole: bool) -> Iterator[str]:
    """Yield how `rows` differ from the table: what grew, by how much, and what the table lacks or has in vain.

    Empty cells of `rows` are not compared. Unless `is_whole`, rows of the table may be missing.
    """
    known = {tuple(row[name] for name in _KEY): row for row in table}
    for row in rows:
        before = known.pop(tuple(row[name] for name in _KEY), None)
        what = " | ".join(row[name] for name in _KEY)
        if before is None:
            yield f"not in the table: {what}"
            continue
        for target in TARGETS:
            if row[target] not in ("", before[target]):
                yield f"{target}, {_change(before[target], row[target])}: {what}"
    if is_whole:
        yield from (f"launched no more: {' | '.join(key)}" for key in known)


def _change(before: str, now: str) -> str:
    if not before:
        return f"{now}, in the table nothing"
    names, pairs = ("registers", "spills", "shared memory"), zip(before.split("/"), now.split("/"), strict=True)
    return ", ".join(
        f"{name} {'grew' if int(new) > int(old) else 'fell'} from {old} to {new}, by {abs(int(new) - int(old))}"
        for name, (old, new) in zip(names, pairs, strict=True)
        if old != new
    )


def read_table() -> list[Row]:
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def _write_table(rows: Sequence[Row]) -> None:
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, _HEADER, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile every kernel for every target.")
    parser.add_argument("--write", action="store_true", help=f"rewrite {TABLE.name}; needs triton {TRITON}")
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS), help="see `tasks_of`")
    parser.add_argument("--quick", action="store_true", help="see `tasks_of`")
    parser.add_argument("--processes", type=int, default=2)
    values = parser.parse_args()
    quiet()
    is_whole = not values.quick and {*values.targets} == {*TARGETS}
    if values.write and not (is_whole and triton.__version__ == TRITON):
        sys.exit(f"resources: --write needs triton {TRITON}, here is {triton.__version__}, and no --quick or --targets")
    found = launched(NAMES, quick=values.quick)
    rows, faults = measured(found, tasks_of(found, values.targets, values.quick), values.processes)
    faults += [f"no step launches {name}" for name in unlaunched(each.specialisation.name for each in found.values())]
    if values.write and not faults:
        _write_table(rows)
    elif triton.__version__ == TRITON and not faults:
        faults = list(differences(rows, read_table(), is_whole=not values.quick))
        faults += ["If this is intended: python -m tests.kernels.resources --write"] if faults else []
    print("\n".join(faults) or f"{len(rows)} specialisations compile")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
