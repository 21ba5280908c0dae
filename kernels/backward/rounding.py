"""Rounding of updated rows to the type that stores them."""

import triton
import triton.language as tl


@triton.jit
def rounded(x, at, seed, TYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return float32 `x` rounded to TYPE: to the nearest number or, if STOCHASTIC, up or down at random, keeping the
    mean.

    The random bits are a hash of `seed` and `at`, the element's offset. NaN, infinity and numbers not below the largest
    of TYPE are rounded to the nearest, so that no update overflows by chance.
    """
    if not STOCHASTIC:
        return x.to(TYPE)
    chance = tl.randint(seed, at.to(tl.int32)).to(tl.uint32, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    if tl.bfloat16 == TYPE:
        largest = 3.3895313892515355e38
        near = ((bits + (chance & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        largest = 65504.0
        normal = ((bits + (chance & 0x1FFF)) & 0xFFFFE000).to(tl.float32, bitcast=True)
        # Below 2^-14 float16 has steps of 2^-24, at most 1024. `fraction`, an odd multiple of 2^-14 below 1, can be
        # added to that many without rounding.
        fraction = ((chance & 0x3FFF) | 1).to(tl.float32) * 6.103515625e-05
        tiny = tl.floor(x * 16777216.0 + fraction) * 5.9604644775390625e-08
        near = tl.where(tl.abs(x) < 6.103515625e-05, tiny, normal)
    # NaN is not below the largest, so it is kept: adding chance to CUDA's NaN, all ones, would change the sign bit.
    return tl.where(tl.abs(x) < largest, near, x).to(TYPE)
