"""Lists the files of a checkpoint folder that hold its weights. No torch."""

import json
from pathlib import Path

from snapcap.models.errors import UserError

_FORMATS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


class WeightsError(UserError):
    """Weights that cannot be read or do not fit; one line that says what and where."""


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: safetensors before ``.bin``, a single file before an index.

    Raises:
        WeightsError: there are none, or an index names a file that is not there.
    """
    for single, index in _FORMATS:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            try:
                names = sorted(set(json.loads((folder / index).read_text())["weight_map"].values()))
                missing = [n for n in names if Path(n).name != n or not (folder / n).is_file()]
            except (ValueError, KeyError, AttributeError, TypeError):
                raise WeightsError(f"{index} is not a weight index: it needs a 'weight_map' object") from None
            if missing:
                raise WeightsError(f"{index} names {missing[0]!r}, which is not in {folder.name}/")
            return [folder / name for name in names]
    raise WeightsError(f"no weights in {folder}: model.safetensors or pytorch_model.bin is expected")
