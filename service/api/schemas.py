"""Defines the replies of snapcap's own routes as models for the OpenAPI document.

The routes build the replies themselves, so that no reply is validated, and name these models, which are imported
when the document is first asked for. The tests hold the replies to them.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

_State = Literal["starting", "ready", "draining", "failed"]


def _without_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


def _one_of(schema: dict[str, Any]) -> None:
    schema["items"]["oneOf"] = schema["items"].pop("anyOf")


# A member that may be absent, but is never null.
_Optional = Annotated[str | SkipJsonSchema[None], Field(default=None, json_schema_extra=_without_default)]
_OptionalCount = Annotated[int | SkipJsonSchema[None], Field(default=None, json_schema_extra=_without_default)]


class Timings(BaseModel):
    """Milliseconds."""

    queue: float = Field(description="waiting, for a decode thread and for the device")
    decode_image: float = Field(description="decoding and resizing the image")
    encode: float = Field(description="the encoder batch")
    decode: float = Field(description="all decode steps")
    total: float = Field(description="from the end of the body to the reply")


class Caption(BaseModel):
    caption: str = Field(description="The caption; it begins with the prompt.")
    model: str
    tokens: int = Field(ge=0, description="Tokens generated.")
    finish_reason: Literal["stop", "length"] = Field(
        description="stop: the model ended it; length: the limit of new tokens was reached."
    )
    backend: str
    timings: Timings


class Problem(BaseModel):
    """RFC 9457. Members beyond these belong to one code."""

    type: str = Field(json_schema_extra={"format": "uri"}, description="urn:snapcap:problem: and the code")
    title: str
    status: int = Field(ge=400, le=599)
    detail: str = Field(description="A sentence that says what to do.")
    instance: str = Field(description="The path of the request.")
    error: str = Field(description="The same sentence as detail.")
    code: str
    request_id: str
    option: _Optional = Field(description="the option that is wrong")
    reason: _Optional = Field(description="why the image cannot be processed")
    phase: _Optional = Field(description="what the server is doing instead of serving")


class CaptionItem(Caption):
    """The caption of one of several images."""

    index: int = Field(ge=0)
    filename: str


class ProblemItem(Problem):
    """Why one of several images has no caption."""

    index: int = Field(ge=0)
    filename: str


class Captions(BaseModel):
    captions: list[CaptionItem | ProblemItem] = Field(min_length=1, max_length=16, json_schema_extra=_one_of)


class Live(BaseModel):
    status: Literal["live"]


class Ready(BaseModel):
    state: _State
    phase: str
    error: _Optional = Field(description="why the start failed")


class Phase(BaseModel):
    name: str
    start: float
    end: float | None


class Bucket(BaseModel):
    component: Literal["encoder", "decoder"]
    size: int = Field(ge=1)
    state: Literal["pending", "eager", "warm", "captured", "failed"]
    backend: str
    seconds: float | None = Field(description="How long its warm-up took.")
    start: float | None = Field(description="When its warm-up began.")


class Artifacts(BaseModel):
    """What came of looking for compiled artifacts."""

    kind: str
    result: Literal["hit", "miss", "stale", "corrupt", "untrusted", "error"]
    reason: str
    key: str
    seconds: float
    bytes_fetched: int = Field(ge=0)


class Build(BaseModel):
    """The background build, once there is one. Members beyond the state stay once they are known."""

    state: Literal["declined", "waiting", "fetched", "building", "published", "failed"]
    done: _OptionalCount = Field(description="packages built")
    of: _OptionalCount = Field(description="packages to build")
    holder: _Optional = Field(description="who builds, while this process waits")
    reason: _Optional = Field(description="why this process does not build")
    command: _Optional = Field(description="what to run instead")
    error: _Optional


class Startup(BaseModel):
    state: _State
    phase: str
    model: str | None = Field(description="The model, once it is loaded.")
    now: float = Field(description="Seconds since the process was executed, as all times here.")
    marks: dict[str, float] = Field(description="The moments live, ready and first_caption, once they have come.")
    phases: list[Phase]
    backend: str | None = Field(description="What serves: mixed while a build swaps buckets in.")
    tier: str | None = Field(description="The backend that the start ended with.")
    device: str | None
    dtype: str | None
    error: str | None
    artifacts: Artifacts | None
    build: Build | None
    buckets: list[Bucket]


class TraceEvent(BaseModel):
    """One event of the Trace Event Format."""

    name: str
    ph: Literal["M", "X", "i"] = Field(description="M: names a process or a track, X: from ts for dur, i: a moment")
    pid: int
    tid: int = Field(description="The track.")
    ts: _OptionalCount = Field(description="microseconds since the process was executed")
    dur: _OptionalCount = Field(description="microseconds")
    cat: _Optional = Field(description="phase, warm-up or mark")
    s: _Optional = Field(description="scope of a moment: p, the process")
    args: dict[str, Any]


class Trace(BaseModel):
    """The start as a Chrome trace."""

    traceEvents: list[TraceEvent]  # noqa: N815  the format's name
    displayTimeUnit: Literal["ms"]  # noqa: N815
    otherData: dict[str, str | None]  # noqa: N815
