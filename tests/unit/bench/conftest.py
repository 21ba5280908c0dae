from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.workload import Workload, make_workload, read_ids
from dlrm_overlap.bench.options import options_of
from dlrm_overlap.config import Config
from dlrm_overlap.launching.parsing import Parser
from tests.conftest import configuration


def values_of(kind: str, *argv: str) -> Any:
    parser = Parser(kind, "")
    for name, settings in options_of(kind).items():
        parser.add_argument(f"--{name}", **settings)
    return parser.read(argv)


@pytest.fixture(scope="module")
def config() -> Config:
    return configuration("--config", "configs/bench/tiny.yaml")


@pytest.fixture(scope="module")
def workload(config: Config, world_of_one: dist.ProcessGroup) -> Workload:
    return make_workload(config, read_ids(config, world_of_one), world_of_one, torch.device("cpu"), 1)
