"""Who may ask, and what pages may do.

Loopback is shared with every other user of the machine, and with every page that the browser has open. So every request
needs a key, the `Host` must be ours (another site may let its name point to this machine), and a request that another
site's page makes is refused unless it follows a link to a page. Nothing can be changed by a request.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from aiohttp import web

from holdfast.errors import UsageError
from holdfast.store.files import make_directory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from aiohttp.typedefs import Middleware

LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
OPEN: Final = "/open"
"""the address that exchanges the key for a cookie"""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_DAYS: Final = 30 * 86400
"""seconds that a browser keeps the cookie"""
_DATA = re.compile(r"\.(json|csv)$|^/(static|files|events)/")
"""addresses that are not pages: no other site may link to them"""
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^:\[\]]+)(:(?P<port>[0-9]{1,5}))?")
_LOCAL_PATH = re.compile(r"/(?![/\\])[!-~]*")


@dataclass(frozen=True)
class AccessRules:
    """The conditions under which a request is answered."""

    key: str
    names: frozenset[str] = LOOPBACK
    """names of this server, as `Host` has them"""
    port: int | None = None
    """None for a Unix socket, which may be reached through any forwarded port"""
    any_address: bool = False
    """the server listens on all addresses of the machine; a number cannot be made to point elsewhere"""

    @property
    def cookie(self) -> str:
        """Name of the cookie. Cookies do not know ports: servers with different keys must not replace each other's."""
        return f"holdfast-view-{sha256(self.key.encode()).hexdigest()[:8]}"


def read_key(home: Path) -> str:
    """Return this user's key, which is made once, so that open tabs survive a restart of the server."""
    path = home / "view.key"
    make_directory(home)
    fresh = home / f".view.key.{secrets.token_hex(4)}.tmp"
    if not path.exists():
        write_private(fresh, secrets.token_urlsafe(24) + "\n")
        try:
            os.link(fresh, path)
        except FileExistsError:
            pass  # another process has just made one
        except OSError:  # no hard links here
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(
            f"{path} can be read by others", remedy=f"Remove it: rm {path}. The next `holdfast view` makes a new key."
        )
    key = path.read_text().strip()
    if len(key) < 20:
        raise UsageError(f"{path} has no key", remedy=f"Remove it: rm {path}. The next `holdfast view` makes one.")
    return key


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)


def refusal(rules: AccessRules, request: web.BaseRequest) -> tuple[int, str] | None:
    """Return the status and the reason if a request is refused."""
    host = request.headers.get("Host", "")
    if not _is_ours(rules, host):
        return 421, "This server does not answer to that name. Open the address that `holdfast view` printed."
    if request.method not in ("GET", "HEAD"):
        return 405, "This server only shows: GET and HEAD are all it answers."
    if request.headers.get("Origin", f"http://{host}") != f"http://{host}":
        return 403, "Another site may not ask this server."
    foreign = request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none")
    if foreign and not _follows_link(request):
        return 403, "Another site may not ask this server; a link to a page may be followed."
    if request.path != OPEN and not _has_key(rules, request):
        return 401, "A key is needed. Open the address that `holdfast view` printed."
    return None


def _is_ours(rules: AccessRules, host: str) -> bool:
    match = _HOST.fullmatch(host.lower())
    if match is None or (rules.port is not None and int(match["port"] or 80) != rules.port):
        return False
    name = match["name"]
    return name in rules.names or (rules.any_address and _is_number(name))


def _is_number(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _follows_link(request: web.BaseRequest) -> bool:
    """True for a top-level navigation to a page, as when a link in a chat is clicked."""
    headers = request.headers
    navigates = headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
    return navigates and _DATA.search(request.path) is None


def _has_key(rules: AccessRules, request: web.BaseRequest) -> bool:
    shown = request.cookies.get(rules.cookie) or request.headers.get("Authorization", "").removeprefix("Bearer ")
    return is_key(rules, shown)


def is_key(rules: AccessRules, text: str) -> bool:
    """Compare a text with the key in constant time."""
    return hmac.compare_digest(text.encode("utf-8", "surrogateescape"), rules.key.encode())


def guard(rules: AccessRules) -> Middleware:
    """Return the middleware that refuses requests without the right to ask."""

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if (refused := refusal(rules, request)) is not None:
            status, reason = refused
            return web.Response(
                status=status, text=reason + "\n", headers={"Allow": "GET, HEAD"} if status == 405 else {}
            )
        if request.path == OPEN:
            return _let_in(rules, request)
        return await handler(request)

    return check


def _let_in(rules: AccessRules, request: web.Request) -> web.Response:
    """Exchange the key for a cookie, and redirect to a page without the key in its address."""
    if not is_key(rules, request.query.get("key", "")):
        return web.Response(status=401, text="That is not the key. Open the address that `holdfast view` printed.\n")
    page = request.query.get("to", "/")
    response = web.Response(status=303, headers={"Location": page if _LOCAL_PATH.fullmatch(page) else "/"})
    # Not Strict: a link in a chat or an issue would then open without the cookie.
    response.set_cookie(rules.cookie, rules.key, max_age=_DAYS, httponly=True, samesite="Lax")
    return response


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Add the headers that every answer has."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
