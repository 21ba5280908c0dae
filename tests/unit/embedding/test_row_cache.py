"""Rows that come and go through a cache are, after every step, those of a table that has none, bit for bit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.embedding import cache as cache_module
from dlrm_overlap.embedding.cache import CachedTable, RowCache, activate, make_caches
from dlrm_overlap.embedding.tables import LocalTables
from dlrm_overlap.kernels import reference
from dlrm_overlap.kernels import swap_rows as swapping
from dlrm_overlap.kernels.find_slots import Blocks, find_slots
from dlrm_overlap.kernels.optimizer_params import STATES, OptimizerParams
from dlrm_overlap.kernels.row_cache import CacheState, Swaps
from tests.kernels.emulation import CPU, interpreted

IDS, ROWS, DIM = 6, 20, 4
NUMBERS = OptimizerParams(lr=0.5, eps=1e-3, l2=0.01, decoupled=0.01, beta1=0.9, beta2=0.99, count=9)


class Tables:
    """Tables of ROWS rows in all and their states, of which a cache may have some, and steps on them."""

    def __init__(self, optimizer: str, slots: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = [(ROWS, DIM), *[(ROWS, DIM) if kind == "elements" else (ROWS,) for kind in STATES[optimizer]]]
        self.optimizer, self.plain = optimizer, [torch.rand(shape, generator=generator) for shape in shapes]
        self.homes = [each.clone() for each in self.plain]
        self.cache = RowCache(self.homes, slots, CPU)
        for each in self.cache.rows:
            each.fill_(torch.nan)

    def send(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the slots of the ids of a step that comes next. What is at home of rows in the cache is poisoned."""
        slots = torch.tensor(ids, dtype=torch.int32)
        bags = KeyedJaggedTensor(["ids"], slots, offsets=torch.tensor([0, len(ids)], dtype=torch.int32), stride=1)
        activate([(self.cache, torch.tensor([0, -1]))], bags)
        for home in self.homes:
            home[self.held()] = torch.nan
        return slots

    def held(self) -> torch.Tensor:
        rows = self.cache._state.row_in
        return rows[rows >= 0]

    def look_up(self, ids: Sequence[int], slots: torch.Tensor) -> None:
        assert torch.equal(self.cache.rows[0][slots.long()], self.plain[0][torch.tensor(ids)]), "rows looked up"

    def update(self, ids: Sequence[int], slots: torch.Tensor) -> None:
        gradient = torch.rand(len(ids), DIM, generator=torch.Generator().manual_seed(1))
        for tensors, named in ((self.plain, torch.tensor(ids)), (self.cache.rows, slots.long())):
            reference.update_rows(tensors[0], tensors[1:], named, gradient, self.optimizer, NUMBERS)

    def check_home(self) -> None:
        self.cache.write_back()
        for number, (home, plain) in enumerate(zip(self.homes, self.plain, strict=True)):
            assert torch.equal(home, plain), f"tensor {number} at home"


@contextmanager
def _references() -> Iterator[None]:
    """Let caches be without kernels, which take Triton's interpreter long."""
    kernels = cache_module.find_slots, cache_module.swap_rows
    cache_module.find_slots, cache_module.swap_rows = reference.find_slots, reference.swap_rows
    try:
        yield
    finally:
        cache_module.find_slots, cache_module.swap_rows = kernels


ids_of_a_step = st.lists(st.integers(0, ROWS - 1), min_size=IDS, max_size=IDS)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    optimizer=st.sampled_from([*STATES]),
    steps=st.lists(
        st.tuples(ids_of_a_step, st.sampled_from(["before", "between", "after", "twice"])), min_size=6, max_size=20
    ),
    slots=st.sampled_from([2 * IDS, 2 * IDS + 3, ROWS - 1, ROWS]),
)
def test_streams_that_thrash(optimizer: str, steps: list[tuple[list[int], str]], slots: int) -> None:
    """The ids of the next step are sent before, between and after this one's lookup and update, or sent anew."""
    with _references():
        tables = Tables(optimizer, slots)
        sent = tables.send(steps[0][0]) if steps else torch.empty(0)
        for number, (ids, moment) in enumerate(steps):
            following, coming = (steps[number + 1][0] if number + 1 < len(steps) else None), None
            if following and moment == "before":
                coming = tables.send(following)
            tables.look_up(ids, sent)
            if following and moment == "between":
                coming = tables.send(following)
            tables.update(ids, sent)
            if following and moment == "twice":
                tables.send([*reversed(range(ROWS - IDS, ROWS))])  # which are forgotten
            if following and coming is None:
                coming = tables.send(following)
            if coming is not None:
                sent = coming
            assert tables.held().unique().numel() == tables.held().numel(), "a row in two slots"
        tables.check_home()


def test_rows_written_at_home_are_read_again() -> None:
    tables = Tables("adagrad", 2 * IDS)
    slots = tables.send(range(IDS))
    tables.check_home()
    for home, plain in zip(tables.homes, tables.plain, strict=True):
        home.add_(1)
        plain.add_(1)
    tables.cache.read_again()
    tables.look_up(range(IDS), slots)


