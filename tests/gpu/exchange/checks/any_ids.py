"""Tables of any id: kernels against the reference on the device, and captured steps against eager ones under delays."""

from dataclasses import replace
from typing import Any

import torch

from dlrm_overlap.config import Config, IdTablesConfig, SequenceConfig
from dlrm_overlap.kernels.ids import reference
from dlrm_overlap.kernels.ids.id_map import MapState, Policy
from dlrm_overlap.kernels.ids.map_ids import IdSet, map_ids
from tests.agreement import LOSS_TOLERANCE
from tests.gpu.exchange.checks.graphs import train_in_segments
from tests.gpu.exchange.checks.training import assert_agree, check_resumes, make_trainer, small_config, train_steps
from tests.gpu.exchange.place import Check, Place, every
from tests.kernels.test_map_ids import CASES, Table, batches, claims_of, random_ids, state_of, words_of

_RULES: dict[str, dict[str, Any]] = {
    "lru": {"rows": 512},
    "lfu": {"rows": 256, "eviction": "lfu", "admit_after": 2},
    "ttl": {"rows": 256, "eviction": "ttl", "ttl_steps": 3, "admit_share": 0.75},
}
_ROOMY = {"rows": 4096}
_STEPS = 20
# Tables, number of known ids, ids of a feature in a step.
_LARGE: dict[str, tuple[tuple[Table, ...], int, int]] = {
    "many buckets, large ones": ((Table(64, 128), Table(3, 700, 0, policy=Policy.LFU)), 30_000, 12_000),
    "many sightings": ((Table(64, 128, policy=Policy.DISTANCE_LFU, admit_after=3, halve_at=256),), 20_000, 20_000),
    "hours": ((Table(2, 1500, 0, probes=60, policy=Policy.TTL),), 9_000, 5_000),
}


def _check_kernels(place: Place, case: str) -> None:
    """After each of several steps the map, the rows and the claims are those of the reference."""
    tables, known, count = (CASES | (_LARGE if place.on_gpu else {})).get(case, CASES["lru"])
    state, features = state_of(*tables)
    mine = MapState(*(each.to(place.device, copy=True) for each in state))
    on_device, members = features._replace(infos=features.infos.to(place.device)), IdSet()
    for step, (drawn, offsets) in enumerate(batches(random_ids(known, 1), count, len(tables), 8)):
        train = step % 3 != 2
        state.clock[1] = mine.clock[1] = step
        low, high = words_of(drawn)
        expected = low.clone()
        claimed = reference.map_ids(state, features, low, high, expected, offsets, 4, train)
        found, upper, ends = low.to(place.device), high.to(place.device), offsets.to(place.device)
        claims = map_ids(mine, on_device, members, found, upper, found, ends, 4, train)
        assert torch.equal(found.cpu(), expected), f"step {step}: rows"
        for name, column, its in zip(MapState._fields, mine, state, strict=True):
            assert torch.equal(*(_comparable(name, each.cpu()) for each in (column, its))), f"step {step}: {name}"
        if train:
            assert claims is not None
            assert claimed is not None
            assert claims_of(claims) == claims_of(claimed)


def _comparable(name: str, column: torch.Tensor) -> torch.Tensor:
    return column.sum(1) if name == "totals" else column


def _config(place: Place, backend: str, rules: str, capture: bool) -> Config:
    return _of_any(small_config(place, backend, "adagrad", pipeline="graph"), _RULES[rules], capture)


def _of_any(config: Config, rules: dict[str, Any], capture: bool) -> Config:
    tables = replace(config.data.tables, ids="any")
    return replace(
        config,
        data=replace(config.data, tables=tables),
        embedding=replace(config.embedding, id_tables=IdTablesConfig(**rules)),
        train=replace(config.train, capture=capture),
    )


def _check_captured(place: Place, backend: str, rules: str) -> None:
    """Captured steps have the bits of eager ones, whatever ranks and hosts are late."""
    eager = train_in_segments(place, _config(place, backend, rules, capture=False))
    for delays in (False, True):
        captured = train_in_segments(place, _config(place, backend, rules, capture=True), delays)
        captured.assert_same(eager, f"captured, delays {delays}")


