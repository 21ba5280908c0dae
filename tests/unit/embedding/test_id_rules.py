"""Which rows tables of any id have, and which modules of TorchRec the map takes."""

import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

from dlrm_overlap.config import IdTablesConfig
from dlrm_overlap.data.schema import MISSING_ID
from dlrm_overlap.embedding.id_tables import counts
from dlrm_overlap.embedding.id_tables.id_map import IdMap, pool_of
from dlrm_overlap.embedding.id_tables.module import IdTableModule, check_rows, rules_of
from dlrm_overlap.embedding.id_tables.rules import EVERY_ID, IdRules, map_bytes, rows_of_tables
from dlrm_overlap.embedding.id_tables.sharder import _why_plan_stays
from dlrm_overlap.kernels.ids.id_map import SEGMENT, MapFeature, Policy, Totals
from dlrm_overlap.train.assembly import check_torchrec_maps
from dlrm_overlap.train.growth import Growth
from tests.conftest import ROOT, configuration, refuses


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [(1000, 2, [50, 1024, 1024]), ([1, 300], 2, [50, 256, 512]), (128, 3, [50, 384, 384])],
)
def test_rows_are_whole_buckets_of_every_rank(given: Any, ranks: int, expected: list[int]) -> None:
    assert rows_of_tables([50, None, None], IdTablesConfig(rows=given), ranks) == expected


def test_tables_of_known_rows_need_no_rules() -> None:
    assert rows_of_tables([50, 7], IdTablesConfig(), 4) == [50, 7]


@pytest.mark.parametrize(("given", "rule"), [(None, "null, but 2 tables take any id"), ([1], "1 numbers for 2 tables")])
def test_missing_rows_are_refused(given: Any, rule: str) -> None:
    with refuses(rule):
        rows_of_tables([50, None, None], IdTablesConfig(rows=given), 1)


@pytest.mark.parametrize("keys", [{"eviction": "ttl"}, {"ttl_steps": 5}])
def test_ttl_and_its_steps_go_together(keys: dict[str, Any]) -> None:
    with refuses("ttl_steps"):
        IdTablesConfig(**keys)


def test_a_limit_of_rows_needs_growth() -> None:
    with refuses("max_rows: 900 without grow_at"):
        IdTablesConfig(max_rows=900)


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ("--checkpoint.last=false", "tables grow by a checkpoint"),
        ("--checkpoint.delta_every=9", "with checkpoint.delta_e"),
    ],
)
def test_growth_needs_checkpoints_without_deltas(option: str, rule: str) -> None:
    with refuses(rule):
        configuration("--config", str(ROOT / "configs/quickstart.yaml"), "--embedding.id_tables.grow_at", "0.8", option)


def test_growth_needs_our_map_of_ids() -> None:
    with refuses("with backend torchrec TorchRec maps the ids"):
        Growth(IdTablesConfig(rows=256, grow_at=0.5), {"t": 256}, "torchrec", counts=False)
    assert Growth(IdTablesConfig(grow_at=0.5), {}, "torchrec", counts=False).due({}) == {}


def test_tables_double_up_to_their_limits() -> None:
    config = IdTablesConfig(rows=256, grow_at=0.5, max_rows=[512, 1024])
    growth = Growth(config, {"a": 256, "b": 512}, "pgas", counts=True)
    assert growth.due({"a": 0.51, "b": 0.5}) == {"a": 512}
    assert growth.due({"a": 0.5, "b": 0.9}) == {"b": 1024}
    growth.rows = {"a": 512, "b": 512}
    assert growth.due({"a": 0.9, "b": 0.9}) == {"b": 1024}
    with refuses("max_rows: 1 numbers for 2 tables"):
        Growth(IdTablesConfig(grow_at=0.5, max_rows=[512]), {"a": 256, "b": 512}, "pgas", counts=True)


def _module(**given: Any) -> HashZchManagedCollisionModule:
    return HashZchManagedCollisionModule(512, torch.device("cpu"), **{"total_num_buckets": 4, **given})


