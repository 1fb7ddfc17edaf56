"""Adds the captioning APIs, the pages and the OpenAPI document to an application that answers probes already.

A thread imports this module after /livez answers, so `app.py` must not import it at its top.
"""

from snapcap.service.api.answers import Answers
from snapcap.service.api.app import Application, Services
from snapcap.service.api.caption import CaptionRoutes
from snapcap.service.api.huggingface import HuggingFaceRoutes
from snapcap.service.api.image_fetcher import ImageFetcher
from snapcap.service.api.ollama import OllamaRoutes
from snapcap.service.api.openai import OpenAIRoutes
from snapcap.service.api.page import page_routes
from snapcap.service.api.responses import ResponsesRoutes
from snapcap.service.api.v2 import V2Routes
from snapcap.service.http.bodies import BodyLimits


def add_captioning_apis(app: Application, services: Services, limits: BodyLimits) -> None:
    """Adds the routes to `app` and marks it complete. `limits`: the limits of request bodies."""
    captioner, routes, http = services.captioner, app.routes, app.http
    fetcher = ImageFetcher(http.image_hosts, limits)
    answers = Answers(captioner, limits, fetcher, app.handler, continue_text=http.chat_text == "continue")
    v2 = V2Routes(captioner, services.readiness, limits)
    routes.add(
        CaptionRoutes(answers).group(),
        OpenAIRoutes(answers).group(),
        ResponsesRoutes(answers).group(),
        OllamaRoutes(answers, services.status).group(),
        HuggingFaceRoutes(answers).group(),
        v2.probes(),
        v2.group(),
    )
    routes.add(page_routes(routes, http, keys=app.keys is not None))
    routes.complete = True
