"""Checks of the embedding exchange between ranks: on GPUs where there are some, else on CPU processes.

`tests/gpu/test_exchange.py` runs them in few sets of processes, since starting one takes most of the time.
"""
