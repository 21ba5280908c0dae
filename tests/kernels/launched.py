"""The kernels that training steps launch on GPUs, found on a CPU: `python -m tests.kernels.launched --help`.

One process takes the steps of each rank in turn, in a process group whose collectives do nothing. It takes the GPU's
path through the code with tensors on the CPU, and notes what is launched: kernels, streams and copy engines do nothing
either. Must run without TRITON_INTERPRET.

Constants depend on the plan, the number of ranks, the bags' mean sizes and the model, but on no number of samples or
rows: samples are few and tables small. The plan cuts the tables in the same way, for other ranks.
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import utils as sharded_tensor
from torch.distributed._shard.sharding_spec import api as sharding_spec
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.backends import Implementation
from dlrm_overlap.bench.harness.workload import with_keys
from dlrm_overlap.comm.arena import open_arena
from dlrm_overlap.comm.copy_engine import CopyEngine
from dlrm_overlap.config import Config, DataConfig, EmbeddingConfig, TablesConfig
from dlrm_overlap.data.loader import open_datasets
from dlrm_overlap.data.records import RecordLayout, Unpacker
from dlrm_overlap.data.synthetic_device import DeviceSynthetic
from dlrm_overlap.dense import cross, flat_steps, layers, mlp
from dlrm_overlap.dense.functions import StoreOptions
from dlrm_overlap.dense.gemm.operators import all_gather_matmul, matmul_reduce_scatter
from dlrm_overlap.dense.gemm.products import ParallelProducts
from dlrm_overlap.embedding import capacity, exchange, opening, unpooled
from dlrm_overlap.embedding.backends import base
from dlrm_overlap.embedding.backends.fused import SlicedForward
from dlrm_overlap.embedding.backends.ids import IdExchange
from dlrm_overlap.embedding.id_layout import BatchCapacity, IdLayout, joined
from dlrm_overlap.embedding.layout import Layout
from dlrm_overlap.embedding.options import ExchangeContext, ExchangeOptions, StepCounters
from dlrm_overlap.embedding.windows import WindowPair
from dlrm_overlap.kernels import compiled, find_slots, launches, messages, peer_copy, store_words, swap_rows
from dlrm_overlap.kernels.count_bags import count_bags
from dlrm_overlap.kernels.ids import fill_rows, map_ids
from dlrm_overlap.kernels.network import Network
from dlrm_overlap.launching.launcher import LOOPBACK, World
from dlrm_overlap.launching.parsing import parse_config
from dlrm_overlap.torchrec_private.check import check_private_api
from dlrm_overlap.train.dense_part import small_form
from dlrm_overlap.train.graphs import train_pipeline
from dlrm_overlap.train.model import TrainTask, build_model
from dlrm_overlap.train.trainer import Trainer
from tests.distributed import interpreted
from tests.distributed.captured import captures
from tests.distributed.tiny_stage import Stage
from tests.kernels.specialisations import Specialisation, noting_launches

WORLD_SIZE = 4
CPU = torch.device("cpu")
_CAPTURED = {"train.pipeline": "graph", "train.compile_dense": True, "embedding.backend": "pgas"}
_CACHED = {"embedding.memory": "cached", "embedding.cache_fraction": 0.1}
_ANY_IDS = {"data.tables.ids": "any", "embedding.id_tables.rows": 1024}
_COUNTED = {"embedding.id_tables.eviction": "lfu", "embedding.id_tables.admit_after": 2}
_DELTAS = {"checkpoint.delta_every": 1}
REQUIRED = ("mlperf", "history", "cached", "ids", "any_ids")
"""steps all of whose specialisations `make test` compiles for sm_90; one of each kernel it also compiles for another"""
# Name -> configuration and keys.
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlperf": ("mlperf_dcnv2", {}),
    "history": ("bench/step_sequence", {}),
    "cached": ("mlperf_dcnv2", _CACHED),
    "update_on_all": ("mlperf_dcnv2", {"train.dense_update": "all"}),
    "fused": ("mlperf_dcnv2", {"embedding.backend": "fused"}),
    "dot": ("bench/step_dot", {}),
    "rows": ("quickstart", {"data.tables.multi_hot": [40, "0..6", 1, 1, 2, 1, 1, 1]}),  # the plan cuts a table by rows
    "any_ids": ("bench/step_mlperf", _ANY_IDS),
    "counted_ids": ("quickstart", {**_ANY_IDS, **_COUNTED, **_DELTAS}),
    "cached_ids": ("quickstart", {**_ANY_IDS, **_COUNTED, **_CACHED}),
    "nodes": ("bench/step_mlperf", {"embedding.nodes": 2, "embedding.internode": "puts"}),
}
_FEW = {"train.global_batch_size": None, "train.batch_size": 16, "data.tables.max_rows": 10_000, "data.workers": 0}
_ON_CPU = {"train.device": "cpu", "log.tensorboard": False, "train.graph_dense": False}
_MAX_STEPS = 12  # eager ones, then the captures of both buffers


def step_config(name: str, keys: dict[str, Any]) -> Config:
    """Return the configuration of a step of `STEPS`, changed by `keys`."""
    file, own = STEPS[name]
    config, _ = parse_config(Config, "launched", "", ["--config", f"configs/{file}.yaml"])
    return with_keys(config, {**_CAPTURED, **own, **keys})


def _transposed(
    _: torch.Tensor, __: int, values: torch.Tensor, *___: Any, **____: Any
) -> tuple[torch.Tensor | None, ...]:
    """Return tensors of the types of FBGEMM's `transpose_embedding_input`, which sorts ids."""
    keys, ids = torch.zeros_like(values), torch.zeros(len(values) + 1, dtype=torch.int32)
    return keys.clone(), None, ids[:-1], keys, None, ids[:1].clone(), ids


