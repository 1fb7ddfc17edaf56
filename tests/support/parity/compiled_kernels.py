"""Compiles the kernels of decode steps, and attention of encoders, for GPUs, without one; prints their names.

Triton's interpreter does not check types. The fused blocks run on empty tensors of real widths, with launches that
only note the kernel and its arguments.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from snapcap.models.kernels import attention, head, linear
from snapcap.models.layers import bart, bert, git, gpt2, llama, vit
from snapcap.models.layers.fused import compiled_function
from snapcap.models.layers.linear import activation
from snapcap.models.layers.weights import weight_names

LARGE, SMALL = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 86, 32)
SMALL_BYTES = 99 << 10  # shared memory of a program on compute capability 8.6, 8.9 and 12.0
TYPES = {torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}
# Constants that decide which lines of a kernel there are, and whether two loops take steps of one length.
DECIDING = ("NORM", "GATED", "PARTS", "ROTATED", "CHUNK", "PREFIX_CHUNK", "BM", "LATE", "KEYS", "TEXT")
OPTIONS = ("num_warps", "num_stages")
WIDTH, HEADS, HEAD_DIM, LENGTH, VOCABULARY = 768, 12, 64, 160, 1000
# A step's rows by the path through a product: whole rows, and small and large tiles for tensor cores.
ROWS = (1, 4, 256)
FEW_TOKENS, MANY_TOKENS = 65, 577  # tokens of an image: less and more than attention holds at once


class Launch(NamedTuple):
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: list[int]
    options: dict[str, int]

    def compiled(self, target: GPUTarget) -> Any:
        """Returns the compiled kernel. Before 9.0 no kernel begins before the one in front has ended."""
        constants = self.constants | ({"AHEAD": target is LARGE} if "AHEAD" in self.constants else {})
        places = {(self.kernel.arg_names.index(name),): value for name, value in constants.items()}
        attributes = {(place,): [["tt.divisibility", 16]] for place in self.aligned}
        source = ASTSource(fn=self.kernel, signature=self.signature, constexprs=places, attrs=attributes)
        return triton.compile(source, target=target, options=self.options)


class Launches:
    """Stands in for `kernels.launch.launch`: notes each kernel with its signature and constants."""

    def __init__(self) -> None:
        self.noted: dict[str, Launch] = {}

    def __call__(self, kernel: Any) -> "Launches":
        self._kernel = kernel
        return self

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return partial(self._note, self._kernel)

    def _note(self, kernel: Any, *arguments: Any, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        aligned = []  # Triton's launcher finds torch's pointers, and multiples of 16
        for place, name in enumerate(kernel.arg_names):
            value = given[name]
            if isinstance(value, Tensor):
                signature[name] = TYPES[value.dtype]
            elif name.isupper() or value == 1:  # Triton takes 1 for a constant
                signature[name], constants[name] = "constexpr", value
            else:
                signature[name] = "i32"
            if isinstance(value, Tensor) or (signature[name] == "i32" and value % 16 == 0):
                aligned.append(place)
        kinds = [given.get(name) for name in DECIDING]
        self.noted[f"{kernel.fn.__module__} {kernel.__name__} {kinds}"] = Launch(
            kernel, signature, constants, aligned, options
        )


def blocks(rows: int, tokens: int) -> Iterator[tuple[Any, list[Tensor]]]:
    """Yields the blocks and heads of a step with their inputs, in 16 bits."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float16)

    def caches(heads: int) -> list[Tensor]:
        shapes = [(rows, heads, length, HEAD_DIM) for length in (LENGTH, tokens)]
        return [each for shape in shapes for each in (empty(*shape).mT, empty(*shape))]

    def own(block: Any, **shapes: tuple[int, ...]) -> list[Tensor]:
        given = {
            name: shapes.get(name.removesuffix("_weight").removesuffix("_bias"), (WIDTH,))
            for name in weight_names(block)
        }
        return [empty(*shape) if name.endswith("_weight") else empty(shape[-1]) for name, shape in given.items()]

    positions, hidden = torch.zeros(rows, dtype=torch.int64), empty(rows, WIDTH)
    square, inner = (WIDTH, WIDTH), 4 * WIDTH
    outwards = {"out": square, "cross_q": square, "cross_out": square}
    common: dict[str, Any] = {"eps": 1e-5, "scale": 0.125}
    block = partial(gpt2.block, act=activation("gelu_new"), **common)
    stored_in_out = {"qkv": (WIDTH, 3 * WIDTH), "fc1": (WIDTH, inner), "fc2": (inner, WIDTH)}
    yield block, [hidden, positions, *caches(HEADS), *own(gpt2.block, **outwards, **stored_in_out)]
    gelu: dict[str, Any] = {"num_heads": HEADS, "act": activation("gelu"), **common}
    stored_out_in = {"qkv": (3 * WIDTH, WIDTH), "fc1": (inner, WIDTH), "fc2": (WIDTH, inner)}
    of_bert = own(bert.block, **outwards, **stored_out_in)
    yield partial(bert.block, **gelu), [hidden, positions, *caches(HEADS), *of_bert]
    text = torch.zeros(rows, 5, dtype=torch.int64)
    yield partial(bart.decoder_block, **gelu), [hidden, positions, text, *caches(HEADS), *of_bert]
    of_git = own(git.block, **outwards, **stored_out_in)
    yield partial(git.block, **gelu), [hidden, positions, *caches(HEADS), *of_git]
    of_llama = [
        *(empty(WIDTH), empty(WIDTH + 8 * HEAD_DIM, WIDTH), torch.empty(HEAD_DIM // 2)),
        *(empty(*square), empty(WIDTH), empty(2 * inner, WIDTH), empty(WIDTH, inner)),
    ]
    yield partial(llama.block, act=activation("silu"), **common), [hidden, positions, *caches(4), *of_llama]
    chosen = [torch.zeros(rows, dtype=torch.int64), positions, torch.zeros(rows, LENGTH, dtype=torch.int64)]
    vocabulary = empty(VOCABULARY, WIDTH)
    yield partial(gpt2.head, eps=1e-5), [hidden, *chosen, empty(WIDTH), empty(WIDTH), vocabulary]
    yield partial(bert.head, eps=1e-5, act=None), [hidden, *chosen, vocabulary, empty(VOCABULARY)]
    # The encoder's activation is no epilogue of a product here: a CPU has none in 16 bits.
    encoder: dict[str, Any] = {"num_heads": HEADS, "eps": 1e-5, "act": activation("quick_gelu")}
    image = empty(1, tokens, WIDTH)
    norm, qkv, out = [empty(WIDTH)] * 2, [empty(3 * WIDTH, WIDTH), empty(3 * WIDTH)], [empty(*square), empty(WIDTH)]
    mlp = [empty(inner, WIDTH), empty(inner), empty(WIDTH, inner), empty(WIDTH)]
    yield partial(vit.block, **encoder), [image, *norm, *qkv, *out, *norm, *mlp]
    slots, texts = torch.zeros(1, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.int64)
    yield partial(bart.block, **encoder), [image, slots, texts, *qkv, *out, *norm, *mlp, *norm]


def main() -> None:
    launches = Launches()
    with (
        mock.patch.object(attention, "launch", launches),
        mock.patch.object(linear, "launch", launches),
        mock.patch.object(head, "launch", launches),
        mock.patch.object(attention, "ahead", return_value=True),
        mock.patch.object(linear, "ahead", return_value=True),
        mock.patch.object(head, "ahead", return_value=True),
    ):
        for rows in ROWS:
            for block, inputs in blocks(rows, FEW_TOKENS if rows == 1 else MANY_TOKENS):
                compiled_function(block, torch.device("cuda"), torch.float16)(*inputs)
    names: list[str] = []
    for launch in launches.noted.values():
        name = launch.kernel.__name__
        waits = launch.compiled(LARGE).asm["ptx"].count("griddepcontrol.wait")
        assert waits == name.endswith("_ahead"), name
        names.append(name)
        if launch.constants.get("BM", 0) > 16 or "KEYS" in launch.constants:  # the largest tiles
            shared = launch.compiled(SMALL).metadata.shared
            assert shared <= SMALL_BYTES, f"{name} {launch.constants} takes {shared} bytes of shared memory"
    print(json.dumps(names))


if __name__ == "__main__":
    main()
