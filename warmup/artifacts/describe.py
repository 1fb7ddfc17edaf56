"""Describes in one line the model family and shapes that a key or a manifest is for, from its factors alone."""

from typing import Any

from snapcap.warmup.artifacts.key import Factors


def describe_model(factors: Factors) -> str:
    """One line: ``blip: blip 384×384, 12 layers of 768 → blip, 12 layers of 768, 30524 tokens; float32``.

    A factor that is not there, as in a manifest of another version, is a question mark.
    """

    def of(name: str) -> Any:
        return factors.get(f"model.{name}", "?")

    def layers(part: str) -> str:
        return f"{of(f'{part}.num_layers')} layers of {of(f'{part}.hidden_size')}"

    image = of("vision.image_size")
    size = "×".join(str(side) for side in image) if isinstance(image, list) else str(image)
    return (
        f"{of('family')}: {of('vision.family')} {size}, {layers('vision')} → "
        f"{of('decoder.family')}, {layers('decoder')}, {of('decoder.vocab_size')} tokens; {of('dtype')}"
    )
