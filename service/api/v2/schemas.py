"""Describes the replies of the Open Inference Protocol v2."""

from typing import Literal

from pydantic import BaseModel, Field

from snapcap.service.api.openapi.base_schemas import ClosedReply


class V2Live(ClosedReply):
    live: Literal[True]


class V2Ready(ClosedReply):
    ready: bool


class V2Server(ClosedReply):
    name: Literal["snapcap"]
    version: str
    extensions: list[str]


class V2ModelReady(ClosedReply):
    name: str
    ready: Literal[True]


class V2TensorMetadata(ClosedReply):
    name: str
    datatype: Literal["BYTES"]
    shape: list[int]


class V2Model(ClosedReply):
    name: str
    versions: list[str]
    platform: str
    inputs: list[V2TensorMetadata]
    outputs: list[V2TensorMetadata]


class V2OutputParameters(ClosedReply):
    binary_data_size: int = Field(ge=0)


class V2Output(ClosedReply):
    name: Literal["caption"]
    datatype: Literal["BYTES"]
    shape: list[int]
    data: list[str] = Field(default=[], description="The captions, unless they follow as binary tensor data.")
    parameters: V2OutputParameters | None = None


class V2Captions(ClosedReply):
    model_name: str
    model_version: Literal["1"]
    outputs: list[V2Output] = Field(min_length=1, max_length=1)
    id: str = Field(default="", description="that of the request, if it had one")


class V2Error(ClosedReply):
    error: str = Field(description="A sentence that says what to do.")


ROOTS: tuple[type[BaseModel], ...] = (V2Live, V2Ready, V2Server, V2ModelReady, V2Model, V2Captions, V2Error)
