"""The command line: `dlrm-overlap train | eval | compare | bench | ..` (see `usage`).

A user's mistake is reported in one line with exit code 2, if possible before a process group is created.
"""

import contextlib
import dataclasses
import errno
import math
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import dlrm_overlap
from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.bench.options import FIGURES, options_of
from dlrm_overlap.config import BelowOne, Config, FullPath, InputError, NonNegativeInt, PositiveInt
from dlrm_overlap.launching import process_group
from dlrm_overlap.launching.launcher import announced_rank, unset_empty
from dlrm_overlap.launching.library_warnings import hide_library_warnings
from dlrm_overlap.launching.lifetime import (
    DISAGREEMENT,
    SAVED,
    UNSAVED,
    end_on_signals,
    report_missing,
    say,
    unwinding_on_sigterm,
)
from dlrm_overlap.launching.parsing import Parser, parse_config, suggest
from dlrm_overlap.launching.supported_versions import check_pyarrow, check_stack, check_torch
from dlrm_overlap.launching.text_table import count_of, plain
from dlrm_overlap.train.ranks import (
    Ranks,
    check_data,
    check_needs_no_checkpoint,
    check_output,
    check_start,
    check_writable,
    run_on_ranks,
)

DAMAGED = 1
USER_ERROR = 2
_CURES = {errno.ENAMETOOLONG: "give a shorter path", errno.EACCES: "correct its permissions, or give another path"}
"""for errors of a path that a command did not expect"""


def train(argv: list[str]) -> int:
    """Train a DLRM, on several processes with --nproc or under torchrun, Slurm or mpirun."""

    def work(ranks: Ranks) -> int:
        from dlrm_overlap.observe.restarts import continued
        from dlrm_overlap.observe.run_log import check_folder
        from dlrm_overlap.train.evaluation import label_table, means_of
        from dlrm_overlap.train.trainer import PreemptedError

        ranks.end.listen(answers=ranks.world.rank == 0)
        if ranks.are_restarted() and (config := continued(ranks.config)) is not ranks.config:
            if ranks.world.rank == 0:
                say("dlrm-overlap: the job has restarted, and resumes without log.overwrite and checkpoint.resume")
            ranks = dataclasses.replace(ranks, config=config)
        check_folder(ranks.config)  # before a process group is created, if possible
        trainer = ranks.trainer(resumes=not ranks.config.log.overwrite)
        try:
            summary = trainer.fit()
        except PreemptedError as error:
            if ranks.world.rank == 0:
                say(f"dlrm-overlap: {error}")
            return SAVED if error.has_saved else UNSAVED
        trainer.close()
        if ranks.world.rank == 0:
            print(
                f"AUROC {summary['eval_auroc']:.4f}, NE {summary['eval_ne']:.4f}{means_of(summary, 'eval_')}, "
                f"{_speed_of(summary)}"
            )
            if table := label_table(summary, "eval_"):
                print(table)
            _print_paths(trainer.folder / "summary.json", trainer.folder.parent, ranks.config.log.tensorboard)
        return 0

    def check(config: Config, values: Any) -> None:
        check_data(config.data)
        check_writable(config.folder, "log.dir")
        if config.checkpoint.delta_every:
            from dlrm_overlap.checkpoint.delta_files import check_deltas

            check_deltas(config)

    return run_on_ranks(["train"], train.__doc__ or "", argv, work, check=check)


def evaluate(argv: list[str]) -> int:
    """Evaluate a checkpoint on held-out samples: AUROC, NE, calibration, loss, accuracy. The run is not changed."""
    from dlrm_overlap.train import evaluation

    return evaluation.run(argv, evaluate.__doc__ or "")


