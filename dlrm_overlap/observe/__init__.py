"""The output of a run: log lines, metrics, TensorBoard's events, traces and their summary."""
