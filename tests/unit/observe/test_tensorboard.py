"""What a run writes for TensorBoard's page HParams."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # pyright: ignore[reportAttributeAccessIssue]

from dlrm_overlap.observe.tensorboard import TensorBoard


def test_hyperparameters_read_as_in_the_configurations_file(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, start_step=0)
    config = {"train.compile_dense": False, "data.path": None, "model.top_mlp": [64, 1], "train.lr": 0.5}
    board.hyperparameters(config | {"embedding.backend": "pgas"}, {"result/step_ms_p50": 2.0})
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    texts = {name: value.string_value for name, value in values.items() if name != "train.lr"}
    assert texts == {
        "train.compile_dense": "false",
        "data.path": "null",
        "model.top_mlp": "[64, 1]",
        "embedding.backend": "pgas",
    }
    assert values["train.lr"].number_value == 0.5
