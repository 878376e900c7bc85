"""The Triton kernels of `retrain/models/fused_cross_entropy.py`, which launches them; importing this needs Triton."""

import triton
import triton.language as tl


@triton.jit
def log_sum_exp(
    hidden, weight, targets, partial, chosen, num_tokens, vocabulary, width, per_split,
    TOKENS: tl.constexpr, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr, ONE_STEP: tl.constexpr,
    EVEN_VOCABULARY: tl.constexpr, EVEN_WIDTH: tl.constexpr, PRECISION: tl.constexpr, TARGET_IN_TILE: tl.constexpr,
):  # fmt: skip
    """One tile of tokens against one part of the vocabulary: partial[part, token] = log sum exp of those logits.

    hidden (num_tokens, width) and weight (vocabulary, width) are row-major. The target's own logit goes into `chosen`:
    by part 0 in float32; or, where products are rounded (tf32), chosen[part, token] is it as the tile has it, or 0.
    """
    log2e: tl.constexpr = 1.4426950408889634
    part = tl.program_id(1)
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row_there = rows < num_tokens
    steps = tl.arange(0, WIDTH)
    hidden_rows = hidden + rows.to(tl.int64)[:, None] * width
    first = part * per_split
    last = tl.minimum(first + per_split, vocabulary)

    largest = tl.full((TOKENS,), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    if TARGET_IN_TILE:  # otherwise no register is spent on it within the loop
        logit = tl.zeros((TOKENS,), tl.float32)
        target = tl.load(targets + rows, mask=row_there, other=0)
    kept = tl.load(hidden_rows + steps[None, :], mask=row_there[:, None] & (steps < width)[None, :], other=0.0)
    for start in range(first, last, VOCABULARY):
        columns = start + tl.arange(0, VOCABULARY)
        column_there = columns < vocabulary
        weight_rows = weight + columns.to(tl.int64)[:, None] * width
        if ONE_STEP:
            if EVEN_VOCABULARY and EVEN_WIDTH:
                entries = tl.load(weight_rows + steps[None, :])
            else:
                entries = tl.load(
                    weight_rows + steps[None, :], mask=column_there[:, None] & (steps < width)[None, :], other=0.0
                )
            logits = tl.dot(kept, tl.trans(entries), input_precision=PRECISION)
        else:
            logits = tl.zeros((TOKENS, VOCABULARY), tl.float32)
            for step in range(0, width, WIDTH):
                k = step + steps
                values = tl.load(hidden_rows + k[None, :], mask=row_there[:, None] & (k < width)[None, :], other=0.0)
                entries = tl.load(
                    weight_rows + k[None, :], mask=column_there[:, None] & (k < width)[None, :], other=0.0
                )
                logits = tl.dot(values, tl.trans(entries), logits, input_precision=PRECISION)
        if not EVEN_VOCABULARY:
            logits = tl.where(column_there[None, :], logits, float("-inf"))
        if TARGET_IN_TILE:
            logit += tl.sum(tl.where(columns[None, :] == target[:, None], logits, 0.0), 1)
        # Powers of two are what the hardware has; the scale goes into the subtraction.
        higher = tl.maximum(largest, tl.max(logits, 1) * log2e)
        total = total * tl.exp2(largest - higher) + tl.sum(tl.exp2(logits * log2e - higher[:, None]), 1)
        largest = higher
    tl.store(partial + part.to(tl.int64) * num_tokens + rows, (largest + tl.log2(total)) / log2e, mask=row_there)

    if TARGET_IN_TILE:
        tl.store(chosen + part.to(tl.int64) * num_tokens + rows, logit, mask=row_there)
    elif part == 0:
        target = tl.load(targets + rows, mask=row_there, other=0).to(tl.int64)
        target_rows = weight + target[:, None] * width
        logit = tl.zeros((TOKENS,), tl.float32)
        for step in range(0, width, WIDTH):
            k = step + steps
            there = row_there[:, None] & (k < width)[None, :]
            values = tl.load(hidden_rows + k[None, :], mask=there, other=0.0).to(tl.float32)
            logit += tl.sum(values * tl.load(target_rows + k[None, :], mask=there, other=0.0).to(tl.float32), 1)
        tl.store(chosen + rows, logit, mask=row_there)


@triton.jit
def logits_gradient(
    hidden, weight, targets, logsumexp, gradient, slope, num_tokens, vocabulary, width, vocabulary_tiles,
    TOKENS: tl.constexpr, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr, EVEN_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """slope[token, v] = gradient[token] * (softmax - one-hot), one tile a program, from recomputed logits."""
    log2e: tl.constexpr = 1.4426950408889634
    # Neighbouring programs share their tokens, so that those stay in the cache beside the whole weight matrix.
    rows = (tl.program_id(0) // vocabulary_tiles) * TOKENS + tl.arange(0, TOKENS)
    columns = (tl.program_id(0) % vocabulary_tiles) * VOCABULARY + tl.arange(0, VOCABULARY)
    row_there, column_there = rows < num_tokens, columns < vocabulary
    steps = tl.arange(0, WIDTH)
    hidden_rows = hidden + rows.to(tl.int64)[:, None] * width
    weight_rows = weight + columns.to(tl.int64)[:, None] * width
    logits = tl.zeros((TOKENS, VOCABULARY), tl.float32)
    for step in range(0, width, WIDTH):
        k = step + steps
        inside = k < width
        values = tl.load(hidden_rows + k[None, :], mask=row_there[:, None] & inside[None, :], other=0.0)
        entries = tl.load(weight_rows + k[None, :], mask=column_there[:, None] & inside[None, :], other=0.0)
        logits = tl.dot(values, tl.trans(entries), logits, input_precision=PRECISION)
    shift = tl.load(logsumexp + rows, mask=row_there, other=0.0) * log2e
    scale = tl.load(gradient + rows, mask=row_there, other=0.0)
    target = tl.load(targets + rows, mask=row_there, other=0)
    probability = tl.exp2(logits * log2e - shift[:, None])
    value = (probability - tl.where(columns[None, :] == target[:, None], 1.0, 0.0)) * scale[:, None]
    place = slope + rows.to(tl.int64)[:, None] * vocabulary + columns[None, :]
    tl.store(place, value.to(slope.dtype.element_ty), mask=row_there[:, None] & column_there[None, :])


@triton.jit
def log_sum_exp_with_slope(
    hidden, weight, targets, logsumexp, chosen, slope, num_tokens, vocabulary, width,
    TOKENS: tl.constexpr, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr, EVEN_VOCABULARY: tl.constexpr,
    EVEN_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `log_sum_exp` over the whole vocabulary, and the loss's slope in the hidden state.

    The slope is the weight's mean row minus the target's own. The mean is over the softmax and kept up as in flash
    attention, with the weight as keys and as values; width <= WIDTH.
    """
    log2e: tl.constexpr = 1.4426950408889634
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row_there = rows < num_tokens
    steps = tl.arange(0, WIDTH)
    there = row_there[:, None] & (steps < width)[None, :]
    places = rows.to(tl.int64)[:, None] * width + steps[None, :]
    kept = tl.load(hidden + places, mask=there, other=0.0)
    largest = tl.full((TOKENS,), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    mean = tl.zeros((TOKENS, WIDTH), tl.float32)
    for start in range(0, vocabulary, VOCABULARY):
        columns = start + tl.arange(0, VOCABULARY)
        entry_places = weight + columns.to(tl.int64)[:, None] * width + steps[None, :]
        if EVEN_VOCABULARY and EVEN_WIDTH:
            entries = tl.load(entry_places)
        else:
            entries = tl.load(entry_places, mask=(columns < vocabulary)[:, None] & (steps < width)[None, :], other=0.0)
        logits = tl.dot(kept, tl.trans(entries), input_precision=PRECISION)
        if not EVEN_VOCABULARY:
            logits = tl.where((columns < vocabulary)[None, :], logits, float("-inf"))
        higher = tl.maximum(largest, tl.max(logits, 1) * log2e)
        share = tl.exp2(logits * log2e - higher[:, None])
        shrink = tl.exp2(largest - higher)
        total = total * shrink + tl.sum(share, 1)
        mean = tl.dot(share.to(entries.dtype), entries, mean * shrink[:, None], input_precision=PRECISION)
        largest = higher
    tl.store(logsumexp + rows, (largest + tl.log2(total)) / log2e, mask=row_there)
    target = tl.load(targets + rows, mask=row_there, other=0).to(tl.int64)
    entry = tl.load(weight + target[:, None] * width + steps[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(chosen + rows, tl.sum(kept.to(tl.float32) * entry, 1), mask=row_there)
    tl.store(slope + places, (mean / total[:, None] - entry).to(slope.dtype.element_ty), mask=there)


@triton.jit
def weight_gradient(
    hidden, weight, targets, logsumexp, gradient, result, num_tokens, vocabulary, width,
    TOKENS: tl.constexpr, VOCABULARY: tl.constexpr, WIDTH: tl.constexpr, EVEN_WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """result (vocabulary, width) float32 = (gradient * (softmax - one-hot)).T @ hidden; width <= WIDTH.

    One program a tile of the vocabulary walks over all tokens: no two write the same place, so sums repeat exactly.
    """
    log2e: tl.constexpr = 1.4426950408889634
    columns = tl.program_id(0) * VOCABULARY + tl.arange(0, VOCABULARY)
    steps = tl.arange(0, WIDTH)
    inside = (columns < vocabulary)[:, None] & (steps < width)[None, :]
    places = columns.to(tl.int64)[:, None] * width + steps[None, :]
    entries = tl.load(weight + places, mask=inside, other=0.0)
    found = tl.zeros((VOCABULARY, WIDTH), tl.float32)
    for start in range(0, num_tokens, TOKENS):
        rows = start + tl.arange(0, TOKENS)
        row_there = rows < num_tokens
        values = tl.load(
            hidden + rows.to(tl.int64)[:, None] * width + steps[None, :],
            mask=row_there[:, None] & (steps < width)[None, :],
            other=0.0,
        )
        shift = tl.load(logsumexp + rows, mask=row_there, other=0.0) * log2e
        scale = tl.load(gradient + rows, mask=row_there, other=0.0)
        target = tl.load(targets + rows, mask=row_there, other=-1)
        logits = tl.dot(entries, tl.trans(values), input_precision=PRECISION)
        share = tl.exp2(logits * log2e - shift[None, :])
        share = (share - tl.where(columns[:, None] == target[None, :], 1.0, 0.0)) * scale[None, :]
        found = tl.dot(share.to(values.dtype), values, found, input_precision=PRECISION)
    tl.store(result + places, found, mask=inside)
