"""Computes DaViT's embedding of pixels, its depthwise convolutions, and its attention in windows and of channels.

Attention reads the strided output of the q/k/v product, and copies no tokens into windows. An addition, a depthwise
convolution and a layer norm are one launch.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from snapcap.models.kernels.launch import launch, pointer

_PIXELS_TILE, _PIXELS_WARPS = 128, 8  # tokens of a program; warps
_CHANNELS = 4  # three and one of zeros, so that one load reads a row under the kernel
# Greatest width whose sums, and greatest kernel whose weights, fit in a program.
_MOST_WIDTH, _MOST_KERNEL = 256, 16


def fits_pixels(width: int, kernel: int) -> bool:
    """Returns whether the kernel here can compute tokens of ``width`` features with a convolution of side
    ``kernel``."""
    return 16 <= width <= _MOST_WIDTH and 3 <= kernel <= _MOST_KERNEL


@triton_op("snapcap::embed_pixels", mutates_args=())
def embed_pixels(
    pixels: Tensor,  # [B, height, width, 3] uint8
    rescale: Tensor,  # [1] fp32
    mean: Tensor,  # [3] fp32
    std: Tensor,  # [3] fp32
    weight: Tensor,  # [D, kernel * kernel * 3], padded with zeros
    bias: Tensor,  # [D]
    gamma: Tensor,  # [D]
    beta: Tensor,  # [D]
    kernel: int,
    stride: int,
    padding: int,
    eps: float,
) -> Tensor:  # [B, S, D]
    """Returns the layer norm of a convolution of the normalised image, which is padded with zeros."""
    batch, height, width, channels = pixels.shape
    rows, columns = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
    # Pixels of a row that a program reads; those behind the kernel are multiplied by 0.
    across = triton.next_power_of_2(kernel)
    right = padding + across - kernel
    right += -(padding + width + right) % 8  # aligns the beginning of each row to 16 bytes
    image = ((pixels.float() * rescale - mean) / std).to(weight.dtype)
    image = F.pad(image, (0, _CHANNELS - channels, padding, right, padding, padding)).contiguous()
    features = weight.shape[0]
    out = torch.empty(batch, rows * columns, features, dtype=weight.dtype, device=weight.device)
    launch(_embed_pixels)[(triton.cdiv(rows * columns, _PIXELS_TILE), batch)](
        image,
        weight,
        bias,
        gamma,
        beta,
        out,
        HEIGHT=image.shape[1],
        BREADTH=image.shape[2],
        COLUMNS=columns,
        TOKENS=rows * columns,
        KERNEL=kernel,
        ACROSS=across,
        STRIDE=stride,
        CHANNELS=channels,
        STORED=_CHANNELS,
        INPUTS=weight.shape[1],
        WIDTH=features,
        PADDED=triton.next_power_of_2(features),
        TILE=_PIXELS_TILE,
        EPS=eps,
        num_warps=_PIXELS_WARPS,
    )
    return out


@triton.jit
def _embed_pixels(
    image,
    weight,
    bias,
    gamma,
    beta,
    out,
    HEIGHT: tl.constexpr,
    BREADTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    KERNEL: tl.constexpr,
    ACROSS: tl.constexpr,
    STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    STORED: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    EPS: tl.constexpr,
):
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = (token < TOKENS)[:, None]
    corner = (token // COLUMNS * BREADTH + token % COLUMNS) * (STRIDE * STORED)
    k, d = tl.arange(0, ACROSS * STORED), tl.arange(0, PADDED)
    real = (d < WIDTH)[None, :]
    pixel, channel = k // STORED, k % STORED
    used = ((pixel < KERNEL) & (channel < CHANNELS))[:, None]
    at = image + tl.program_id(1).to(tl.int64) * (HEIGHT * BREADTH * STORED) + corner[:, None] + k[None, :]
    of_weight = weight + d[None, :] * INPUTS + (pixel * CHANNELS + channel)[:, None]
    sums = tl.zeros([TILE, PADDED], tl.float32)
    for row in range(KERNEL):
        x = tl.load(at + row * (BREADTH * STORED), mask=there, other=0.0)
        w = tl.load(of_weight + row * (KERNEL * CHANNELS), mask=used & real, other=0.0)
        sums = tl.dot(x, w, sums, input_precision="ieee")
    sums += tl.load(bias + d, mask=d < WIDTH, other=0.0).to(tl.float32)[None, :]
    centred = tl.where(real, sums - (tl.sum(sums, 1) / WIDTH)[:, None], 0.0)
    y = centred * tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + EPS)[:, None]
    y = y * tl.load(gamma + d, mask=d < WIDTH, other=0.0).to(tl.float32)[None, :]
    y += tl.load(beta + d, mask=d < WIDTH, other=0.0).to(tl.float32)[None, :]
    to = out + (tl.program_id(1).to(tl.int64) * TOKENS + token)[:, None] * WIDTH + d[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=there & real)


_CONV_TILE = 1024  # numbers of a row that a program holds
_CONV_STAGES = 3  # rows that are being loaded at the same time
_CONV_STRIP = 8  # greatest number of rows in a program's strip
_CONV_PROGRAMS = 1024  # number of programs that keep a device busy; strips are shortened to reach it


@triton_op("snapcap::convolve_and_norm", mutates_args=())
def convolve_and_norm(
    hidden: Tensor,  # [B, rows * columns, D]
    added: Tensor | None,  # [B, rows * columns, D], added to `hidden` first
    weight: Tensor,  # [3, 3, D]
    bias: Tensor,  # [D]
    gamma: Tensor,  # [D]
    beta: Tensor,  # [D]
    rows: int,
    columns: int,
    eps: float,
) -> tuple[Tensor, Tensor]:  # both [B, rows * columns, D]
    """Returns the sum plus its depthwise 3×3 convolution, and the layer norm of this result.

    A program goes down a strip of the image. Each row that it reads contributes to the sums of three rows, which
    the program holds.
    """
    batch, _, width = hidden.shape
    padded = triton.next_power_of_2(width)
    tile = max(1, min(_CONV_TILE // padded, triton.next_power_of_2(columns)))
    across, strip = triton.cdiv(columns, tile), _CONV_STRIP
    while strip > 1 and across * triton.cdiv(rows, strip) * batch < _CONV_PROGRAMS:
        strip //= 2
    total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    launch(_convolve_and_norm)[(across, triton.cdiv(rows, strip), batch)](
        hidden,
        pointer(added, hidden),
        weight,
        bias,
        gamma,
        beta,
        total,
        normed,
        ADDED=added is not None,
        ROWS=rows,
        COLUMNS=columns,
        WIDTH=width,
        PADDED=padded,
        TILE=tile,
        STRIP=strip,
        STAGES=_CONV_STAGES,
        EPS=eps,
        num_warps=max(2, min(padded // 256, 8)),  # a thread has registers for the weights of eight channels
    )
    return total, normed


@triton.jit
def _numbers(hidden, added, at, mask, ADDED: tl.constexpr):
    x = tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
    if ADDED:
        x += tl.load(added + at, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _taps(weight, d, real, WIDTH: tl.constexpr):
    """Loads three neighbouring weights of a kernel for each channel: fp32 [1, PADDED] each."""
    left = tl.load(weight + d, mask=real, other=0.0).to(tl.float32)
    middle = tl.load(weight + WIDTH + d, mask=real, other=0.0).to(tl.float32)
    right = tl.load(weight + 2 * WIDTH + d, mask=real, other=0.0).to(tl.float32)
    return left[None, :], middle[None, :], right[None, :]


@triton.jit
def _convolve_and_norm(
    hidden,
    added,
    weight,
    bias,
    gamma,
    beta,
    total,
    normed,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    STRIP: tl.constexpr,
    STAGES: tl.constexpr,
    EPS: tl.constexpr,
):
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    top = tl.program_id(1) * STRIP
    image = tl.program_id(2).to(tl.int64) * (ROWS * COLUMNS * WIDTH)
    d = tl.arange(0, PADDED)
    real = d < WIDTH
    inside = (column < COLUMNS)[:, None] & real[None, :]
    has_left = inside & (column > 0)[:, None]
    has_right = (column < COLUMNS - 1)[:, None] & real[None, :]
    up_left, up, up_right = _taps(weight, d, real, WIDTH)
    left, middle, right = _taps(weight + 3 * WIDTH, d, real, WIDTH)
    down_left, down, down_right = _taps(weight + 6 * WIDTH, d, real, WIDTH)
    first = tl.load(bias + d, mask=real, other=0.0).to(tl.float32)[None, :]
    scale = tl.load(gamma + d, mask=real, other=0.0).to(tl.float32)[None, :]
    shift = tl.load(beta + d, mask=real, other=0.0).to(tl.float32)[None, :]
    above = tl.zeros([TILE, PADDED], tl.float32)  # sums of the row before the one that is read
    here = tl.zeros([TILE, PADDED], tl.float32)  # sums of the row that is read
    for step in tl.range(STRIP + 2, num_stages=STAGES):
        row = top + step - 1
        there = (row >= 0) & (row < ROWS)
        at = image + (row * COLUMNS + column)[:, None] * WIDTH + d[None, :]
        x = _numbers(hidden, added, at, inside & there, ADDED)
        before = _numbers(hidden, added, at - WIDTH, has_left & there, ADDED)
        behind = _numbers(hidden, added, at + WIDTH, has_right & there, ADDED)
        sums = above + down_left * before + down * x + down_right * behind
        above = here + left * before + (middle + 1.0) * x + right * behind
        here = first + up_left * before + up * x + up_right * behind
        if (step > 1) & (row <= ROWS):
            to = at - COLUMNS * WIDTH
            tl.store(total + to, sums.to(total.dtype.element_ty), mask=inside)
            centred = tl.where(inside, sums - (tl.sum(tl.where(inside, sums, 0.0), 1) / WIDTH)[:, None], 0.0)
            norm = tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + EPS)[:, None]
            tl.store(normed + to, (centred * norm * scale + shift).to(normed.dtype.element_ty), mask=inside)


_WINDOW_WARPS = 4
_WINDOW_QUERIES = 64  # greatest number of queries that a program computes at once
_WINDOW_TOKENS = 256  # greatest window whose scores fit in a program


def fits_windows(grid: tuple[int, int], window: int, width: int) -> bool:
    """Returns whether `attend_windows` can compute heads of ``width`` features over such windows.

    Windows must tile the grid. Tensor cores need powers of two, at least 16.
    """
    rest = _parts(window)[1]
    return (
        all(side % window == 0 for side in grid)
        and 16 <= window * window <= _WINDOW_TOKENS
        and (rest == 0 or (rest >= 16 and _is_power(rest)))
        and width >= 16
        and _is_power(width)
    )


def _parts(window: int) -> tuple[int, int]:
    """Splits the number of tokens of a window into the largest power of two and the rest."""
    tokens = window * window
    largest = 1 << (tokens.bit_length() - 1)
    return largest, tokens - largest


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


@triton_op("snapcap::attend_windows", mutates_args=())
def attend_windows(
    qkv: Tensor,  # [B, rows * columns, 3 * H * d]
    rows: int,
    columns: int,
    window: int,
    heads: int,
) -> Tensor:  # [B, rows * columns, H * d]
    """Computes attention in which the tokens of a square of ``window`` by ``window`` attend to each other.

    Each program computes one head of one square. Programs find the tokens of a square by their places, so no token
    is copied into squares or back.
    """
    batch, length, outputs = qkv.shape
    width = outputs // (3 * heads)
    out = torch.empty(batch, length, heads * width, dtype=qkv.dtype, device=qkv.device)
    squares = batch * (rows // window) * (columns // window)
    large, rest = _parts(window)
    # Neighbouring programs are heads of one square, which read the same cache lines.
    launch(_attend_windows)[(squares * heads,)](
        qkv,
        out,
        ROWS=rows,
        COLUMNS=columns,
        WINDOW=window,
        HEADS=heads,
        WIDTH=width,
        LARGE=large,
        REST=rest,
        QUERIES=min(large, _WINDOW_QUERIES),
        # The hardware computes exp2 and not exp, so log2(e) is multiplied into the scale.
        SCALE=width**-0.5 * 1.4426950408889634,
        num_warps=_WINDOW_WARPS,
    )
    return out


@triton.jit
def _attend_windows(
    qkv,
    out,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGE: tl.constexpr,
    REST: tl.constexpr,
    QUERIES: tl.constexpr,
    SCALE: tl.constexpr,
):
    square, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    across: tl.constexpr = COLUMNS // WINDOW
    squares: tl.constexpr = (ROWS // WINDOW) * across
    place = square % squares
    first = (square // squares).to(tl.int64) * (ROWS * COLUMNS)
    first += (place // across) * (WINDOW * COLUMNS) + (place % across) * WINDOW
    t, d = tl.arange(0, LARGE), tl.arange(0, WIDTH)
    at = _places(qkv, first, t, d, head, COLUMNS, WINDOW, 3 * HEADS * WIDTH, WIDTH)
    key, value = tl.load(at + HEADS * WIDTH), tl.load(at + 2 * HEADS * WIDTH)
    key2, value2 = key, value
    if REST > 0:
        r = LARGE + tl.arange(0, REST)
        at = _places(qkv, first, r, d, head, COLUMNS, WINDOW, 3 * HEADS * WIDTH, WIDTH)
        query = tl.load(at)
        key2, value2 = tl.load(at + HEADS * WIDTH), tl.load(at + 2 * HEADS * WIDTH)
        mixed = _attend_window(query, key, value, key2, value2, REST, SCALE)
        to = _places(out, first, r, d, head, COLUMNS, WINDOW, HEADS * WIDTH, WIDTH)
        tl.store(to, mixed.to(out.dtype.element_ty))
    for start in tl.static_range(0, LARGE, QUERIES):
        q = start + tl.arange(0, QUERIES)
        query = tl.load(_places(qkv, first, q, d, head, COLUMNS, WINDOW, 3 * HEADS * WIDTH, WIDTH))
        mixed = _attend_window(query, key, value, key2, value2, REST, SCALE)
        to = _places(out, first, q, d, head, COLUMNS, WINDOW, HEADS * WIDTH, WIDTH)
        tl.store(to, mixed.to(out.dtype.element_ty))


@triton.jit
def _places(tensor, first, token, d, head, COLUMNS: tl.constexpr, WINDOW: tl.constexpr, ROW, WIDTH: tl.constexpr):
    """Returns pointers [tokens, WIDTH] to a head's numbers of a window's tokens. A row of ``tensor`` has ROW
    numbers."""
    row = first + (token // WINDOW) * COLUMNS + token % WINDOW
    return tensor + row[:, None] * ROW + head * WIDTH + d[None, :]


@triton.jit
def _attend_window(query, key, value, key2, value2, REST: tl.constexpr, SCALE: tl.constexpr):
    """Computes attention with a softmax over one block of keys, or over two if REST > 0."""
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * SCALE
    top = tl.max(score, 1)
    if REST > 0:
        score2 = tl.dot(query, tl.trans(key2), input_precision="ieee") * SCALE
        top = tl.maximum(top, tl.max(score2, 1))
    p = tl.exp2(score - top[:, None])
    total = tl.sum(p, 1)
    mixed = tl.dot(p.to(value.dtype), value, input_precision="ieee")
    if REST > 0:
        p2 = tl.exp2(score2 - top[:, None])
        total += tl.sum(p2, 1)
        mixed = tl.dot(p2.to(value.dtype), value2, mixed, input_precision="ieee")
    return mixed / total[:, None]


_CHANNEL_CHUNK = 64  # tokens that a program of `_score_channels` reads at once
_CHANNEL_TILE = 128  # tokens that a program of `_mix_channels` writes
_CHANNEL_PROGRAMS = 1024  # number of programs that keep a device busy; the sum over tokens is split to reach it
_MOST_CHANNELS = 128  # greatest width whose scores fit in a program


def fits_channels(width: int) -> bool:
    """Returns whether there are kernels for groups of ``width`` channels. Tensor cores need a power of two, at
    least 16."""
    return 16 <= width <= _MOST_CHANNELS and width & (width - 1) == 0


@triton_op("snapcap::attend_channels", mutates_args=())
def attend_channels(
    qkv: Tensor,  # [B, S, 3 * groups * c]
    groups: int,
) -> Tensor:  # [B, S, groups * c]
    """Computes attention in which the channels of a group attend to each other, with sums and softmax in fp32.

    Each channel is a vector over all tokens.
    """
    batch, length, outputs = qkv.shape
    width = outputs // (3 * groups)
    chunks = triton.cdiv(length, _CHANNEL_CHUNK)
    each = triton.cdiv(chunks, max(1, _CHANNEL_PROGRAMS // (batch * groups)))
    parts = triton.cdiv(chunks, each)
    scores = torch.empty(batch, groups, parts, width, width, dtype=torch.float32, device=qkv.device)
    launch(_score_channels)[(groups, parts, batch)](
        qkv, scores, LENGTH=length, GROUPS=groups, WIDTH=width, CHUNKS=each, CHUNK=_CHANNEL_CHUNK, num_warps=4
    )
    # [B, groups, channel of a key, channel of a query]
    weights = (scores.sum(2) * length**-0.5).softmax(dim=-2).to(qkv.dtype)
    out = torch.empty(batch, length, groups * width, dtype=qkv.dtype, device=qkv.device)
    launch(_mix_channels)[(groups, triton.cdiv(length, _CHANNEL_TILE), batch)](
        qkv, weights, out, LENGTH=length, GROUPS=groups, WIDTH=width, TILE=_CHANNEL_TILE, num_warps=4
    )
    return out


@triton.jit
def _score_channels(
    qkv,
    scores,
    LENGTH: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    group, part, image = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = tl.arange(0, WIDTH)
    sums = tl.zeros([WIDTH, WIDTH], tl.float32)
    for chunk in range(CHUNKS):
        token = (part * CHUNKS + chunk) * CHUNK + tl.arange(0, CHUNK)
        there = (token < LENGTH)[:, None]
        place = (image.to(tl.int64) * LENGTH + token)[:, None]
        at = qkv + place * (3 * GROUPS * WIDTH) + group * WIDTH + c[None, :]
        query = tl.load(at, mask=there, other=0.0)
        key = tl.load(at + GROUPS * WIDTH, mask=there, other=0.0)
        sums = tl.dot(tl.trans(key), query, sums, input_precision="ieee")
    to = scores + ((image * GROUPS + group) * tl.num_programs(1) + part) * (WIDTH * WIDTH)
    tl.store(to + c[:, None] * WIDTH + c[None, :], sums)


@triton.jit
def _mix_channels(
    qkv,
    weights,
    out,
    LENGTH: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    group, image = tl.program_id(0), tl.program_id(2)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = (token < LENGTH)[:, None]
    place = (image.to(tl.int64) * LENGTH + token)[:, None]
    c = tl.arange(0, WIDTH)
    at = qkv + place * (3 * GROUPS * WIDTH) + (2 * GROUPS + group) * WIDTH + c[None, :]
    of_group = weights + (image * GROUPS + group) * (WIDTH * WIDTH)
    mixed = tl.dot(
        tl.load(at, mask=there, other=0.0),
        tl.load(of_group + c[:, None] * WIDTH + c[None, :]),
        input_precision="ieee",
    )
    to = out + place * (GROUPS * WIDTH) + group * WIDTH + c[None, :]
    tl.store(to, mixed.to(out.dtype.element_ty), mask=there)
