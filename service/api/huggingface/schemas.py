"""Describes the replies of the Hugging Face API.

Only the OpenAPI document imports it: replies are written without pydantic.
"""

from pydantic import BaseModel, Field, RootModel

from snapcap.service.api.openapi.base_schemas import ClosedReply


class HuggingFaceCaption(ClosedReply):
    generated_text: str = Field(description="The caption; it begins with the prompt.")


class HuggingFaceCaptions(RootModel[list[HuggingFaceCaption]]):
    """A list of one."""


class HuggingFaceError(ClosedReply):
    error: str = Field(description="A sentence that says what to do.")


ROOTS: tuple[type[BaseModel], ...] = (HuggingFaceCaptions, HuggingFaceError)