@contextlib.contextmanager
def _as_on_gpus() -> Iterator[None]:
    """Take a GPU's path in the places that ask whether tensors are on one."""
    load, order = Implementation.load, exchange.CommunicationOrder()
    dense_step: Any = train_pipeline.DenseStep

    def dense_stores(*arguments: Any, **options: Any) -> Any:
        return dense_step(*arguments[:-1], StoreOptions(), **options)

    def add_partials(forward: Any, step: Any, arrived: torch.Tensor) -> None:
        base.add_partials(arrived, forward._partial_table, step.own_offsets)

    with contextlib.ExitStack() as stack:

        def replace(owner: Any, **values: Any) -> None:
            stack.enter_context(patch.multiple(owner, **values))

        # Kernels instead of references.
        replace(launches, INTERPRETED=True)  # prepares nothing for the driver
        for module in (find_slots, swap_rows, map_ids, fill_rows, store_words):
            replace(module, INTERPRETED=True)
        for module in (cross, layers, flat_steps, mlp):
            replace(module, kernels_on=lambda _, name: import_module(f"dlrm_overlap.kernels.dense.{name}"))
        replace(Implementation, load=lambda implementation, _: load(implementation, "cuda"))
        replace(opening, ON_CPU=opening.ON_GPU, CpuLocalLookup=opening.DeviceLocalLookup)
        replace(base.Forward, add_partials=add_partials)
        sums = property(lambda sender: unpooled.RowSums(sender.dim, CPU), lambda *_: None)
        stack.enter_context(patch.object(unpooled.UnpooledIdSender, "sums", sums, create=True))
        replace(SlicedForward, grid=lambda *_: 1)
        replace(train_pipeline, DenseStep=dense_stores, CommunicationOrder=lambda: order)
        replace(exchange, nullcontext=lambda: order)
        replace(train_pipeline.PaddingProbe, why_padding_is_read=lambda *_: "")  # no kernel has written an output
        # What needs a GPU, or other ranks.
        replace(interpreted, _transpose_embedding_input=_transposed)
        replace(torch, compile=lambda function, **_: function)
        replace(capacity, AsyncMaxReduce=lambda _: None)
        for module in (sharded_tensor, sharding_spec):  # all ranks have this one's shards
            replace(module, validate_non_overlapping_shards_metadata=lambda _: None)
        replace(sharded_tensor, check_tensor=lambda *_: None)
        replace(opening, start_puts=lambda *_: None)
        replace(CopyEngine, wait_counter=lambda *_: None)
        yield


def _train(name: str, world: World) -> None:
    config = step_config(name, {**_FEW, **_ON_CPU})
    with captures() as taken:
        trainer = Trainer(config, world, CPU, *open_datasets(config.data))
        batches = itertools.repeat(trainer.train_data.read(0, trainer.samples_per_rank))
        for step in range(_MAX_STEPS):
            trainer.learning_rate.set(step)
            trainer.step(batches)
            if taken["captured"] == 2:
                break
        trainer.pipeline.release_model()  # type: ignore[attr-defined]  # its hooks would keep the trainer alive
    assert taken["captured"] == 2, f"{name}: {taken}"


