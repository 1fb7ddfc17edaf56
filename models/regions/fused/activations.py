"""Names the activations that the kernels have."""

from snapcap.models.regions.layers.activations import Activation, activation


def kernel_activation(act: Activation) -> str | None:
    """An activation's name in `regions.kernels.launch`, if it has one."""
    known = {activation("gelu"): "gelu", activation("gelu_new"): "gelu_tanh", activation("relu"): "relu"}
    return known.get(act)
