"""What a run writes and shows: log lines, metrics, TensorBoard's events, traces and their summary."""
