"""The figures, one per file: contenders, columns and headline. `run` measures a figure on all ranks."""
