"""A training configuration as the sections of a simulation."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.parsing import parse_config


def read_training(path: Path, hosts: str) -> dict[str, Any]:
    """Return what the training configuration of a file says on a simulated step, nested as in a simulation's file.

    Its ids have one skew; where the tables have several, it is their mean. What a run reads from its data, a
    simulation must be given: rows.

    Raises:
        InputError: if the file is none, or lacks the tables' rows.
    """
    config = parse_config("dlrm-overlap simulate", "", ["--config", str(path)], lambda parser: None)[0]
    backend = "fused" if config.embedding.backend == "fused" else "pgas"
    tables, embedding, train = config.data.tables, replace(config.embedding, backend=backend), config.train
    if tables.rows is None:
        raise InputError(f"--train {path}: data.tables.rows is null; write the tables' rows into the file")
    if not hosts.isdigit() or not int(hosts):
        raise InputError(f"--hosts {hosts}: not a whole number above 0; give the number of hosts")
    wire = embedding.resolved_wire_dtype(train.precision)
    return {
        "model": asdict(config.model),
        "network": {"kind": "switch" if int(hosts) == 1 else "fat_tree", "hosts": int(hosts), "gpus_per_host": 8},
        "work": {
            "tables": tables.number(),
            "rows": tables.rows,
            "max_rows": tables.max_rows,
            "multi_hot": tables.multi_hot,
            "zipf_alpha": float(np.mean(tables.zipf_alpha)),
            "samples": train.batch_size,
            "global_batch": train.global_batch_size,
            "dense_features": config.data.dense_features,
            "row_bytes": 2 if embedding.weight_dtype == "fp16" else 4,
            "wire_bytes": 4 if wire == "fp32" else 2,
            "id_bytes": 4,
            "optimizer": embedding.optimizer,
        },
        "exchange": {
            "backend": backend,
            "schedule": embedding.schedule,
            "slice_bags": embedding.slice_bags,
            "aggregate_bytes": embedding.aggregate_bytes,
        },
    }
