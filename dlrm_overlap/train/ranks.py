"""Runs a command on all ranks. Does not import torch, so that mistakes are reported before any rank starts."""

import contextlib
import gc
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dlrm_overlap.config import Config, DataConfig, InputError, PeerError, PositiveInt, flatten, in_one_line
from dlrm_overlap.launching import launcher, process_group
from dlrm_overlap.launching.environment import code_digest
from dlrm_overlap.launching.lifetime import HOLD_BACK_S, EndRequest, end_on_signals
from dlrm_overlap.launching.parsing import Parser, parse_config
from dlrm_overlap.launching.resources import check_processes, exhausted_memory, lacks_threads
from dlrm_overlap.launching.spawn import spawn
from dlrm_overlap.launching.watch import Progress

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from dlrm_overlap.train.assembly import MakeSharders
    from dlrm_overlap.train.trainer import Trainer

log = logging.getLogger("dlrm_overlap")

_ON_CPUS = ("sgd", "adagrad", "rowwise_adagrad")  # optimizers that FBGEMM has on CPUs
_NOT_COMPARED = ("config", "nproc")  # the resolved configuration is compared instead


@dataclass(frozen=True)
class Ranks:
    config: Config
    values: Any
    """all parsed options, including the command's own"""
    world: launcher.World
    device: "torch.device"
    progress: Progress = field(default_factory=Progress)
    end: EndRequest = field(default_factory=EndRequest)

    def meet(self) -> "dist.ProcessGroup":
        """Start logging and make the process group of all ranks, once; return the group.

        Raises:
            InputError: if the ranks do not meet.
        """
        import torch.distributed as dist

        from dlrm_overlap.observe.run_log import start_logging

        if not dist.is_initialized():
            start_logging(self.world.rank)
            log.info("%s", self.world.describe())
            wait_s = self.config.embedding.wait_timeout_s
            with self.end.while_ranks_meet():
                process_group.init_process_group(self.world, self.device, wait_timeout_s=wait_s)
            process_group.watch_ranks(self.world, wait_s, self.progress)
        group = dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup)
        return group

    def connect(self, **samples: str) -> "dist.ProcessGroup":
        """Let the ranks meet, compare them, and return their group; a collective.

        `samples` maps keys of `data` to fingerprints of their samples.

        Raises:
            InputError: if the ranks do not meet, or differ in configuration, options, code or samples.
        """
        group = self.meet()
        options = {f"--{key}": str(value) for key, value in vars(self.values).items() if key not in _NOT_COMPARED}
        data = {f"the samples of data.{key}": value for key, value in samples.items()}
        facts = flatten(self.config.as_dict()) | options | data | {"code": code_digest()}
        process_group.check_identical(facts, group)
        return group

    def are_restarted(self) -> bool:
        """Return whether the launcher has started the ranks again; on several machines under torchrun a collective.

        torchrun counts on each machine the restarts that ranks of this machine have caused.
        """
        from dlrm_overlap.comm.every_rank import gathered
        from dlrm_overlap.observe.restarts import is_restart

        if self.world.source == "torchrun" and self.world.local_world_size < self.world.world_size:
            return any(gathered(is_restart(), self.meet()))
        return is_restart()

    def trainer(
        self,
        config: Config | None = None,
        make_sharders: "MakeSharders | None" = None,
        resumes: bool = False,
        **options: Any,
    ) -> "Trainer":
        """Make the process group and build the trainer, by default for the command's own `config`; a collective.

        If `resumes`, first check that the run can resume from the checkpoint that `checkpoint.resume` selects.
        `options` are further arguments of `StepRunner`.

        Raises:
            InputError: before the group is made, if the device, the data or the checkpoint does not fit.
        """
        from dlrm_overlap.checkpoint.checkpoint import check_resume_fits, samples_of
        from dlrm_overlap.comm.every_rank import gathered
        from dlrm_overlap.data.days import Days
        from dlrm_overlap.data.loader import open_datasets, warnings_of_time
        from dlrm_overlap.embedding.configured_sharders import build_sharders
        from dlrm_overlap.train.stepping import check_batch_size
        from dlrm_overlap.train.trainer import Trainer

        config = config or self.config
        check_start(config, self.device)
        train_data, held_out = open_datasets(config.data, self.device)
        config.model.check_samples(len(train_data.rows), len(train_data.labels))
        config.embedding.id_tables.check_tables(train_data.rows)
        check_batch_size(config, train_data, self.world.world_size)
        resumed = config
        if resumes:
            batch = config.train.samples_per_rank(self.world.world_size) * self.world.world_size
            about = list(train_data.rows), train_data.dense_features, batch, train_data.encoded
            resumed = check_resume_fits(config, *about, samples_of(train_data, held_out))
        group = self.connect(path=train_data.fingerprint(), eval_path=held_out.fingerprint())
        if self.world.rank == 0 and isinstance(train_data, Days) and isinstance(held_out, Days):
            for warning in warnings_of_time(train_data, held_out):
                log.warning("data: %s", warning)
        id_rows = gathered(resumed.embedding.id_tables.rows if resumed is not config else None, group)[0]
        return Trainer(
            config,
            self.world,
            self.device,
            train_data,
            held_out,
            make_sharders or build_sharders,
            progress=self.progress,
            id_rows=id_rows,
            end=self.end,
            **options,
        )


