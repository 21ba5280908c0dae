"""`launch/slurm.sbatch` under a real Slurm on this machine, where Debian's packages are installed."""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, read_metrics, wait_until
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


def _await(cluster: SlurmCluster, job: str, folder: Path, condition: Callable[[], object]) -> None:
    output = folder / f"{job}.out"
    wait_until(condition, 120, lambda: (cluster.state(job), output.read_text() if output.exists() else ""), 0.2)


def _await_first_step(cluster: SlurmCluster, job: str, folder: Path) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    _await(cluster, job, folder, lambda: metrics.exists() and metrics.read_text())


def _await_end(cluster: SlurmCluster, job: str, folder: Path) -> str:
    """Wait until the job has ended well, and return its output."""
    _await(cluster, job, folder, lambda: cluster.state(job)["JobState"] in ("COMPLETED", "FAILED"))
    output = (folder / f"{job}.out").read_text()
    assert cluster.state(job)["ExitCode"] == "0:0", output
    return output


def test_ranks_of_a_step_find_each_other_and_train(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = _submit(cluster, tmp_path, "--train.steps", "20")
    assert "launch: slurm, rank 0 of 2, local rank 0 of 2" in _await_end(cluster, job, tmp_path)
    assert list(read_metrics(tmp_path / "run", "train/loss")) == list(range(1, 21))


def test_a_job_that_is_asked_before_its_limit_saves_is_requeued_and_goes_on(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = _submit(cluster, tmp_path, "--train.steps", "200", "--log.overwrite", "true")
    _await_first_step(cluster, job, tmp_path)
    cluster.run("scancel", "--batch", "--signal=USR1", job, check=True)  # what --signal=B:USR1@120 sends
    requeued = {"Restarts": "1", "JobState": "PENDING"}.items()
    _await(cluster, job, tmp_path, lambda: requeued <= cluster.state(job).items())
    time.sleep(3)  # Slurm counts seconds: a launch within the one in which the first turn ended is refused as killed
    assert "asked to end: step" in (tmp_path / f"{job}.out").read_text()
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm lets a requeued job wait two minutes
    assert "resume: " in _await_end(cluster, job, tmp_path)
    assert list(read_metrics(tmp_path / "run", "train/loss")) == list(range(1, 201))


def test_a_killed_task_ends_the_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = _submit(cluster, tmp_path, "--train.steps", "1000000")
    _await_first_step(cluster, job, tmp_path)
    cluster.run("scancel", "--signal=KILL", f"{job}.0", check=True)
    _await(cluster, job, tmp_path, lambda: cluster.state(job)["JobState"] in ("FAILED", "COMPLETED"))
    assert cluster.state(job)["JobState"] == "FAILED"