def _multiply() -> None:
    """Products with communication inside, as in a tensor-parallel pair of layers."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    products, brain = ParallelProducts(group, CPU), torch.bfloat16
    for way in ("copies", "tiles", "triggered"):
        x, weight = (torch.zeros(256, 64, dtype=brain, requires_grad=True) for _ in range(2))
        bias = torch.zeros(256, dtype=brain, requires_grad=True)
        y = all_gather_matmul(x, weight, bias, "relu", products=products, way=way)
        columns = torch.zeros(64, 256, dtype=brain, requires_grad=True)
        z = matmul_reduce_scatter(y, columns, None, "relu", products=products, way=way)
        z.backward(torch.zeros_like(z))


def _small_mlps() -> None:
    """The dense part of a small model in float32: that of the quickstart."""
    config, _ = parse_config(Config, "launched", "", ["--config", "configs/quickstart.yaml"])
    model, tables = config.model, 8
    dlrm = build_model(model, EmbeddingConfig(), [1] * tables, 13, seed=0)
    task = TrainTask(dlrm, "cpu", bf16=False)
    for part in (dlrm.bottom, dlrm.head):
        small = small_form(task, part)
        assert small is not None
        x = torch.zeros(4, 13) if part is dlrm.bottom else torch.zeros(4, (tables + 1) * model.dim, requires_grad=True)
        output = small(x)
        output.backward(torch.zeros_like(output))


def _read() -> None:
    """Samples made, unpacked or counted on the GPU, the copies of `bench collectives`, and an empty message."""
    with patch.object(torch, "empty", torch.zeros):  # numbers of ids, which a kernel would have written
        for step in ("mlperf", "history"):
            DeviceSynthetic(step_config(step, _FEW).data, "train", CPU).read(0, 64)
    of_any = DataConfig(tables=TablesConfig(count=2, rows=1000, ids="any", drift=9))
    DeviceSynthetic(of_any, "train", CPU).read(0, 64)
    for rows in (1000, None):
        layout = RecordLayout({"click": 1.0}, 13, [rows], [1])
        Unpacker(layout, CPU)(torch.zeros(64, layout.record_bytes, dtype=torch.uint8))
    count_bags(torch.ones(26, 64, dtype=torch.int32), torch.zeros(3, 26, dtype=torch.int64))
    messages.send_signal(
        Network("stores", torch.zeros(2, dtype=torch.int64), 0), messages.Outgoing(0, 0, 1), torch.zeros(1).long(), 1
    )
    addresses, counted = torch.zeros(WORLD_SIZE, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    flags = peer_copy.RowFlags(addresses, counted, torch.zeros(1, dtype=torch.int64))
    rows = peer_copy.Rows(torch.zeros(WORLD_SIZE, 1024), 4096, 4096, addresses, 0, own=True)
    peer_copy.store_rows(rows, flags, 0)


def _send_ids() -> None:
    """Ids of 64 bits to a table of any id, with and without weights."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    stage = Stage([([], [])] * WORLD_SIZE, group.rank(), cut=[(8, range(WORLD_SIZE))])
    shards = [dataclasses.replace(shard, buckets=WORLD_SIZE) for shard in stage.shards]
    layout = joined(Layout(shards, stage.layout.names, WORLD_SIZE))
    (name,), samples = layout.names, 16
    for weights in (None, torch.ones(samples)):
        ids, counters = (
            IdLayout(layout, [name], BatchCapacity(samples, {name: (0, 1)}), weights is not None),
            StepCounters(CPU),
        )
        about = stage.tables, ExchangeOptions(), group, CPU, samples, counters
        arena = open_arena(ids.windows.regions(WORLD_SIZE), group, CPU)
        sender = IdExchange(ExchangeContext(layout, *about, ids=ids), ids, WindowPair(ids.windows, arena, counters.ids))
        lengths = torch.ones(samples, dtype=torch.int32)
        sender.send(KeyedJaggedTensor([name], torch.zeros(samples).long(), weights, lengths=lengths), samples)


OTHERS: dict[str, Callable[[], None]] = {"products": _multiply, "mlp": _small_mlps, "data": _read, "ids": _send_ids}
NAMES = (*STEPS, *OTHERS)


class Launched(SimpleNamespace):
    specialisation: Specialisation
    steps: list[str]


def launched(names: tuple[str, ...] = NAMES, world_size: int = WORLD_SIZE, quick: bool = False) -> dict[str, Launched]:
    """Return what the steps of `names` launch on all ranks, by the text.

    If `quick`, on the first rank, and those of `REQUIRED` on the last one, too.
    """
    assert not compiled.INTERPRETED, "unset TRITON_INTERPRET: it changes constants"
    check_private_api()  # once, before FBGEMM's operator has a stand-in
    found: dict[str, Launched] = {}
    gc.freeze()  # the modules, which each collection below would visit
    for rank in (0, world_size - 1) if quick else range(world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        world = World(rank, rank, world_size, world_size, LOOPBACK, 1, "nproc")
        for name in REQUIRED if quick and rank else names:
            with _as_on_gpus(), interpreted.without_streams(), noting_launches() as noted:
                OTHERS[name]() if name in OTHERS else _train(name, world)
            for text, specialisation in noted.items():
                each = found.setdefault(text, Launched(specialisation=specialisation, steps=[]))
                each.steps += [name] if name not in each.steps else []
            gc.collect()  # a trainer is in cycles of references
        dist.destroy_process_group()
    return found


def quiet() -> None:
    for library in ("torchrec", "torch.fx", "dlrm_overlap"):
        logging.getLogger(library).setLevel(logging.ERROR)
    torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print what each step launches, as JSON: text -> steps.")
    parser.add_argument("--world_size", type=int, default=WORLD_SIZE)
    parser.add_argument("--steps", nargs="+", choices=NAMES, default=NAMES)
    values = parser.parse_args()
    quiet()
    found = launched(tuple(values.steps), values.world_size)
    print(json.dumps({text: each.steps for text, each in found.items()}, indent=1))


if __name__ == "__main__":
    main()
