"""Rounding of updated rows to the type in which they are stored."""

import triton
import triton.language as tl


@triton.jit
def rounded(x, at, seed, TYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return float32 `x` rounded to TYPE: to the nearest number or, if STOCHASTIC, up or down by chance.

    A number between two of TYPE is rounded to the upper one with the probability that keeps the mean; a number of TYPE
    stays as it is. The chance is a hash of `seed` and of `at`, the element's offset, so equal runs round alike. Numbers
    that are not below the greatest of TYPE in size are rounded to the nearest: so NaN stays NaN, infinity stays
    infinity, and no update overflows that would not without chance.

    Example: float16, whose numbers near 1 are 2^-10 apart. 1 + 2^-12 becomes 1 + 2^-10 one time in four, else 1. 65510
    becomes 65504, the greatest, and 65530 infinity.
    """
    if not STOCHASTIC:
        return x.to(TYPE)
    chance = tl.randint(seed, at.to(tl.int32)).to(tl.uint32, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    if tl.bfloat16 == TYPE:
        greatest = 3.3895313892515355e38
        near = ((bits + (chance & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        greatest = 65504.0
        normal = ((bits + (chance & 0x1FFF)) & 0xFFFFE000).to(tl.float32, bitcast=True)
        # Below 2^-14 float16 has steps of 2^-24, up to 1024 of them. The chance, an odd multiple of 2^-14 below 1, can
        # be added to so many without rounding.
        fraction = ((chance & 0x3FFF) | 1).to(tl.float32) * 6.103515625e-05
        tiny = tl.floor(x * 16777216.0 + fraction) * 5.9604644775390625e-08
        near = tl.where(tl.abs(x) < 6.103515625e-05, tiny, normal)
    # NaN is not below the greatest, so it is kept: of CUDA's own, all ones, chance would carry bits into the sign.
    return tl.where(tl.abs(x) < greatest, near, x).to(TYPE)
