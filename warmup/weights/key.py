"""Names prepared weights by all that decides what is in them. No torch.

Nothing of it enters the artifact key: checkpoints of the same shapes share one set of packages.
"""

import errno
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from snapcap.warmup.artifacts.key import Factors, canonical_json
from snapcap.warmup.artifacts.source import source_digest
from snapcap.warmup.machine.installation import package_folder, torch_version

if TYPE_CHECKING:
    from snapcap.models.config import ModelConfig
    from snapcap.models.processing.transform import ImageTransform

# Sources that decide the layout of prepared weights and the names of tensors in a checkpoint.
_SOURCES = ("weights/*.py", "layers/*.py", "families/**/*.py", "names.py", "text.py", "dimensions.py", "config.py")
# Names of files of weights: prepared on this machine, or fetched.
PREPARED_NAME = re.compile(r"[0-9a-f]{64}(\.(cpu|cuda)\.(float32|bfloat16|float16)\.[0-9a-f]{64})?\.safetensors")


def prepared_name(digest: str, device_type: str, dtype: str, layout: str) -> str:
    """``<checkpoint>.<device>.<dtype>.<layout>.safetensors``

    Args:
        digest: ``identity.content_digest``.
        layout: ``layout_digest``.
    """
    return f"{digest}.{device_type}.{dtype}.{layout}.safetensors"


def fetched_name(content: str) -> str:
    """``<content>.safetensors``: of fetched weights, for whoever names the same ``ModelManifest.content``."""
    return f"{content}.safetensors"


def model_factors(source: str, device_type: str, dtype: str) -> Factors:
    """The factors of the manifest under which the prepared weights of a source are published; all of them are known
    without its files.

    Raises:
        OSError, MachineError: as ``layout_digest``.
    """
    return {
        "kind": "model",
        "model.source": source,
        "device.type": device_type,
        "model.dtype": dtype,
        "source.weights": _source_digest(package_folder("snapcap.models")),
        "torch.version": torch_version().version,
    }


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
