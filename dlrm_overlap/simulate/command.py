"""`dlrm-overlap simulate`: simulate a stage, a step or a product, or many that differ in some keys; rows, a trace."""

import csv
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.environment import commit
from dlrm_overlap.launching.parsing import Parser, parse_sections, reader_may_leave
from dlrm_overlap.launching.text_table import format_table
from dlrm_overlap.simulate.config import SimulateConfig
from dlrm_overlap.simulate.product import SimulatedProduct, simulate_product
from dlrm_overlap.simulate.rows import chrome_trace, describe, describe_product, phases
from dlrm_overlap.simulate.step import simulate
from dlrm_overlap.simulate.training import read_training

_SHOWN = ("what", "backend", "world_size", "hosts", "samples", "ms", "gpu_ms", "samples_per_s", "busiest_link")
_SHOWN_OF_PRODUCTS = ("name", "layer", "ranks", "way", "ms", "product_ms", "scatter_ms", "memory_mb")


def run(argv: Sequence[str], description: str) -> int:
    """Do what the command line asks for and return the exit code 0.

    Raises:
        InputError: if a key, a value or a file is wrong.
    """
    try:
        return _run(argv, description)
    except MemoryError:
        raise InputError("the simulation needs more memory than there is; take fewer GPUs, tables or waves") from None


def _run(argv: Sequence[str], description: str) -> int:
    train = [text for _, _, text in _options_at(argv, "--train")]
    hosts = [text for _, _, text in _options_at(argv, "--hosts")]
    if hosts and not train:
        raise InputError(f"--hosts {hosts[-1]}: it goes with --train; set network.hosts")
    defaults = read_training(Path(train[-1]), hosts[-1] if hosts else "1") if train else None
    if defaults:
        argv = [*argv, "--vary", f"exchange.backend=torchrec,{defaults['exchange']['backend']}"]

    def read(options: Sequence[str]) -> tuple[SimulateConfig, Any]:
        return parse_sections(SimulateConfig, "dlrm-overlap simulate", description, options, _add_options, defaults)

    first, values = read(_without_vary(argv))
    output, trace = values.output and Path(values.output), values.trace and Path(values.trace)
    for path in filter(None, (output, trace)):
        _check_file(path)
    header = _header_of(output) if output and values.append else []
    combinations = list(_combinations(argv))
    if trace and len(combinations) > 1:
        raise InputError(
            f"--trace {trace}: it takes one simulation, and --vary asks for {len(combinations)}; leave one of both out"
        )
    configs = [first]
    if combinations[0]:
        # All are read before the first is simulated, so that a mistake in the last value costs no time.
        configs = [read([*_without_vary(argv), *_options(each)])[0] for each in combinations]
    if len({config.what == "product" for config in configs}) > 1:
        raise InputError("--vary what: rows of products have other columns than those of steps; simulate them apart")
    rows, last = [], None
    with _progress() as progress:
        for number, config in enumerate(configs):
            kind = config.product.way if config.what == "product" else config.exchange.backend
            title = f"{number + 1} of {len(configs)}: {kind}, {config.network.world_size} GPUs"
            task = progress.add_task(title, total=None)

            def tell(done: int, all_of: int, task: TaskID = task) -> None:
                progress.update(task, completed=done, total=all_of)

            last = simulate_product(config, tell) if config.what == "product" else simulate(config, tell)
            rows.append(describe_product(last) if isinstance(last, SimulatedProduct) else describe(last))
    if output:
        made_by = {"commit": commit() or ""}
        _write(output, [row | made_by for row in rows], header, values.append)
    with reader_may_leave():
        print("simulated, not measured")
        shown = _SHOWN_OF_PRODUCTS if first.what == "product" else _SHOWN
        varied = {key.rpartition(".")[2]: key for key in combinations[0]}
        more = {name: key for name, key in varied.items() if name not in shown}
        lines = ([str(row[name]) for name in shown] for row in rows)
        values_varied = ([each[key] for key in more.values()] for each in combinations)
        print(format_table([[*more, *shown], *([*a, *b] for a, b in zip(values_varied, lines, strict=True))]))
        if last is not None and len(rows) == 1:
            print(f"\nrank 0, us\n{format_table(phases(last))}")
        for base, ours in zip(rows[::2], rows[1::2], strict=True) if train else ():
            print(_verdict(base, ours))
    if trace and last is not None:
        with _one_line(trace):
            trace.write_text(json.dumps(chrome_trace(last)))
        print(f"\ntrace: {trace}")
    return 0


