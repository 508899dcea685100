"""The application, its sockets and its end."""

from __future__ import annotations

import asyncio
import errno
import socket
import stat
import traceback
from importlib.resources import files
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from aiohttp import web

from holdfast.apps.view import compare_pages, jobs, live, run_list, run_pages, trial_list
from holdfast.apps.view.guard import LOOPBACK, add_headers, guard
from holdfast.apps.view.site import ProblemPage, problem_page
from holdfast.engine.signals import Signals
from holdfast.errors import HoldfastError, UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from aiohttp.typedefs import Middleware

    from holdfast.apps.view.guard import AccessRules
    from holdfast.apps.view.site import Site

_PAGES: Final = (run_list, trial_list, run_pages, compare_pages, live, jobs)
"""modules with `routes(site)`"""
_STATIC: Final = {
    path.name: str(path)
    for folder in (files("holdfast.apps.view").joinpath("static"), files("holdfast.pages").joinpath("templates"))
    for path in folder.iterdir()
    if path.name.endswith((".js", ".css", ".svg"))
}
_PORTS: Final = 100
"""number of consecutive ports that are tried"""


def application(site: Site, rules: AccessRules) -> web.Application:
    """Return the application that shows a site to those who may see it."""
    app = web.Application(middlewares=[guard(rules), _problems(site)])
    app.on_response_prepare.append(add_headers)
    app.on_shutdown.append(site.end_streams)
    for module in _PAGES:
        app.add_routes(module.routes(site))
    app.add_routes([web.get("/static/{name}", _static)])
    return app


async def _static(request: web.Request) -> web.StreamResponse:
    path = _STATIC.get(request.match_info["name"])
    if path is None:
        raise web.HTTPNotFound
    return web.FileResponse(path)


def _problems(site: Site) -> Middleware:
    @web.middleware
    async def show(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Show a page for errors, too: unknown addresses, and pages that could not be made."""
        try:
            return await handler(request)
        except web.HTTPNotFound:
            problem, status = ProblemPage("Not found", "There is no page at this address."), 404
        except HoldfastError as error:
            problem, status = problem_page(error)
        except FileNotFoundError as error:
            problem, status = ProblemPage("Not found", f"{error.filename} was removed while it was read."), 404
        except web.HTTPException:
            raise
        except Exception:
            traceback.print_exc()
            problem, status = (
                ProblemPage("This page cannot be shown", "This is a bug in Holdfast, please report it."),
                500,
            )
        return site.answer(request, "problem.html", problem, status)

    return show


def is_loopback(host: str) -> bool:
    """True if only this machine can reach an address."""
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Listen on a port, or on the next one that is free."""
    for candidate in range(port, min(port + _PORTS, 65536)):
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host, candidate, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(address)
                listener.listen(128)
            except OSError:
                listener.close()
                raise
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise UsageError(f"cannot listen on {host}: {error.strerror}", remedy="Give another --host.") from error
        else:
            return listener
    raise UsageError(f"no free port from {port} on", remedy="Give another one with --port.")


def listen_on_socket(path: Path) -> socket.socket:
    """Listen on a Unix socket that only this user may open."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        _remove_dead_socket(path)
        listener.bind(str(path))
        path.chmod(0o600)  # nobody can connect before `listen`
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {path}: {error.strerror or error}", remedy="Give another path with --socket."
        ) from error
    return listener


def _remove_dead_socket(path: Path) -> None:
    """Remove the socket of a server that was killed; a server that answers keeps its own."""
    if not path.exists() or not stat.S_ISSOCK(path.lstat().st_mode):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def names_of(host: str) -> frozenset[str]:
    """Return the names under which a server that listens on an address may be asked for."""
    return LOOPBACK | {f"[{host}]" if ":" in host else host.lower(), socket.gethostname().lower()}


async def serve(site: Site, rules: AccessRules, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Answer requests until a signal ends the server, even while pages follow a run."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    runner = web.AppRunner(application(site, rules), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)

    def stop(_: int) -> None:
        loop.call_soon_threadsafe(stopped.set)

    with Signals(stop):
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            site.prepare()
            ready()
            await stopped.wait()
        finally:
            await runner.cleanup()
            site.close()
