"""Makes the weights of regions over a mapped file, or uploads them as they are."""

import torch
from torch import Tensor

from snapcap.models.weights.prepared.mapped import MappedWeights
from snapcap.models.weights.sets import Weights
from snapcap.models.weights.upload import upload

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def prepared_weights(mapped: MappedWeights, device: torch.device) -> Weights[Tensor]:
    """Returns the weights of a file. For a CPU they are the file's own pages.

    On CUDA they share one allocation, in which each begins at a multiple of 256 bytes.
    """
    memory = torch.frombuffer(mapped.memory, dtype=torch.uint8, offset=mapped.begin)
    placed = upload({"all": memory}, device)["all"]
    tensors = {
        name: placed[tensor.offset : tensor.offset + tensor.nbytes]
        .view(DTYPES[tensor.dtype])
        .as_strided(tensor.shape, tensor.strides)
        for name, tensor in mapped.header.tensors.items()
    }
    return Weights.of_names(mapped.header.regions, tensors)