def _add_options(parser: Parser) -> None:
    parser.add_argument("--output", help="CSV file for the rows; one that exists is replaced")
    parser.add_argument("--append", action="store_true", help="instead: write the rows behind those of the file")
    text = "instead of the sections model, work and exchange: a training configuration; says whether its backend pays"
    parser.add_argument("--train", metavar="FILE", help=text)
    parser.add_argument("--hosts", help="of a training configuration: hosts of 8 GPUs that a fat tree joins")
    parser.add_argument("--trace", help="file for a trace of the first ranks, for chrome://tracing or Perfetto")
    text = (
        "values of a key: --vary network.hosts=1,2,4; several of these are simulated in all combinations, and keys "
        "joined by / change together: --vary network.hosts/work.samples=1/4096,2/2048"
    )
    parser.add_argument("--vary", action="append", metavar="KEY=A,B,..", help=text)


def _check_file(path: Path) -> None:
    """Raise what is wrong with a file to be written, before anything is simulated."""
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}; make it, or name another file")
    if path.is_dir():
        raise InputError(f"{path}: it is a folder; name a file in it")


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """Raise what the system says about a file as a user's mistake."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; name another file") from None


def _header_of(path: Path) -> list[str]:
    """Return the columns of a file of rows, none if it does not exist or is empty."""
    if not path.exists():
        return []
    try:
        with _one_line(path), path.open(newline="") as file:
            return next(csv.reader(file), [])
    except (UnicodeDecodeError, csv.Error):
        raise InputError(f"--append {path}: it is no CSV file in UTF-8; give another file") from None


def _write(path: Path, rows: Sequence[dict[str, Any]], found: Sequence[str], append: bool) -> None:
    """Write the rows; `found` are the columns of the file to whose rows they are appended."""
    header = list(rows[0])
    if found and found != header:
        raise InputError(f"--append {path}: it has other columns than a simulation's rows; give another file")
    with _one_line(path), path.open("a" if append else "w", newline="") as file:
        writer = csv.DictWriter(file, header, lineterminator="\n")
        if not found:
            writer.writeheader()
        writer.writerows(rows)


def _options_at(argv: Sequence[str], name: str) -> Iterator[tuple[int, int, str]]:
    """Yield for each option `name` the index of its first and behind its last part, and its text."""
    for i, option in enumerate(argv):
        if option.startswith(f"{name}="):
            yield i, i + 1, option.partition("=")[2]
        elif option == name:
            if i + 1 == len(argv):
                raise InputError(f"{name}: no value follows; see --help")
            yield i, i + 2, argv[i + 1]


def _without_vary(argv: Sequence[str]) -> list[str]:
    taken = {i for first, end, _ in _options_at(argv, "--vary") for i in range(first, end)}
    return [option for i, option in enumerate(argv) if i not in taken]


def _combinations(argv: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield for each simulation the value of each key that varies."""
    varied = []
    for _, _, text in _options_at(argv, "--vary"):
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


def _options(values: dict[str, str]) -> list[str]:
    """Return the options that give each key its value."""
    return [part for key, value in values.items() for part in (f"--{key}", value)]


def _progress() -> Progress:
    """Return a bar on standard error, shown only on a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _verdict(torchrec: dict[str, Any], ours: dict[str, Any]) -> str:
    """Return one line: does the backend of a row pay, compared with that of torchrec?"""
    over = float(torchrec["ms"]) / float(ours["ms"])
    idle = f"; {ours['idle_ranks']} ranks hold no table" if ours["idle_ranks"] else ""
    return (
        f"simulated, on {ours['world_size']} GPUs: {ours['backend']} {'pays' if over > 1 else 'does not pay'}, "
        f"{over:.2f} times as fast as torchrec's exchange in a captured step{idle}"
    )
