"""`launch/slurm.sbatch` under a real Slurm on this machine, where Debian's packages are installed."""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, read_metrics
from tests.distributed.launchers import NO_SLURM, SlurmCluster, slurm_is_here

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not slurm_is_here(), reason=NO_SLURM)]
TWO_RANKS = ["--ntasks-per-node", "2", "--cpus-per-task", "1", "--gpus-per-node", "0"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    try:
        with SlurmCluster(folder) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _submit(cluster: SlurmCluster, folder: Path, *options: str) -> str:
    """Queue a training that saves every 10 steps, and return the job's number."""
    argv = [f"--output={folder}/%j.out", *TWO_RANKS, "launch/slurm.sbatch", "configs/quickstart.yaml"]
    argv += ["--train.device", "cpu", "--log.dir", str(folder), "--log.name", "run", "--log.every", "1"]
    argv += ["--log.tensorboard", "false", "--checkpoint.every", "10", "--data.eval_samples", "1024", *options]
    path = f"{Path(sys.executable).parent}:{cluster.environ['PATH']}"
    job = cluster.run(
        "sbatch", "--parsable", f"--chdir={ROOT}", *argv, check=True, PATH=path, VIRTUAL_ENV="x", PYTHONPATH=str(ROOT)
    )
    return job.strip()


def _await(cluster: SlurmCluster, job: str, folder: Path, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    output = folder / f"{job}.out"
    while not condition():
        assert time.monotonic() < deadline, (cluster.state(job), output.read_text() if output.exists() else "")
        time.sleep(0.2)


def _restarts(cluster: SlurmCluster, job: str) -> tuple[str, str]:
    state = cluster.state(job)
    return state["Restarts"], state["JobState"]


def _has_stepped(folder: Path) -> bool:
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.exists() and bool(metrics.read_text())


def test_ranks_of_a_step_find_each_other_and_train(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = _submit(cluster, tmp_path, "--train.steps", "20")
    _await(cluster, job, tmp_path, lambda: cluster.state(job)["JobState"] in ("COMPLETED", "FAILED"))
    output = (tmp_path / f"{job}.out").read_text()
    assert cluster.state(job)["ExitCode"] == "0:0", output
    assert "launch: slurm, rank 0 of 2, local rank 0 of 2" in output
    assert list(read_metrics(tmp_path / "run", "train/loss")) == list(range(1, 21))


def test_a_job_that_is_asked_before_its_limit_saves_is_requeued_and_goes_on(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = _submit(cluster, tmp_path, "--train.steps", "200")
    _await(cluster, job, tmp_path, lambda: _has_stepped(tmp_path))
    cluster.run("scancel", "--batch", "--signal=USR1", job, check=True)  # what --signal=B:USR1@120 sends
    _await(cluster, job, tmp_path, lambda: _restarts(cluster, job) == ("1", "PENDING"))
    time.sleep(3)  # Slurm's clock counts seconds: a launch in that of the first turn's end is refused as killed
    assert "asked to end: step" in (tmp_path / f"{job}.out").read_text()
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm lets a requeued job wait two minutes
    _await(cluster, job, tmp_path, lambda: cluster.state(job)["JobState"] in ("COMPLETED", "FAILED"))
    output = (tmp_path / f"{job}.out").read_text()
    assert cluster.state(job)["ExitCode"] == "0:0", output
    assert "resume: " in output
    assert list(read_metrics(tmp_path / "run", "train/loss")) == list(range(1, 201))


def test_a_killed_task_ends_the_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = _submit(cluster, tmp_path, "--train.steps", "1000000")
    _await(cluster, job, tmp_path, lambda: _has_stepped(tmp_path))
    cluster.run("scancel", "--signal=KILL", f"{job}.0", check=True)
    _await(cluster, job, tmp_path, lambda: cluster.state(job)["JobState"] in ("FAILED", "COMPLETED"))
    assert cluster.state(job)["JobState"] == "FAILED"
