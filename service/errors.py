"""Defines every error of a request with its status, code and title; `http/problems.py` renders the errors.

    ServiceError                    500
    ├── BadRequest                  400  bad_request
    │   ├── EmptyBody               400  empty_body
    │   ├── InvalidJson             400  invalid_json
    │   ├── InvalidMultipart        400  invalid_multipart
    │   ├── InvalidEncoding         400  invalid_encoding
    │   ├── Unauthorized            401  invalid_api_key       (WWW-Authenticate)
    │   ├── OriginRefused           403  origin_refused
    │   ├── NotFound                404  not_found
    │   │   └── ModelNotFound       404  model_not_found
    │   ├── MethodNotAllowed        405  method_not_allowed
    │   ├── BodyTimeout             408  body_timeout
    │   ├── PayloadTooLarge         413  payload_too_large
    │   ├── QueryTooLong            414  query_too_long
    │   ├── HostRefused             421  host_refused
    │   ├── UnsupportedMediaType    415  unsupported_media_type
    │   │   └── UnsupportedEncoding 415  unsupported_media_type (Accept-Encoding)
    │   └── Unprocessable           422  unprocessable
    │       ├── UnknownOption       422  unknown_option         (names the option and similar options)
    │       ├── InvalidOption       422  invalid_option         (names the option)
    │       ├── UnsupportedOption   422  unsupported_option     (names the option)
    │       ├── MissingImage        422  missing_image
    │       ├── TooManyImages       422  too_many_images
    │       ├── PromptTooLong       422  prompt_too_long
    │       ├── UnprocessableImage  422  unprocessable_image    (carries the decoder's reason)
    │       ├── ImageUrlRefused     422  image_url_refused
    │       └── ImageNotFetched     422  image_not_fetched
    ├── ClientDisconnected          499  client_disconnected    (counted and logged; nobody reads the reply)
    ├── Overloaded                  429                         (Retry-After; `limits.py` has the limits)
    │   └── …                       429  queue_full, body_memory_full, …
    ├── NotReady                    503  not_ready              (Retry-After, phase)
    │   ├── BeamsNotReady           503  not_ready              (no bucket has a row for each beam)
    │   └── ModelNotAwake           503  not_ready              (the model that the request names cannot wake)
    ├── DeadlineExceeded            504  deadline_exceeded
    └── EngineFailed                500  internal_error         (one fixed sentence; the log has the cause)

400 means that the body could not be read as the format it claims to have; 422 means that the body was read and
something in it is wrong. The message of an exception is a sentence for the client that says what to do.
"""
# ruff: noqa: N818 - the classes are named after conditions, as logs and metrics are, and do not end with "Error"

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from snapcap.models.errors import suggestion


