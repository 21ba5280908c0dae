"""Fixtures and helpers for all tests."""

import contextlib
import csv
import gc
import json
import logging
import os
import resource
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dlrm_overlap.config import Config, InputError
from dlrm_overlap.launching import environment
from dlrm_overlap.launching.parsing import parse_config

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ROOT = Path(__file__).parents[1]
PYTHON_PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # for processes of tests


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options of `tests/gpu/test_exchange.py`, and prepare this process for tests, if it runs any.

    With `-n` it hands them to others, which start sooner if it imports no torch.
    """
    given = pluginmanager.get_plugin("pytestconfig").known_args_namespace  # pyright: ignore[reportOptionalMemberAccess]
    if "PYTEST_XDIST_WORKER" in os.environ or not getattr(given, "numprocesses", None):
        from tests.without_gpu import interpret_kernels

        gc.disable()  # until the tests are collected
        interpret_kernels()
    parser.addoption("--nproc", type=int, help="ranks, a GPU each where there are any")
    parser.addoption("--ranks_per_gpu", type=int, help="ranks that share a GPU, which times nothing")
    parser.addoption("--left", help="file of the checks to run, if it is there, which takes those that do not pass")
    parser.addoption("--budget_s", type=float, help="seconds for all checks; by default 540 for each rank of a GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests without a GPU, except those whose fixture decides where they run."""
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") and "schedule" not in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason="needs NVIDIA GPUs"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """Keep what all tests share, the modules, out of collections of garbage, which take up to 0.3 seconds each.

    Then start what forks the tests' processes, if there may be any, with the output that pytest captures.
    """
    result = yield
    gc.freeze()
    gc.enable()
    environment.commit = cache(environment.commit)  # which each run asks git for
    environment.commit()
    if warm := sys.modules.get("tests.warm"):
        capture: Any = session.config.pluginmanager.get_plugin("capturemanager")
        capture.resume_global_capture()
        warm.fork_server()
        capture.suspend_global_capture()
    return result


@pytest.fixture(scope="module")
def world_of_one() -> "Iterator[ProcessGroup]":
    import torch.distributed as dist

    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Leave out what torch logs: it gives some warnings once in a process, so in whichever test comes first."""

    def is_not_of_torch(record: logging.LogRecord) -> bool:
        return record.name.partition(".")[0] != "torch"

    caplog.handler.addFilter(is_not_of_torch)
    yield caplog
    caplog.handler.removeFilter(is_not_of_torch)


# Each makes something that is not a file: to read it fails, blocks for ever or does not end.
NO_FILES: dict[str, Callable[[Path], Any]] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


def wait_until(
    condition: Callable[[], object], timeout_s: float, what: str | Callable[[], object], every_s: float = 0.005
) -> None:
    """Wait until `condition` holds, or fail with `what`, a message or a function that returns one."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(every_s)


def is_alive(pid: int) -> bool:
    """Return whether a process runs or is stopped; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def listening_on(pid: int | None = None) -> list[tuple[str, int]]:
    """Return the TCP addresses and ports that process `pid`, by default any process, listens on."""
    sockets, found = set(), []
    for file in Path(f"/proc/{pid}/fd").iterdir() if pid else []:
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            sockets.add(os.readlink(file))
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            node, port = fields[1].split(":")
            if fields[3] == "0A" and (not pid or f"socket:[{fields[9]}]" in sockets):
                words = [bytes.fromhex(node[i : i + 8])[::-1] for i in range(0, len(node), 8)]
                found.append((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def configuration(*argv: str) -> Config:
    """Return the configuration of a command line of keys."""
    return parse_config(Config, "test", "", argv)[0]


@contextmanager
def refuses(rule: str | None = None) -> Iterator[pytest.ExceptionInfo[InputError]]:
    """Check that an InputError is raised whose message is one line, and matches `rule`."""
    with pytest.raises(InputError, match=rule) as error:
        yield error
    assert "\n" not in str(error.value)


@contextmanager
def file_limit(size_bytes: int) -> Iterator[None]:
    """Let no file grow beyond `size_bytes`, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run_cli(*argv: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    import torch

    from tests import warm

    ours = ("RANK", "WORLD_SIZE", "TRITON_INTERPRET")
    environment = {k: v for k, v in os.environ.items() if k not in ours} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dlrm_overlap", *argv]
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        with streams[0].open("w") as output, streams[1].open("w") as errors:
            if torch.cuda.is_available():
                process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=errors)
            else:
                process = warm.Command(argv, ROOT, environment, streams)
            try:
                code = process.wait(timeout_s)
            finally:
                process.kill()
        return subprocess.CompletedProcess(command, code, *(path.read_text() for path in streams))


def run_quickstart(folder: Path, name: str, nproc: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Train the quickstart on `nproc` CPU processes, with `torchrec` unless asked otherwise, and log every step."""
    argv = ["train", "--config", "configs/quickstart.yaml", "--train.device", "cpu", "--embedding.backend", "torchrec"]
    argv += ["--nproc", str(nproc)] if nproc > 1 else []
    argv += ["--log.dir", str(folder), "--log.name", name, "--log.every", "1", "--checkpoint.last", "false", *options]
    return run_cli(*argv)


def train_quickstart(folder: Path, name: str, nproc: int, *options: str) -> Path:
    """Train the quickstart as `run_quickstart` does, check that it succeeds, and return the run's folder."""
    result = run_quickstart(folder, name, nproc, *options)
    assert result.returncode == 0, result.stderr
    return folder / name


def read_table(page: str, header: str) -> list[list[str]]:
    """Return the cells of the table that begins with `header` in `page`, a Markdown file."""
    lines = Path(page).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(header)) + 2
    end = next(i for i, line in enumerate([*lines, ""]) if i >= start and not line.lstrip().startswith("|"))
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines[start:end]]


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_metrics(run: Path, key: str) -> dict[int, float]:
    """Return step -> value of `key` in the run's metrics.jsonl."""
    records: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record[key] for record in records if key in record}


def assert_losses_agree(run: Path, reference: Path, rtol: float) -> None:
    """Check that two runs logged the same steps with losses that differ by at most `rtol`, relatively."""
    losses, expected = read_metrics(run, "train/loss"), read_metrics(reference, "train/loss")
    assert list(losses) == list(expected)
    worst = max(expected, key=lambda step: abs(losses[step] - expected[step]) / abs(expected[step]))
    error = abs(losses[worst] - expected[worst]) / abs(expected[worst])
    assert error <= rtol, f"step {worst}: loss {losses[worst]} against {expected[worst]}, relative error {error:.1e}"
