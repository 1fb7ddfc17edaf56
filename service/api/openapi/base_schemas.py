"""Describes the parts that replies of several APIs share: errors, optional members, objects without other members.

Only the OpenAPI document and the tests use the models. The routes build the replies without them, and no reply is
validated while serving."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema


def one_of(schema: dict[str, Any]) -> None:
    """Changes the schema of a list: each item matches exactly one of the models, not any number of them."""
    schema["items"]["oneOf"] = schema["items"].pop("anyOf")


def without_default(schema: dict[str, Any]) -> None:
    """Removes the default from the schema of a member that may be absent but is never null."""
    schema.pop("default", None)


# Types of members that may be absent but are never null.
OptionalText = Annotated[str | SkipJsonSchema[None], Field(default=None, json_schema_extra=without_default)]
OptionalCount = Annotated[int | SkipJsonSchema[None], Field(default=None, json_schema_extra=without_default)]


class ClosedReply(BaseModel):
    """An object with these members and no others."""

    model_config = ConfigDict(extra="forbid")


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
    option: OptionalText = Field(description="the option that is wrong")
    reason: OptionalText = Field(description="why the image cannot be processed")
    phase: OptionalText = Field(description="what the server is doing instead of serving")
    limit: OptionalCount = Field(description="the bytes that a body may have")


ROOTS: tuple[type[BaseModel], ...] = (Problem,)
