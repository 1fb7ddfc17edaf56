"""Hands out a checkpoint's tensors by name, checked and converted, and remembers which are left over."""

from collections.abc import Mapping

import torch
from torch import Tensor

from snapcap.models.names import Names, ties
from snapcap.models.weights.listing import WeightsError

WeightSet = tuple[Tensor, ...]


class WeightSource:
    """Tensors by snapcap's names, in the dtype of the file, which are handed out in the layout of regions.

    Errors have the checkpoint's names. On CUDA the tensors are on the device from the start, so cutting, joining
    and transposing happen there.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        theirs: Mapping[str, str],
        names: Names,
        device: torch.device,
        dtype: torch.dtype,
        layout: str,
        *,
        tied_head: bool,
    ) -> None:
        """Takes the tensors of a checkpoint.

        Args:
            theirs: the checkpoint's name of each tensor; ``names`` gives the names of missing ones for errors.
            layout: the type of the device that will read the weights, which decides how they lie in memory.
            tied_head: the head may be the token embedding.
        """
        self.layout = layout
        self._names = names
        self._theirs = dict(theirs)
        self._tensors = dict(tensors)
        for first, *others in ties(tied_head):
            stored = next((name for name in others if name in self._tensors), None)
            if first not in self._tensors and stored is not None:
                self._tensors[first] = self._tensors.pop(stored)
                self._theirs[first] = self._theirs.pop(stored)
        self._device = device
        self._dtype = dtype

    def has(self, name: str) -> bool:
        """Returns whether the checkpoint has the tensor, handed out or not."""
        return name in self._theirs

    def raw(self, name: str, *shape: int) -> Tensor:
        """Returns the tensor as the file has it. Returns it only once, so its memory can be freed after use.

        Raises:
            WeightsError: the tensor is missing, is not of floating-point numbers, or has another shape.
        """
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise WeightsError(
                f"the checkpoint has no tensor {self._original(name)!r}; is it what its config.json says?"
            )
        if tuple(tensor.shape) != shape:
            raise WeightsError(
                f"tensor {self._theirs[name]!r} has shape {tuple(tensor.shape)}, config.json implies {shape}"
            )
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise WeightsError(
                f"tensor {self._theirs[name]!r} is {kind}; quantized weights are not read, only floating-point ones"
            )
        return tensor

    def place(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the tensor on the device, contiguous. On CUDA it begins its own allocation, because compiled
        kernels read 16 bytes at a time."""
        placed = tensor.to(device=self._device, dtype=dtype or self._dtype).contiguous()
        return placed.clone() if placed.is_cuda and placed.storage_offset() else placed

    def __call__(self, name: str, *shape: int) -> Tensor:
        return self.place(self.raw(name, *shape))

    def affine(self, name: str, *weight_shape: int, bias: int | None = None) -> WeightSet:
        """Returns ``name.weight`` and ``name.bias`` of a norm, or of a linear layer [out, in]."""
        width = weight_shape[0] if bias is None else bias
        return self(f"{name}.weight", *weight_shape), self(f"{name}.bias", width)

    def turned(self, placed: Tensor) -> Tensor:
        """Returns the weight [out, in] of a layer that many rows go through at once, such as an encoder's.

        For a CPU in fp32 its memory is that of [in, out], so a product reads it in order, without transposing it.
        """
        if self.layout != "cpu" or placed.dtype != torch.float32:
            return placed
        return placed.t().contiguous().t()

    def wide(self, name: str, outputs: int, inputs: int) -> WeightSet:
        """Returns ``affine``, with the weight laid out by ``turned``."""
        weight, bias = self.affine(name, outputs, inputs)
        return self.turned(weight), bias

    def stacked(self, names: list[str], *shape: int) -> Tensor:
        """Returns the tensors of these names, concatenated along the first dimension."""
        return self.place(torch.cat([self.raw(name, *shape) for name in names]))

    def head(self, name: str, placed_token: Tensor, tied: bool) -> Tensor:
        """Returns the head's weight, which is the token embedding itself if the two are tied.

        A tied checkpoint may hold the head as well. Like in transformers, an equal head is the embedding, and a
        different one is a head of its own, whatever the configuration says.

        Raises:
            WeightsError: the head is not tied and missing.
        """
        if tied:
            return self.copy(name, placed_token)
        if not self.has(name):
            raise WeightsError(f"the checkpoint has no {self._original(name)}, and tie_word_embeddings is false")
        return self(name, *placed_token.shape)

    def copy(self, name: str, placed: Tensor) -> Tensor:
        """Returns ``placed``, to which the tensor ``name`` is tied, or the checkpoint's own tensor if it has one
        that differs."""
        if not self.has(name):
            return placed
        own = self(name, *placed.shape)
        # Meta tensors count as equal: an import that knows only shapes has no values to compare.
        same = own.is_meta or own.data_ptr() == placed.data_ptr() or torch.equal(own, placed)
        return placed if same else own

    def finish(self) -> None:
        """Checks that every tensor was handed out.

        Raises:
            WeightsError: a tensor was never asked for.
        """
        if self._tensors:
            names = ", ".join(sorted(self._theirs[name] for name in self._tensors)[:5])
            raise WeightsError(f"the checkpoint holds {len(self._tensors)} tensors that no region uses: {names}")

    def _original(self, name: str) -> str:
        return self._names.original(name, self._theirs.values())
