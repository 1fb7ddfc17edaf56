"""Answers POST / and POST /models/{name}, as `huggingface_hub.InferenceClient` calls them."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from snapcap.service.api.bodies.body import BodyLimits
from snapcap.service.api.bodies.replies import JsonReply
from snapcap.service.api.caption.routes import caption_of
from snapcap.service.api.huggingface.request import read_huggingface
from snapcap.service.api.problems import HUGGING_FACE
from snapcap.service.api.routing import Api, RouteGroup
from snapcap.service.captioning.captioner import Captioner


class HuggingFaceRoutes:
    """Serves the two endpoints of the API for one captioner."""

    def __init__(self, captioner: Captioner, limits: BodyLimits) -> None:
        self._captioner = captioner
        self._limits = limits

    def group(self) -> RouteGroup:
        routes = [
            Route("/", self.image_to_text, methods=["POST"]),
            Route("/models/{model:path}", self.image_to_text_of_model, methods=["POST"]),
        ]
        return RouteGroup("Hugging Face", routes, Api("huggingface", HUGGING_FACE, captions=True))

    async def image_to_text(self, request: Request) -> Response:
        """The image is the body, or base64 in JSON with parameters."""
        result, headers = await caption_of(request, self._captioner, self._limits, read_huggingface)
        return JsonReply([{"generated_text": result.caption}], headers)

    async def image_to_text_of_model(self, request: Request) -> Response:
        """As POST /, if the model is the one that is served. Its name may hold slashes."""
        self._captioner.served_model(request.path_params["model"])
        return await self.image_to_text(request)
