"""Describes the probes, /startup, /metrics, the pages and the OpenAPI document in that document."""

from typing import Literal

from pydantic import BaseModel, Field

from snapcap.service.api.schema_parts import ModelState, Omittable, Operation, Replies, ready_replies, reply
from snapcap.service.errors import InvalidOption, ModelNotFound
from snapcap.warmup.progress.status import BucketState, ComponentName

_MODEL = {
    "name": "model",
    "in": "query",
    "description": "A model whose last start is reported, instead of the server's start.",
    "schema": {"type": "string"},
}
_TEXT = {"schema": {"type": "string"}}
State = Literal["starting", "ready", "draining", "failed"]


def _page(description: str) -> Replies:
    unchanged = {"description": "The page is the one that If-None-Match names"}
    return {200: {"description": description, "content": {"text/html": _TEXT}}, 304: unchanged}


OPERATIONS = {
    "livez": Operation("Tell whether the process is alive", reply("The process is alive", "Live")),
    "readyz": Operation("Tell whether the server captions images", ready_replies("Ready")),
    "health": Operation("Do the same as /readyz, at the path that other servers use", ready_replies("Ready")),
    "startup": Operation(
        "Report the start by phase",
        reply("The timeline", "Startup"),
        [InvalidOption, ModelNotFound],
        parameters=[_MODEL],
    ),
    "metrics": Operation(
        "Return the Prometheus metrics",
        {
            200: {
                "description": "The metrics",
                "content": {"text/plain": _TEXT, "application/openmetrics-text": _TEXT},
            }
        },
    ),
    "page": Operation("Show the page", _page("A page that captions images and shows the start")),
    "docs": Operation("Show the OpenAPI document as a page", _page("The reference")),
    "openapi": Operation(
        "Return this document",
        {200: {"description": "The document", "content": {"application/json": {"schema": {"type": "object"}}}}},
    ),
}


class Live(BaseModel):
    status: Literal["live"]


class Ready(BaseModel):
    state: State
    phase: str
    error: Omittable[str] = Field(description="The reason for which the start failed.")


class Phase(BaseModel):
    name: str
    start: float
    end: float | None


class Bucket(BaseModel):
    component: ComponentName
    size: int = Field(ge=1)
    state: BucketState
    backend: str
    seconds: float | None = Field(description="Seconds that the warm-up of the bucket took.")
    start: float | None = Field(description="Moment at which the warm-up of the bucket began.")


class Weights(BaseModel):
    """The result of the lookup of prepared weights. Unless it is `hit`, the start converts the checkpoint."""

    result: Literal["hit", "miss", "corrupt", "untrusted", "error", "off"]
    reason: str
    bytes_fetched: int = Field(ge=0, description="Bytes downloaded from the artifact store.")


class Artifacts(BaseModel):
    """The result of the lookup of compiled artifacts."""

    kind: str
    result: Literal["hit", "miss", "stale", "corrupt", "untrusted", "error"]
    reason: str
    key: str
    seconds: float
    bytes_fetched: int = Field(ge=0)


class Build(BaseModel):
    """Reports the background build, if there is one. A member beside the state stays once it is known. `looking`:
    the store could not be read, and is asked again."""

    state: Literal["looking", "declined", "waiting", "fetched", "building", "published", "failed"]
    done: Omittable[int] = Field(description="Number of packages built.")
    of: Omittable[int] = Field(description="Number of packages to build.")
    holder: Omittable[str] = Field(description="The process that builds while this process waits.")
    reason: Omittable[str] = Field(description="The reason for which this process does not build, or not yet.")
    command: Omittable[str] = Field(description="The command that builds the artifacts instead.")
    error: Omittable[str]


class CompileEvents(BaseModel):
    """Counts the graphs that this server's processes compiled. A background build compiles in other processes."""

    startup: int = Field(ge=0, description="Graphs compiled until the end of the start.")
    serving: int = Field(ge=0, description="Graphs compiled after the end of the start.")


class Startup(BaseModel):
    state: State | ModelState = Field(description="The server's state, or with `model` in the query the model's.")
    phase: str
    model: str | None = Field(description="The name of the model, once the model is loaded.")
    models: Omittable[dict[str, ModelState]] = Field(
        description="The state of each model, if the server has several or has one that may leave."
    )
    family: str | None = Field(description="The `model_type` of the model in transformers.")
    takes_instructions: bool = Field(
        description="True: a prompt is an instruction. False: a prompt is the beginning of a caption."
    )
    settings_not_done: list[str] = Field(
        description="Settings of the checkpoint's `generation_config.json` that would change captions and that the "
        "server does not support."
    )
    tasks: list[str] = Field(
        description="Values that `task` of a request may have, the default first. Empty: the model has one task."
    )
    now: float = Field(
        description="The current time, in seconds since the process was executed, as all times here."
    )
    marks: dict[str, float] = Field(
        description="The times of `live`, `ready` and `first_caption`, as far as they have been reached."
    )
    phases: list[Phase]
    backend: str | None = Field(
        description="The backend that captions. `mixed`: a background build is replacing buckets."
    )
    tier: str | None = Field(description="The backend at the end of the start.")
    device: str | None
    dtype: str | None
    error: str | None
    compile_events: CompileEvents
    torch_modules: int = Field(
        ge=0,
        description="Number of Python modules of torch in the server's processes. 0 if packages run without torch.",
    )
    weights: Weights | None
    artifacts: Artifacts | None
    build: Build | None
    buckets: list[Bucket]


ROOTS: tuple[type[BaseModel], ...] = (Live, Ready, Startup)