class ServiceError(Exception):
    """Base of all errors of a request. `detail` is the sentence for the client, `extras` are further members of the
    problem. A class with a title has a code too: its name in lower case, unless the class sets another."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    title: ClassVar[str] = "Internal error"

    def __init_subclass__(cls) -> None:
        if "title" in vars(cls) and "code" not in vars(cls):
            cls.code = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, detail: str, **extras: object) -> None:
        super().__init__(detail)
        self.detail = detail
        self.extras: Mapping[str, object] = extras

    def headers(self) -> dict[str, str]:
        """Returns the response headers that belong to this error."""
        return {}

    def __reduce__(self) -> tuple[Any, ...]:
        # An error is pickled between processes. Pickle would call a subclass with the arguments of Exception, so
        # the attributes are restored without calling it.
        return type(self).__new__, (type(self), *self.args), vars(self)


class BadRequest(ServiceError):
    status = 400
    title = "Bad request"


class EmptyBody(BadRequest):
    title = "Empty body"


class InvalidJson(BadRequest):
    title = "Invalid JSON"


class InvalidMultipart(BadRequest):
    title = "Invalid multipart body"


class InvalidEncoding(BadRequest):
    title = "Body cannot be decompressed"

    def __init__(self) -> None:
        super().__init__(
            "The body does not match its Content-Encoding, or is incomplete; send the whole body, or send it "
            "without Content-Encoding."
        )


class Unauthorized(BadRequest):
    """The request has no valid API key. `given` tells if the request had a key at all."""

    status = 401
    code = "invalid_api_key"
    title = "No valid API key"

    def __init__(self, given: bool) -> None:
        what = "The API key is not valid" if given else "There is no API key"
        super().__init__(f"{what}; send one as `Authorization: Bearer KEY`.")
        self._given = given

    def headers(self) -> dict[str, str]:
        # RFC 6750: a request without a key gets no error code.
        return {"WWW-Authenticate": 'Bearer realm="snapcap"' + ', error="invalid_token"' * self._given}


class OriginRefused(BadRequest):
    """A page of another origin sent a request, or its preflight, that is not allowed. `why` names the reason."""

    status = 403
    title = "Origin refused"

    def __init__(self, origin: str, why: str) -> None:
        super().__init__(
            f"Pages of the origin {origin[:200]!r} may not send this request ({why}); the operator allows origins "
            "with --allow-origin."
        )


class HostRefused(BadRequest):
    """The request's Host is not a name that the server accepts."""

    status = 421
    title = "Name of the server refused"

    def __init__(self, host: str) -> None:
        super().__init__(
            f"This server does not have the name {host[:200]!r}; the operator allows names with --allowed-host."
        )


class NotFound(BadRequest):
    status = 404
    title = "Not found"


class ModelNotFound(NotFound):
    title = "No such model"

    def __init__(self, name: str, *served: str) -> None:
        names = " or ".join(map(repr, served))
        super().__init__(f"The model {name[:200]!r} is not served here; use {names}.", option="model")


class MethodNotAllowed(BadRequest):
    status = 405
    title = "Method not allowed"

    def __init__(self, method: str, path: str, allowed: Iterable[str]) -> None:
        self.allow = ", ".join(allowed)
        super().__init__(f"{path[:200]} does not answer {method[:20]}; use {self.allow}.")

    def headers(self) -> dict[str, str]:
        return {"Allow": self.allow}


class BodyTimeout(BadRequest):
    status = 408
    title = "Body too slow"

    def headers(self) -> dict[str, str]:
        # Without this header the server would keep waiting for the rest of the stalled body.
        return {"Connection": "close"}


class PayloadTooLarge(BadRequest):
    status = 413
    title = "Body too large"


class QueryTooLong(BadRequest):
    status = 414
    title = "Query too long"

    def __init__(self, limit: int, fields: int) -> None:
        super().__init__(
            f"The query of the URL has more than {limit} bytes or {fields} fields; send options in a form or in "
            "JSON."
        )


class UnsupportedMediaType(BadRequest):
    status = 415
    title = "Unsupported media type"


class UnsupportedEncoding(UnsupportedMediaType):
    """The server does not read the body's Content-Encoding. `what` begins the sentence for the client."""

    READ: ClassVar[str] = "gzip, deflate"

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; send the body as {self.READ} or without Content-Encoding.")

    def headers(self) -> dict[str, str]:
        # RFC 9110: this header tells the client that the coding is at fault, and not the media type.
        return {"Accept-Encoding": self.READ}


class Unprocessable(BadRequest):
    status = 422
    title = "Unprocessable request"


_FEW = 20  # greatest number of options that an error message lists


class UnknownOption(Unprocessable):
    """The request has an option that does not exist. The message suggests similar names, and lists all options if
    they are few. `within` names the member of the request that holds options, if this one stands elsewhere."""

    title = "Unknown option"

    def __init__(self, option: str, known: Iterable[str], within: str = "") -> None:
        named, names = option[:64], tuple(known)
        meant = suggestion(named, names, most=3)
        listed = f"options{within and f' in {within}'} are {', '.join(names)}"
        if len(names) > _FEW:
            listed = "reference at /openapi.json lists the options"
        joined = f"{meant} The" if meant else "; the"
        sentence = f"There is no option {named!r}{within and ' here'}{joined} {listed}."
        if within and named in names:
            sentence = f"The option {named!r} is not read here; put it into {within}."
        super().__init__(sentence, option=named)