def run_on_ranks(
    command: list[str],
    description: str,
    argv: list[str],
    work: Callable[[Ranks], int],
    add_options: Callable[[Parser], None] = lambda parser: None,
    check: Callable[[Config, Any], None] = lambda config, values: None,
    defaults: Mapping[str, Any] | None = None,
) -> int:
    """Run `work` on every rank with the configuration and options in `argv`, and return its exit code.

    With --nproc this process starts the ranks and waits for them; otherwise it is one of the ranks.

    Args:
        command: words of the command, such as ["bench", "input"].
        argv: options after these words.
        work: runs on each rank, must create the process group, and returns the exit code.
        check: raises an InputError before any rank starts.
        defaults: values that replace the defaults of configuration keys, nested as in a configuration file.
    """

    def add_all(parser: Parser) -> None:
        text = "number of processes to start on this machine; auto: one per GPU, or two on the CPU"
        parser.add_argument("--nproc", type=PositiveInt | Literal["auto"], help=text)
        add_options(parser)

    launcher.end_with_launcher()
    with _one_rank_reports():
        config, values = parse_config(
            Config, " ".join(["dlrm-overlap", *command]), description, argv, add_all, defaults
        )
        check(config, values)
        if values.nproc:
            nproc = _count_processes(values.nproc, config)
            check_processes(nproc)
            config.train.samples_per_rank(nproc)
            if config.train.device == "cuda":
                process_group.find_device("cuda", local_rank=nproc - 1)
            return spawn([*command, *_without_nproc(argv)], nproc)

        world = launcher.detect()
        # Imported only after the options are checked: this loads torch, which takes seconds.
        with _importing():
            from dlrm_overlap.launching.supported_versions import check_stack

            check_stack()
            device = process_group.find_device(
                config.train.device, world.local_rank, world.source, world.local_world_size
            )
            import_module("dlrm_overlap.train.trainer")  # and what it needs
        ranks = Ranks(config, values, world, device)
        code = work(ranks)
        ranks.progress.is_over = True
    process_group.shutdown()
    return code


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Disable garbage collection during imports, and exclude the imported objects from later collections.

    It takes a third of a rank's time to start.
    """
    gc.collect()  # garbage of before would stay
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def check_data(data: DataConfig, *keys: str) -> None:
    """Raise an InputError unless the files of `keys`, by default "path" and "eval_path", exist."""
    for key in keys or ("path", "eval_path"):
        path = getattr(data, key)
        if path is not None and not os.path.exists(path):
            raise InputError(f"data.{key}: {path}: no such file or folder on this machine; give one that is there")


def check_writable(folder: Path, key: str) -> None:
    """Raise an InputError unless `folder`, or its nearest existing parent, is writable."""
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise InputError(
            f"{key}: nothing can be written to {folder} ({error.strerror}); give a folder that is yours"
        ) from None


def check_needs_no_checkpoint(config: Config, command: str) -> None:
    """Raise an InputError if training by `config` needs checkpoints, which the runs of `command` do not save."""
    if (at := config.embedding.id_tables.grow_at) is not None:
        raise InputError(
            f"embedding.id_tables.grow_at: {at}, but {command} saves no checkpoints, by which tables grow; leave out "
            f"grow_at and max_rows"
        )


def check_output(path: Path, key: str = "--output") -> None:
    if path.is_dir():
        raise InputError(f"{key}: {path} is a folder; name a file in it")
    check_writable(path.parent, key)


def check_start(config: Config, device: "torch.device") -> None:
    """Raise an InputError if a key asks for a GPU feature on a CPU."""
    gpu_only = {
        "train.precision": (config.train.precision, "tf32", "fp32"),
        "train.graph_dense": (config.train.graph_dense, True, "false"),
        "embedding.plan": (config.embedding.plan, "row_wise", "auto"),
    }
    for key, (value, forbidden, cure) in gpu_only.items():
        if device.type == "cpu" and value == forbidden:
            shown = str(value).lower()
            raise InputError(f"{key}: {shown} needs a GPU, and this run is on a CPU; set --{key} {cure}")
    if device.type == "cpu" and config.embedding.optimizer not in _ON_CPUS:
        raise InputError(
            f"embedding.optimizer: {config.embedding.optimizer} needs a GPU, since FBGEMM has none on a CPU; take "
            f"{', '.join(_ON_CPUS)}"
        )


def _count_processes(nproc: int | str, config: Config) -> int:
    if nproc != "auto":
        return int(nproc)
    gpus = process_group.visible_gpus(config.train.device)
    text = f"{gpus} process{'es' * (gpus > 1)}, one per GPU" if gpus else "2 processes on the CPU"
    print(f"--nproc auto: {text}", file=sys.stderr)
    return gpus or 2


@contextlib.contextmanager
def _one_rank_reports() -> Iterator[None]:
    """Delay an error on all ranks but one, so that the launcher ends them before they report it too.

    Rank 0 reports a user's mistake at once, since every rank finds it. Other errors may be caused by the end of a peer,
    so rank 0 delays them too, but less than the other ranks. A `PeerError` is delayed longest. An error for lack of
    memory or threads becomes an `InputError`.
    """
    try:
        yield
    except Exception as raised:
        error = _as_lack(raised) or raised
        rank = launcher.announced_rank()
        held_back = 3 if isinstance(error, PeerError) else (rank != 0) + (not isinstance(error, InputError))
        if rank is not None and held_back:
            end_on_signals()  # torchrun and mpirun end ranks by SIGTERM
            time.sleep(HOLD_BACK_S * held_back)
        if error is raised:
            raise
        raise error from raised


def _as_lack(error: Exception) -> InputError | None:
    """Return an error with the cure if `error` says that there is no memory or thread left, else None."""
    exhausted, said = exhausted_memory(error), in_one_line(error) or type(error).__name__
    fewer = "take a smaller train.batch_size, fewer rows (data.tables.max_rows) or a smaller model"
    if exhausted == "GPU":
        return InputError(f"memory: none left on the GPU ({said:.200}); {fewer}, more ranks or embedding.memory auto")
    if exhausted == "machine":
        return InputError(f"memory: none left on this machine ({said[-200:]}); {fewer}, or more machines")
    if lacks_threads(error) and not isinstance(error, InputError):  # which has a cure
        return InputError(
            f"limit of threads and processes: no more can be started ({said[-200:]}); raise it (`ulimit -u`, in a "
            f"container `docker run --pids-limit`), or take fewer ranks, data.workers and OMP_NUM_THREADS"
        )
    return None


def _without_nproc(argv: list[str]) -> list[str]:
    kept = []
    options = iter(argv)
    for option in options:
        if option == "--nproc":
            next(options)
        elif not option.startswith("--nproc="):
            kept.append(option)
    return kept
