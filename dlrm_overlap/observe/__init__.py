"""The output of a run: log lines, metrics, TensorBoard events, traces and their summary."""
