"""`dlrm-overlap simulate`: print and write simulated times, optionally for all combinations of some keys' values."""

import csv
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrm_overlap.config import FullPath, InputError
from dlrm_overlap.launching.environment import commit
from dlrm_overlap.launching.parsing import Parser, keys_of, new_name, parse_config, suggest, with_new_names
from dlrm_overlap.launching.text_table import format_table
from dlrm_overlap.simulate.config import SimulateConfig
from dlrm_overlap.simulate.step import simulate
from dlrm_overlap.train.ranks import check_output

_IN_ROWS = {
    "what": "what",
    **{f"embedding.{name}": name for name in ("backend", "slice_bags", "aggregate_bytes", "plan")},
    **{f"network.{name}": name for name in ("nodes", "gpus_per_node", "gpus_per_machine", "nic_gbit_per_s")},
}
"""the columns of rows that show the values of keys; another key that is varied is a column of its own"""
_SHOWN = ("what", "backend", "world_size", "nodes", "samples", "ms", "samples_per_s")
_BETWEEN_VALUES = re.compile(r",(?![^\[]*\])")  # not a comma within a list, as in [512,128],[256,128]


def run(argv: Sequence[str], description: str) -> int:

    def parse(options: Sequence[str]) -> tuple[SimulateConfig, Any]:
        return parse_config(SimulateConfig, "dlrm-overlap simulate", description, options, _add_options)

    argv = with_new_names(argv)
    own = parse(argv)[1]
    varied = _read_vary(own.vary, argv)
    if own.output:
        check_output(Path(own.output))
    chosen = list(itertools.product(*varied.values()))
    columns = [_IN_ROWS.get(key, key) for key in (option.removeprefix("--") for option in varied)]
    rows = []
    for values in chosen:
        config, _ = parse([*argv, *itertools.chain(*zip(varied, values, strict=True))])
        config.check_modelled()
        row = describe(config)
        rows.append(row | {name: value for name, value in zip(columns, values, strict=True) if name not in row})
    if own.output:
        made_by = {"commit": commit() or ""}
        names = dict.fromkeys(itertools.chain(*rows, made_by))
        try:
            Path(own.output).parent.mkdir(parents=True, exist_ok=True)
            with Path(own.output).open("w", newline="") as file:
                writer = csv.DictWriter(file, list(names), lineterminator="\n")
                writer.writeheader()
                writer.writerows(row | made_by for row in rows)
        except OSError as error:
            raise InputError(
                f"--output: {own.output} cannot be written ({error.strerror}); give another file"
            ) from None
    names = [*(name for name in columns if name not in _SHOWN), *_SHOWN]
    print("simulated, not measured")
    print(format_table([names, *([str(row[name]) for name in names] for row in rows)]))
    return 0


def _add_options(parser: Parser) -> None:
    parser.add_argument("--output", type=FullPath, help="CSV file for the rows; an existing file is overwritten")
    text = "values of a key: --vary network.nodes=1,2,4; may be repeated to simulate all combinations"
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=A,B,..", help=text)


def _read_vary(texts: Sequence[str], argv: Sequence[str]) -> dict[str, list[str]]:
    known = ["config", *(key.name for key in keys_of(SimulateConfig))]
    given = {word.partition("=")[0] for word in argv}
    varied: dict[str, list[str]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        key = new_name(name)
        option = f"--{key}"
        if key not in known:
            raise InputError(f"--vary: {key} is not a key; {suggest(key, known)}")
        if option in varied or (option in given and key != "config"):
            raise InputError(f"--vary: {key} is given twice on the command line; give all its values in one --vary")
        varied[option] = _BETWEEN_VALUES.split(values)
    return varied


def describe(config: SimulateConfig) -> dict[str, Any]:
    work, ms, _ = simulate(config)
    embedding, network = config.embedding, config.network
    return {
        "kind": "simulated",
        "what": config.what,
        "backend": embedding.backend,
        "slice_bags": embedding.slice_bags,
        "aggregate_bytes": embedding.aggregate_bytes,
        "nodes": network.nodes,
        "gpus_per_node": network.gpus_per_node,
        **({"gpus_per_machine": network.gpus_per_machine} if network.gpus_per_machine else {}),
        "nic_gbit_per_s": network.nic_gbit_per_s,
        "world_size": work.world_size,
        "tables": work.tables,
        "samples": work.samples,
        "plan": embedding.plan,
        **{f"fullest_{name}": f"{getattr(work.shares, name).max():.4g}" for name in ("memory", "links", "ids")},
        "hbm_bytes": round(work.hbm_bytes),
        "link_bytes": round(work.link_bytes),
        "ms": f"{ms:.4g}",
        "samples_per_s": f"{work.samples * work.world_size / ms * 1e3:.4g}",
    }
