"""Compares every fused region with the plain one, in Triton's interpreter; prints {case: differences} as JSON.

Run with TRITON_INTERPRET=1 before anything imports Triton, hence as a process of its own. Kernels do the same
arithmetic for every dtype, so fp32 shows their logic without rounding.
"""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from snapcap.models.layers import bart, bert, choice, cross_kv, davit, git, gpt2, llama, vit
from snapcap.models.layers.choice import reorder
from snapcap.models.layers.fused import compiled_function
from snapcap.models.layers.linear import activation
from snapcap.models.layers.weights import RegionFunction
from snapcap.warmup.build.check_worker import example_groups

# The interpreter takes a millisecond for a program, and a product has a program for each few of its outputs.
WIDTH, HEADS, HEAD_DIM, INNER, LENGTH, TOKENS, VOCABULARY, LAYERS = 32, 2, 16, 48, 150, 33, 150, 2
# Batch, grid, window, width, heads, groups: windows of a power of two, of two, of neither, over the edge; channels
# that are no power of two.
DAVIT_CASES = (
    (2, (8, 12), 4, 64, 2, 4),
    (1, (12, 24), 12, 32, 2, 2),
    (1, (9, 6), 3, 48, 3, 2),
    (2, (7, 10), 4, 64, 2, 2),
    (1, (8, 8), 4, 48, 3, 3),
)
# Batch, image, width, kernel, stride.
PIXELS_CASES = ((2, (21, 30), 48, 7, 4), (1, (16, 16), 32, 3, 2))
# Batch, tokens, heads, width of a head: fewer tokens than a program holds, and more.
BART_CASES = ((3, 21, 2, 16), (2, 150, 3, 32), (1, 33, 2, 24))
# The same of ViT's blocks: blocks of keys with and without a rest, in both sizes, and a width without a kernel.
VIT_CASES = ((2, 21, 2, 16), (1, 128, 1, 32), (1, 150, 3, 32), (2, 300, 2, 16), (1, 70, 1, 128), (1, 33, 2, 24))
LARGE_TOKENS = 577  # tokens of a ViT-B/16 at 384 pixels: more than cross-attention holds at once
# Rows and inputs of a product, and whether it is gated: small and large tiles, one and several of them, with and
# without inputs that are divided among programs.
LINEAR_CASES = ((5, 1100, False), (65, 2100, False), (129, 70, False), (33, 70, True))
# More rows than the kernels' first choices: attention to a prefix, to many tokens, and tiles of heads. All other
# parts of a block have a program for each row, or are products.
CROWDS = (
    (17, "llama_block"),
    (17, "florence2_block_many_tokens"),
    (33, "gpt2_head"),
    (300, "gpt2_head"),
    (33, "llama_head"),
    (33, "bert_head_plain"),
    (33, "bert_head"),
)
# Not for two rows, which differ from one in the product alone.
ODD_ROWS_ONLY = (
    "gpt2_block_relu",
    "bert_block_blip_base",
    "florence2_block_many_tokens",
    "git_block_many_tokens",
    "llama_block_many_tokens",
)
EPS = 1e-5


def fused(function: RegionFunction) -> RegionFunction:
    other = compiled_function(function, torch.device("cuda"), torch.float16)
    assert other is not function
    return other


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*shape) * 0.05 for shape in shapes]


def difference(function: RegionFunction, inputs: list[Tensor]) -> float:
    """The largest difference between both, in the result and in everything they write."""
    ours, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    pairs = [(fused(function)(*ours), function(*theirs)), *zip(ours, theirs, strict=True)]
    worst = 0.0
    for a, b in pairs:
        worst = max(worst, float((a.double() - b.double()).abs().max()))
    return worst


