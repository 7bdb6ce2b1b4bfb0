"""FlashAttention-2 in Triton, forward and backward, with the fixes as compile-time switches.

One source for sm80 and newer.  The host side (argument checks, launches, autograd) is in
`triton_flash_ops.py`; this file holds device code only.

Notation (Dao 2023, arXiv 2307.08691), one program instance per tile:

    S = scale * Q K^T          logits, fp32
    m                          row shift (running row maximum, unless a fix moves it), log2 units
    P = exp2(S * log2(e) - m)  unnormalised probabilities, fp32
    row_sum = rowsum(P)        normaliser, fp32
    O = P V / row_sum          P is cast to the storage dtype for this product only
    lse = (m + log2(row_sum)) / log2(e)        natural-log units, fp32, [B, H, Tq]
    delta = rowsum(dO * O)                     fp32, [B, H, Tq]
    dS = P * (dP - delta), dP = dO V^T, P = exp(S - lse)
    dV = P^T dO, dK = scale * dS^T Q, dQ = scale * dS K

Shapes: q, o, do, dq [B, Hq, Tq, D]; k, v, dk, dv [B, Hkv, Tk, D]; query head h reads key head
h // (Hq / Hkv).  A tensor argument is a 4-D tensor descriptor where the chip has a tensor memory
accelerator (TMA: sm90, sm100), else a tuple (pointer, stride_b, stride_h, stride_t) with a dense
last dimension; `_load` and `_store` hide the difference.  Loads past the end of a sequence, or of a
head_dim that is no power of two, return zeros; stores past it are dropped.

Causal masking is aligned TOP-LEFT, as PyTorch's `is_causal`: query i sees keys 0..i whatever Tq
and Tk are.  Every query therefore sees key 0, and no row is ever fully masked.

Nothing is accumulated through atomics: dQ and dK/dV have a pass each, in this order, and every
output element is written once, by one program.  The same inputs give the same bits.

Switches of the forward pass (all `tl.constexpr`, so `stock` pays for none of them):
    SHIFT         0: m is the running maximum.  1: for every key tile whose maximum repeats, the
                  shift of arXiv 2510.04212 (see `_repeated_maximum`).  2: every row shifts by 0.35
    CONSISTENT_L  O is divided by the sum of the *cast* P that the product with V used
    RESIDUAL      also store (fp32 O) - (stored O), so that delta can be computed from both
    ROUND_BITS    round O stochastically, dropping this many low bits of the fp32 pattern
    TRACE         also store which (row, key tile) took the shift; for tests
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TUPLES = tl.constexpr(hasattr(tl, "tuple"))  # Triton before 3.3 takes no tuples as arguments
SHIFT_CONST = tl.constexpr(0.35)  # `shift_const`: natural-log units; a negative control


@triton.jit
def _row_pointer(x, batch, head, start, length, HEAD_DIM: tl.constexpr):
    """(pointer to row `start` of one head, elements from row to row)."""
    if TUPLES:
        ptr, stride_b, stride_h, stride_t = x
        ptr += batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
        ptr += tl.cast(start, tl.int64) * stride_t
    else:
        stride_t = HEAD_DIM
        ptr = x + (head.to(tl.int64) * length + start) * HEAD_DIM
    return ptr, stride_t


@triton.jit
def _load(x, batch, head, start, length, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
          TMA: tl.constexpr):  # fmt: skip
    """[ROWS, HEAD_DIM padded to a power of two]: rows start.. of one head, zeros past the end."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    if TMA:
        tile = x.load([batch, head, start, 0]).reshape(ROWS, BLOCK_D)
    else:
        ptr, stride_t = _row_pointer(x, batch, head, start, length, HEAD_DIM)
        rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
        inside = (start + rows < length) & (cols < HEAD_DIM)
        tile = tl.load(ptr + rows * stride_t + cols, mask=inside, other=0.0)
    return tile


@triton.jit
def _store(x, batch, head, start, length, tile, HEAD_DIM: tl.constexpr, TMA: tl.constexpr):
    """Write a tile, already in x's dtype, at rows start.. of one head."""
    ROWS: tl.constexpr = tile.shape[0]
    BLOCK_D: tl.constexpr = tile.shape[1]
    if TMA:
        x.store([batch, head, start, 0], tile.reshape(1, 1, ROWS, BLOCK_D))
    else:
        ptr, stride_t = _row_pointer(x, batch, head, start, length, HEAD_DIM)
        rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_D)[None, :]
        inside = (start + rows < length) & (cols < HEAD_DIM)
        tl.store(ptr + rows * stride_t + cols, tile, mask=inside)


