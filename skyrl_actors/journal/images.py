"""Take the bytes of images out of requests, and put them back (pure).

A journal stores each image once, whichever requests have it. A stored request has empty contents.
"""

from collections.abc import Mapping
from dataclasses import replace

from skyrl_actors.messages.requests import ForwardBackward, Request, Sample


def images_in(request: Request) -> dict[str, bytes]:
    """Return the images of a request by the SHA-256 of their content."""
    if isinstance(request, ForwardBackward) and request.columns.images is not None:
        images = request.columns.images
        return dict(zip(images.digests, images.contents, strict=True))
    if isinstance(request, Sample):
        return {picture.digest: picture.content for picture in request.pictures}
    return {}


def with_images(request: Request, contents: Mapping[str, bytes]) -> Request:
    """Return a request with other contents of its images, by their digests."""
    if isinstance(request, ForwardBackward) and request.columns.images is not None:
        images = request.columns.images
        found = tuple(contents[digest] for digest in images.digests)
        columns = replace(request.columns, images=replace(images, contents=found))
        return replace(request, columns=columns)
    if isinstance(request, Sample) and request.pictures:
        pictures = [replace(one, content=contents[one.digest]) for one in request.pictures]
        return replace(request, pictures=tuple(pictures))
    return request


def without_images(request: Request) -> Request:
    """Return a request without the contents of its images."""
    return with_images(request, dict.fromkeys(images_in(request), b""))
