"""Names prepared weights by all that decides what is in them. No torch.

Nothing of it enters the artifact key: checkpoints of the same shapes share one set of packages.
"""

import errno
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.warmup.artifacts.key import FORMAT, Factors, canonical_json, source_digest
from snapcap.warmup.artifacts.store import MODELS
from snapcap.warmup.checkpoints.source import is_at_hand, is_publishable, published_name
from snapcap.warmup.machine.installation import package_folder, torch_version
from snapcap.warmup.options import StartOptions

if TYPE_CHECKING:
    from snapcap.models.config import ModelConfig
    from snapcap.models.processing.transform import ImageTransform

# Sources that decide the layout of prepared weights and the names of tensors in a checkpoint.
_SOURCES = ("weights/*.py", "layers/*.py", "families/**/*.py", "names.py", "text.py", "dimensions.py", "config.py")


def prepared_name(digest: str, device_type: str, dtype: str, layout: str) -> str:
    """``<checkpoint>.<device>.<dtype>.<layout>.safetensors``

    Args:
        digest: ``identity.content_digest``.
        layout: ``layout_digest``.
    """
    return f"{digest}.{device_type}.{dtype}.{layout}.safetensors"


def model_factors(source: str, device_type: str, dtype: str) -> Factors:
    """The factors of the manifest under which the prepared weights of a source are published; all of them are known
    without its files.

    Raises:
        OSError, MachineError: as ``layout_digest``.
    """
    return {
        "kind": "model",
        "format": FORMAT,
        "model.source": source,
        "device.type": device_type,
        "model.dtype": dtype,
        "source.weights": _source_digest(package_folder("snapcap.models")),
        "torch.version": torch_version().version,
    }


def model_factors_of(options: StartOptions) -> Factors:
    """Returns the factors of the key under which the model of these options is published and looked for.

    Raises:
        OSError, MachineError, StartError: as ``model_factors`` and ``device_and_dtype``.
    """
    from snapcap.warmup.plan.plan import device_and_dtype  # noqa: PLC0415  the module imports every family

    device, dtype = device_and_dtype(options.compute)
    return model_factors(published_name(options.model.source), device.partition(":")[0], dtype)


def may_be_published(options: StartOptions) -> bool:
    """Returns whether a start should ask its store for the model: the machine has no checkpoint, and the store may
    have the model. The call itself sends no request."""
    model = options.model
    try:
        if not model.prepared_weights or not is_publishable(model.source):
            return False
        if is_at_hand(model.source, model.cache_dir, options.s3):
            return False
        return options.store.remote is not None or any((options.store_folder / MODELS).glob("*.json"))
    except (OSError, ValueError):  # the source cannot be a file's name
        return False


def layout_digest(config: "ModelConfig", transform: "ImageTransform", models: Path | None = None) -> str:
    """SHA-256, in hex, of what makes a checkpoint's tensors the regions' ones: our sources, torch, whose arithmetic
    it is, and of the configuration the dimensions, the tokens before an image and the normalisation of images.

    Args:
        models: the folder of our sources, if it is not the installed one.

    Raises:
        OSError: the sources are not there, or cannot be read.
        MachineError: what is installed cannot be told.
    """
    normalisation = transform.effective_rescale, transform.effective_mean, transform.effective_std
    described = {
        "sources": _source_digest(models or package_folder("snapcap.models")),
        "torch": torch_version().version,
        "dimensions": config.dimensions(),
        "prefix": config.prefix,
        "normalisation": normalisation,
    }
    return hashlib.sha256(canonical_json(described)).hexdigest()


def _source_digest(models: Path) -> str:
    files: list[Path] = []
    for pattern in _SOURCES:
        found = [*models.glob(pattern)]
        if not found:
            raise FileNotFoundError(errno.ENOENT, "an installation without its sources", str(models / pattern))
        files += found
    return source_digest(models, files)
