"""float32 to the type of the rows."""

import triton
import triton.language as tl


@triton.jit
def rounded(x, at, seed, TYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return float32 `x` as TYPE; stochastically, up or down by chance so that the mean stays, by the bits of `at`."""
    if not STOCHASTIC:
        return x.to(TYPE)
    chance = tl.randint(seed, at.to(tl.int32)).to(tl.uint32, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    if tl.bfloat16 == TYPE:
        return ((bits + (chance & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True).to(TYPE)
    normal = ((bits + (chance & 0x1FFF)) & 0xFFFFE000).to(tl.float32, bitcast=True)
    # Below 2^-14 half precision has steps of 2^-24.
    tiny = tl.floor(x * 16777216.0 + (chance >> 8).to(tl.float32) * 5.9604644775390625e-08) * 5.9604644775390625e-08
    return tl.where(tl.abs(x) < 6.103515625e-05, tiny, normal).to(TYPE)