def test_what_others_write_to_cached_tables_is_seen_by_the_next_step() -> None:
    """Such as a checkpoint that is loaded: before, the tables get what training has written to the cache."""
    tables, local = Tables("adagrad", 2 * IDS), LocalTables([])
    local._cached_features = [(tables.cache, torch.tensor([0, -1]))]
    with _references():
        tables.update(range(IDS), tables.send(range(IDS)))
        local.note_writes()
        for home, plain in zip(tables.homes, tables.plain, strict=True):
            assert torch.equal(home, plain)
            home.add_(1)
            plain.add_(1)
        for _ in range(2):  # read again once, or the second step would lose what the first has written
            slots = torch.arange(IDS, dtype=torch.int32)
            ends = torch.tensor([0, IDS], dtype=torch.int32)
            local.activate(KeyedJaggedTensor(["ids"], slots, offsets=ends, stride=1))
            tables.look_up(range(IDS), slots)
            tables.update(range(IDS), slots)
        tables.check_home()


def test_rows_that_are_used_often_stay() -> None:
    """Two rows that every fourth step names outlast the others, each of which comes back after they have all gone."""
    tables, hot = Tables("sgd", ROWS - 4), [0, 1]
    missing = 0
    with _references():
        for step in range(48):
            cold = [2 + (2 * step + i) % (ROWS - 2) for i in range(2)]
            if step % 4 == 3:
                missing += len(set(hot) - set(tables.held().tolist()))
            tables.send([*(hot if step % 4 == 3 else cold), *cold, *cold])
    assert missing == 2, "but for the first time"


@interpreted
@pytest.mark.parametrize(("features", "slots", "blocks"), [(1, 16, Blocks(8, 1, 4, 2)), (3, 32, Blocks())])
def test_the_kernels_find_the_slots_that_the_reference_does(features: int, slots: int, blocks: Blocks) -> None:
    """Of 70 rows, over a turn of the hand; of three features the second is not cached, and two ids are in no bag."""
    generator = torch.Generator().manual_seed(features)
    first_rows = torch.tensor([*[20, -1, 0][:features], -1])
    found, expected = CacheState.empty(70, slots, CPU), CacheState.empty(70, slots, CPU)
    for step in range(12):
        lengths = torch.randint(0, 5, (2 * features,), generator=generator)
        offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
        numbers = torch.rand(int(offsets[-1]) + 2, generator=generator) ** (1 + step % 3)
        ids, before = (50 * numbers).int(), found.row_in.clone()
        theirs = ids.clone()
        swaps = find_slots(found, ids, offsets, 2, first_rows, blocks)
        twin = reference.find_slots(expected, theirs, offsets, 2, first_rows)
        entries = int(twin.count)
        assert int(swaps.count) == entries
        for name, ours, others in zip(swaps._fields[:3], swaps, twin, strict=False):
            assert torch.equal(ours[:entries], others), f"step {step}: {name}"
        for name, ours, others in zip(found._fields, found, expected, strict=True):
            assert torch.equal(ours, others), f"step {step}: {name}"
        assert torch.equal(ids, theirs), f"step {step}: ids"
    assert int(before.min()) >= 0, "all slots were taken, and some again"


@interpreted
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 12), (torch.float16, 4), (torch.float32, 0)])
def test_the_kernel_swaps_as_the_reference_does(dtype: torch.dtype, dim: int) -> None:
    shape = (dim,) if dim else ()
    home, cached = torch.rand(31, *shape).to(dtype)[1:], torch.rand(9, *shape).to(dtype)
    slots, leaving, entering = [0, 3, 8, 5, 1], [-1, 0, 7, -1, 9], [4, -1, 2, -1, 9]
    swaps = Swaps(torch.tensor(slots), torch.tensor(leaving), torch.tensor(entering), torch.tensor([4]))
    found, expected = (home.clone(), cached.clone()), (home.clone(), cached.clone())
    # Of several blocks, and so few rows that a program has none.
    with patch.multiple(swapping, _BLOCK_WORDS=32, _BLOCK_ROWS=2, _SHARE_WORDS=16):
        swapping.swap_rows(*found, swaps)
    reference.swap_rows(*expected, swaps)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert not torch.equal(found[0], home)


def test_tables_side_by_side_share_a_cache() -> None:
    weights, state = torch.rand(30 * DIM), torch.rand(30)
    bounds = (0, 10), (10, 16), (20, 30)  # the last one does not follow
    homes = {
        number: CachedTable([weights[first * DIM : end * DIM].view(-1, DIM), state[first:end]], 0.2, 1)
        for number, (first, end) in enumerate(bounds)
    }
    (shared, firsts), (alone, own) = make_caches(homes, CPU)
    assert (firsts, own) == ({0: 0, 1: 10}, {2: 0})
    assert (shared.slots, alone.slots) == (4, 2)
    assert torch.equal(shared.host_rows[0], weights[: 16 * DIM].view(-1, DIM))
    assert alone.host_rows[1].data_ptr() == state[20:].data_ptr()


@pytest.mark.parametrize(("ids", "slots"), [(1, 3), (2, 4), (4, 8), (6, 10)])
def test_a_cache_has_slots_for_the_ids_of_two_steps_or_for_all_rows(ids: int, slots: int) -> None:
    """No slot is free that one of the two names; three slots are the share of ten rows."""
    ((cache, _),) = make_caches({0: CachedTable([torch.rand(10, DIM)], 0.25, ids)}, CPU)
    assert cache.slots == slots
