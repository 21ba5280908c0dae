"""The kernels' maths in plain PyTorch, which tests compare kernels with and which runs on CPUs."""

from collections.abc import Sequence

import torch
from torch import nn

from dlrm_overlap.kernels.bags import EVERY_BAG, Partials
from dlrm_overlap.kernels.dense.arguments import GROUP, LINE, CrossGradient, FlatUpdate, MLPShape
from dlrm_overlap.kernels.ids.id_map import unsigned_remainder
from dlrm_overlap.kernels.optimizer_params import OptimizerParams
from dlrm_overlap.kernels.row_cache import MOST_USES, CacheState, Swaps

Rows = torch.Tensor
States = list[torch.Tensor]


def pool(
    weight: torch.Tensor,
    lengths: torch.Tensor,
    values: torch.Tensor,
    mean: bool = False,
    id_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum or mean of the rows of each bag of one table, [n, D] float32; an empty bag gives zeros.

    Args:
        weight: [rows, D], any float type.
        lengths: [n] int.
        values: [sum of lengths] int, bag after bag; rows are added up in this order, in float32.
        id_weights: [sum of lengths] float32, factor of each id's row.
    """
    bag = torch.repeat_interleave(lengths.long())
    pooled = torch.zeros(lengths.numel(), weight.shape[1], dtype=torch.float32, device=weight.device)
    rows = weight[values.long()].float()
    pooled.index_add_(0, bag, rows if id_weights is None else rows * id_weights[:, None])
    if mean:
        pooled *= (1.0 / lengths.clamp(min=1).float())[:, None]
    return pooled


def divide_ids(
    values: torch.Tensor, offsets: torch.Tensor, shares: Sequence[tuple[int, ...]], samples: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the ids of each share, their positions in `values`, and the lengths [shares * samples].

    Ids of a range of rows are returned minus the first; ids of a range of buckets, of a table of any id, as they are.

    Args:
        values: [n] int32 or int64, bag after bag.
        offsets: [features * samples + 1] int32, of the bags.
        shares: feature, first id and end of each; ids are unsigned, a negative id is 2^32 + id. Or feature, first
            bucket and end, and the table's number of buckets, if that is not 0.
    """
    lengths, ids, positions = [], [], []
    for feature, first, end, *buckets in shares:
        bags = offsets[feature * samples : (feature + 1) * samples + 1].long()
        here = values[int(bags[0]) : int(bags[-1])]
        index = unsigned_remainder(here.long(), buckets[0]) if any(buckets) else rows_of(here).long() % (1 << 32)
        inside = (index >= first) & (index < end)
        bag = torch.repeat_interleave(bags.diff())[inside]
        lengths.append(torch.bincount(bag, minlength=samples))
        ids.append(here[inside] if any(buckets) else (index[inside] - first).to(torch.int32))
        positions.append(int(bags[0]) + inside.nonzero().flatten())
    return torch.cat(ids).to(values.dtype), torch.cat(positions), torch.cat(lengths)


def rows_of(ids: torch.Tensor) -> torch.Tensor:
    """Return [n] int32: ids as row numbers; -1 or 2^31 - 1, which no table has, for ids beyond int32."""
    if ids.dtype == torch.int32:
        return ids
    rows = ids.to(torch.int32)
    return rows.where(rows == ids, torch.where(ids < 0, -1, 2**31 - 1).to(torch.int32))


def joined_words(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return [n] int64: the ids with low words `low` [n] int32 and high words `high` [n] int32."""
    return (high.long() << 32) | (low.long() & 0xFFFFFFFF)


def split_words(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the low and the high words, [n] int32 each, of int64 ids."""
    words = ids.contiguous().view(torch.int32)
    return words[::2], words[1::2]


def add_partials(window: torch.Tensor, sums: Sequence[Partials], offsets: torch.Tensor | None = None) -> None:
    """Add up the partial sums in a window [b, columns], in float32, in the order of the row shards; in place.

    With `offsets` [shards * b + 1] int32, of the bags of each share, partial sums of empty bags are not read.
    """
    for sum in sums:
        total = torch.zeros(window.shape[0], sum.dim, dtype=torch.float32, device=window.device)
        for number, column in enumerate(sum.columns):
            part = window[:, column : column + sum.dim].float()
            if offsets is not None and sum.shares[number] != EVERY_BAG:
                filled = have_ids(offsets, sum.shares[number], window.shape[0])
                part = part.masked_fill(~filled[:, None], 0.0)
            total += part
        window[:, sum.columns[0] : sum.columns[0] + sum.dim] = total


def have_ids(offsets: torch.Tensor, feature: int, samples: int) -> torch.Tensor:
    """Return [samples] bool, from `offsets` [features * samples + 1]: whether each bag of a feature has ids."""
    return offsets[feature * samples : (feature + 1) * samples + 1].diff() > 0


def pull_ids(
    published: Sequence[tuple[torch.Tensor, torch.Tensor]], requested: Sequence[int], samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the features `requested`, each with the first rank's bags first, and the bags' offsets.

    `published` has each rank's ids of all features, bag after bag, and the offsets [features * samples + 1].
    """
    values, lengths = [published[0][0][:0]], [published[0][1][:0]]
    for feature in requested:
        for ids, offsets in published:
            bags = offsets[feature * samples : (feature + 1) * samples + 1]
            values.append(ids[int(bags[0]) : int(bags[-1])])
            lengths.append(bags.diff())
    ends = torch.cat(lengths).cumsum(0, dtype=lengths[0].dtype)
    return torch.cat(values), torch.cat([ends.new_zeros(1), ends])


def count_bags(lengths: torch.Tensor) -> torch.Tensor:
    """Return [3, T]: the ids of each feature, of its largest bag, and minus those of its smallest bag.

    Without samples these are 0, -2^31 and -2^31. The result has the type of `lengths` [T, b], which the sums must fit.
    """
    if not lengths.shape[1]:
        none = lengths.new_full((len(lengths),), -(2**31))
        return torch.stack([torch.zeros_like(none), none, none])
    smallest = lengths.neg().amax(dim=1)  # ten times as fast as `amin`
    ids = lengths.sum(dim=1, dtype=lengths.dtype)  # for int32 four times as fast as a sum in int64
    return torch.stack([ids, lengths.amax(dim=1), smallest])


def expand_rows(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return [m, D]: the row of `rows` [n, D] at each of `positions` [m], or zeros if it is negative."""
    return rows[positions.clamp(min=0).long()].masked_fill((positions < 0)[:, None], 0.0)


def sum_rows(gradient: torch.Tensor, positions: torch.Tensor, rows: int) -> torch.Tensor:
    """Return [rows, D] float32: the sum of the gradients [n, D] of each row, in their order.

    `positions` [n] int is the row of each gradient; negative for none.
    """
    named = (positions >= 0).nonzero().flatten()
    sums = torch.zeros(rows, gradient.shape[1], device=gradient.device)
    return sums.index_add_(0, positions[named].long(), gradient[named].float())


def unpack(records: torch.Tensor, fields: Sequence[Sequence[int]], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return the numbers of records [b, record_bytes] uint8, [words * b] `dtype`: field after field, sample by sample.

    `fields` are rows of the table of fields, see `kernels/unpack.py`. `dtype` is int32, or int64 for fields of ids.
    """
    found = []
    for offset, width, count, kind, modulus, _ in fields:
        numbers = records[:, offset : offset + count * width].reshape(-1, width)
        padded = numbers.new_zeros(len(numbers), dtype.itemsize)
        padded[:, :width] = numbers
        words = padded.view(dtype).flatten()
        if modulus:
            words %= modulus
        if kind == 1:
            words = words.float().view(torch.int32)
        found.append(words)
    return torch.cat(found)


def update_rows(
    weight: torch.Tensor,
    states: Sequence[torch.Tensor],
    ids: torch.Tensor,
    gradient: torch.Tensor,
    optimizer: str,
    numbers: OptimizerParams,
) -> None:
    """Update each row that `ids` name, once, by the sum of the gradients of its ids, in place.

    Args:
        weight: [rows, D], any float type.
        states: each [rows, D] or [rows], of the gradient's type.
        ids: [n] int64, row ids, in any order.
        gradient: [n, D] float32 or float64, the type of all arithmetic; the gradient of each id's bag.
        optimizer: FBGEMM's name, a key of `_UPDATES`.
    """
    rows, which = ids.unique(return_inverse=True)
    total = gradient.new_zeros(rows.numel(), weight.shape[1])
    total.index_add_(0, which, gradient)
    row = weight[rows].to(total.dtype)
    step, updated = _UPDATES[optimizer](row, [state[rows] for state in states], total, numbers)
    for state, value in zip(states, updated, strict=True):
        state[rows] = value
    weight[rows] = (row - step).to(weight.dtype)


def mark_rows(words: torch.Tensor, rows: torch.Tensor) -> None:
    """Set the bits of `rows` [n] int64, in any order, in `words` [at least rows / 32] int32: row r has bit r % 32."""
    rows = rows.unique()
    at, bits = rows // 32, (1 << (rows % 32)).to(torch.int32)
    missing = bits.masked_fill(words[at] & bits != 0, 0)
    words.index_add_(0, at, missing)  # a sum of different bits of a word, none of which is set


def _sgd(row: Rows, states: States, gradient: Rows, numbers: OptimizerParams) -> tuple[Rows, States]:
    return numbers.lr * gradient, []


def _adagrad(row: Rows, states: States, gradient: Rows, numbers: OptimizerParams) -> tuple[Rows, States]:
    """State: sum of squares [rows, D]."""
    squares = states[0] + gradient.square()
    return gradient * (numbers.lr / (squares.sqrt() + numbers.eps)), [squares]


def _rowwise_adagrad(row: Rows, states: States, gradient: Rows, numbers: OptimizerParams) -> tuple[Rows, States]:
    """State: sum of mean squares [rows]."""
    gradient = gradient + numbers.l2 * row
    squares = states[0] + gradient.square().mean(1)
    step = gradient * (numbers.lr / (squares.sqrt() + numbers.eps))[:, None] + numbers.lr * numbers.decoupled * row
    # Limit the norm of the updated row.
    after = row - step
    norm = after.norm(dim=1, keepdim=True)
    return torch.where(norm > numbers.max_norm, row - after * (numbers.max_norm / norm), step), [squares]


def _rowwise_adagrad_with_counter(
    row: Rows, states: States, gradient: Rows, numbers: OptimizerParams
) -> tuple[Rows, States]:
    """States [rows] each: sum of mean squares, step of the row's last update, the row's counter."""
    lr, halflife, decay = numbers.lr, numbers.halflife, numbers.decoupled
    # The counter of each row, which decays with the steps since its last update.
    past = torch.where(states[1] == 0, 1.0, numbers.count - states[1])
    if halflife == 0:
        counter = torch.ones_like(past)
    else:
        counter = 1 + (0.5 ** (past / halflife) if halflife > 0 else 1.0) * states[2]
    # Learning rate and weight decay depend on the counter once `decay_after` steps are done.
    squares = states[0] + (gradient + numbers.l2 * row).square().mean(1)
    root, rate, kept = squares.sqrt() + numbers.eps, torch.full_like(past, lr), torch.ones_like(past)
    if numbers.count > numbers.decay_after and numbers.lazy:
        power = (1 - decay * lr) ** (past.clamp(max=numbers.count - numbers.decay_after) - 1)
        if halflife == -1:
            rate = lr * counter.sqrt()
        elif halflife == -2:
            rate = (lr * counter).clamp(max=numbers.max_rate)
        rate, kept = rate * power, (1 - decay * lr) * power
    elif numbers.count > numbers.decay_after:
        kept = 1 - halflife / counter * (decay * lr + numbers.l2 * lr / root)
    step = gradient * (rate / root)[:, None] + row * (1 - kept)[:, None]
    return step, [squares, torch.full_like(past, numbers.count), counter]


def _adam(row: Rows, states: States, gradient: Rows, numbers: OptimizerParams) -> tuple[Rows, States]:
    """States: moving means of gradients [rows, D], and of squares, [rows, D] or the row's mean [rows]."""
    squares = gradient.square() if states[1].dim() == 2 else gradient.square().mean(1)
    means = [
        beta * state + (1 - beta) * x
        for beta, state, x in zip((numbers.beta1, numbers.beta2), states, (gradient, squares), strict=True)
    ]
    root = (means[1] / (1 - numbers.beta2**numbers.count)).sqrt() + numbers.eps
    direction = means[0] / (1 - numbers.beta1**numbers.count) / (root if root.dim() == 2 else root[:, None])
    return numbers.lr * (direction + numbers.decoupled * row), means


def _lamb(row: Rows, states: States, gradient: Rows, numbers: OptimizerParams) -> tuple[Rows, States]:
    """Adam's step, scaled to the norm of lr * row."""
    step, means = _adam(row, states, gradient, numbers)
    return step * (numbers.lr * row.norm(dim=1) / step.norm(dim=1))[:, None], means


_UPDATES = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "decaying_rowwise_adagrad": _rowwise_adagrad,
    "rowwise_adagrad_with_counter": _rowwise_adagrad_with_counter,
    "adam": _adam,
    "partial_rowwise_adam": _adam,
    "lamb": _lamb,
    "partial_rowwise_lamb": _lamb,
}


def find_slots(
    state: CacheState, ids: torch.Tensor, offsets: torch.Tensor, samples: int, first_rows: torch.Tensor
) -> Swaps:
    # Find the rows of the ids, and which of them have slots.
    step, hand, _ = state.clock.tolist()
    slots = state.row_in.numel()
    ends = offsets[samples::samples].contiguous()
    position = torch.arange(ids.numel(), dtype=ends.dtype, device=ids.device)
    first = first_rows[torch.searchsorted(ends, position, right=True)]
    cached = first >= 0
    rows = first[cached] + ids[cached]
    named = rows.unique()
    found = state.slot_of[named].long()
    hits, entering = found[found >= 0], named[found < 0]
    # Mark the slots that the step uses; then slots may be taken that neither this step nor the last one used.
    state.used_at[hits] = step
    counted = hits[hits < slots]  # resident rows have the later slots
    state.uses[counted] = (state.uses[counted] + 1).clamp(max=MOST_USES)
    order = torch.arange(slots, device=ids.device).roll(-hand)
    free = order[state.used_at[order] < step - 1]
    # Take slots without uses first, in the hand's order; slots that the hand passes lose a use.
    is_idle = state.uses[free] == 0
    idle = free[is_idle][: entering.numel()]
    taken = torch.cat([idle, free[~is_idle]])[: entering.numel()]
    if idle.numel():
        last = int(idle[-1])
        passed = order[: (last - hand) % slots + 1]
        state.uses[passed] = (state.uses[passed] - 1).clamp(min=0)
        state.clock[1:] = (last + 1) % slots
    # Assign the slots to the rows that enter.
    leaving = state.row_in[taken]
    state.slot_of[leaving[leaving >= 0]] = -1
    state.slot_of[entering] = taken.int()
    state.row_in[taken], state.used_at[taken], state.uses[taken] = entering, step, 0
    ids[cached] = state.slot_of[rows]
    state.clock[0] += 1
    return Swaps(taken, leaving, entering, torch.tensor([taken.numel()], device=ids.device))


def swap_rows(home: torch.Tensor, cached: torch.Tensor, swaps: Swaps) -> None:
    slots, leaving, entering = (each[: int(swaps.count)] for each in swaps[:3])
    leaves, enters = leaving >= 0, entering >= 0
    home[leaving[leaves]] = cached[slots[leaves]]
    cached[slots[enters]] = home[entering[enters]]


def begin_update(update: FlatUpdate) -> None:
    update.step.add_(1)


def update_range(update: FlatUpdate, begin: int, end: int) -> None:
    """Update the flat weights [begin, end) of a counted update by torch.optim's operators, bit for bit."""
    rows, lines = torch.unique_consecutive(update.rows[begin // LINE : end // LINE], return_counts=True)
    ends = (begin + lines.cumsum(0) * LINE).tolist()
    for row, first, last in zip(rows.tolist(), [begin, *ends], ends, strict=False):
        if row >= 0:
            _update_row(update, row, slice(first, last))
    if update.shadow is not None:
        update.shadow[begin:end].copy_(update.weights[begin:end])


def update_share(
    update: FlatUpdate,
    gradients: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    shadows: Sequence[torch.Tensor],
    in_float32: torch.Tensor,
    begin: int,
    end: int,
) -> None:
    """Update the flat weights [begin, end) by the mean of all ranks' gradients, and copy them to all ranks.

    Args:
        gradients: [n] of each rank, float32 or bfloat16; the sum is float32, in the order of the ranks.
        weights, shadows: [n] of each rank: its `weights`, written where `in_float32` is 1, and its `shadow`.
        in_float32: [n / LINE] int32, 0 or 1.
    """
    total = gradients[0][begin:end].float()
    for gradient in gradients[1:]:
        total = total + gradient[begin:end].float()
    update.gradients[begin:end] = (total * (1 / len(gradients))).to(gradients[0].dtype)
    update_range(update, begin, end)
    assert update.shadow is not None
    copied = in_float32[begin // LINE : end // LINE].repeat_interleave(LINE) == 1
    for weight, shadow in zip(weights, shadows, strict=True):
        weight[begin:end][copied] = update.weights[begin:end][copied]
        shadow[begin:end] = update.shadow[begin:end]


def _update_row(update: FlatUpdate, row: int, part: slice) -> None:
    weights, gradients = update.weights[part], update.gradients[part]
    states = [state[part] for state in update.states]
    lr, eps, first, second, nesterov, l2, decoupled = update.numbers[row].tolist()
    steps = update.step[row].item()
    if decoupled:
        weights.mul_(1 - lr * decoupled)
    if l2:
        gradients = gradients.add(weights, alpha=l2)
    if update.kind == "sgd":
        weights.add_(gradients, alpha=-lr)
    elif update.kind == "momentum":
        states[0].mul_(first).add_(gradients, alpha=1 if steps == 1 else 1 - second)
        weights.add_(gradients.add(states[0], alpha=first) if nesterov else states[0], alpha=-lr)
    elif update.kind == "adagrad":
        states[0].addcmul_(gradients, gradients)
        weights.addcdiv_(gradients, states[0].sqrt().add_(eps), value=-lr / (1 + (steps - 1) * first))
    else:
        states[0].lerp_(gradients, 1 - first)
        states[1].mul_(second).addcmul_(gradients, gradients, value=1 - second)
        root = (states[1].sqrt() / (1 - second**steps) ** 0.5).add_(eps)
        weights.addcdiv_(states[0], root, value=-lr / (1 - first**steps))


def add_layer(x0: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x0.float() * (w.float() + bias) + x.float())


def gradient_of_layer(tensors: CrossGradient, layer: int, layers: int) -> None:
    gradient, dx0 = tensors.gradient.float(), torch.zeros_like(tensors.x0, dtype=torch.float32)
    for k in range(layers - 1, layer - 1, -1):
        if k < layers - 1:
            gradient = gradient + tensors.later[k].float()  # p_{k+1}
        if layer == 0:
            dx0 += gradient * (tensors.w[k].float() + tensors.bias[k])
    du = gradient * tensors.x0.float()
    tensors.du.copy_(du)
    for group, part in enumerate(du.split(GROUP)):
        tensors.sums[group] = part.sum(0)
    if layer == 0:
        tensors.dx.copy_(dx0 + gradient)


def interact(embeddings: torch.Tensor, features: int, out: torch.Tensor) -> None:
    """Write each sample's first embedding, the products of its pairs in float32, and zeros."""
    each = embeddings.float().unflatten(1, (features, -1))
    rows, columns = torch.triu_indices(features, features, offset=1)
    dim = each.shape[2]
    out.zero_()
    out[:, :dim] = each[:, 0]
    out[:, dim : dim + len(rows)] = torch.bmm(each, each.transpose(1, 2))[:, rows, columns]


def gradient_of_interaction(gradient: torch.Tensor, embeddings: torch.Tensor, features: int, out: torch.Tensor) -> None:
    each = embeddings.float().unflatten(1, (features, -1))
    rows, columns = torch.triu_indices(features, features, offset=1)
    dim = each.shape[2]
    pairs = gradient.new_zeros(len(each), features, features, dtype=torch.float32)
    pairs[:, rows, columns] = gradient[:, dim : dim + len(rows)].float()
    result = torch.bmm(pairs + pairs.transpose(1, 2), each)
    result[:, 0] += gradient[:, :dim]
    out.copy_(result.flatten(1))


def mlp(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    shape: MLPShape,
    z: torch.Tensor,
    out: torch.Tensor,
) -> None:
    activate = nn.functional.gelu if shape.gelu else torch.relu
    written = []
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True), 1):
        x = nn.functional.linear(x, weight, bias)
        if layer < shape.layers or not shape.ends_linear:
            written.append(x)
            x = activate(x)
    if written:
        z.copy_(torch.cat(written, dim=1))
    out.copy_(x)


def gradient_of_mlp(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    shape: MLPShape,
    z: torch.Tensor,
    partial_sums: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    """Write the gradient of x, unless `out` is None, and the parameters' gradients to row 0 of `partial_sums`.

    Its other rows become 0.
    """
    sums = z.split(list(shape.widths[1 : len(shape.widths) - shape.ends_linear]), dim=1)
    activated = [x, *((nn.functional.gelu(each) if shape.gelu else each.relu()) for each in sums)]
    found: list[torch.Tensor] = []
    for layer in reversed(range(shape.layers)):
        if layer < len(sums):
            gradient = _gradient_before(gradient, sums[layer], shape.gelu)
        found = [(gradient.t() @ activated[layer]).flatten(), gradient.sum(0), *found]
        gradient = gradient @ weights[layer]
    partial_sums.zero_()
    partial_sums[0] = torch.cat(found)
    if out is not None:
        out.copy_(gradient)


def _gradient_before(gradient: torch.Tensor, z: torch.Tensor, gelu: bool) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(gradient, z) if gelu else gradient.where(z > 0, 0)


def mask_and_sum(gradient: torch.Tensor, output: torch.Tensor, out: torch.Tensor, sums: torch.Tensor) -> None:
    """Write the gradient where `output` is positive, and its sums in float32."""
    out.copy_(gradient.where(output > 0, 0))
    for group, part in enumerate(out.float().split(GROUP)):
        sums[group] = part.sum(0)


def logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_((x.float() * weight.float()).sum(1) + bias.float())


def gradient_of_logits(
    gradient: torch.Tensor, output: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, sums: torch.Tensor
) -> None:
    """Write the gradient of ReLU's input, and sums, in float32."""
    each, width = gradient.float()[:, None], output.shape[1]
    mask_and_sum(each * weight.float(), output, out, sums[:, :width])
    for group, part in enumerate(torch.cat((each * output.float(), each), dim=1).split(GROUP)):
        sums[group, width:] = part.sum(0)