def step_cases(rows: int) -> Iterator[tuple[str, Any, list[Tensor]]]:
    positions = torch.randint(0, LENGTH, (rows,))
    positions[0] = 0
    positions[-1] = LENGTH - 1
    caches = [
        torch.randn(rows, HEADS, LENGTH, HEAD_DIM).mT,
        torch.randn(rows, HEADS, LENGTH, HEAD_DIM),
        torch.randn(rows, HEADS, TOKENS, HEAD_DIM).mT,
        torch.randn(rows, HEADS, TOKENS, HEAD_DIM),
    ]
    hidden, square, norm = torch.randn(rows, WIDTH), (WIDTH, WIDTH), ((WIDTH,), (WIDTH,))
    common = {"eps": EPS, "scale": HEAD_DIM**-0.5}
    attention = [square, (WIDTH,), *norm, square, (WIDTH,), square, (WIDTH,)]  # from its end to the cross one's
    gpt2_shapes = [*norm, (WIDTH, 3 * WIDTH), (3 * WIDTH,), *attention]
    gpt2_shapes += [*norm, (WIDTH, INNER), (INNER,), (INNER, WIDTH), (WIDTH,)]
    bert_shapes = [(3 * WIDTH, WIDTH), (3 * WIDTH,), *attention, *norm]
    bert_shapes += [(INNER, WIDTH), (INNER,), (WIDTH, INNER), (WIDTH,), *norm]
    for name in ("gelu_new", "relu"):
        block = partial(gpt2.block, act=activation(name), **common)
        yield f"gpt2_block_{name}", block, [hidden, positions, *caches, *weights(*gpt2_shapes)]
    block = partial(bert.block, num_heads=HEADS, act=activation("gelu"), **common)
    yield "bert_block", block, [hidden, positions, *caches, *weights(*bert_shapes)]
    large = [torch.randn(rows, HEADS, LARGE_TOKENS, HEAD_DIM).mT, torch.randn(rows, HEADS, LARGE_TOKENS, HEAD_DIM)]
    inputs = [hidden, positions, *caches[:2], *large, *weights(*bert_shapes)]
    yield "bert_block_blip_base", block, inputs
    text = torch.where(torch.arange(5) < torch.arange(rows).unsqueeze(1) % 6, 7, -1)  # each of another length
    florence2 = partial(bart.decoder_block, num_heads=HEADS, act=activation("gelu"), **common)
    yield "florence2_block", florence2, [hidden, positions, text, *caches, *inputs[6:]]
    yield "florence2_block_many_tokens", florence2, [hidden, positions, text, *inputs[2:]]
    git_shapes = [(3 * WIDTH, WIDTH), (3 * WIDTH,), square, (WIDTH,), *norm]
    git_shapes += [(INNER, WIDTH), (INNER,), (WIDTH, INNER), (WIDTH,), *norm]
    block = partial(git.block, num_heads=HEADS, act=activation("gelu"), **common)
    yield "git_block", block, [hidden, positions, *caches, *weights(*git_shapes)]
    yield "git_block_many_tokens", block, [hidden, positions, *caches[:2], *large, *weights(*git_shapes)]

    # Three heads of queries share a head of keys and values, and are wider together than the hidden states.
    llama_shapes = [(WIDTH,), (5 * WIDTH, WIDTH), (HEAD_DIM // 2,), (WIDTH, 3 * WIDTH)]
    llama_shapes += [(WIDTH,), (2 * INNER, WIDTH), (WIDTH, INNER)]
    own = weights(*llama_shapes)
    own[2] = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    block = partial(llama.block, act=activation("silu"), **common)
    yield "llama_block", block, [hidden, positions, *caches, *own]
    yield "llama_block_many_tokens", block, [hidden, positions, *caches[:2], *large, *own]

    forced = torch.full((rows, LENGTH), -1)
    forced[0, 1] = 7
    tokens = [torch.zeros(rows, dtype=torch.int64), positions, forced]
    head = weights((VOCABULARY, WIDTH))[0]
    head[140] = head[100]  # equal logits: the first is taken
    yield "gpt2_head", partial(gpt2.head, eps=EPS), [hidden, *tokens, *weights(*norm), head]
    yield "llama_head", partial(llama.head, eps=EPS), [hidden, *tokens, *weights((WIDTH,)), head]
    plain = partial(bert.head, eps=EPS, act=None)
    yield "bert_head_plain", plain, [hidden, *tokens, head, *weights((VOCABULARY,))]
    transform = weights(square, (WIDTH,), *norm)
    full = partial(bert.head, eps=EPS, act=activation("gelu"))
    yield "bert_head", full, [hidden, *tokens, head, *weights((VOCABULARY,)), *transform]


def linear_case(rows: int, inputs: int, gated: bool) -> float:
    """Compares a linear layer with everything that may follow its product."""
    from snapcap.models.kernels.linear import linear

    outputs = 40
    x, residual = torch.randn(rows, inputs), torch.randn(rows, outputs)
    if gated:
        (weight,) = weights((inputs, 2 * outputs))
        ours = linear(x, weight, None, None, None, residual, EPS, "silu", gated=True)
        gate, value = (x @ weight).chunk(2, dim=1)
        return float((ours - (F.silu(gate) * value + residual)).abs().max())
    weight, bias = weights((inputs, outputs), (outputs,))
    ours = linear(x, weight, bias, None, None, residual, EPS, "relu")
    return float((ours - (torch.relu(x @ weight + bias) + residual)).abs().max())


def cross_kv_case(batch: int) -> tuple[Any, list[Tensor]]:
    keys = torch.zeros(LAYERS, batch + 2, HEADS, TOKENS, HEAD_DIM).mT
    values = torch.zeros(LAYERS, batch + 2, HEADS, TOKENS, HEAD_DIM)
    slots = torch.arange(batch).flip(0) + 1
    own = weights((LAYERS * 2 * WIDTH, WIDTH), (LAYERS * 2 * WIDTH,), (WIDTH,), (WIDTH,))
    return partial(cross_kv.cross_kv, eps=EPS), [torch.randn(batch, TOKENS, WIDTH), slots, keys, values, *own]


def prefix_end_case(batch: int) -> tuple[Any, list[Tensor]]:
    _, (hidden, slots, keys, values, *_) = cross_kv_case(batch)
    return git.prefix_end, [hidden, slots, keys[1:], values[1:], *weights((3 * WIDTH, WIDTH), (3 * WIDTH,))]


def davit_case(
    batch: int, grid: tuple[int, int], window: int, width: int, heads: int, groups: int
) -> tuple[Any, list[Tensor]]:
    square, norm = (width, width), ((width,), (width,))
    before = [(3, 3, width), (width,), *norm]
    half = [*before, (3 * width, width), (3 * width,), square, (width,)]
    half += [*before, (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    block = partial(
        davit.block, grid=grid, window=window, num_heads=heads, groups=groups, eps=EPS, act=activation("relu")
    )
    return block, [torch.randn(batch, grid[0] * grid[1], width), *weights(*half, *half)]


def pixels_case(
    batch: int, size: tuple[int, int], width: int, kernel: int, stride: int
) -> tuple[Any, list[Tensor]]:
    padding = kernel // 2
    embed = partial(davit.embed_pixels, kernel=kernel, stride=stride, padding=padding, norm_first=False, eps=EPS)
    pixels = torch.randint(0, 256, (batch, *size, 3), dtype=torch.uint8)
    numbers = [torch.tensor([1 / 255]), torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])]
    inputs = kernel * kernel * 3
    shapes = (width, inputs + -inputs % 8), (width,), (width,), (width,)
    return embed, [pixels, *numbers, *weights(*shapes)]


def bart_case(batch: int, tokens: int, heads: int, width: int) -> tuple[Any, list[Tensor]]:
    """Texts of several lengths, none and all of it among them."""
    hidden = heads * width
    square, norm = ((hidden, hidden), (hidden,)), ((hidden,), (hidden,))
    shapes = (3 * hidden, hidden), (3 * hidden,), *square, *norm, (INNER, hidden), (INNER,), (hidden, INNER)
    block = partial(bart.block, num_heads=heads, eps=EPS, act=activation("relu"))
    slots = torch.arange(batch).flip(0)
    texts = torch.where(torch.arange(5) < torch.arange(batch + 1).unsqueeze(1) * 5 % 6, 7, -1)
    return block, [torch.randn(batch, tokens, hidden), slots, texts, *weights(*shapes, (hidden,), *norm)]


def vit_case(batch: int, tokens: int, heads: int, width: int) -> tuple[Any, list[Tensor]]:
    hidden = heads * width
    square, norm = ((hidden, hidden), (hidden,)), ((hidden,), (hidden,))
    shapes = *norm, (3 * hidden, hidden), (3 * hidden,), *square, *norm, (INNER, hidden), (INNER,)
    block = partial(vit.block, num_heads=heads, eps=EPS, act=activation("relu"))
    return block, [torch.randn(batch, tokens, hidden), *weights(*shapes, (hidden, INNER), (hidden,))]


def beams_case(rows: int, most: int, vocabulary: int, normalised: bool) -> float:
    """Groups of ``most`` rows but for the last one, each at a position of its own."""
    generator = torch.Generator().manual_seed(rows + vocabulary)
    slots = rows + 2
    groups = example_groups(rows, most, generator)
    members, inside, ranks = groups["members"], groups["inside"], groups["ranks"]
    leaders = members[:, 0]
    forced = torch.full((rows, LENGTH), -1)
    greedy = torch.zeros(rows, dtype=torch.bool)
    if rows > 2 * most:
        forced[leaders == leaders[0]] = 7  # a prompt goes on
        greedy = (leaders != leaders[0]) & (inside.sum(dim=1) < most)
        inside[greedy] = False
    ends = torch.zeros(vocabulary, dtype=torch.bool)
    ends[torch.randint(0, vocabulary, (most,), generator=generator)] = True
    scores, finished = torch.randn(rows, generator=generator), torch.randn(rows, generator=generator) - 8
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    logits[:, 1::3] = float("-inf")
    inputs = [
        logits,
        torch.tensor([normalised]),
        torch.randint(0, vocabulary, (rows,), generator=generator),
        torch.randint(1, LENGTH, (rows,), generator=generator)[leaders],
        forced,
        ends,
        torch.randn(LAYERS, slots, HEADS, LENGTH, HEAD_DIM).mT,
        torch.randn(LAYERS, slots, HEADS, LENGTH, HEAD_DIM),
        members,
        inside,
        ranks,
        torch.randint(1, 2 * LENGTH, (rows,), generator=generator)[leaders],
        torch.rand(rows, 2, LENGTH, generator=generator) + 0.5,
        torch.full((rows,), float("inf")),
        scores,
        finished,
        torch.randint(0, vocabulary, (2, slots, LENGTH + 1), generator=generator),
        torch.zeros(rows, LENGTH + 1, dtype=torch.int64),
    ]
    ours, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    select: RegionFunction = choice.select
    parents = select(*theirs)
    reorder(theirs[6], theirs[7], parents, theirs[3])
    moved = fused(select)(*ours)
    for *_, sequences, outcomes in (ours, theirs):  # a greedy row has no hypothesis, and nobody reads any
        sequences[1, :rows][greedy] = 0
        outcomes[:, :-1][greedy] = 0
    pairs = [(moved, parents), *zip(ours, theirs, strict=True)]
    return max(float((a.double() - b.double())[a != b].abs().max()) if (a != b).any() else 0.0 for a, b in pairs)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found = {
        f"{name}_b{rows}": difference(function, tensors)
        for rows in (1, 2, 3)
        for name, function, tensors in step_cases(rows)
        if rows % 2 or name not in ODD_ROWS_ONLY
    }
    for rows, count, gated in LINEAR_CASES:
        found[f"linear_b{rows}_of_{count}"] = linear_case(rows, count, gated)
    for rows, wanted in CROWDS:
        function, inputs = next((case, inputs) for name, case, inputs in step_cases(rows) if name == wanted)
        found[f"{wanted}_b{rows}"] = difference(function, inputs)
    for batch in (1, 5):
        function, inputs = cross_kv_case(batch)
        found[f"cross_kv_b{batch}"] = difference(function, inputs)
        function, inputs = prefix_end_case(batch)
        found[f"prefix_end_b{batch}"] = difference(function, inputs)
    for case in DAVIT_CASES:
        found[f"davit_{case}"] = difference(*davit_case(*case))
    for case in PIXELS_CASES:
        found[f"pixels_{case}"] = difference(*pixels_case(*case))
    for case in BART_CASES:
        found[f"bart_{case}"] = difference(*bart_case(*case))
    for case in VIT_CASES:
        found[f"vit_{case}"] = difference(*vit_case(*case))
    for rows, most, vocabulary in ((1, 1, 50), (2, 2, 3000), (3, 8, 50), (4, 4, 9), (5, 5, 397)):
        for normalised in (False, True):
            found[f"beams_b{rows}_{normalised}"] = beams_case(rows, most, vocabulary, normalised)
    found["beams_b20_False"] = beams_case(20, 8, 2100, normalised=False)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
