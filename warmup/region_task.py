"""What build and check workers are told, and the model they work on."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.preprocess import ImageTransform
from warmup.device import open_device
from warmup.model import LoadedModel, load_model
from warmup.plan import Plan


def job_of(checkpoint: Path, plan: Plan, folder: Path) -> dict[str, Any]:
    """The first line a worker is sent: the checkpoint, the plan, and the folder of the packages."""
    return {"checkpoint": str(checkpoint), "plan": asdict(plan), "folder": str(folder)}


def load_from_job(job: dict[str, Any]) -> tuple[LoadedModel, Plan]:
    """The model on the device of the plan, in this process."""
    plan = Plan(**{**job["plan"], "buckets": tuple(job["plan"]["buckets"])})
    folder = Path(job["checkpoint"])
    config = ModelConfig.from_folder(folder)
    transform = ImageTransform.from_folder(folder, config.vision.image_size)
    device, dtype = open_device(plan)
    return load_model(folder, config, transform, plan, device, dtype), plan
