"""Chooses the function to compile for a region: the plain one, or on CUDA in 16 bits one of fewer kernels.

Each function of `fused.decoders` and `fused.encoders` has the parameters and the result of a plain function in
`regions.gpt2`, `bert`, `florence2`, `prefix.git` or `vit`, and a build compares the two. Llama's layers have no
such function: Inductor compiles the plain ones. Eager serving, the CPU and fp32 use the plain functions, with one
exception: beam search on CUDA has kernels in fp32 too.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from snapcap.models.regions import bert, gpt2, vit
from snapcap.models.regions.choice import beam_search
from snapcap.models.regions.florence2 import bart, davit
from snapcap.models.regions.functions import RegionFunction
from snapcap.models.regions.fused import decoders, encoders
from snapcap.models.regions.fused.activations import kernel_activation
from snapcap.models.regions.prefix import git
from snapcap.models.regions.state import cross_kv
from snapcap.models.regions.table import Region

DTYPES = (torch.bfloat16, torch.float16)


def compiled_function(region: Region, device: torch.device, dtype: torch.dtype) -> RegionFunction:
    """Returns the function to compile for a region: its own, or one of fewer and larger kernels if there is one."""
    function = region.function
    if device.type == "cuda" and function is beam_search.select:
        return decoders.select  # for any dtype, because scores are fp32
    if device.type != "cuda" or dtype not in DTYPES:
        return function
    plain = function.func if isinstance(function, partial) else function
    keywords: Mapping[str, Any] = function.keywords if isinstance(function, partial) else {}
    act = keywords.get("act")
    if plain in _ACTIVATED and act is not None:
        # Large products and attention stay with the vendor's libraries, which are faster at them than Triton.
        return partial(plain, **keywords, activated=encoders.activated(act))
    other = _FUSED.get(plain)
    if other is None or (act is not None and kernel_activation(act) is None):
        return function
    return partial(other, **keywords)


_FUSED: Mapping[Callable[..., Tensor], Callable[..., Tensor]] = {
    gpt2.block: decoders.gpt2_block,
    gpt2.head: decoders.gpt2_head,
    cross_kv.cross_kv: encoders.cross_kv,
    bert.block: decoders.bert_block,
    bart.block: encoders.bart_block,
    bart.decoder_block: decoders.florence2_block,
    git.block: decoders.git_block,
    git.prefix_end: encoders.git_prefix_end,
    bert.head: decoders.bert_head,
    davit.block: encoders.davit_block,
    davit.embed_pixels: encoders.davit_pixels,
}
# Plain functions that take the function of their MLP's first layer as a parameter.
_ACTIVATED = (git.prefix_block, vit.block)
