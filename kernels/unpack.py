"""Unpacks records of samples, whose numbers take as few bytes as they need, into words of 32 bits."""

import torch
import triton
import triton.language as tl

from dlrm_overlap.kernels.compiled import INTERPRETED, specialised

BLOCK = 64 if INTERPRETED else 256  # words of a program

# Columns of the table of fields, [fields, 6] int64; `reference.unpack` has the same.
OFFSET = tl.constexpr(0)  # of the field in a record, bytes
WIDTH = tl.constexpr(1)  # bytes of a number: 1 to 4
COUNT = tl.constexpr(2)  # numbers of the field in a record
KIND = tl.constexpr(3)  # 0: ids; 1: whole numbers that become float32; 2: float32
MODULUS = tl.constexpr(4)  # of which ids are taken the remainder; 0 leaves them
START = tl.constexpr(5)  # numbers of all fields before
FIELD_COLUMNS = tl.constexpr(6)


@triton.jit(do_not_specialize=["samples", "record_bytes", "words"])
def _unpack_records(out, records, fields, field_of, samples, record_bytes, words, BLOCK: tl.constexpr):
    """Unpack numbers of records: a program writes BLOCK words of `out`, one after the other.

    Memory: `out` [words * samples] int32 holds field after field all samples' numbers, and so, of float32 fields, their
    bits. The program reads the bytes of its numbers from `records` [samples, record_bytes] uint8, the properties of
    their fields from `fields` [fields, 6] int64, and of each number of a record its field from `field_of` [words]
    int32.

    Order: no two programs share an element; the kernel's end orders all for those that follow on the stream.

    Example: 2 samples, records of 5 bytes: a label, then two ids of 2 bytes. 1 7 0 8 0 and 0 9 0 0 1 are unpacked into
    the float32 bits of 1.0 and 0.0, then 7 8 9 256. Word 4 is in column 4 // 2 = 2 of a record, so of the ids, whose
    words begin at 1 * 2. It is the second after, so sample 1's first id: record 1, byte 1.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < words * samples
    field = fields + tl.load(field_of + at // samples, mask=mask, other=0) * FIELD_COLUMNS
    count = tl.load(field + COUNT).to(tl.int32)
    within = at - tl.load(field + START).to(tl.int32) * samples
    width = tl.load(field + WIDTH).to(tl.int32)
    byte = (within // count).to(tl.int64) * record_bytes + tl.load(field + OFFSET) + within % count * width
    word = tl.zeros_like(at)
    for k in tl.static_range(4):
        part = tl.load(records + byte + k, mask=mask & (k < width), other=0)
        word |= part.to(tl.int32) << (8 * k)
    modulus = tl.load(field + MODULUS).to(tl.int32)
    word = tl.where(modulus > 0, word % tl.maximum(modulus, 1), word)
    is_number = tl.load(field + KIND) == 1
    tl.store(out + at, tl.where(is_number, word.to(tl.float32).to(tl.int32, bitcast=True), word), mask=mask)


def unpack(records: torch.Tensor, fields: torch.Tensor, field_of: torch.Tensor) -> torch.Tensor:
    """Return the numbers of records, [words * b] int32: of field after field all samples', see `reference.unpack`.

    Args:
        records: [b, record_bytes] uint8, less than 2^31 bytes.
        fields: [fields, 6] int64; see the constants above for the columns.
        field_of: [words] int32: the field of each number of a record.
    """
    samples, record_bytes = records.shape
    words = field_of.numel()
    out = torch.empty(words * samples, dtype=torch.int32, device=records.device)
    programs = -(-out.numel() // BLOCK)
    kernel = specialised(_unpack_records, num_warps=4, BLOCK=BLOCK)
    kernel(programs, (), out, records, fields, field_of, samples, record_bytes, words)
    return out
