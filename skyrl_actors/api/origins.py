"""Tell requests that a browser sends for pages of other sites (pure).

Such a page could otherwise read and act on a service that needs no key.
"""

import ipaddress
from urllib.parse import urlsplit

from skyrl_actors.config.http import HttpConfig, is_loopback

OPEN_PATHS = (
    "/",
    "/healthz",
    "/api/v1/healthz",
    "/api/v1/client/config",
    "/api/v1/client/dynamic_config",
)


def is_of_another_site(method: str, headers: dict[str, str], public_url: str | None) -> bool:
    """Return whether a browser sends this for a page that this service did not serve.

    Browsers name the site (https://www.w3.org/TR/fetch-metadata/) or, over plain HTTP to another
    machine, only the origin of such a page; SDKs name neither.
    """
    if method in ("GET", "HEAD", "OPTIONS"):
        return False
    if (site := headers.get("sec-fetch-site")) is not None:
        return site not in ("none", "same-origin")
    own = {headers.get("host"), urlsplit(public_url).netloc if public_url else None}
    return "origin" in headers and urlsplit(headers["origin"]).netloc not in own


def has_foreign_host(path: str, headers: dict[str, str], http: HttpConfig) -> bool:
    """Return whether a service of this machine alone is asked for by another name.

    Any site can let its own name lead to this machine (DNS rebinding). To a browser the service is
    then a part of that site. Addresses cannot be redirected.
    """
    if path in OPEN_PATHS or "host" not in headers or not is_loopback(http.host):
        return False
    try:
        name = urlsplit(f"//{headers['host']}").hostname
    except ValueError:
        return True
    own = ("localhost", http.host, urlsplit(http.public_url or "").hostname)
    return name not in own and not _is_address(name or "")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
