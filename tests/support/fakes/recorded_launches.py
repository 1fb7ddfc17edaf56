"""Records the operators that an eager first caption runs, as `warmup.runtime.aoti.eager_launches` lists them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from support.parity.device_cases import Captioner, open_model, plan_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from snapcap.warmup.plan.buckets import Bucket
from snapcap.warmup.runtime.aoti.eager_launches import Launch, Like, eager_launches
from snapcap.warmup.runtime.backends.eager import EagerBackend
from snapcap.warmup.runtime.devices.torch_settings import torch_device
from snapcap.warmup.runtime.runner import Runner, open_callables
from snapcap.warmup.runtime.slot_request import SlotRequest

_ATTENTION = "_scaled_dot_product"


def expected_and_run(
    captioner: Captioner, device: torch.device, dtype: str, rows: int
) -> tuple[list[Launch], list[Launch]]:
    """What is launched ahead, and all that an encode and a step launch."""
    plan = plan_of(device, dtype, (rows,))
    model, bucket = open_model(captioner, plan), Bucket(rows)
    runner = Runner(model, torch_device(model.device))
    for component in ("encoder", "decoder"):
        runner.bind(component, bucket, open_callables(model.regions, component, bucket, EagerBackend()))
    with _Recorder() as recorder:
        runner.encode(bucket, captioner.images(rows), 0)
        runner.admit(0, [SlotRequest()] * rows)
        runner.decode_step(bucket)
    return list(eager_launches(model.config, plan, rows)), recorder.launches


def missing(expected: Sequence[Launch], run: Sequence[Launch], on_cuda: bool) -> list[Launch]:
    """What is expected and not run: the same operator on the same dtypes, shapes and, on CUDA, strides. On a CPU
    some weights lie otherwise, and attention is an operator of its own."""

    def seen(launch: Launch) -> tuple[object, ...]:
        name = _ATTENTION if launch.operator.startswith(_ATTENTION) and not on_cuda else launch.operator
        return name, *((like.dtype, like.shape, like.strides if on_cuda else ()) for like in launch.tensors)

    def met(launch: Launch) -> bool:
        return any(seen(launch) == seen(Launch(one.operator, one.tensors[: len(launch.tensors)])) for one in run)

    return [launch for launch in expected if not met(launch)]


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in args if isinstance(each, Tensor)]
        name = func.__name__.removesuffix(".default")
        if name == "_to_copy":  # which makes a tensor and copies into it
            name, tensors = "copy_", [result, *tensors]
        self.launches.append(Launch(name, tuple(map(_like, tensors))))
        return result


def _like(tensor: Tensor) -> Like:
    return Like(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))