def test_arguments_of_a_module_become_rules() -> None:
    keep = HashZchEvictionConfig(features=["a", "b"], per_feature_ttl=[3, 5])
    policy = HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION
    module = _module(
        max_probe=64, opt_in_prob=25, percent_reserved_slots=10, eviction_policy_name=policy, eviction_config=keep
    )
    found = rules_of(module, "t", 512, ["a", "b"])
    assert isinstance(found, IdRules)
    assert (found.size, found.reserved, found.probes, found.policy) == (128, 12, 64, Policy.TTL)
    assert (found.lifetimes, found.in_hours, found.admit_below) == ({"a": 3, "b": 5}, True, EVERY_ID // 4)
    plain = rules_of(_module(), "t", 512, ["a"])
    assert isinstance(plain, IdRules)
    assert (plain.reserved, plain.policy, plain.admit_below) == (0, Policy.NONE, EVERY_ID)


@pytest.mark.parametrize(("is_enabled", "reading"), [(True, {"b_ReadOnly"}), (False, set())])
def test_features_with_the_suffix_of_readers_insert_no_ids(is_enabled: bool, reading: set[str]) -> None:
    module: Any = _module()
    module._read_only_suffix, module._enable_per_feature_lookups = "_readonly", is_enabled
    found = rules_of(module, "t", 512, ["a", "b_ReadOnly", "readonly_c"])
    assert isinstance(found, IdRules)
    assert found.reading == reading


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"disable_fallback": True}, "disable_fallback"),
        ({"max_probe": 200}, "max_probe 200"),
        ({"tb_logging_frequency": 5, "name": "t"}, "TensorBoard"),
        ({"output_segments": [0, 100, 200, 300, 512]}, "different sizes"),
    ],
)
def test_what_the_map_does_not_know_stays_with_torchrec(given: dict[str, Any], reason: str) -> None:
    found = rules_of(_module(**given), "t", 512, ["a"])
    assert isinstance(found, str)
    assert reason in found


def test_other_modules_stay_with_torchrec() -> None:
    assert rules_of(torch.nn.Identity(), "t", 512, ["a"]) == "Identity of table t"


@pytest.mark.parametrize(("rows", "buckets", "ranks"), [(512, 4, 3), (510, 4, 2)])
def test_ranks_have_whole_buckets(rows: int, buckets: int, ranks: int) -> None:
    with refuses(f"{buckets} buckets of {rows} rows on {ranks} ranks"):
        check_rows(IdRules("t", rows, buckets), ranks)


@pytest.mark.parametrize(
    ("kernel", "caches", "expected"),
    [
        ("fused", False, None),
        ("fused_uvm_caching", True, None),
        ("fused_uvm_caching", False, "compute kernel fused_uvm_caching"),
        ("fused_uvm", True, "compute kernel fused_uvm"),
    ],
)
def test_a_kernel_that_the_exchange_lacks_stays_with_torchrec(kernel: str, caches: bool, expected: str | None) -> None:
    params: Any = {"t": SimpleNamespace(compute_kernel=kernel)}
    env: Any = SimpleNamespace()
    assert _why_plan_stays(params, env, caches) == expected