def compare(argv: list[str]) -> int:
    """Train one configuration with several backends, and compare their losses and speed."""

    def add_options(parser: Parser) -> None:
        names = ["torchrec", "pgas", "fused"]
        text = "backends to compare, instead of embedding.backend; the first is the reference"
        parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=names, help=text)
        text = "largest relative difference of logged training losses that counts as agreement"
        parser.add_argument("--rtol", type=BelowOne, default=1e-4, help=text)
        text = "further runs of the reference, whose differences are allowed to all runs; auto: 2 on GPUs, else 0"
        parser.add_argument("--noise_runs", type=NonNegativeInt | Literal["auto"], default="auto", help=text)

    def work(ranks: Ranks) -> int:
        from dlrm_overlap.observe.comparison import report
        from dlrm_overlap.observe.result_files import remove
        from dlrm_overlap.train.compare import run_configs, train_runs

        folder = Path(ranks.config.log.dir)
        output = folder / "comparison.json"
        # Two, as the tolerance from a single run would be more than twice as wide.
        noise_runs = 2 * (ranks.device.type == "cuda") if ranks.values.noise_runs == "auto" else ranks.values.noise_runs
        configs = run_configs(ranks.config, ranks.values.backends, noise_runs)
        for config in configs.values():
            check_start(config, ranks.device)  # all backends, before the first one trains
        if ranks.world.rank == 0:
            remove(output)  # an earlier result would contradict the new runs
        folders = train_runs(configs, ranks.trainer)
        if ranks.world.rank:
            return 0
        faults = report(folders, ranks.values.rtol, output, noise_runs, print)
        _print_paths(output, folder, ranks.config.log.tensorboard)
        for fault in faults:
            print(f"dlrm-overlap: {fault}", file=sys.stderr)
        return DISAGREEMENT if faults else 0

    return run_on_ranks(["compare"], compare.__doc__ or "", argv, work, add_options, _check_comparison)


def _check_comparison(config: Config, values: Any) -> None:
    names = values.backends
    if len(set(names)) < max(2, len(names)):
        raise InputError(f"--backends {' '.join(names)}: a comparison takes two or more backends, each once")
    if config.log.name is not None:
        raise InputError(f"log.name: {config.log.name}, but compare names each run after its backend; set log.dir")
    if config.checkpoint.resume not in ("auto", "never"):
        raise InputError(
            f"checkpoint.resume: {config.checkpoint.resume}, but compare trains from the first step; leave it out"
        )
    check_needs_no_checkpoint(config, "compare")
    check_data(config.data)
    check_writable(Path(config.log.dir), "log.dir")


def _speed_of(summary: Mapping[str, Any]) -> str:
    if math.isnan(summary["step_ms_p50"]):  # a run that resumed at its last step
        return "no step was timed"
    return f"{summary['samples_per_s']:.0f} samples/s, {summary['step_ms_p50']:.2f} ms a step (median)"


def _print_paths(result: Path, runs: Path, has_events: bool) -> None:
    print(f"result:      {plain(str(result))}")
    if has_events:
        tensorboard = "tensorboard" if shutil.which("tensorboard") else Path(sys.executable).with_name("tensorboard")
        print(f"TensorBoard: {tensorboard} --logdir {plain(str(runs))}")


def bench(argv: list[str]) -> int:
    """Measure training steps, the embedding stage, communication or input; `bench --help` lists the benchmarks."""
    kind = argv[0] if argv else ""
    if kind in ("-h", "--help"):
        about = {name: figure.summary for name, figure in FIGURES.items()}
        about["all"] = "the documentation's figures that fit a number of minutes: bench all --minutes 25"
        print("usage: dlrm-overlap bench KIND ...\n")
        print("\n".join(f"  {name:12} {text}" for name, text in about.items()))
        return 0
    if not kind:
        raise InputError(f"bench: no benchmark is named; known: {', '.join([*FIGURES, 'all'])}")
    if kind == "all":
        return import_module("dlrm_overlap.bench.all").run(argv[1:])
    if kind not in FIGURES:
        raise InputError(f"bench {kind}: not a benchmark; {suggest(kind, [*FIGURES, 'all'])}")
    figure = FIGURES[kind]

    def add_options(parser: Parser) -> None:
        for name, settings in options_of(kind).items():
            parser.add_argument(f"--{name}", **settings)

    def check(config: Config, values: Any) -> None:
        check_output(Path(values.output))
        if timeline := getattr(values, "timeline", None):
            check_output(Path(timeline), "--timeline")

    def work(ranks: Ranks) -> int:
        on_cpu, world_size = ranks.device.type == "cpu", ranks.world.world_size
        if world_size == 1 and figure.needs_peers:
            raise InputError(f"bench {kind}: one rank has no peer to communicate with; add --nproc 2, or more")
        if on_cpu and figure.needs_gpu:
            raise InputError(f"bench {kind}: it times a GPU's kernels, and this run is on a CPU; run it on a GPU")
        if ranks.world.rank == 0:
            from dlrm_overlap.bench.rows import check_columns

            check_columns(Path(ranks.values.output), kind, process_group.visible_gpus("auto") > 0)
        if on_cpu and figure.measures_time and ranks.world.rank == 0:
            print(f"bench {kind}: a rehearsal, since times on CPUs say nothing about GPUs", file=sys.stderr)
        code = import_module(f"dlrm_overlap.bench.figures.{figure.module}").run(kind, ranks)
        return 0 if ranks.world.rank else code  # a launcher would kill rank 0, which still writes rows

    meaning = f"Measure {figure.summary}. `dlrm-overlap bench --help` lists the other benchmarks."
    return run_on_ranks(["bench", kind], meaning, argv[1:], work, add_options, check)


