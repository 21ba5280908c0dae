"""`dlrm-overlap simulate`: simulate a stage or a step, or many that differ in some keys; print and write rows."""

import argparse
import csv
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dlrm_overlap.config import Config, InputError
from dlrm_overlap.launching.environment import commit
from dlrm_overlap.launching.parsing import parse_config, reader_may_leave
from dlrm_overlap.launching.text_table import format_table
from dlrm_overlap.simulate.config import SimulateConfig
from dlrm_overlap.simulate.step import Simulated, simulate

_SHOWN = ("what", "backend", "world_size", "hosts", "samples", "ms", "samples_per_s")


def run(argv: Sequence[str], description: str) -> int:
    """Simulate, print and write rows, and return the exit code 0.

    Raises:
        InputError: if a key, a value or a file is wrong.
    """
    try:
        return _run(argv, description)
    except OSError as error:
        raise InputError(f"{error.filename or '--output'}: {error.strerror or error}; name another file") from None


def _run(argv: Sequence[str], description: str) -> int:
    own, keys = _split(argv)
    defaults = read_training(Path(own.train)) if own.train else None
    if defaults:
        own.vary.append(f"exchange.backend=torchrec,{defaults['exchange']['backend']}")
    combinations = list(_combinations(own.vary))
    output = own.output and Path(own.output)
    if output and not output.parent.is_dir():
        raise InputError(f"{output}: there is no folder {output.parent}; make it, or name another file")
    # All are read before the first is simulated, so that a mistake in the last value costs no time.
    configs: list[SimulateConfig] = []
    for each in combinations:
        options = [*keys, *(part for key, value in each.items() for part in (f"--{key}", value))]
        configs.append(
            parse_config(SimulateConfig, "dlrm-overlap simulate", description, options, _add_options, defaults)[0]
        )
    rows = [describe(simulate(each)) for each in configs]
    if output:
        _write(output, [row | {"commit": commit() or ""} for row in rows])
    with reader_may_leave():
        _print(combinations, rows)
        for base, ours in zip(rows[::2], rows[1::2], strict=True) if own.train else ():
            print(_verdict(base, ours))
    return 0


def _split(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the values of the options of this command, and the others: a simulation's keys."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    _add_options(parser)
    try:
        own, keys = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise InputError(f"{error}; see --help") from None
    own.vary = own.vary or []
    return own, keys


def describe(simulated: Simulated) -> dict[str, Any]:
    """Return a simulation's row: the keys of its exchange and network, its work, its time."""
    config, work = simulated.config, simulated.work
    return {
        "kind": "simulated",
        "what": config.what,
        **asdict(config.exchange),
        **asdict(config.network),
        "world_size": work.world_size,
        "arch": config.model.arch,
        "dim": config.model.dim,
        "tables": round(work.features * work.world_size),
        "samples": work.samples,
        "id_bytes": config.work.id_bytes,
        "plan": config.work.plan,
        **{f"fullest_{name}": f"{getattr(work.shares, name).max():.4g}" for name in ("memory", "links", "ids")},
        "hbm_bytes": round(work.hbm_bytes),
        "link_bytes": round(work.link_bytes),
        "ms": f"{simulated.ms:.4g}",
        "samples_per_s": f"{work.samples * work.world_size / simulated.ms * 1e3:.4g}",
    }


def _print(combinations: Sequence[dict[str, str]], rows: Sequence[dict[str, Any]]) -> None:
    """Print a table: the keys that vary, then the columns that are always shown."""
    varied = {key.rpartition(".")[2]: key for key in combinations[0]}
    more = {name: key for name, key in varied.items() if name not in _SHOWN}
    lines = (
        [*(each[key] for key in more.values()), *(str(row[name]) for name in _SHOWN)]
        for each, row in zip(combinations, rows, strict=True)
    )
    print("simulated, not measured")
    print(format_table([[*more, *_SHOWN], *lines]))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", help="CSV file for the rows; one that exists is replaced")
    text = "instead of the sections model, work and exchange: a training configuration; says whether its backend pays"
    parser.add_argument("--train", metavar="FILE", help=text)
    text = (
        "values of a key: --vary network.hosts=1,2,4; several of these are simulated in all combinations, and keys "
        "joined by / change together: --vary network.hosts/work.samples=1/4096,2/2048"
    )
    parser.add_argument("--vary", action="append", metavar="KEY=A,B,..", help=text)


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _combinations(vary: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield for each simulation the value of each key that varies."""
    varied = []
    for text in vary:
        key, equals, values = text.partition("=")
        if not equals or not all(values.split(",")):
            raise InputError(f"--vary {text}: it takes a key and its values; write --vary network.hosts=1,2,4")
        varied.append([_together(key.split("/"), value.split("/"), text) for value in values.split(",")])
    keys = [key for each in varied for key in each[0]]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise InputError(f"--vary {min(twice)}: the key is there twice; give all its values in one --vary")
    for chosen in itertools.product(*varied):
        yield {key: value for each in chosen for key, value in each.items()}


def _together(keys: Sequence[str], values: Sequence[str], text: str) -> dict[str, str]:
    """Return the value of each key of those that change together."""
    if len(keys) != len(values) or not all(values):
        raise InputError(
            f"--vary {text}: {'/'.join(values)} for the keys {'/'.join(keys)}; give as many values as keys"
        )
    return dict(zip(keys, values, strict=True))


def _verdict(torchrec: dict[str, Any], ours: dict[str, Any]) -> str:
    """Return one line: does the backend of a row pay, compared with that of torchrec?"""
    over = float(torchrec["ms"]) / float(ours["ms"])
    return (
        f"simulated, on {ours['world_size']} GPUs: {ours['backend']} {'pays' if over > 1 else 'does not pay'}, "
        f"{over:.2f} times as fast as torchrec's exchange in a captured step"
    )


def read_training(path: Path) -> dict[str, Any]:
    """Return the keys of a simulated step that a training configuration gives, nested as in a simulation's file.

    A run reads the tables' rows from its data; here they must be in the file.

    Raises:
        InputError: if the file is none, or lacks the tables' rows.
    """
    config = parse_config(Config, "dlrm-overlap simulate", "", ["--config", str(path)])[0]
    backend = "fused" if config.embedding.backend == "fused" else "pgas"
    tables, embedding, train = config.data.tables, replace(config.embedding, backend=backend), config.train
    if tables.rows is None:
        raise InputError(f"--train {path}: data.tables.rows is null; write the tables' rows into the file")
    wire = embedding.resolved_wire_dtype(train.precision)
    return {
        "model": asdict(config.model),
        "network": {"gpus_per_host": 8},
        "work": {
            "tables": tables.number(),
            "rows": tables.rows,
            "max_rows": tables.max_rows,
            "multi_hot": tables.multi_hot,
            "zipf_alpha": tables.zipf_alpha,
            "samples": train.batch_size,
            "global_batch": train.global_batch_size,
            "dense_features": config.data.dense_features,
            "row_bytes": 2 if embedding.weight_dtype == "fp16" else 4,
            "wire_bytes": 4 if wire == "fp32" else 2,
            "id_bytes": 4,
            "optimizer": embedding.optimizer,
        },
        "exchange": {
            "backend": backend,
            "slice_bags": embedding.slice_bags,
            "aggregate_bytes": embedding.aggregate_bytes,
        },
    }
