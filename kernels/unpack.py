"""Unpacks records of samples, whose numbers have 1 to 8 bytes each, into words of 32 or 64 bits."""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import INTERPRETED, specialised

BLOCK = 64 if INTERPRETED else 256  # words of a program

# Columns of the table of fields, [fields, 6] int64; `reference.unpack` has the same.
OFFSET = tl.constexpr(0)  # byte of a record where the field begins
WIDTH = tl.constexpr(1)  # bytes of a number: 1 to 4, or up to 8 into words of 64 bits
COUNT = tl.constexpr(2)  # numbers of the field in a record
KIND = tl.constexpr(3)  # 0: ids; 1: integers that become float32; 2: float32
MODULUS = tl.constexpr(4)  # ids are replaced by their remainder; 0 leaves them as they are
START = tl.constexpr(5)  # numbers of all fields before this one in a record
FIELD_COLUMNS = tl.constexpr(6)


@triton.jit(do_not_specialize=["samples", "record_bytes", "words"])
def _unpack_records(
    out,  # [words * samples] int32: field after field, float32 as bits; or int64, for fields of ids
    records,  # [samples, record_bytes] uint8
    fields,  # [fields, 6] int64
    field_of,  # [words] int32: field of each number of a record
    samples,
    record_bytes,
    words,
    WORD_BYTES: tl.constexpr,  # 4 or 8
    BLOCK: tl.constexpr,
):
    """Unpack numbers of records, as program p the words [p * BLOCK, (p + 1) * BLOCK) of `out`.

    Example: 2 samples, records of 5 bytes: a label, then two ids of 2 bytes. 1 7 0 8 0 and 0 9 0 0 1 give the float32
    bits of 1.0 and 0.0, then 7 8 9 256.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < words * samples
    field = fields + tl.load(field_of + at // samples, mask=mask, other=0) * FIELD_COLUMNS
    count = tl.load(field + COUNT).to(tl.int32)
    within = at - tl.load(field + START).to(tl.int32) * samples
    width = tl.load(field + WIDTH).to(tl.int32)
    # Put the bytes of each number together, the lowest first.
    byte = (within // count).to(tl.int64) * record_bytes + tl.load(field + OFFSET) + within % count * width
    word = tl.zeros((BLOCK,), out.dtype.element_ty)
    for k in tl.static_range(WORD_BYTES):
        part = tl.load(records + byte + k, mask=mask & (k < width), other=0)  # [BLOCK] uint8
        word |= part.to(word.dtype) << (8 * k)
    modulus = tl.load(field + MODULUS).to(word.dtype)
    word = tl.where(modulus > 0, word % tl.maximum(modulus, 1), word)
    if WORD_BYTES == 4:
        is_number = tl.load(field + KIND) == 1
        word = tl.where(is_number, word.to(tl.float32).to(tl.int32, bitcast=True), word)
    tl.store(out + at, word, mask=mask)


def unpack(
    records: torch.Tensor, fields: torch.Tensor, field_of: torch.Tensor, dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    """Return the numbers of records as `reference.unpack` does, [words * b] `dtype`.

    `records` have less than 2^31 bytes; `field_of` is the field of each number. `dtype` int64 takes only fields of ids.
    """
    samples, record_bytes = records.shape
    words = field_of.numel()
    out = torch.empty(words * samples, dtype=dtype, device=records.device)
    programs = -(-out.numel() // BLOCK)
    kernel = specialised(_unpack_records, num_warps=4, WORD_BYTES=dtype.itemsize, BLOCK=BLOCK)
    kernel(programs, (), out, records, fields, field_of, samples, record_bytes, words)
    return out