def simulate(argv: list[str]) -> int:
    """Simulate the embedding stage or the step on a larger number of GPUs; needs no GPU."""
    from dlrm_overlap.simulate import command

    return command.run(argv, simulate.__doc__ or "")


def prepare(argv: list[str]) -> int:
    """Convert a table (CSV, Parquet, Arrow), Criteo's text files, or any other samples to memory-mapped files."""
    if argv[:1] == ["samples"]:
        return _prepare_samples(argv[1:])
    parser = Parser("dlrm-overlap prepare", prepare.__doc__ or "")
    text = "format of IN; samples: those of a configuration, see `prepare samples --help`"
    parser.add_argument("format", choices=["table", "criteo", "samples"], metavar="table|criteo|samples", help=text)
    parser.add_argument(
        "source", type=FullPath, metavar="IN", help="file or folder of files; text may be compressed by gzip"
    )
    parser.add_argument("target", type=FullPath, metavar="OUT", help="folder to create")
    parser.add_argument("--schema", type=FullPath, help="table: YAML file that names the columns")
    text = "instead: a folder that `prepare` wrote, a checkpoint or a run, whose schema and vocabularies encode IN"
    parser.add_argument("--like", type=FullPath, metavar="PATH", help=text)
    parser.add_argument(
        "--min_count",
        type=PositiveInt,
        help="criteo: a row for each value that occurs at least this often (default 10)",
    )
    parser.add_argument(
        "--rows", type=PositiveInt, help="criteo, instead: hash each table's values into this number of rows"
    )
    values = parser.read(argv)
    if values.format == "samples":
        raise InputError(f"prepare {argv[0]}: other options than those of samples; write `prepare samples` first")
    if values.rows and values.min_count:
        raise InputError(f"--rows {values.rows} --min_count {values.min_count}: these exclude each other; give one")
    if values.like and (values.schema or values.rows or values.min_count):
        raise InputError(
            f"--like: {values.like} has the schema, with its rows and min_count; leave out the other options"
        )
    if values.format == "table" and not (values.schema or values.like):
        raise InputError("--schema: missing, but a table needs one; give it, or --like, for that of an earlier table")
    if values.format != "table" and values.schema:
        raise InputError(f"--schema: {values.schema}, but the columns of Criteo's text are known; leave it out")
    if values.schema and (values.rows or values.min_count):
        raise InputError("--rows, --min_count: a schema has these for each column; write them into it")
    from dlrm_overlap.data.prepare import prepare_files
    from dlrm_overlap.data.schema import criteo_schema, read_schema

    like = _encoded_at(Path(values.like)) if values.like else None
    schema = read_schema(Path(values.schema)) if values.schema else None
    if not (schema or like):
        schema = criteo_schema(values.rows, None if values.rows else values.min_count or 10)
    target = Path(values.target)
    with _naming_pyarrow():
        layout, unknown = prepare_files(Path(values.source), target, schema, like=like)
    _report_samples(target, layout)
    for each in unknown:
        print(each)
    return 0


def _encoded_at(path: Path) -> Any:
    """Return the encoding of a prepared folder, a checkpoint or a run."""
    from dlrm_overlap.checkpoint import manifest
    from dlrm_overlap.data import encoding, prepared

    found = (
        prepared.encoded_of(path)
        if encoding.is_prepared(path)
        else manifest.encoded_of(manifest.locate_checkpoint(path, "--like", "one that `prepare` wrote, "))
    )
    if found is None:
        raise InputError(
            f"--like: {path} has no encoding, since its samples were not made by `prepare table`, or by an earlier "
            f"version; name another, or prepare both tables in one command"
        )
    return found


