"""URLs without secrets, the servers they lead to, and the proxies on the way."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit


def bare_url(url: str) -> str:
    """Return a URL for names and messages: without `user:password@`, query and fragment."""
    return without_password(re.split(r"[?#]", url, maxsplit=1)[0])


def without_password(url: str) -> str:
    """Return a URL without `user:password@`."""
    return re.sub(r"//[^/@]+@", "//", url)


def origin_of(url: str) -> tuple[str, str | None, int | None]:
    """Return scheme, host and port, which identify a server."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def is_public(url: str) -> bool:
    """Return True for an address on the internet, and not on this machine or in its own network."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return "." in host and not host.endswith((".local", ".internal", ".lan", ".localhost", ".home.arpa"))


def proxy_of(url: str) -> str | None:
    """Return the environment's proxy for a URL; None for a direct connection, as always to this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return None
    import urllib.request  # takes long to import

    if urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(parts.scheme)
