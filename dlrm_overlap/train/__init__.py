"""Models, pipelines, training runs, evaluation and comparison."""
