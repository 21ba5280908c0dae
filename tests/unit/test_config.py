import pytest

from dlrm_overlap.config import (
    Config,
    DataConfig,
    EmbeddingConfig,
    InputError,
    ModelConfig,
    TablesConfig,
    TrainConfig,
    parse_multi_hot,
)


@pytest.mark.parametrize(("spec", "bounds"), [(3, (3, 3)), ("3", (3, 3)), ("0..8", (0, 8)), ("2..2", (2, 2))])
def test_multi_hot(spec: int | str, bounds: tuple[int, int]) -> None:
    assert parse_multi_hot(spec) == bounds


@pytest.mark.parametrize("spec", ["", "-1", "3..1", "0..0", 0, "a", "1.5", "1..", "..2"])
def test_multi_hot_refuses(spec: int | str) -> None:
    with pytest.raises(InputError, match=r"write 3 or '0\.\.8'"):
        parse_multi_hot(spec)


def test_number_of_tables() -> None:
    assert TablesConfig(count=4, rows=10).number() == 4
    assert TablesConfig(rows=[1, 2, 3]).number() == 3
    assert TablesConfig(multi_hot=[1, "0..2"], rows=5).number() == 2
    assert TablesConfig().number(26) == 26
    with pytest.raises(InputError, match=r"set data\.tables\.count"):
        TablesConfig(rows=10).number()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": [1, 2], "multi_hot": [1, 1, 1]}, "must agree on the number of tables"),
        ({"count": 3, "rows": [1, 2]}, "2 values for 3 tables"),
    ],
)
def test_tables_refuse(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TablesConfig(**arguments)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(tables=TablesConfig(count=2)), "need their rows"),
        (DataConfig(kind="criteo_npy"), "set data.path"),
        (DataConfig(kind="criteo_npy", path="x", tables=TablesConfig(rows=[1, 2])), "Criteo has 26"),
    ],
)
def test_data_source_must_be_told(config: DataConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        config.require_source()


def test_endless_data_needs_steps() -> None:
    data = DataConfig(tables=TablesConfig(count=2, rows=3))
    with pytest.raises(InputError, match=r"set train\.steps"):
        Config(data=data)
    assert Config(data=data, train=TrainConfig(steps=1)).as_dict()["data"]["tables"]["rows"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 18, "bottom_mlp": [18]}, "multiple of 4"),
        ({"dim": 16, "bottom_mlp": [32, 8]}, r"must end in model\.dim, 16"),
        ({"top_mlp": [1]}, "must have a hidden layer"),
        ({"top_mlp": [8, 2]}, "end in 1"),
    ],
)
def test_model_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slice_bags": 6}, "6 must be a power of two from 4 on"),
        ({"backward": "atomic", "optimizer": "adagrad"}, r"embedding\.optimizer is adagrad; take push"),
        ({"backward": "atomic"}, r"embedding\.optimizer is rowwise_adagrad; take push"),
    ],
)
def test_embedding_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        EmbeddingConfig(**arguments)
    assert EmbeddingConfig(backward="atomic", optimizer="sgd").backward == "atomic"


def test_ranks_share_the_global_batch() -> None:
    config = TrainConfig(global_batch_size=12, batch_size=7)
    assert [config.samples_per_rank(w) for w in (1, 2, 3, 4)] == [12, 6, 4, 3]
    with pytest.raises(InputError, match="12 samples do not divide by 5 ranks; take 15"):
        config.samples_per_rank(5)
    assert TrainConfig(batch_size=7).samples_per_rank(5) == 7


def test_decay_must_follow_the_warm_up() -> None:
    with pytest.raises(InputError, match="must not lie before the end of the warm-up"):
        TrainConfig(warmup_steps=10, decay_start_step=5, decay_steps=10)