class InvalidOption(Unprocessable):
    """An option has a bad value. `must` completes the sentence "The option … must …"."""

    title = "Invalid option"

    def __init__(self, option: str, must: str) -> None:
        super().__init__(f"The option {option!r} must {must}.", option=option)
        self.must = must


class UnsupportedOption(Unprocessable):
    """The server does not implement this field of an API. `instead` is a sentence that says what the client can
    do."""

    title = "Unsupported option"

    def __init__(self, option: str, instead: str) -> None:
        super().__init__(f"{option!r} is not supported: {instead}.", option=option)


class MissingImage(Unprocessable):
    title = "No image"


class TooManyImages(Unprocessable):
    title = "Too many images"


class PromptTooLong(Unprocessable):
    title = "Prompt too long"


class UnprocessableImage(Unprocessable):
    """An image cannot be decoded. `reason` is a word of the decoder, such as empty, not_an_image, truncated,
    too_large, zero_size or crashed."""

    title = "Unprocessable image"

    def __init__(self, detail: str, reason: str) -> None:
        super().__init__(detail, reason=reason)
        self.reason = reason


class ImageUrlRefused(Unprocessable):
    title = "Image URL refused"


class ImageNotFetched(Unprocessable):
    title = "Image not fetched"


class ClientDisconnected(ServiceError):
    status = 499
    title = "Client closed the connection"

    def __init__(self) -> None:
        super().__init__("The client closed the connection before the reply.")


class _RetryLater(ServiceError):
    def __init__(self, detail: str, retry_after_s: float, **extras: object) -> None:
        super().__init__(detail, **extras)
        self.retry_after_s = retry_after_s

    def headers(self) -> dict[str, str]:
        # The header takes whole seconds; 0 would invite an immediate retry.
        return {"Retry-After": str(max(1, round(self.retry_after_s)))}


class Overloaded(_RetryLater):
    """A limit of the server is reached. The subclass and its code name the limit. `what` begins the sentence for
    the client. `retry_after_s` is the number of seconds until there is likely to be room."""

    status = 429
    title = "Too many requests"
    what: str

    def __init__(self, retry_after_s: float = 1.0) -> None:
        super().__init__(f"{self.what}; retry after the time in Retry-After.", retry_after_s)


class NotReady(_RetryLater):
    """The model is not served yet, or not any more. `phase` names the phase of the start, or the server's state."""

    status = 503
    title = "Not ready"

    def __init__(self, phase: str, retry_after_s: float = 1.0, detail: str = "") -> None:
        detail = detail or f"The server is not ready (phase {phase}); retry when GET /readyz answers 200."
        super().__init__(detail, retry_after_s, phase=phase)
        self.phase = phase


class BeamsNotReady(NotReady):
    """A beam search has more beams than a bucket of this server has rows, because larger buckets could not be made
    ready. `most` is the number of rows of the largest bucket."""

    def __init__(self, num_beams: int, most: int) -> None:
        detail = (
            f"This server has no room for {num_beams} beams, because a larger bucket failed to become ready; send "
            f"num_beams of at most {most}, or retry to reach another server."
        )
        super().__init__("ready", detail=detail)


class ModelNotAwake(NotReady):
    """The model that a request names cannot wake. `reason` is a sentence without a full stop."""

    def __init__(self, name: str, reason: str, retry_after_s: float = 1.0) -> None:
        detail = f"The model {name!r} cannot wake: {reason}; retry after the time in Retry-After."
        super().__init__("absent", retry_after_s, detail)


class DeadlineExceeded(ServiceError):
    status = 504
    title = "Deadline exceeded"

    def __init__(self) -> None:
        super().__init__("The caption was not ready within the time limit of the request; retry later.")


class EngineFailed(ServiceError):
    """The server is at fault. The cause is chained (`raise EngineFailed() from error`) and never shown to
    clients."""

    def __init__(self) -> None:
        super().__init__("The server failed to process the request; its log has the cause under the request id.")
