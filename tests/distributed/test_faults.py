"""Training runs whose processes are killed, stopped or asked to end: how they end, and that nothing is left."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from dlrm_overlap.launching.launcher import free_port
from dlrm_overlap.launching.lifetime import SAVED, UNSAVED
from tests.conftest import listening_on, read_metrics, wait_until
from tests.distributed.faults import Run, assert_same_bits, children_of, fail_at, train
from tests.distributed.launchers import NO_MPI, mpi_is_here

pytestmark = pytest.mark.slow

FOREVER = ["--train.steps", "1000000"]


def test_a_stopped_rank_is_named_within_the_timeout(tmp_path: Path) -> None:
    """Runs by a collective and by flags, with either rank stopped; all at the same time, since they wait."""
    runs = {}
    for backend, stopped in (("torchrec", 0), ("torchrec", 1), ("pgas", 0), ("fused", 1)):
        options = ["--embedding.backend", backend, "--embedding.wait_timeout_s", "10"]
        folder = tmp_path / f"{backend}_{stopped}"
        folder.mkdir()
        fault = fail_at(stopped, 12, "stop")
        runs[backend, stopped] = train(folder, *FOREVER, *options, fault=fault, launcher="forked")
    for run in runs.values():
        run.wait_for("step 10 of ")
    begin = time.monotonic()
    ends = {case: run.end(60) for case, run in runs.items()}
    assert time.monotonic() - begin < 35
    for (backend, stopped), (code, errors) in ends.items():
        assert code == 1, (backend, errors)
        told = rf"rank {1 - stopped} waited 10 s for .* of rank {stopped}: expected epoch \d+, seen \d+"
        waited = re.findall(told, errors)
        told = rf"rank {1 - stopped} has made no progress in step 12 for 1\d s:\n.*rank {stopped}.*(?:silent|answer)"
        stood = re.findall(told, errors)
        assert len(set(waited)) + len(stood) == 1, (backend, errors)


def test_a_run_that_is_asked_to_end_saves_and_goes_on_as_if_it_never_ended(tmp_path: Path) -> None:
    steps = ["--train.steps", "60", "--log.every", "1", "--embedding.backend", "pgas"]
    for folder in ("whole", "asked"):
        (tmp_path / folder).mkdir()
    asks = fail_at(1, 23, "term")  # one rank alone: all ranks end with it
    run = train(tmp_path / "asked", *steps, fault=asks, launcher="forked")
    code, errors = run.end(120)
    assert code == SAVED, errors
    (saved,) = re.findall(r"dlrm-overlap: asked to end: step (\d+) is saved", errors)
    assert 23 <= int(saved) < 40
    for folder in ("asked", "whole"):
        code, errors = train(tmp_path / folder, *steps, launcher="forked").end(120)
        assert code == 0, errors
    asked, whole = (read_metrics(tmp_path / folder / "run", "train/loss") for folder in ("asked", "whole"))
    assert list(asked) == list(range(1, 61))
    assert asked == whole


def test_a_run_that_may_not_save_ends_with_a_code_that_asks_for_no_repetition(tmp_path: Path) -> None:
    options = ["--checkpoint.every", "0", "--checkpoint.last", "false"]
    run = train(tmp_path, *FOREVER, *options, "--log.every", "1", fault=fail_at(1, 3, "term"), launcher="forked")
    code, errors = run.end(120)
    assert code == UNSAVED, errors
    assert "nothing is saved, since checkpoint.every and checkpoint.last are off" in errors


@pytest.mark.parametrize("backend", ["torchrec", "pgas", "fused"])
def test_runs_of_one_seed_end_with_the_same_bits_though_a_rank_is_killed(tmp_path: Path, backend: str) -> None:
    assert_same_bits(tmp_path, "--embedding.backend", backend, "--train.steps", "60")


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    """A loader process is stopped when the launcher is killed."""
    run = train(tmp_path, *FOREVER, fault=fail_at(1, 12, "stop_reader"))
    run.wait_for("step 10 of ")
    ranks = children_of(run.process.pid)
    readers = [child for rank in ranks for child in children_of(rank)]
    assert len(run.processes()) == 1 + len(ranks) + len(readers) == 5
    run.process.kill()
    code, _ = run.end(10)
    assert code == -signal.SIGKILL


@pytest.mark.parametrize(
    ("rank", "how", "told"),
    [(0, "kill_reader", r"ended by SIGKILL, and step \d+ has no batch"), (1, "stop_reader", r"in 8 s")],
)
def test_a_loader_process_that_died_or_stopped_ends_the_run_in_one_line(
    tmp_path: Path, rank: int, how: str, told: str
) -> None:
    options = ["--embedding.backend", "pgas", "--embedding.wait_timeout_s", "10"]
    run = train(tmp_path, *FOREVER, *options, fault=fail_at(rank, 12, how), launcher="forked")
    code, errors = run.end(90)
    assert code == 2
    (line,) = [line for line in errors.splitlines() if not re.match(r"[\d:]+ rank 0: ", line)]
    who = f"rank {rank}: " if rank else ""
    assert re.match(rf"dlrm-overlap: {who}loader process 0 of 1 \(pid \d+\) .*{told}", line)


def test_sigusr1_or_ctrl_c_to_the_launcher_lets_the_ranks_save_and_the_same_command_goes_on(tmp_path: Path) -> None:
    reached = 0
    for number in (signal.SIGUSR1, signal.SIGINT):
        run = train(tmp_path, *FOREVER, launcher="forked")
        run.wait_for(": loss ")
        run.process.send_signal(number)
        code, errors = run.end(30)
        assert code == SAVED, errors
        assert f"step_{reached}, after step {reached}" in errors or not reached
        reached = int(*re.findall(r"asked to end: step (\d+) is saved", errors))
        assert (tmp_path / "run" / "checkpoints" / f"step_{reached}").is_dir()


@pytest.mark.parametrize(
    ("launcher", "number", "delay_s"),
    [("nproc", signal.SIGTERM, 0.5), ("forked", signal.SIGUSR1, 0.2), ("forked", signal.SIGTERM, 1.0)],
)
def test_a_run_that_is_asked_while_it_starts_saves_and_ends_with_the_code_of_one_that_can_go_on(
    tmp_path: Path, launcher: str, number: signal.Signals, delay_s: float
) -> None:
    """While the ranks load their libraries or meet."""
    run = train(tmp_path, *FOREVER, launcher=launcher)
    wait_until(lambda: len(children_of(run.process.pid)) == 2, 30, "no ranks")
    time.sleep(delay_s)
    run.process.send_signal(number)
    code, errors = run.end(90)
    assert code == SAVED, errors
    assert re.search(r"dlrm-overlap: asked to end: step \d+ is saved", errors), errors


def test_a_rank_that_is_asked_while_it_waits_for_another_does_not_wait_for_ever(tmp_path: Path) -> None:
    """As torchrun asks the other ranks when one has failed at its start."""
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": str(free_port())}
    argv = ["train", "--config", "quickstart", "--train.device", "cpu", "--log.dir", str(tmp_path)]
    run = Run(tmp_path, *argv, fault=world, launcher="forked")
    wait_until(lambda: listening_on(run.process.pid), 60, "the rank does not wait")
    run.process.terminate()
    code, errors = run.end(20)
    assert code == SAVED, errors
    assert "asked to end before all ranks had started" in errors


def test_an_exception_of_one_rank_is_shown_once(tmp_path: Path) -> None:
    code, errors = train(tmp_path, *FOREVER, fault=fail_at(1, 12, "exception"), launcher="forked").end(90)
    assert code == 1
    assert errors.count("RuntimeError: injected") == 1
    assert "dlrm-overlap: rank 1 " in errors


@pytest.mark.skipif(not mpi_is_here(), reason=NO_MPI)
def test_an_exception_of_one_rank_of_mpirun_ends_the_others(tmp_path: Path) -> None:
    code, errors = train(tmp_path, *FOREVER, fault=fail_at(1, 12, "exception"), launcher="mpirun").end(60)
    assert code, errors
    assert "RuntimeError: injected" in errors


def test_torchrun_starts_the_ranks_again_which_go_on(tmp_path: Path) -> None:
    options = ["--train.steps", "40", "--embedding.backend", "pgas", "--log.overwrite", "true"]
    run = train(tmp_path, *options, fault=fail_at(1, 12, "kill"), launcher="torchrun")
    run.wait_for("step 10 of ")
    run.wait_for("resume: ", 60)
    code, errors = run.end(150)
    assert code == 0, errors
    assert re.findall(r"resume: .*step_(\d+), after step", errors) == ["10"]
    assert max(read_metrics(tmp_path / "run", "train/loss")) == 40


def test_a_run_all_of_whose_processes_are_stopped_goes_on_when_they_wake(tmp_path: Path) -> None:
    options = ["--embedding.backend", "pgas", "--embedding.wait_timeout_s", "4", "--log.every", "1"]
    run = train(tmp_path, *FOREVER, *options, launcher="forked")
    run.wait_for("step 10 of ")
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in run.processes():
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            seen = run.errors.read_text().rpartition("step ")[2].partition(" of ")[0]
            time.sleep(7)  # longer than the timeout, shorter than the collective's of 10 s
    run.wait_for(f"step {int(seen) + 50} of ")
    run.process.terminate()
    code, errors = run.end(30)
    assert code == SAVED, errors
