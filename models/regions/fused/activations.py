"""Names the activations that the kernels have."""

from snapcap.models.regions.layers.activations import Activation, activation


def kernel_activation(act: Activation) -> str | None:
    """Returns the name of an activation in `regions.kernels.launch`, or None if the kernels lack it."""
    known = {activation("gelu"): "gelu", activation("gelu_new"): "gelu_tanh", activation("relu"): "relu"}
    return known.get(act)