def _prepare_samples(argv: list[str]) -> int:
    """Convert the samples of a configuration, such as MLPerf's multi-hot arrays or synthetic ones."""

    def add_options(parser: Parser) -> None:
        parser.add_argument("target", type=FullPath, metavar="OUT", help="folder to create")
        parser.add_argument(
            "--samples", type=PositiveInt, help="number of training samples, the first ones (default all)"
        )

    text = _prepare_samples.__doc__ or ""
    config, values = parse_config(Config, "dlrm-overlap prepare samples OUT", text, argv, add_options)
    config.data.require_source()
    from dlrm_overlap.data.prepare import prepare_samples

    target = Path(values.target)
    return _report_samples(target, prepare_samples(config.data, target, values.samples))


def _report_samples(target: Path, meta: Any) -> int:
    held_out = f", {meta.held_out} of them held out" if meta.held_out else ""
    known = [rows for rows in meta.rows if rows is not None]
    rows = f"{min(known)} to {max(known)} rows per table" if known else "no table with a number of rows"
    if of_any := len(meta.rows) - len(known):
        rows += f", {count_of(of_any, 'table')} of any id"
    print(f"{target}: {count_of(meta.samples, 'sample')}{held_out}, {rows}")
    if meta.unordered:
        print(
            f"dlrm-overlap: {count_of(meta.unordered, 'sample')} of {meta.samples} are older than one before them; "
            f"sort the table by time, since the last samples are held out",
            file=sys.stderr,
        )
    return 0


def predict(argv: list[str]) -> int:
    """Predict by a checkpoint: the probability of each label for each row of a table."""
    with _naming_pyarrow():
        from dlrm_overlap.predict import command
    return command.run(argv, predict.__doc__ or "")


def trace(argv: list[str]) -> int:
    """Summarize a GPU's traces: the time of each kind of work, and how much of it did not overlap."""
    parser = Parser("dlrm-overlap trace", trace.__doc__ or "")
    text = "file written by log.trace_steps"
    parser.add_argument("files", type=FullPath, metavar="TRACE", nargs="+", help=text)
    from dlrm_overlap.observe.trace_summary import summarise

    print("\n\n".join(summarise(Path(file)) for file in parser.read(argv).files))
    return 0


def checkpoint(argv: list[str]) -> int:
    """Show a checkpoint, verify that it is complete, or export it as one file for torch.load."""
    parser = Parser("dlrm-overlap checkpoint", checkpoint.__doc__ or "")
    actions = ["show", "verify", "export"]
    text = "verify exits with code 1 if the checkpoint is damaged"
    parser.add_argument("action", choices=actions, metavar="|".join(actions), help=text)
    text = "folder step_<N>, or a run's folder, for its newest checkpoint"
    parser.add_argument("path", type=FullPath, metavar="PATH", help=text)
    text = "export: a new file for torch.load, with the keys model and optimizer"
    parser.add_argument("output", type=FullPath, metavar="OUT", nargs="?", help=text)
    values = parser.read(argv)
    path = Path(values.path)
    if (values.action == "export") != bool(values.output):
        raise InputError(f"checkpoint {values.action}: OUT is for export, which needs one: name a .pt")
    from dlrm_overlap.checkpoint.manifest import locate_checkpoint, read_manifest, without_checksums

    if os.path.isdir(path / "checkpoints"):  # pathlib would raise if `path` may not be read
        path = locate_checkpoint(path, "checkpoint")
    from dlrm_overlap.checkpoint.tools import export, show, verify

    if values.action == "show":
        print(show(path))
        return 0
    if values.action == "export":
        with unwinding_on_sigterm():
            export(path, Path(values.output))
        return 0
    faults = verify(path)
    for fault in faults:
        print(f"dlrm-overlap: {plain(fault)}", file=sys.stderr)
    if faults:
        return DAMAGED
    print(f"{path}: whole")
    if not read_manifest(path).has_checksums:
        print(f"dlrm-overlap: {plain(without_checksums(path))}", file=sys.stderr)
    return 0


