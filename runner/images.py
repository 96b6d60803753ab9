"""Images that a tool returns. A tool message can't carry one, so they follow its block.

The model reads a line of text in the image's place, and the image itself in a user message behind
the block's last tool message.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

MAX_IMAGE_BYTES = 5_000_000
"""What the common servers take at most; it is kept in the history, so smaller is better."""

MAX_DEPTH = 4
"""Containers in which an image is looked for; one that lies deeper is shown as any other bytes."""

MEDIA_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")


@dataclass(frozen=True, slots=True)
class Image:
    """An image for the model to look at: its bytes, and one of `MEDIA_TYPES`.

    A tool returns it as its value, or inside of a list or a dict.
    """

    data: bytes
    media_type: str = "image/png"

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes):  # else it fails much later, where it is encoded
            raise TypeError(f"an Image's data is bytes, not {type(self.data).__name__}")
        if self.media_type not in MEDIA_TYPES:
            raise ValueError(f"an Image is one of {', '.join(MEDIA_TYPES)}")
        if not 0 < len(self.data) <= MAX_IMAGE_BYTES:
            raise ValueError(f"an Image has 1 to {MAX_IMAGE_BYTES} bytes: make it smaller")


def take_images(value: Any, found: list[Image], path: tuple[int, ...] = ()) -> Any:
    """`value` with a line of text in the place of each image, which goes to `found`.

    `path` holds the identities of the containers around it: a cycle is left as it is.
    """
    if len(path) == MAX_DEPTH or id(value) in path:
        return value
    inner = (*path, id(value))
    match value:
        case Image():
            found.append(value)
            size = len(value.data)
            return f"[image {len(found)}: {value.media_type}, {size} bytes; it follows]"
        case list():
            return [take_images(each, found, inner) for each in value]
        case tuple():
            return tuple(take_images(each, found, inner) for each in value)
        case dict():
            return {key: take_images(each, found, inner) for key, each in value.items()}
        case _:
            return value


def image_parts(images: tuple[Image, ...], call_id: str) -> list[dict[str, Any]]:
    """The parts of the user message that shows them, with a line that says where they are from."""
    if not images:
        return []
    said = {"type": "text", "text": f"Images returned by call {call_id}, as data:"}
    shown = [
        {
            "type": "image_url",
            "image_url": {
                "url": f"data:{each.media_type};base64,{base64.b64encode(each.data).decode()}"
            },
        }
        for each in images
    ]
    return [said, *shown]
