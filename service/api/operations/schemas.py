"""Describes the replies of /livez, /readyz and /startup."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from snapcap.service.api.openapi.base_schemas import OptionalCount, OptionalText

State = Literal["starting", "ready", "draining", "failed"]


class Live(BaseModel):
    status: Literal["live"]


class Ready(BaseModel):
    state: State
    phase: str
    error: OptionalText = Field(description="why the start failed")


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


class Weights(BaseModel):
    """What came of looking for prepared weights; all but a hit convert the checkpoint."""

    result: Literal["hit", "miss", "corrupt", "untrusted", "error", "off"]
    reason: str
    bytes_fetched: int = Field(ge=0, description="Downloaded from the artifact store.")


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
    done: OptionalCount = Field(description="packages built")
    of: OptionalCount = Field(description="packages to build")
    holder: OptionalText = Field(description="who builds, while this process waits")
    reason: OptionalText = Field(description="why this process does not build")
    command: OptionalText = Field(description="what to run instead")
    error: OptionalText


class CompileEvents(BaseModel):
    """Graphs that this server's processes compiled; a background build compiles in others."""

    startup: int = Field(ge=0, description="Until the start was over.")
    serving: int = Field(ge=0, description="Since then.")


class Startup(BaseModel):
    state: State
    phase: str
    model: str | None = Field(description="The model, once it is loaded.")
    family: str | None = Field(description="Its `model_type`, as transformers calls it.")
    takes_instructions: bool = Field(description="A prompt is an instruction, and not the beginning of a caption.")
    settings_not_done: list[str] = Field(
        description="Settings of the checkpoint's `generation_config.json` that would change captions, and do not."
    )
    tasks: list[str] = Field(
        description="What `task` of a request may be, the default first; none: one task alone."
    )
    now: float = Field(description="Seconds since the process was executed, as all times here.")
    marks: dict[str, float] = Field(description="The moments live, ready and first_caption, once they have come.")
    phases: list[Phase]
    backend: str | None = Field(description="What serves: mixed while a build swaps buckets in.")
    tier: str | None = Field(description="The backend that the start ended with.")
    device: str | None
    dtype: str | None
    error: str | None
    compile_events: CompileEvents
    torch_modules: int = Field(
        ge=0,
        description="Python modules of torch in the server's processes: 0 where packages run without them.",
    )
    weights: Weights | None
    artifacts: Artifacts | None
    build: Build | None
    buckets: list[Bucket]


class TraceEvent(BaseModel):
    """One event of the Trace Event Format."""

    name: str
    ph: Literal["M", "X", "i"] = Field(description="M: names a process or a track, X: from ts for dur, i: a moment")
    pid: int
    tid: int = Field(description="The track.")
    ts: OptionalCount = Field(description="microseconds since the process was executed")
    dur: OptionalCount = Field(description="microseconds")
    cat: OptionalText = Field(description="phase, warm-up or mark")
    s: OptionalText = Field(description="scope of a moment: p, the process")
    args: dict[str, Any]


class Trace(BaseModel):
    """The start as a Chrome trace."""

    traceEvents: list[TraceEvent]  # noqa: N815  the format's name
    displayTimeUnit: Literal["ms"]  # noqa: N815
    otherData: dict[str, str | None]  # noqa: N815


ROOTS: tuple[type[BaseModel], ...] = (Live, Ready, Startup, Trace)
