"""The application, its sockets and its end."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Final

from aiohttp import web

from holdfast.view import guard, run_list

if TYPE_CHECKING:
    from holdfast.view.site import Site

_PAGES: Final = (run_list,)
"""modules with `routes(site)`"""
_STATIC: Final = {
    path.name: path
    for folder in (files("holdfast.view").joinpath("static"), files("holdfast.pages").joinpath("templates"))
    for path in folder.iterdir()
    if path.name.endswith((".js", ".css", ".svg"))
}


def application(site: Site) -> web.Application:
    """Return the application that shows a site."""
    app = web.Application(middlewares=[guard.guard])
    app.on_response_prepare.append(guard.add_headers)
    for module in _PAGES:
        app.add_routes(module.routes(site))
    app.add_routes([web.get("/static/{name}", _static)])
    return app


async def _static(request: web.Request) -> web.StreamResponse:
    path = _STATIC.get(request.match_info["name"])
    if path is None:
        raise web.HTTPNotFound
    return web.FileResponse(str(path))
