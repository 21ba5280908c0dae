"""What a run writes and shows: log lines, metrics, TensorBoard, traces."""
