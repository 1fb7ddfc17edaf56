"""Hands out a checkpoint's tensors by name, checked and converted, and puts a region's weights in its order.

A region is a function whose parameters are its inputs, then ``/``, then its weights, then ``*`` and its settings.
So the order of a region's weights stands in its signature and nowhere else. A weight with a default may be
missing.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from snapcap.models.errors import WeightsError
from snapcap.models.names import Names, ties

RegionFunction = Callable[..., Tensor]
WeightSet = tuple[Tensor, ...]  # the weights of a region, in its order
NamedWeights = dict[str, Tensor]  # the weights of a region, by parameter


def weight_names(function: Callable[..., object]) -> dict[str, bool]:
    """Returns the names of a region's weights in their order, each with whether it must be given."""
    plain = function.func if isinstance(function, partial) else function
    names: dict[str, bool] | None = getattr(plain, "weight_names", None)
    if names is not None:
        return names
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(plain).parameters.values()
    return {each.name: each.default is inspect.Parameter.empty for each in parameters if each.kind is kind}


def takes_weights_of(other: Callable[..., object], *parts: str) -> Callable[[RegionFunction], RegionFunction]:
    """Declares that a region's ``*weights`` are those of another function: all of them once, or once for each of
    ``parts``, which then begin their names."""

    def declare(function: RegionFunction) -> RegionFunction:
        prefixes = [f"{part}_" for part in parts] or [""]
        names = {f"{prefix}{name}": must for prefix in prefixes for name, must in weight_names(other).items()}
        function.weight_names = names  # type: ignore[attr-defined]
        return function

    return declare


def takes(function: RegionFunction, count: int) -> bool:
    """Returns whether a region can take so many weights."""
    names = weight_names(function)
    return sum(names.values()) <= count <= len(names)


def in_order(function: RegionFunction, weights: NamedWeights) -> WeightSet:
    """Returns the weights of a region in the order in which it takes them.

    Raises:
        TypeError: a weight is missing, is unknown to the region, or follows an optional one that is missing.
    """
    names = weight_names(function)
    given = [name for name in names if name in weights]
    missing = [name for name, must in names.items() if must and name not in weights]
    if missing or weights.keys() - names.keys() or given != [*names][: len(given)]:
        raise TypeError(f"{[*weights]} are not the weights {[*names]} of {function}")
    return tuple(weights[name] for name in given)


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
        normalisation: tuple[float, tuple[float, ...], tuple[float, ...]],
    ) -> None:
        """Takes the tensors of a checkpoint.

        Args:
            theirs: the checkpoint's name of each tensor; ``names`` gives the names of missing ones for errors.
            dtype: of the tensors; int8 is that of linear layers' weights alone, and float32 that of all others.
            layout: the type of the device that will read the weights, which decides how they lie in memory.
            tied_head: the head may be the token embedding.
            normalisation: rescale, mean and std of pixels (``processing.transform.Normalisation``), which are
                weights of an encoder's first region.
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
        self.quantises = dtype == torch.int8
        self._device = device
        self._dtype = torch.float32 if self.quantises else dtype
        self._normalisation = normalisation

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

    def affine(self, ours: str, name: str, *weight_shape: int, bias: int | None = None) -> NamedWeights:
        """Returns ``name.weight`` and ``name.bias`` of a norm, or of a linear layer [out, in], as parameters
        ``ours_weight`` and ``ours_bias``."""
        width = weight_shape[0] if bias is None else bias
        return {
            f"{ours}_weight": self(f"{name}.weight", *weight_shape),
            f"{ours}_bias": self(f"{name}.bias", width),
        }

    def turned(self, placed: Tensor) -> Tensor:
        """Returns the weight [out, in] of a layer that many rows go through at once, such as an encoder's.

        For a CPU in fp32 its memory is that of [in, out], so a product reads it in order, without transposing it.
        """
        if self.layout != "cpu" or placed.dtype != torch.float32:
            return placed
        return placed.t().contiguous().t()

    def wide(self, ours: str, name: str, outputs: int, inputs: int) -> NamedWeights:
        """Returns ``affine``, with the weight laid out by ``turned``."""
        layer = self.affine(ours, name, outputs, inputs)
        return {**layer, f"{ours}_weight": self.turned(layer[f"{ours}_weight"])}

    def stacked(self, names: list[str], *shape: int) -> Tensor:
        """Returns the tensors of these names, concatenated along the first dimension."""
        return self.place(torch.cat([self.raw(name, *shape) for name in names]))

    def statistics(self) -> NamedWeights:
        """Returns rescale, mean and std of pixels, in fp32."""
        rescale, mean, std = self._normalisation
        values = {"rescale": [rescale], "mean": mean, "std": std}
        return {name: self.place(torch.tensor(each), torch.float32) for name, each in values.items()}

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
