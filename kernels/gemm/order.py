"""The order in which the programs of a product take its tiles."""

import triton
import triton.language as tl


@triton.jit
def tile_at(tile, blocks, columns, owners, world_size, GROUP: tl.constexpr, ORDER: tl.constexpr):
    """Return (owner, block, column) of the tile at a position in the order of the tiles.

    The shards have `blocks` blocks of rows each, and are visited as `owners` [W] int32 names them:

        own_first     one after the other, as shards arrive; the first one is the rank's own
        remote_first  one after the other; the last one is the rank's own, during which nothing is left to send
        balanced      block 0 of all, then block 1 of all, ..: links and multiprocessors are busy all the time

    GROUP blocks that follow each other in this order are computed together, column after column, so that they share
    blocks in L2; but the rank's own blocks share a group with those of peers in the balanced order alone.

    Example: owners 1 0, 2 blocks each, 3 columns, GROUP 2, own_first: owner, block, column are 1 0 0, 1 1 0, 1 0 1,
    1 1 1, 1 0 2, 1 1 2, then 0 0 0, 0 1 0 and so forth.
    """
    first, rows = 0, blocks * world_size
    if ORDER == "own_first":
        first = tl.where(tile < blocks * columns, 0, blocks)
        rows = tl.where(tile < blocks * columns, blocks, rows)
    elif ORDER == "remote_first":
        remote = blocks * (world_size - 1)
        first = tl.where(tile < remote * columns, 0, remote)
        rows = tl.where(tile < remote * columns, remote, rows)
    within = tile - first * columns
    first += within // (GROUP * columns) * GROUP
    height = tl.minimum(GROUP, rows - first)
    within = within % (GROUP * columns)
    position = first + within % height
    turn, block = position // blocks, position % blocks
    if ORDER == "balanced":
        turn, block = position % world_size, position // world_size
    return tl.load(owners + turn), block, within // height
