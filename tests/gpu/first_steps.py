"""What the first steps behind a save take, over many saves: `torchrun --nproc-per-node 2 -m tests.gpu.first_steps`.

It trains with the options of `dlrm-overlap train`, MLPerf's shape with rows capped at 500,000 by default, and begins a
save beside every 110th step, whose copy is spread over the steps that follow and is not written. Every second save
leaves out the copy of what is no row, the dense part above all, which shows how much of it that is. The first saves are
left out, and by default none is behind a log line.
"""

import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from dlrm_overlap.checkpoint.background_save import BackgroundSaves
from dlrm_overlap.checkpoint.storage.snapshot import Snapshot
from dlrm_overlap.launching import launcher
from dlrm_overlap.observe.result_files import read_step_ms
from dlrm_overlap.train.ranks import Ranks, run_on_ranks

_EVERY, _BESIDE, _FIRST = 110, 80, 150  # steps between saves; of these beside one; that find caches cold
_WARMUP_STEPS = 10  # which step_ms.npy leaves out
_OPTIONS = [
    *("--config", "configs/bench/step_mlperf.yaml", "--embedding.backend", "pgas", "--train.compile_dense", "true"),
    *("--data.tables.max_rows", "500000", "--train.steps", "3600", "--log.every", "1000"),
]


def work(ranks: Ranks) -> int:
    """Train, and print what steps take behind a save and where there is none."""
    begin, take = BackgroundSaves.begin, Snapshot.take
    begun: list[int] = []

    def noting_begin(saves: Any, step: int, metrics: Any = None) -> None:
        begun.append(step)
        begin(saves, step, metrics)

    def taking(snapshot: Any) -> None:
        pairs = snapshot._pairs
        if len(begun) % 2 == 0:
            snapshot._pairs = {}
        take(snapshot)
        snapshot._pairs = pairs

    setattr(BackgroundSaves, "begin", noting_begin)  # noqa: B010
    setattr(BackgroundSaves, "_write", lambda *_: None)  # noqa: B010
    setattr(Snapshot, "take", taking)  # noqa: B010
    trainer = ranks.trainer()
    trainer.fit()
    trainer.close()
    if ranks.world.rank:
        return 0
    times = read_step_ms(trainer.folder)  # rank 0 wrote them; another rank might look before it has
    beside = {step - _WARMUP_STEPS + later for step in begun for later in range(_BESIDE)}
    none = [ms for index, ms in enumerate(times) if index > _FIRST and index not in beside]
    print(f"no save under way: {len(none)} steps, median {statistics.median(none):.3f} ms")
    for name, saves in (("all", begun[::2]), ("rows alone", begun[1::2])):
        for which in (0, 1):
            indices = [step - _WARMUP_STEPS + which for step in saves if step > _FIRST]
            taken = [times[index] for index in indices if index < len(times)]
            median, factor = statistics.median(taken), statistics.median(taken) / statistics.median(none)
            print(
                f"step {which + 1} behind a copy of {name}: {len(taken)} saves, median {median:.3f} ms, {factor:.3f} "
                f"times; {min(taken):.3f} to {max(taken):.3f} ms"
            )
    return 0


def main() -> int:
    """Add what every such run has to the options of the command line."""
    folder = Path(tempfile.gettempdir()) / "dlrm_overlap_first_steps"
    options = sys.argv[1:] if "--config" in sys.argv else [*_OPTIONS, *sys.argv[1:]]
    options += ["--checkpoint.every", str(_EVERY), "--checkpoint.asynchronous", "true", "--checkpoint.last", "false"]
    options += ["--checkpoint.resume", "never", "--log.tensorboard", "false"]
    options += ["--log.dir", str(folder), "--log.name", "run"]
    if launcher.detect().rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        return run_on_ranks(["train"], __doc__ or "", options, work)
    finally:
        if launcher.detect().rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
