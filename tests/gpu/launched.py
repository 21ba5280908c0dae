"""Which kernels captured steps launch on GPUs, against those that `tests.kernels.launched` finds on a CPU.

    torchrun --nproc-per-node 4 -m tests.gpu.launched --config configs/quickstart.yaml

It takes the steps named by `--steps` with the sizes of their configurations, tables capped at `--max_rows` rows, until
both graphs are captured, and prints each specialisation that only one side has. The exit code is 1 if there is one.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.workload import collect_garbage
from dlrm_overlap.config import PositiveInt
from dlrm_overlap.data.loader import open_datasets
from dlrm_overlap.launching.parsing import Parser
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from dlrm_overlap.train.ranks import Ranks, run_on_ranks
from dlrm_overlap.train.trainer import Trainer
from tests.kernels.launched import REQUIRED, STEPS, step_config
from tests.kernels.specialisations import noting_on_gpu

_MAX_STEPS = 16
_SAMPLES = {"history": 256}  # of a rank; others have 8192
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def on_gpus(ranks: Ranks, name: str) -> set[str]:
    """Take steps until both buffers have their graphs; return what this rank has launched. A collective."""
    values, samples = ranks.values, _SAMPLES.get(name, 8192)
    keys = {"train.global_batch_size": None, "train.batch_size": min(samples, values.max_samples)}
    config = step_config(name, {**keys, "train.device": ranks.device.type, "data.tables.max_rows": values.max_rows})
    with noting_on_gpu() as noted:
        trainer = Trainer(config, ranks.world, ranks.device, *open_datasets(config.data))
        assert isinstance(trainer.pipeline, GraphTrainPipeline), f"{name}: steps are not captured"
        batch = trainer.train_data.read(ranks.world.rank * trainer.samples_per_rank, trainer.samples_per_rank)
        batches = itertools.repeat(batch.pin_memory() if ranks.device.type == "cuda" else batch)
        for step in range(_MAX_STEPS):
            trainer.learning_rate.set(step)
            trainer.step(batches)
    replays = trainer.pipeline._replays
    trainer.close()
    collect_garbage(ranks.device)
    assert replays > 0, f"{name}: no step was captured in {_MAX_STEPS}"
    return set(noted)


def on_a_cpu(names: list[str], world_size: int) -> Mapping[str, list[str]]:
    """Return specialisation -> steps, found without GPUs in another process."""
    environment = {key: value for key, value in os.environ.items() if key not in (*_FOREIGN, "TRITON_INTERPRET")}
    command = [sys.executable, "-m", "tests.kernels.launched", "--world_size", str(world_size), "--steps", *names]
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=150, check=True)
    found: dict[str, list[str]] = json.loads(result.stdout)
    return found


def work(ranks: Ranks) -> int:
    ranks.connect()
    names, different = list(ranks.values.steps), 0
    expected = on_a_cpu(names, ranks.world.world_size) if ranks.world.rank == 0 else {}
    for name in names:
        every: list[Any] = [None] * ranks.world.world_size
        dist.all_gather_object(every, on_gpus(ranks, name))
        if ranks.world.rank == 0:
            ours, cpus = set().union(*every), {text for text, steps in expected.items() if name in steps}
            print(f"{name}: {len(ours)} on GPUs, {len(cpus)} found on a CPU, {len(ours & cpus)} in both")
            for side, texts in (("GPUs", ours - cpus), ("a CPU", cpus - ours)):
                print("".join(f"  only on {side}: {text}\n" for text in sorted(texts)), end="", flush=True)
            different += len(ours ^ cpus)
    return int(different > 0)


def add_options(parser: Parser) -> None:
    parser.add_argument("--steps", nargs="+", choices=tuple(STEPS), default=list(REQUIRED), help="steps to take")
    parser.add_argument("--max_rows", type=PositiveInt, default=1_000_000, help="upper limit of a table's rows")
    parser.add_argument("--max_samples", type=PositiveInt, default=8192, help="upper limit of a rank's samples")


if __name__ == "__main__":
    torch.set_num_threads(4)
    sys.exit(run_on_ranks(["train"], str(__doc__), sys.argv[1:], work, add_options))
