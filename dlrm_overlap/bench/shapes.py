"""The shapes on which the figures of the embedding stage are measured. Loads no torch."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dlrm_overlap.config import Config, InputError


def worlds_of(kind: str, world_size: int) -> list[int]:
    """Return the numbers of ranks to measure the figure `kind` on, ascending: powers of two where it is of scaling."""
    return [2**n for n in range(world_size.bit_length())] if kind in ("weak", "strong") else [world_size]


def shapes_of(kind: str, values: Any, config: Config, world_size: int) -> list[Config]:
    """Return the shapes that the figure `kind` has on so many ranks, of a sweep those of all values of its axes.

    Raises:
        InputError: if there are fewer tables than ranks, if the samples cannot be divided among the ranks, or if a
            sweep's come from files.
    """
    tables = getattr(values, "tables_per_rank", None)
    if kind != "sweep":
        return [_shape(config, world_size, tables)]
    if config.data.kind != "synthetic":
        raise InputError(
            f"data.kind: {config.data.kind}, but bench sweep takes shapes that no file has; set data.kind synthetic"
        )
    axes: list[Sequence[Any]] = [values.tables or [tables]]
    axes += [each or [None] for each in (values.dims, values.global_batches, values.pooling_factors)]
    return [_resized(config, world_size, *each) for each in itertools.product(*axes)]


def _resized(
    config: Config, world_size: int, tables: int | None, dim: int | None, batch: int | None, ids: int | None
) -> Config:
    if dim:
        mlp = [*config.model.bottom_mlp[:-1], dim]
        config = replace(config, model=replace(config.model, dim=dim, bottom_mlp=mlp))
    if batch:
        config = replace(config, train=replace(config.train, global_batch_size=batch))
    if ids:
        config = _with_tables(config, multi_hot=f"0..{2 * ids}")
    return _shape(config, world_size, tables)


def _shape(config: Config, world_size: int, tables_per_rank: int | None) -> Config:
    if tables_per_rank is not None:
        config = _with_tables(config, count=tables_per_rank * world_size)
    elif (count := config.data.tables.number(world_size)) < world_size:
        raise InputError(f"data.tables.count: {count} tables for {world_size} ranks; each takes at least one")
    config.train.samples_per_rank(world_size)
    return config


def _with_tables(config: Config, **keys: Any) -> Config:
    return replace(config, data=replace(config.data, tables=replace(config.data.tables, **keys)))
