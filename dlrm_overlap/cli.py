"""The command line: `dlrm-overlap train | bench | prepare | doctor`.

Every command that takes a configuration takes its keys as dotted options. A user's mistake ends in one line on
standard error and exit code 2, before a process group is made where that is possible.
"""

import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse.typing import PositiveInt

from dlrm_overlap import launcher
from dlrm_overlap.config import InputError
from dlrm_overlap.parsing import Parser, parse_config, suggest
from dlrm_overlap.spawn import spawn

if TYPE_CHECKING:
    from dlrm_overlap.trainer import Trainer

USER_ERROR = 2
log = logging.getLogger("dlrm_overlap")


def train(argv: list[str]) -> int:
    """Train a DLRM; under torchrun, Slurm or mpirun, or with --nproc, on several processes."""
    return run_on_ranks(["train"], argv, _fit)


def _fit(trainer: "Trainer", _: Any) -> None:
    summary = trainer.fit()
    if trainer.launch.rank == 0:
        tensorboard = "tensorboard" if shutil.which("tensorboard") else Path(sys.executable).with_name("tensorboard")
        print(
            f"AUROC {summary['eval_auroc']:.4f}, NE {summary['eval_ne']:.4f}, "
            f"{summary['samples_per_s']:.0f} samples/s, {summary['step_ms_p50']:.2f} ms a step (median)\n"
            f"result:      {trainer.folder / 'summary.json'}\n"
            f"TensorBoard: {tensorboard} --logdir {trainer.folder.parent}"
        )


def bench(argv: list[str]) -> int:
    """Measure: `bench input` times the step fed by the loader against the step on one cached batch."""
    if argv[:1] != ["input"]:
        raise InputError(f"bench {argv[0] if argv else ''}: not a benchmark; known: input")

    def add_options(parser: Parser) -> None:
        parser.add_argument("--steps", type=PositiveInt, default=200, help="timed steps of each kind")
        parser.add_argument("--output", default="bench_input.csv", help="CSV file to append the row to")

    def work(trainer: "Trainer", values: Any) -> None:
        from dlrm_overlap.bench.input import measure

        measure(trainer, values.steps, Path(values.output))

    return run_on_ranks(["bench", "input"], argv[1:], work, add_options)


def run_on_ranks(
    command: list[str],
    argv: list[str],
    work: Callable[["Trainer", Any], None],
    add_options: Callable[[Parser], None] = lambda parser: None,
) -> int:
    """Run `work` on every rank, on a trainer of the configuration in `argv` and with its other options.

    With --nproc it starts the ranks and waits for them; otherwise this process is one. All that can be checked before
    a process group exists is checked before.

    Returns:
        The exit code.
    """

    def add_all(parser: Parser) -> None:
        parser.add_argument("--nproc", type=PositiveInt, help="start this many processes on this machine")
        add_options(parser)

    description = COMMANDS[command[0]].__doc__ or ""
    config, values = parse_config(" ".join(["dlrm-overlap", *command]), description, argv, add_all)
    if values.nproc:
        config.train.samples_per_rank(values.nproc)
        if config.train.device == "cuda":
            launcher.find_device("cuda", local_rank=values.nproc - 1)
        return spawn([*command, *_without_nproc(argv)], values.nproc)

    launch = launcher.detect()
    try:
        from dlrm_overlap.doctor import check_stack  # torch takes seconds: not before the options are known to be good

        check_stack()
        from rich.console import Console

        from dlrm_overlap.data.loader import open_datasets
        from dlrm_overlap.run_log import start_logging
        from dlrm_overlap.trainer import Trainer, check_device, total_steps

        device = launcher.find_device(config.train.device, launch.local_rank, launch.source)
        check_device(config, device)
        train_data, held_out = open_datasets(config.data)
        total_steps(config, train_data, launch.world_size)
        start_logging(launch.rank, Console(stderr=True))
        log.info("%s", launch.describe())
        launcher.init_process_group(launch, device)
        work(Trainer(config, launch, device, train_data, held_out), values)
    except InputError:
        if launch.rank:  # mostly every rank finds it: rank 0 tells, and its end ends the others
            time.sleep(2)
        raise
    launcher.shutdown()
    return 0


def _without_nproc(argv: list[str]) -> list[str]:
    kept = []
    options = iter(argv)
    for option in options:
        if option == "--nproc":
            next(options)
        elif not option.startswith("--nproc="):
            kept.append(option)
    return kept


def prepare(argv: list[str]) -> int:
    """Turn Criteo's text days into memory-mapped arrays."""
    parser = Parser("dlrm-overlap prepare", prepare.__doc__ or "")
    parser.add_argument("format", choices=["criteo"], help="format of IN")
    parser.add_argument("source", metavar="IN", help="text file or folder of text days, plain or gzip")
    parser.add_argument("target", metavar="OUT", help="folder of the arrays; finished days in it are kept")
    parser.add_argument("--min_count", type=PositiveInt, help="a row for each value seen this often (default 10)")
    parser.add_argument("--rows", type=PositiveInt, help="instead: hash each table's values into this many rows")
    values = parser.read(argv)
    if values.rows and values.min_count:
        raise InputError(f"--rows {values.rows} --min_count {values.min_count}: these exclude each other; give one")
    from dlrm_overlap.data.prepare_criteo import prepare_criteo

    min_count = None if values.rows else values.min_count or 10
    meta = prepare_criteo(Path(values.source), Path(values.target), rows=values.rows, min_count=min_count)
    samples, rows = sum(day.samples or 0 for day in meta.days), meta.rows or []
    print(f"{values.target}: {samples} samples, {min(rows)} to {max(rows)} rows a table")
    return 0


def doctor(argv: list[str]) -> int:
    """Tell what this machine has, what is missing and how to get it."""
    Parser("dlrm-overlap doctor", doctor.__doc__ or "").read(argv)
    from dlrm_overlap.doctor import run_doctor

    return run_doctor()


COMMANDS: dict[str, Callable[[list[str]], int]] = {"train": train, "bench": bench, "prepare": prepare, "doctor": doctor}


def usage() -> str:
    """Return the commands, a line each."""
    lines = [f"  {name:8} {function.__doc__}" for name, function in COMMANDS.items()]
    return "\n".join(["usage: dlrm-overlap COMMAND ...; COMMAND --help tells its options", "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` names and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else USER_ERROR
    try:
        if argv[0] not in COMMANDS:
            raise InputError(f"{argv[0]}: not a command; {suggest(argv[0], list(COMMANDS))}")
        return COMMANDS[argv[0]](argv[1:])
    except InputError as error:
        print(f"dlrm-overlap: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def run() -> None:
    """Run `main` and end the process.

    Ends by `os._exit`: with process groups, loader threads and CUDA contexts alive, a few runs in a hundred abort
    while the interpreter takes itself down, after all work is done.
    """
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