def _check_histories(place: Place, backend: str, rules: str) -> None:
    """Captured steps of a model that attends to a table of any id have the bits of eager ones, too."""
    plain, captures = (_with_history(_config(place, backend, rules, capture)) for capture in (False, True))
    eager = train_in_segments(place, plain)
    for delays in (False, True):
        captured = train_in_segments(place, captures, delays)
        captured.assert_same(eager, f"histories captured, delays {delays}")


def _with_history(config: Config) -> Config:
    # Table 1 has bags of 0 to 6 ids.
    return replace(config, model=replace(config.model, sequence=SequenceConfig(history=1, candidate=2)))


def _check_growth(place: Place, backend: str, capture: bool) -> None:
    """A run whose tables double their rows twice has the losses of one whose tables do not, where none is full."""
    rows, found = int(_ROOMY["rows"]), list[list[float]]()
    for name, grows in (("kept", False), ("grown", True)):
        config = _of_any(small_config(place, backend, "rowwise_adagrad", pipeline="graph"), _ROOMY, capture)
        log = replace(config.log, name=f"{place.name}_{backend}_{capture}_{name}")
        trainer = make_trainer(place, replace(config, log=log))
        trainer.checkpointer.make_shared_folder()
        losses = list[float]()
        for part, first in enumerate(range(0, 3 * _STEPS, _STEPS)):
            if grows and part:
                trainer.grow(first, dict.fromkeys(list(trainer.id_rows)[:part], rows << part))
            losses += train_steps(place, trainer, first, first + _STEPS)
        assert trainer.id_rows["t_00"] == (4 * rows if grows else rows)
        place.close(trainer)
        found.append(losses)
    assert_agree(found[1], found[0], LOSS_TOLERANCE["rowwise_adagrad"], "grown")


def _check_cached(place: Place, backend: str, rules: str) -> None:
    """With rows in host memory, captured steps have the bits of eager ones with rows on the GPU."""
    plain, cached = (_of_many_ids(_config(place, backend, rules, capture)) for capture in (False, True))
    eager = train_in_segments(place, plain)
    for delays in (False, True):
        captured = train_in_segments(place, _cached(cached), delays)
        captured.assert_same(eager, f"captured, rows in host memory, delays {delays}")


def _of_many_ids(config: Config) -> Config:
    """Let most ids of a step be new, and a rank have the rows of some steps."""
    tables = replace(config.data.tables, rows=1_000_000, zipf_alpha=0.5)
    rules = replace(config.embedding.id_tables, rows=4096)
    return replace(
        config,
        data=replace(config.data, tables=tables),
        embedding=replace(config.embedding, id_tables=rules),
    )


def _cached(config: Config) -> Config:
    return replace(config, embedding=replace(config.embedding, memory="cached", cache_fraction=0.01))


def _check_resumes(place: Place, memory: str) -> None:
    """A run that resumes has the losses of the whole run: each rank has the ids of its own rows."""
    config = _of_many_ids(_config(place, "pgas", "lru", capture=True))
    check_resumes(place, config, _cached(config) if memory == "cached" else config, 20)


_NAMES = {case.replace(",", "").replace(" ", "_"): case for case in {**CASES, **_LARGE}}
CHECKS: dict[str, Check] = {
    **every("any_ids_kernels", _check_kernels, case=_NAMES),
    **every("any_ids_captured", _check_captured, backend=("pgas", "fused"), rules=tuple(_RULES), gpu_only=True),
    **every("any_ids_histories", _check_histories, backend=("pgas", "fused"), rules=tuple(_RULES), gpu_only=True),
    **every("any_ids_growth", _check_growth, backend=("pgas", "fused"), capture=(False, True), gpu_only=True),
    **every("any_ids_cached", _check_cached, backend=("pgas", "fused"), rules=tuple(_RULES), gpu_only=True),
    **every("any_ids_resumed", _check_resumes, memory=("gpu", "cached"), gpu_only=True),
}
