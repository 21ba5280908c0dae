"""The figures, one file each: contenders, columns of a row, headline; `run` measures the figure on all ranks."""
