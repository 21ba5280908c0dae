"""Ranks for tests that run many cases in one set of processes: to start one takes seconds."""

import gc
import logging
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes

from dlrm_overlap.config import Config
from dlrm_overlap.data.loader import open_datasets
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.launching.launcher import LOOPBACK, World
from dlrm_overlap.train.ranks import Ranks
from dlrm_overlap.train.trainer import Trainer
from tests import warm
from tests.conftest import ROOT, configuration

_COLLECTIVE_TIMEOUT = timedelta(seconds=60)


def _start(world_size: int, work: Callable[..., None], folder: Path, *arguments: Any) -> Any:
    method = "spawn" if torch.cuda.is_available() else warm.START_METHOD
    arguments = (world_size, work, folder, *arguments)
    return start_processes(_rank, arguments, nprocs=world_size, join=False, start_method=method)


def run_ranks(
    work: Callable[..., None], world_size: int, folder: Path, *arguments: Any, timeout_s: float = 300
) -> None:
    """Run `work(folder, *arguments)` on `world_size` CPU processes that share a process group.

    Raises:
        Exception: with the traceback of the first rank that failed; the others are ended.
    """
    context, deadline = _start(world_size, work, folder, *arguments), time.monotonic() + timeout_s
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, f"{work.__name__}: ranks still run after {timeout_s:g} s"
    finally:
        for process in context.processes:
            process.kill()


def ran_on_ranks(world_size: int, work: Callable[[Path], None]) -> Any:
    """Return a fixture for the module that assigns it: the folder in which `work(folder)` has run on all ranks."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("ranks")
        run_ranks(work, world_size, folder)
        return folder

    return folder


class RankPool:
    """CPU processes that share a process group and wait for work, so that many calls start them once."""

    def __init__(self, world_size: int, folder: Path, timeout_s: float = 120) -> None:
        self.world_size = world_size
        self._folder, self._timeout_s, self._calls = folder, timeout_s, 0
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []

    def run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run `work(folder, *arguments)` on all ranks, each time with another folder; start them if they do not run.

        Raises:
            AssertionError: with what all ranks have asserted in vain at the end of `work`; they wait for the next call.
            RuntimeError: with the first other error, or since the call takes longer than `timeout_s`; all ranks are
                ended, since some may wait for others.
        """
        self._calls += 1
        if not self._processes:
            self._start()
        folder = self._folder / str(self._calls)
        folder.mkdir()
        for pipe in self._pipes:
            pipe.send((work, folder, arguments))
        answers, deadline = dict[int, tuple[bool, str]](), time.monotonic() + self._timeout_s
        while len(answers) < self.world_size:
            for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True)):
                if rank not in answers and pipe.poll(0.002):
                    answers[rank] = pipe.recv()
                elif process.exitcode is not None:
                    answers[rank] = False, f"rank {rank} has died, with exit code {process.exitcode}"
            broken = [error for in_step, error in answers.values() if not in_step]
            if broken or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(broken[0] if broken else f"ranks still run after {self._timeout_s:g} s")
        errors = [error for _, error in answers.values() if error]
        assert not errors, "\n\n".join(errors)

    def _start(self) -> None:
        pairs = [multiprocessing.Pipe() for _ in range(self.world_size)]
        self._pipes = [ours for ours, _ in pairs]
        folder = self._folder / f"ranks_{self._calls}"
        folder.mkdir()
        self._processes = list(_start(self.world_size, _serve, folder, [theirs for _, theirs in pairs]).processes)
        for _, theirs in pairs:
            theirs.close()


def _serve(_: Path, pipes: Sequence[Any]) -> None:
    """Do the work that arrives in this rank's pipe, until the process is ended; answer (is in step, error)."""
    pipe = pipes[dist.get_rank()]
    while True:
        work, folder, arguments = pipe.recv()
        answer = True, ""
        try:
            work(folder, *arguments)
        except AssertionError as error:
            answer = True, str(error)
        except Exception:
            answer = False, traceback.format_exc()
        pipe.send(answer)


def logged_messages() -> list[str]:
    """Return a list to which each later message of the package's log is appended, in this process."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("dlrm_overlap").addHandler(handler)
    return messages


def cases_on_ranks(world_size: int, run: Callable[[str], None], cases: Sequence[str]) -> Any:
    """Return a fixture for the module that assigns it, which runs `run(case)` for each of `cases` on all ranks.

    The fixture is a function that fails the test of a case that did not end well on all ranks. It shows the error, or
    which earlier case had one.
    """

    @pytest.fixture(scope="module")
    def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
        folder, error = tmp_path_factory.mktemp("ranks"), ""
        try:
            run_ranks(_run_each, world_size, folder, run, *cases)
        except ProcessRaisedException as raised:
            error = str(raised)

        def check(case: str) -> None:
            if not (folder / case).exists():
                failed = next(case for case in cases if not (folder / case).exists())
                pytest.fail(error if case == failed else f"did not run, since {failed} failed", pytrace=False)

        return check

    return ended


def _run_each(folder: Path, run: Callable[[str], None], *cases: str) -> None:
    for case in cases:
        run(case)
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / case).touch()


def _rank(rank: int, world_size: int, work: Callable[..., None], folder: Path, *arguments: Any) -> None:
    gc.freeze()  # what it was forked with, which each collection would visit
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torchrec|torch|dlrm_overlap")
    for library in ("torchrec", "torch.fx"):
        logging.getLogger(library).setLevel(logging.ERROR)
    store = dist.FileStore(str(folder / f"store_{work.__name__}"), world_size)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_COLLECTIVE_TIMEOUT)
    work(folder, *arguments)
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # see cli.run


def quickstart(folder: Path, name: str, *options: str) -> Config:
    """Return the quickstart's configuration for a run `name` in `folder`, changed by dotted `options`.

    The backend is `torchrec` unless they change it.
    """
    argv = ["--config", str(ROOT / "configs/quickstart.yaml"), "--train.device", "cpu"]
    argv += ["--embedding.backend", "torchrec"]
    argv += ["--log.dir", str(folder), "--log.name", name, "--log.every", "1", "--log.tensorboard", "false"]
    argv += ["--checkpoint.last", "false"]
    return configuration(*argv, *options)


def world_here() -> World:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return World(rank, rank, world_size, world_size, LOOPBACK, 1, "nproc")


def make_trainer(config: Config) -> Trainer:
    """Return this rank's trainer; all ranks of the process group call this."""
    return Trainer(config, world_here(), torch.device("cpu"), *open_datasets(config.data))


def ranks_here(config: Config) -> Ranks:
    return Ranks(config, SimpleNamespace(), world_here(), torch.device("cpu"))


def train(config: Config) -> Path:
    """Train `config` on the ranks of the process group and return the run's folder."""
    trainer = make_trainer(config)
    used = {exchange.options.backend for exchange in exchanges(trainer.model)}
    assert used == {trainer.embedding.backend} - {"torchrec"}, f"fell back: {used}"
    trainer.fit()
    trainer.close()
    return trainer.folder