def test_torchrec_picks_rank_and_bucket_alike_where_it_is_not_refused() -> None:
    """And not where it is refused: by the remainders of FBGEMM's operator and of TorchRec's module."""
    ids, ranks = torch.tensor([MISSING_ID, -7, *range(-(2**40), 2**40, 2**33 + 5)]), 2
    gpu = torch.device("cuda")
    for rows in (4 * SEGMENT, 6 * SEGMENT, 8 * SEGMENT, 10 * SEGMENT):
        buckets = rows // SEGMENT
        sent_to_0, sent, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
            torch.tensor([len(ids)]), ids, False, False, torch.tensor([0]), ranks,
            total_num_blocks=torch.tensor([buckets]), keep_orig_idx=True,
        )  # fmt: skip
        module = IdTableModule("t", rows, torch.device("cpu"), IdTablesConfig(rows=rows))
        _, _, first_rows = module.input_mapper(sent, None)
        ranks_of_buckets = first_rows // (rows // ranks)
        agree = torch.equal(ranks_of_buckets, (torch.arange(len(ids)) >= sent_to_0[0]).long())
        assert agree == (buckets & (buckets - 1) == 0), rows
        with nullcontext() if agree else refuses("take pgas, or set embedding.id_tables.rows to"):
            check_torchrec_maps([512, rows], has_negative_ids=True, device=gpu)
        check_torchrec_maps([512, rows], has_negative_ids=False, device=gpu)
    with refuses("on GPUs only"):
        check_torchrec_maps([512], has_negative_ids=False, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 0),
        ({"admit_after": 2}, 128),
        ({"admit_after": 4, "admit_memory": 0.5}, 192),
        ({"admit_after": 2, "admit_memory": 1e-9}, 1),
        ({"admit_after": 9, "admit_memory": 1e37}, 2**30),
        ({"admit_after": 2, "admit_memory": None}, 0),
    ],
)
def test_counters_of_sightings_are_halved_at(keys: Any, expected: int) -> None:
    module = IdTableModule("t", 256, torch.device("cpu"), IdTablesConfig(rows=256, **keys))
    rules = rules_of(module, "t", 256, ["f"])
    assert isinstance(rules, IdRules)
    assert rules.halve_at == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"policy": Policy.LRU}),
        ({"eviction": "ttl", "ttl_steps": 9}, {"policy": Policy.TTL, "lifetime": 9}),
        ({"eviction": "lfu", "admit_share": 0.25}, {"policy": Policy.LFU, "admit_below": 1 << 30}),
        ({"eviction": "distance_lfu"}, {"policy": Policy.DISTANCE_LFU}),
        ({"eviction": "none", "admit_after": 3, "admit_memory": None}, {"policy": Policy.NONE, "admit_after": 3}),
    ],
)
def test_our_tables_have_the_rules_of_the_configuration(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    module = IdTableModule("t", 256, torch.device("cpu"), IdTablesConfig(rows=256, **keys))
    ours = IdRules("t", 256, 2, reserved=1, frozen=True, mixes=True)
    assert rules_of(module, "t", 256, ["f"]) == replace(ours, **expected)


def test_features_of_a_table_have_lifetimes_of_their_own() -> None:
    """The rank has the second of two buckets; `b` inserts no ids, and `d` is not in the map."""
    rules = IdRules("t", 256, 2, policy=Policy.TTL, lifetime=4, lifetimes={"a": 3, "b": 5}, reading=frozenset("b"))
    id_map = IdMap([rules], {"t": (128, 256)}, torch.device("cpu"), lambda: True)
    features = id_map.features_of([("t", "a"), ("t", "b"), ("t", "c"), (None, "d")])
    found = {name: features.infos[:4, MapFeature._fields.index(name)].tolist() for name in ("lifetime", "writes")}
    assert found == {"lifetime": [3, 5, 4, 0], "writes": [1, 0, 1, 0]}
    assert features.infos[0, MapFeature._fields.index("first_bucket")] == 1


def test_times_in_hours_follow_the_clock_and_count_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    hours, steps = (IdRules("t", 128, 1, policy=Policy.TTL, in_hours=in_hours) for in_hours in (True, False))
    for rules, expected in ((hours, [(7, 5), (7, 5), (7, 6)]), (steps, [(7, 7)] * 3)):
        id_map = IdMap([rules], {"t": (0, 128)}, torch.device("cpu"), lambda: True)
        id_map.state.clock.fill_(7)
        found = list[tuple[int, ...]]()
        for seconds in (5 * 3600, 6 * 3600 - 1, 6 * 3600):
            monkeypatch.setattr(time, "time", lambda seconds=seconds: float(seconds))
            id_map.follow_clock()
            found.append(tuple(id_map.state.clock.tolist()))
        assert found == expected


def test_initial_rows_depend_on_the_seed_alone() -> None:
    """Ranks whose generators differ have the same ones, and the generator stays."""
    config, pools = EmbeddingBagConfig(name="t", num_embeddings=50, embedding_dim=4, feature_names=["f"]), []
    for seed, state in ((3, 1), (3, 2), (4, 2)):
        before = torch.manual_seed(state).get_state()
        pools.append(pool_of(20, config, seed))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(pools[0], pools[1])
    assert not (pools[1] == pools[2]).any()
    assert pools[0].shape == (20, 4)
    assert pool_of(10_000, config, 3).shape == (4096, 4)


@pytest.mark.usefixtures("world_of_one")
def test_what_becomes_of_ids_is_counted_since_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    maps = [IdMap([IdRules(name, 128, 1, reserved=1)], {name: (0, 128)}, cpu, lambda: True) for name in "ab"]
    monkeypatch.setattr(counts, "id_maps_of", lambda model: maps)
    maps[0].state.totals[Totals.INSERTED, 0] = 1000  # before the run
    counted = counts.IdCounts(torch.nn.Module(), cpu)
    lines = []
    for inserted, seen in ((30, 40), (5, 50)):
        for each, where in zip(maps, (0, 8), strict=True):
            each.state.totals[Totals.INSERTED, where] += inserted
            each.state.totals[Totals.EVICTED, where] += 1
            each.state.totals[Totals.NOT_ADMITTED, where] += 10
            each.state.totals[Totals.SEEN, where] += seen
        maps[1].state.ids[:inserted] = 7
        lines.append(counted.take())
    assert [line["ids_inserted"] for line in lines] == [60, 10]
    assert [line["ids_evicted"] for line in lines] == [2, 2]
    assert [line["ids_not_admitted"] for line in lines] == [0.25, 0.2]
    assert lines[1]["ids_rows_used"] == 30 / 254
    assert (lines[1]["ids_rows_used/a"], lines[1]["ids_rows_used/b"]) == (0, 30 / 127)


def test_a_sketch_that_was_never_halved_is_halved_when_it_is_loaded() -> None:
    """A second time changes nothing, so a run that resumes has the same bits."""
    rules = [IdRules(name, rows, rows // 128, 1, admit_after=2, halve_at=at) for name, rows, at in _SKETCHES]
    id_map = IdMap(rules, {"a": (0, 256), "b": (0, 128), "c": (0, 128)}, torch.device("cpu"), lambda: True)
    stored = torch.cat([torch.full((128,), 2**30), torch.arange(128) // 64, torch.full((256,), 7)]).int()
    id_map.state.sketch.copy_(stored)
    for _ in range(2):
        id_map.rebuild()
        assert id_map.state.sketch.view(4, 128).unique(dim=1).tolist() == [[0, 0], [0, 1], [1, 1], [7, 7]]
        assert id_map.state.sketch_sums.tolist() == [0, 64, 128, 0]


_SKETCHES = (("a", 256, 128), ("b", 128, 200), ("c", 128, 0))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 13),
        ({"eviction": "ttl", "ttl_steps": 9}, 17),
        ({"eviction": "lfu", "admit_after": 2}, 21),
        ({"eviction": "none", "admit_after": 2}, 17),
    ],
)
def test_the_bytes_of_a_map(keys: Any, expected: int) -> None:
    config, rows = IdTablesConfig(**keys), 128 * 1000
    rules = rules_of(IdTableModule("t", rows, torch.device("cpu"), config), "t", rows, ["f"])
    assert isinstance(rules, IdRules)
    columns = IdMap([rules], {"t": (0, rows)}, torch.device("cpu"), lambda: True).state
    assert map_bytes(config) == expected == sum(each.nbytes for each in columns) // rows
