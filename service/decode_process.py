"""A decode process: images come in, one at a time, and their pixels go into the shared memory."""

import socket
import time
import traceback
from typing import TYPE_CHECKING

from service.decode_messages import HEAD, Answer, Broken, Decoded, Refused, receive_exactly
from service.messages import pack
from service.shared_pixels import SharedPixels

if TYPE_CHECKING:
    from models.preprocess import ImageTransform


def decode_images(end: socket.socket, pixels: SharedPixels, transform: "ImageTransform") -> int:
    """Until the other end is closed. Exit status 0."""
    try:
        while (head := receive_exactly(end, HEAD.size)) is not None:
            slot, length = HEAD.unpack(head)
            image = receive_exactly(end, length)
            if image is None:
                break
            end.sendall(pack(_decode(image, slot, pixels, transform)))
    except ConnectionError:  # closed with an answer under way
        pass
    return 0


def _decode(image: bytes, slot: int, pixels: SharedPixels, transform: "ImageTransform") -> Answer:
    from models.image import ImageError  # noqa: PLC0415  imported before the fork

    began = time.monotonic()
    try:
        decoded = transform.decode(image)
        pixels.write(slot, decoded.pixels)
    except ImageError as error:
        return Refused(error.reason, str(error))
    except Exception:
        return Broken(traceback.format_exc())
    return Decoded(decoded.format, began, time.monotonic() - began)
