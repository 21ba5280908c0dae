"""Checks of the embedding exchange between ranks, on GPUs or, where there are none, on CPU processes.

`tests/gpu/test_exchange.py` runs them on few sets of processes: to start one takes most of the time.
"""
