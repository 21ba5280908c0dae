"""The numbers and states of the rows' optimizers."""

import math
from typing import NamedTuple


class OptimizerParams(NamedTuple):
    """The numbers of a row optimizer at one step. FBGEMM's names follow a semicolon."""

    lr: float
    eps: float = 0.0
    l2: float = 0.0
    """added to the gradient; weight_decay under WeightDecayMode.L2"""
    decoupled: float = 0.0
    """subtracted from the row; weight_decay under WeightDecayMode.DECOUPLE, and of Adam and LAMB"""
    max_norm: float = math.inf
    """limit of an updated row's norm"""
    beta1: float = 0.0
    """share of the old mean of gradients"""
    beta2: float = 0.0
    """share of the old mean of their squares"""
    count: float = 0.0
    """steps, this one included; iter"""
    halflife: float = 0.0
    """steps that halve a row's counter; 0: it stays 1, negative: it counts steps; counter_halflife"""
    decay_after: float = 0.0
    """count after which rows decay by their counters; adjustment_iter"""
    max_rate: float = 0.0
    """limit of AdagradW's rate if halflife is -2; adjustment_ub"""
    lazy: float = 0.0
    """1 for AdagradW, else 0"""


STATES: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("elements",),
    "rowwise_adagrad": ("number",),
    "decaying_rowwise_adagrad": ("number",),
    "rowwise_adagrad_with_counter": ("number", "number", "number"),
    "adam": ("elements", "elements"),
    "partial_rowwise_adam": ("elements", "number"),
    "lamb": ("elements", "elements"),
    "partial_rowwise_lamb": ("elements", "number"),
}
"""states of each optimizer in FBGEMM's order: one number for each of a row's `elements`, or one `number` per row"""


def state_bytes(optimizer: str, dim: float) -> float:
    return sum(4 * dim if kind == "elements" else 4 for kind in STATES[optimizer])


def looks_at_rows(optimizer: str) -> bool:
    """Return whether the update of an element depends on other elements of its row."""
    return "number" in STATES[optimizer] or "lamb" in optimizer