def delta(argv: list[str]) -> int:
    """Bring a checkpoint's weights up to date by deltas, which training writes with checkpoint.delta_every."""
    parser = Parser("dlrm-overlap delta", delta.__doc__ or "")
    parser.add_argument("action", choices=["apply"], metavar="apply", help="write BASE with the deltas applied")
    text = "folder step_<N>, a result of `delta apply`, or a run's folder, for its newest checkpoint"
    parser.add_argument("base", type=FullPath, metavar="BASE", help=text)
    text = "folders delta_<N>, in the order of steps"
    parser.add_argument("deltas", type=FullPath, metavar="DELTA", nargs="+", help=text)
    parser.add_argument("--output", type=FullPath, metavar="FOLDER", required=True, help="checkpoint to create")
    values = parser.read(argv)
    from dlrm_overlap.checkpoint.manifest import locate_checkpoint

    base = locate_checkpoint(Path(values.base), "BASE")
    with _naming_pyarrow(), unwinding_on_sigterm():
        from dlrm_overlap.checkpoint.apply_deltas import apply_deltas

        result = apply_deltas(base, [Path(each) for each in values.deltas], Path(values.output))
    print(f"{values.output}: weights of step {result.step}")
    return 0


def doctor(argv: list[str]) -> int:
    """Report what this machine has, what is missing, and how to get it."""
    Parser("dlrm-overlap doctor", doctor.__doc__ or "").read(argv)
    from dlrm_overlap.launching.doctor import run_doctor

    return run_doctor()


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "eval": evaluate,
    "predict": predict,
    **{each.__name__: each for each in (compare, bench, simulate, trace, checkpoint, delta, prepare, doctor)},
}


def usage() -> str:
    lines = [f"  {name:10} {function.__doc__}" for name, function in COMMANDS.items()]
    return "\n".join(["usage: dlrm-overlap COMMAND ... | --version; COMMAND --help lists its options", "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else USER_ERROR
    if argv[0] == "--version":
        print(f"dlrm-overlap {dlrm_overlap.__version__}")
        return 0
    try:
        if argv[0] not in COMMANDS:
            raise InputError(f"{argv[0]}: not a command; {suggest(argv[0], list(COMMANDS))}")
        _check_working_folder()
        hide_library_warnings()
        unset_empty()
        if argv[0] != "train":  # the only command that saves, and it unblocks signals when it can
            end_on_signals()
        with _naming_torch():
            return COMMANDS[argv[0]](argv[1:])
    except InputError as error:
        return _refuse("; ".join(filter(None, (str(error), error.cure))))
    except OSError as error:
        if "usable temporary directory" in str(error):  # by tempfile, which torch calls when it is imported
            return _refuse(f"TMPDIR: {error.strerror}; free disk space, or set TMPDIR to a folder that is yours")
        if error.filename is None or error.errno not in _CURES:
            raise
        return _refuse(f"{error.filename}: {error.strerror}; {_CURES[error.errno]}")
    except ModuleNotFoundError as error:
        if not report_missing(error):
            raise
        return USER_ERROR
    except KeyboardInterrupt:
        print("dlrm-overlap: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _check_working_folder() -> None:
    """Raise an `InputError` if the working folder is gone: MKL would end the process when torch is imported."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise InputError("the working folder has been removed or replaced; change to one that exists (cd)") from None


@contextlib.contextmanager
def _naming_torch() -> Iterator[None]:
    """If an import fails since torch, TorchRec or FBGEMM is missing or does not load, raise an `InputError` for it."""
    try:
        yield
    except (ImportError, OSError) as error:
        check_torch()
        if re.search("torchrec|fbgemm", str(error)):
            check_stack()
        raise


@contextlib.contextmanager
def _naming_pyarrow() -> Iterator[None]:
    """If an import fails since pyarrow is missing or does not load, raise an `InputError` that says so."""
    try:
        yield
    except ImportError:
        check_pyarrow()
        raise


def _refuse(message: str) -> int:
    rank = announced_rank()  # rank 0's line has no rank: all ranks may find the same
    print(f"dlrm-overlap: {f'rank {rank}: ' if rank else ''}{plain(message)}", file=sys.stderr)
    return USER_ERROR


def run() -> None:
    """Run `main` and end the process with its exit code; after an exception, with a traceback and exit code 1.

    `os._exit`, since the interpreter's shutdown may abort or hang with live process groups and CUDA contexts.
    """
    try:
        code = main()
    except SystemExit as ended:  # raised by argparse for --help
        code = ended.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        code = 1
        with contextlib.suppress(OSError):
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader may have ended
            stream.flush()
    if code:
        process_group.abandon(code)
    os._exit(code)
