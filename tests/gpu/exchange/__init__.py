"""Checks of the embedding exchange between ranks: on GPUs where there are some, else on CPU processes.

`python -m tests.gpu.exchange --nproc 4` runs them all in few sets of processes, since starting one takes most of the
time, and needs no pytest.
"""
