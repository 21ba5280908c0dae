"""Commands of which a rank fails at a step; nothing of them may be left afterwards.

For the ranks, `rank_main` takes the part of `python -m dlrm_overlap`: it puts the fault into `Trainer.step`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import warm
from tests.conftest import PYTHON_PATH, ROOT, wait_until
from tests.distributed.launchers import MPI_AS_ROOT, find_mpirun

_FAULT, _MARK = "TEST_FAULT", "TEST_FAULT_RUN"
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")  # as launchers set it
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "usr1": signal.SIGUSR1}


def fail_at(rank: int, step: int, how: str) -> dict[str, str]:
    """Return the variables that let `rank` fail as it begins its `step`-th call of `Trainer.step`.

    `how` is kill, stop, term or usr1 (a signal to itself), exception, nan (its loss), stop_reader or kill_reader.
    """
    return {_FAULT: f"{rank}:{step}:{how}"}


def rank_main() -> None:
    from dlrm_overlap.__main__ import run

    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if (fault := os.environ.get(_FAULT)) and not again:
        rank, step, how = fault.split(":")
        if rank == next((os.environ[name] for name in _RANKS if name in os.environ), "0"):
            _install(int(step), how)
    run()


def _install(at: int, how: str) -> None:
    from dlrm_overlap.train.trainer import Trainer

    step, calls = Trainer.step, 0

    def failing(self: Trainer, batches: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != at:
            return step(self, batches)
        if how == "exception":
            raise RuntimeError("injected")
        if how.endswith("_reader"):
            os.kill(children_of(os.getpid())[0], _SIGNALS[how.removesuffix("_reader")])
        elif how != "nan":
            os.kill(os.getpid(), _SIGNALS[how])
        loss = step(self, batches)
        return loss * float("nan") if how == "nan" else loss

    Trainer.step = failing


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for task in tasks for child in task.read_text().split())


class Run:
    """A command that runs; all of its processes have a mark."""

    def __init__(
        self, folder: Path, *argv: str, fault: Mapping[str, str] | None = None, launcher: str = "nproc"
    ) -> None:
        wrapper = folder / "rank"
        cut = "import sys; sys.argv[1:3] = []"  # -m dlrm_overlap
        wrapper.write_text(f"#!{sys.executable}\n{cut}\nfrom tests.distributed.faults import rank_main\nrank_main()\n")
        wrapper.chmod(0o755)
        self._mark = uuid.uuid4().hex
        self._others = _shared_names()
        ours = ("RANK", "WORLD_SIZE", "TRITON_INTERPRET")
        environ = {name: value for name, value in os.environ.items() if name not in ours}
        environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH, "TMPDIR": str(folder), _MARK: self._mark}
        defaults = "; ".join(f"signal.signal(signal.SIG{name}, signal.SIG_DFL)" for name in ("INT", "QUIT", "HUP"))
        program = f"import signal, sys; {defaults}; sys.executable = {str(wrapper)!r}; "
        program += "from dlrm_overlap.__main__ import run; run()"
        command = [sys.executable, "-c", program, *argv]
        if launcher == "mpirun":
            rank = [str(wrapper), "-m", "dlrm_overlap", *argv]
            command = [find_mpirun() or "mpirun", "-n", "2", "--bind-to", "none", *rank]
            environ |= MPI_AS_ROOT
        if launcher == "torchrun":
            agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
            agent += ["--shutdown-timeout", "3"]  # before SIGKILL: the ranks that are left wait for the dead one
            command = [sys.executable, *agent, "--no-python", str(wrapper), "-m", "dlrm_overlap", *argv]
            environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as launch/torchrun.sh sets it
        self.errors = folder / "stderr"
        environ |= fault or {}
        self.process: subprocess.Popen[bytes] | warm.Command
        if launcher == "forked":
            mark = folder / self._mark
            mark.write_text("mapped by each process of the run")
            self.errors.write_text("")  # an earlier run's may be there
            streams = [Path(os.devnull), self.errors]
            self.process = warm.Command(argv, ROOT, environ, streams, mark, rank_main)
            return
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=errors)

    def processes(self) -> list[int]:
        """Return the ids of the run's processes that are alive, the launcher's among them."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                marks = (entry / "environ").read_bytes(), (entry / "maps").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if any(self._mark.encode() in mark for mark in marks) and state not in "ZX":
                found.append(int(entry.name))
        return found

    def wait_for(self, text: str, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.errors.read_text():
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < deadline, f"no {text!r} in {timeout_s:g} s: {self.errors.read_text()}"
            time.sleep(0.02)

    def end(self, timeout_s: float) -> tuple[int, str]:
        """Wait for the command's end, check that nothing of it is left, and return exit code and standard error."""
        try:
            code = self.process.wait(timeout_s)
            self.assert_nothing_left()
        finally:
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
        return code, self.errors.read_text()

    def assert_nothing_left(self) -> None:
        """Check that no process of the run is alive, and that none of its shared memory or semaphores has a name."""
        wait_until(lambda: not self.processes(), 5, self._command_lines, 0.02)  # the kernel takes a moment
        names = _shared_names() - self._others
        wait_until(lambda: not _unused(names), 5, lambda: f"{_unused(names)} stay", 0.02)

    def _command_lines(self) -> list[bytes]:
        return [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.processes()]


def _shared_names() -> set[str]:
    """Return the names of all shared memory and semaphores, of any process."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("dlrm_overlap", "sem."))}


def _unused(names: set[str]) -> set[str]:
    """Return which of `names` exist, but are mapped by no process: other tests and programs map theirs."""
    inodes = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            inodes[os.stat(f"/dev/shm/{name}").st_ino] = name
    for maps in Path("/proc").glob("[0-9]*/maps") if inodes else ():
        with contextlib.suppress(OSError):
            for line in maps.read_text(errors="replace").splitlines():
                if "/dev/shm/" in line:  # with a semaphore's first name, so by inode
                    inodes.pop(int(line.split()[4]), None)
    return set(inodes.values())


def train(folder: Path, *options: str, fault: Mapping[str, str] | None = None, launcher: str = "nproc") -> Run:
    """Start the quickstart on two CPU ranks, with a loader process each, which saves every 10 steps.

    `launcher` is nproc, mpirun, torchrun, or forked: as nproc, by processes that need not import torch.
    """
    argv = ["train", "--config", "configs/quickstart.yaml", "--train.device", "cpu", "--embedding.backend", "torchrec"]
    argv += ["--nproc", "2"] if launcher in ("nproc", "forked") else []
    argv += ["--log.dir", str(folder), "--log.name", "run", "--log.every", "5", "--log.tensorboard", "false"]
    argv += ["--data.workers", "1", "--checkpoint.every", "10"]
    return Run(folder, *argv, *options, fault=fault, launcher=launcher)


def assert_same_bits(folder: Path, *options: str, launcher: str = "forked") -> None:
    """Check that two runs, and one whose rank 1 is killed before step 33 and which resumes, write the same weights."""
    written = {}
    for name, fault in (("first", None), ("second", None), ("killed", fail_at(1, 33, "kill"))):
        (folder / name).mkdir()
        if fault is not None:
            code, errors = train(folder / name, *options, fault=fault, launcher=launcher).end(200)
            assert code == 128 + signal.SIGKILL, errors
        code, errors = train(folder / name, *options, launcher=launcher).end(200)
        assert code == 0, errors
        assert ("after step 30" in errors) == (fault is not None), errors
        newest = max((folder / name / "run" / "checkpoints").glob("step_*"), key=lambda path: path.stat().st_mtime)
        written[name] = {path.name: path.read_bytes() for path in newest.glob("*.distcp")}
    assert written["first"]
    assert written["first"] == written["second"]
    assert written["first"] == written["killed"]
