"""A command on all ranks: its options read once, the ranks started or found, and what each of them is given."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jsonargparse.typing import PositiveInt

from dlrm_overlap import launcher
from dlrm_overlap.config import Config, InputError
from dlrm_overlap.parsing import Parser, parse_config
from dlrm_overlap.spawn import spawn

if TYPE_CHECKING:
    import torch

    from dlrm_overlap.trainer import Trainer

log = logging.getLogger("dlrm_overlap")


@dataclass(frozen=True)
class Ranks:
    """This rank's part of a command: what was asked for, and its place among the ranks."""

    config: Config
    values: Any
    """all parsed options, the command's own among them"""
    launch: launcher.Launch
    device: "torch.device"

    def connect(self) -> None:
        """Start the log and make the process group, unless that is done."""
        import torch.distributed as dist
        from rich.console import Console

        from dlrm_overlap.run_log import start_logging

        if not dist.is_initialized():
            start_logging(self.launch.rank, Console(stderr=True))
            log.info("%s", self.launch.describe())
            launcher.init_process_group(self.launch, self.device)

    def trainer(self, config: Config | None = None) -> "Trainer":
        """Connect and build the trainer of `config`, by default the command's own.

        All that can be checked before a process group exists is checked before.

        Raises:
            InputError: if the device, the data or a checkpoint does not fit `config`.
        """
        from dlrm_overlap.data.loader import open_datasets
        from dlrm_overlap.trainer import Trainer, check_device, total_steps

        config = config or self.config
        check_device(config, self.device)
        train_data, held_out = open_datasets(config.data)
        total_steps(config, train_data, self.launch.world_size)
        self.connect()
        return Trainer(config, self.launch, self.device, train_data, held_out)


def run_on_ranks(
    command: list[str],
    description: str,
    argv: list[str],
    work: Callable[[Ranks], int],
    add_options: Callable[[Parser], None] = lambda parser: None,
    check: Callable[[Config, Any], None] = lambda config, values: None,
) -> int:
    """Run `work`, which returns an exit code, on every rank, with the configuration and options in `argv`.

    With --nproc it starts the ranks and waits for them; otherwise this process is one. `work` makes the process group
    (`Ranks.connect` or `Ranks.trainer`), after its own checks.

    Args:
        command: its words, such as ["bench", "input"].
        description: what --help says of it.
        argv: the options behind them.
        work: what a rank does.
        add_options: adds the command's own options.
        check: refuses what does not go together, before any rank is started.

    Returns:
        The exit code.
    """

    def add_all(parser: Parser) -> None:
        parser.add_argument("--nproc", type=PositiveInt, help="start this many processes on this machine")
        add_options(parser)

    config, values = parse_config(" ".join(["dlrm-overlap", *command]), description, argv, add_all)
    check(config, values)
    if values.nproc:
        config.train.samples_per_rank(values.nproc)
        if config.train.device == "cuda":
            launcher.find_device("cuda", local_rank=values.nproc - 1)
        return spawn([*command, *_without_nproc(argv)], values.nproc)

    launch = launcher.detect()
    try:
        from dlrm_overlap.doctor import check_stack  # torch takes seconds: not before the options are known to be good

        check_stack()
        device = launcher.find_device(config.train.device, launch.local_rank, launch.source)
        code = work(Ranks(config, values, launch, device))
    except InputError:
        if launch.rank:  # mostly every rank finds it: rank 0 tells, and its end ends the others
            time.sleep(2)
        raise
    launcher.shutdown()
    return code


def _without_nproc(argv: list[str]) -> list[str]:
    kept = []
    options = iter(argv)
    for option in options:
        if option == "--nproc":
            next(options)
        elif not option.startswith("--nproc="):
            kept.append(option)
    return kept