@triton.jit
def _load_rows(x, batch_head, start, length, ROWS: tl.constexpr, TMA: tl.constexpr):
    """ROWS per-row values of one head out of [B * H, length], a descriptor or base pointer."""
    if TMA:
        values = x.load([batch_head, start]).reshape(ROWS)
    else:
        rows = start + tl.arange(0, ROWS)
        values = tl.load(x + tl.cast(batch_head, tl.int64) * length + rows, rows < length, 0.0)
    return values


@triton.jit
def _resident(tile, start, length, ROWS: tl.constexpr, IN_REGISTERS: tl.constexpr):
    """A program's own tile, held in registers as a matrix operand rather than read again and again.

    The select changes no value, rows past the end are zeros already: but its result lives in
    registers, so that the shared memory which the tile was loaded to is free for other stages.
    """
    if IN_REGISTERS:
        tile = tl.where((start + tl.arange(0, ROWS) < length)[:, None], tile, 0.0)
    return tile


@triton.jit
def _visible(rows, cols, len_k, CAUSAL: tl.constexpr):
    """Mask of the (row, col) pairs that attend, for rows [M, 1] and cols [1, N]."""
    keep = cols < len_k
    if CAUSAL:
        keep = keep & (cols <= rows)
    return keep


@triton.jit
def _key_range(start_m, len_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """(whole, end): every row sees all of the tiles in keys [0, whole), part of [whole, end)."""
    end = len_k
    whole = len_k // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(len_k, start_m + BLOCK_M)
        whole = tl.minimum(len_k, start_m) // BLOCK_N * BLOCK_N
    return whole, end


# ------------------------------------------------------------------------------------- forward


@triton.jit
def _repeated_maximum(s, tile_max, scale, beta, tol):
    """Rows whose maximum repeats within this tile, and the shift that replaces it (units of s).

    arXiv 2510.04212, forward pass: entries with scale * s >= scale * tile_max - tol equal the
    maximum; if more than one does, the shift is beta * maximum for a positive maximum and 0 for a
    negative one.  Masked entries are -inf: they never count, and nor does a row that is all masked.
    """
    threshold = tile_max - tol / scale
    count = tl.sum((s >= threshold[:, None]).to(tl.float32), 1)
    repeated = (count > 1.5) & (tile_max > -float("inf"))
    return repeated, tl.where(tile_max > 0, beta * tile_max, 0.0)


@triton.jit
def _forward_tiles(
    acc, row_sum, row_sum_cast, m, q, k, v, fired_ptr,
    batch, kv_head, rows, lo, hi, len_q, len_k, scale, beta, tol,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    SHIFT: tl.constexpr, CONSISTENT_L: tl.constexpr, TRACE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key tiles lo, lo + BLOCK_N, .. < hi; `MASK` for the ragged ones."""
    scale_log2 = scale * LOG2E
    for start in tl.range(lo, hi, BLOCK_N):
        k_tile = _load(k, batch, kv_head, start, len_k, BLOCK_N, HEAD_DIM, TMA)
        s = tl.dot(q, k_tile.T, input_precision=PRECISION)  # the scale is folded into exp2
        if MASK:
            cols = start + tl.arange(0, BLOCK_N)
            s = tl.where(_visible(rows[:, None], cols[None, :], len_k, CAUSAL), s, -float("inf"))
        tile_max = tl.max(s, 1)
        if SHIFT == 1:
            repeated, shift = _repeated_maximum(s, tile_max, scale, beta, tol)
            tile_max = tl.where(repeated, shift, tile_max)
            if TRACE:
                fired = fired_ptr + rows.to(tl.int64) * tl.cdiv(len_k, BLOCK_N) + start // BLOCK_N
                tl.store(fired, repeated.to(tl.int8), mask=rows < len_q)
        if SHIFT == 2:
            m_new = tl.maximum(m, tile_max * scale_log2 + SHIFT_CONST * LOG2E)
        else:
            m_new = tl.maximum(m, tile_max * scale_log2)

        # While a row has seen scores of -inf alone, any finite shift gives P = 0.
        base = tl.where(m_new == -float("inf"), 0.0, m_new)
        alpha = tl.exp2(m - base)  # what was summed under the old shift, under the new one
        acc = acc * alpha[:, None]
        p = tl.exp2(s * scale_log2 - base[:, None])
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v_tile = _load(v, batch, kv_head, start, len_k, BLOCK_N, HEAD_DIM, TMA)
        p_cast = p.to(v_tile.dtype)
        if CONSISTENT_L:
            row_sum_cast = row_sum_cast * alpha + tl.sum(p_cast.to(tl.float32), 1)
        acc = tl.dot(p_cast, v_tile, acc, input_precision=PRECISION)
        m = m_new
    return acc, row_sum, row_sum_cast, m


@triton.jit
def _round_stochastic(x, index, seed, ROUND_BITS: tl.constexpr):
    """x (fp32) rounded up or down at random, with the odds of its dropped ROUND_BITS low bits.

    The random word of element `index` is lane 0 of Philox4x32-10 with counter (index, 0, 0, 0) and
    key `seed`, so it depends on the element alone, not on tiles or launch order.  Inf and NaN pass.
    """
    KEEP: tl.constexpr = 0xFFFFFFFF << ROUND_BITS & 0xFFFFFFFF
    bits = x.to(tl.uint32, bitcast=True)
    noise = tl.randint(seed, index).to(tl.uint32, bitcast=True) & (0xFFFFFFFF ^ KEEP)
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, (bits + noise) & KEEP, bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["seed"])
def forward_kernel(
    q, k, v, o, residual, lse_ptr, fired_ptr,
    heads, group, len_q, len_k, scale, beta, tol, seed,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    SHIFT: tl.constexpr, CONSISTENT_L: tl.constexpr, RESIDUAL: tl.constexpr,
    ROUND_BITS: tl.constexpr, TRACE: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """O and lse of BLOCK_M queries of one head.  Grid: cdiv(Tq, BLOCK_M) * B * Hq programs."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    num_m = tl.cdiv(len_q, BLOCK_M)
    # Under a causal mask later queries see more keys: start with the longest programs.
    start_m = (num_m - 1 - tl.program_id(0) % num_m) * BLOCK_M
    batch_head = tl.program_id(0) // num_m
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // group
    rows = start_m + tl.arange(0, BLOCK_M)
    fired_ptr += batch_head.to(tl.int64) * len_q * tl.cdiv(len_k, BLOCK_N)

    q_tile = _load(q, batch, head, start_m, len_q, BLOCK_M, HEAD_DIM, TMA)
    q_tile = _resident(q_tile, start_m, len_q, BLOCK_M, IN_REGISTERS)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_sum_cast = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    whole, end = _key_range(start_m, len_k, BLOCK_M, BLOCK_N, CAUSAL)
    acc, row_sum, row_sum_cast, m = _forward_tiles(
        acc, row_sum, row_sum_cast, m, q_tile, k, v, fired_ptr,
        batch, kv_head, rows, 0, whole, len_q, len_k, scale, beta, tol,
        BLOCK_N, HEAD_DIM, CAUSAL, False, SHIFT, CONSISTENT_L, TRACE, PRECISION, TMA,
    )  # fmt: skip
    acc, row_sum, row_sum_cast, m = _forward_tiles(
        acc, row_sum, row_sum_cast, m, q_tile, k, v, fired_ptr,
        batch, kv_head, rows, whole, end, len_q, len_k, scale, beta, tol,
        BLOCK_N, HEAD_DIM, CAUSAL, True, SHIFT, CONSISTENT_L, TRACE, PRECISION, TMA,
    )  # fmt: skip

    lse = (m + tl.log2(row_sum)) * LN2
    tl.store(lse_ptr + batch_head.to(tl.int64) * len_q + rows, lse, mask=rows < len_q)
    if CONSISTENT_L:
        row_sum = row_sum_cast
    out = acc * (1.0 / row_sum)[:, None]
    if ROUND_BITS > 0:
        cols = tl.arange(0, BLOCK_D)
        index = ((batch_head * len_q + rows) * HEAD_DIM)[:, None] + cols[None, :]  # modulo 2^32
        out = _round_stochastic(out, index, seed, ROUND_BITS)
    stored = out.to(DTYPE)
    _store(o, batch, head, start_m, len_q, stored, HEAD_DIM, TMA)
    if RESIDUAL:
        rest = (out - stored.to(tl.float32)).to(DTYPE)
        _store(residual, batch, head, start_m, len_q, rest, HEAD_DIM, TMA)


# ------------------------------------------------------------------------------------ backward


@triton.jit
def _dq_tiles(
    dq, delta, q, do, lse_log2, k, v, batch, kv_head, rows, lo, hi, len_k, scale_log2,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    DELTA_ONLY: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Walk key tiles for one query tile: add to dq, or (DELTA_ONLY) to delta = rowsum(dP * P)."""
    for start in tl.range(lo, hi, BLOCK_N):
        k_tile = _load(k, batch, kv_head, start, len_k, BLOCK_N, HEAD_DIM, TMA)
        v_tile = _load(v, batch, kv_head, start, len_k, BLOCK_N, HEAD_DIM, TMA)
        s = tl.dot(q, k_tile.T, input_precision=PRECISION)
        p = tl.exp2(s * scale_log2 - lse_log2[:, None])
        if MASK:
            cols = start + tl.arange(0, BLOCK_N)
            p = tl.where(_visible(rows[:, None], cols[None, :], len_k, CAUSAL), p, 0.0)
        dp = tl.dot(do, v_tile.T, input_precision=PRECISION)
        if DELTA_ONLY:
            delta += tl.sum(p * dp, 1)
        else:
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq, delta


@triton.jit
def dq_kernel(
    q, k, v, do, o, residual, dq_out, lse_ptr, lse_log2_ptr, delta_ptr,
    heads, group, len_q, len_k, padded_q, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    RESIDUAL: tl.constexpr, DELTA_DP: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """dQ of BLOCK_M queries; first what both passes need of a row: lse in log2 units, and delta.

    delta = rowsum(dO * O), with O's kept rounding residual added under RESIDUAL (`delta_fp32`), or
    rowsum(dP * P) by a walk over the keys of its own under DELTA_DP (`delta_dp`).  Both rows are
    [B, Hq, padded_q] and zero past the end: q and dO load as zeros there, so that P = 1,
    dP = delta = 0, and nothing is added to dK or dV.  Grid: padded_q / BLOCK_M * B * Hq programs.
    """
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    num_m = padded_q // BLOCK_M
    start_m = (num_m - 1 - tl.program_id(0) % num_m) * BLOCK_M  # longest first, as in the forward
    batch_head = tl.program_id(0) // num_m
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // group
    rows = start_m + tl.arange(0, BLOCK_M)
    whole, end = _key_range(start_m, len_k, BLOCK_M, BLOCK_N, CAUSAL)

    # Plain loads, even with TMA: they overlap one another and what follows.
    if not DELTA_DP:
        out = _load(o, batch, head, start_m, len_q, BLOCK_M, HEAD_DIM, False)
    if RESIDUAL:
        rest = _load(residual, batch, head, start_m, len_q, BLOCK_M, HEAD_DIM, False)
    lse = tl.load(lse_ptr + batch_head.to(tl.int64) * len_q + rows, mask=rows < len_q, other=0.0)
    lse_log2 = lse * LOG2E
    q_tile = _load(q, batch, head, start_m, len_q, BLOCK_M, HEAD_DIM, TMA)
    do_tile = _load(do, batch, head, start_m, len_q, BLOCK_M, HEAD_DIM, TMA)
    delta = tl.zeros([BLOCK_M], tl.float32)
    if not DELTA_DP:
        out = out.to(tl.float32)
        if RESIDUAL:
            out += rest.to(tl.float32)
        delta = tl.sum(out * do_tile.to(tl.float32), 1)
    q_tile = _resident(q_tile, start_m, len_q, BLOCK_M, IN_REGISTERS)
    do_tile = _resident(do_tile, start_m, len_q, BLOCK_M, IN_REGISTERS)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if DELTA_DP:
        dq, delta = _dq_tiles(
            dq, delta, q_tile, do_tile, lse_log2, k, v, batch, kv_head, rows, 0, whole, len_k,
            scale * LOG2E, BLOCK_N, HEAD_DIM, CAUSAL, False, True, PRECISION, TMA,
        )  # fmt: skip
        dq, delta = _dq_tiles(
            dq, delta, q_tile, do_tile, lse_log2, k, v, batch, kv_head, rows, whole, end, len_k,
            scale * LOG2E, BLOCK_N, HEAD_DIM, CAUSAL, True, True, PRECISION, TMA,
        )  # fmt: skip
    offset = batch_head.to(tl.int64) * padded_q
    tl.store(lse_log2_ptr + offset + rows, lse_log2)
    tl.store(delta_ptr + offset + rows, delta)

    dq, delta = _dq_tiles(
        dq, delta, q_tile, do_tile, lse_log2, k, v, batch, kv_head, rows, 0, whole, len_k,
        scale * LOG2E, BLOCK_N, HEAD_DIM, CAUSAL, False, False, PRECISION, TMA,
    )  # fmt: skip
    dq, delta = _dq_tiles(
        dq, delta, q_tile, do_tile, lse_log2, k, v, batch, kv_head, rows, whole, end, len_k,
        scale * LOG2E, BLOCK_N, HEAD_DIM, CAUSAL, True, False, PRECISION, TMA,
    )  # fmt: skip
    _store(dq_out, batch, head, start_m, len_q, (dq * scale).to(DTYPE), HEAD_DIM, TMA)


@triton.jit
def _dkdv_tiles(
    dk, dv, k, v, q, do, lse_log2, delta, batch, head, heads, cols, lo, hi, len_q, padded_q,
    scale_log2, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Walk query tiles for a fixed key tile; S and P are held transposed, [BLOCK_N, BLOCK_M]."""
    for start in tl.range(lo, hi, BLOCK_M):
        q_tile = _load(q, batch, head, start, len_q, BLOCK_M, HEAD_DIM, TMA)
        s_t = tl.dot(k, q_tile.T, input_precision=PRECISION)
        lse_row = _load_rows(lse_log2, batch * heads + head, start, padded_q, BLOCK_M, TMA)
        p_t = tl.exp2(s_t * scale_log2 - lse_row[None, :])
        if MASK:  # causal only: keys past the end are rows of dk, dv that are never stored
            rows = start + tl.arange(0, BLOCK_M)
            p_t = tl.where(cols[:, None] <= rows[None, :], p_t, 0.0)
        do_tile = _load(do, batch, head, start, len_q, BLOCK_M, HEAD_DIM, TMA)
        dv = tl.dot(p_t.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
        dp_t = tl.dot(v, do_tile.T, input_precision=PRECISION)
        delta_row = _load_rows(delta, batch * heads + head, start, padded_q, BLOCK_M, TMA)
        ds_t = p_t * (dp_t - delta_row[None, :])
        dk = tl.dot(ds_t.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def dkdv_kernel(
    q, k, v, do, dk_out, dv_out, lse_log2, delta, heads, group, len_q, len_k, padded_q, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """dK, dV of BLOCK_N keys, summed over the query heads that share them, in order.

    Grid: cdiv(Tk, BLOCK_N) * B * Hkv programs; early keys, which most queries see, come first.
    """
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    num_n = tl.cdiv(len_k, BLOCK_N)
    start_n = tl.program_id(0) % num_n * BLOCK_N
    batch_head = tl.program_id(0) // num_n
    batch, kv_head = batch_head // (heads // group), batch_head % (heads // group)
    cols = start_n + tl.arange(0, BLOCK_N)

    k_tile = _load(k, batch, kv_head, start_n, len_k, BLOCK_N, HEAD_DIM, TMA)
    v_tile = _load(v, batch, kv_head, start_n, len_k, BLOCK_N, HEAD_DIM, TMA)
    k_tile = _resident(k_tile, start_n, len_k, BLOCK_N, IN_REGISTERS)
    v_tile = _resident(v_tile, start_n, len_k, BLOCK_N, IN_REGISTERS)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    first = 0
    whole = 0
    if CAUSAL:
        first = start_n // BLOCK_M * BLOCK_M  # first tile with a query that sees any of these keys
        whole = tl.minimum(tl.cdiv(start_n + BLOCK_N, BLOCK_M) * BLOCK_M, len_q)
    for member in range(group):
        head = kv_head * group + member
        if CAUSAL:
            dk, dv = _dkdv_tiles(
                dk, dv, k_tile, v_tile, q, do, lse_log2, delta, batch, head, heads, cols, first,
                whole, len_q, padded_q, scale * LOG2E, BLOCK_M, HEAD_DIM, True, PRECISION, TMA,
            )  # fmt: skip
        dk, dv = _dkdv_tiles(
            dk, dv, k_tile, v_tile, q, do, lse_log2, delta, batch, head, heads, cols, whole,
            len_q, len_q, padded_q, scale * LOG2E, BLOCK_M, HEAD_DIM, False, PRECISION, TMA,
        )  # fmt: skip
    _store(dv_out, batch, kv_head, start_n, len_k, dv.to(DTYPE), HEAD_DIM, TMA)
    _store(dk_out, batch, kv_head, start_n, len_k, (dk * scale).to(DTYPE), HEAD_DIM, TMA)
