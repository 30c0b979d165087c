"""Images in a folder of the service, which clients name instead of sending them."""

import re
from pathlib import Path

from skyrl_actors.messages.errors import InvalidRequest

# Parts begin with a letter, a digit or an underscore: so none is "..", hidden or absolute.
LOCATION = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
LONGEST = 512


def image_at(folder: Path | None, what: str, location: object, most_bytes: int) -> bytes:
    """Return the content of an image in the folder. No address and no other path is opened.

    Raises:
        InvalidRequest: There is no folder, or no such image in it. `what` names the chunk.
    """
    if folder is None:
        raise InvalidRequest(
            f"{what} is an image_asset_pointer, and this service has no folder of images "
            "(http.images); send the image itself"
        )
    if not isinstance(location, str) or len(location) > LONGEST or not LOCATION.fullmatch(location):
        raise InvalidRequest(
            f"{what}: location {str(location)[:80]!r} is no path of an image in the service's "
            "folder; use a relative path of letters, digits, '_', '-', '.' and '/'"
        )
    inside = folder.resolve()
    try:
        file = (inside / location).resolve(strict=True)
        if file.is_relative_to(inside) and file.is_file():
            with file.open("rb") as stream:
                # One byte more than is allowed, which is refused as any image of that size.
                return stream.read(most_bytes + 1)
    except OSError:
        pass
    raise InvalidRequest(f"{what}: the service's folder of images has no {location!r}")
