"""Who may ask `holdfast view`, and how it starts and ends. A real server on loopback is asked."""

from __future__ import annotations

import http.client
import itertools
import os
import signal
import socket
import stat
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from holdfast.apps.view.guard import AccessRules, read_key, refusal
from tests.support.running import holdfast, server, start, wait_for, write_eval
from tests.support.viewing import Viewer, read_address, viewer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PATHS = {"/": "page", "/index.json": "data", "/static/style.css": "data", "/nothing": "missing"}
SITES = {None: True, "same-origin": True, "same-site": False, "cross-site": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of an eval."""
    path = tmp_path_factory.mktemp("guarded")
    with server() as running:
        file = write_eval(path, running.base_url, rows=3)
        for model in ("one", "two"):
            holdfast("eval", file, "--model", model, cwd=path)
    return path


@pytest.fixture(scope="module")
def shown(folder: Path) -> Iterator[Viewer]:
    """The server that the tests ask."""
    with viewer(folder, home=folder / "home") as running:
        yield running


def listed(shown: Viewer) -> list[dict[str, Any]]:
    """Return the runs of the list, in its order."""
    return [item["run"] for group in shown.json("/index.json")["evals"] for item in group["runs"]]


def expected(host: bool, origin: bool, site: str | None, navigates: bool, key: bool, method: str, kind: str) -> int:
    """Return the status that the rules promise."""
    if not host:
        return 421
    if method not in ("GET", "HEAD"):
        return 405
    if not origin or not (SITES[site] or (navigates and kind != "data")):
        return 403
    if not key:
        return 401
    return 404 if kind == "missing" else 200


def test_every_combination_of_host_origin_key_method_and_path_gets_its_answer(shown: Viewer) -> None:
    ours = f"localhost:{shown.port}"
    hosts = {ours: True, f"evil.example:{shown.port}": False}
    origins = {None: True, f"http://{ours}": True, "http://evil.example": False}
    wrong = []
    with closing(http.client.HTTPConnection("127.0.0.1", shown.port, timeout=60)) as connection:
        for (host, is_ours), (origin, same), site, navigates, key, method, (path, kind) in itertools.product(
            hosts.items(), origins.items(), SITES, (True, False), (True, False), ("GET", "HEAD", "POST"), PATHS.items()
        ):
            headers = {
                "Host": host,
                "Origin": origin,
                "Sec-Fetch-Site": site,
                "Sec-Fetch-Mode": "navigate" if navigates else "cors",
                "Sec-Fetch-Dest": "document" if navigates else "empty",
                "Cookie": f"{AccessRules(shown.key).cookie}={shown.key if key else 'guess'}",
            }
            response = ask(connection, method, path, headers)
            promised = expected(is_ours, same, site, navigates, key, method, kind)
            if response.status != promised:
                wrong.append((method, path, headers, response.status, promised))
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
            assert "Access-Control-Allow-Origin" not in response.headers
    assert wrong == []


def ask(
    connection: http.client.HTTPConnection, method: str, path: str, headers: Mapping[str, str | None]
) -> http.client.HTTPResponse:
    """Send exactly these headers."""
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in headers.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    response.read()
    return response


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:{port}", 200),
        ("LOCALHOST:{port}", 200),
        ("[::1]:{port}", 200),
        ("127.0.0.1", 421),
        ("localhost:1", 421),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:{port}", 421),
        ("localhost:{port}:{port}", 421),
        ("[::1", 421),
        ("", 421),
        (None, 400),
    ],
)
def test_only_names_of_loopback_with_the_right_port_are_ours(shown: Viewer, host: str | None, status: int) -> None:
    named = None if host is None else host.format(port=shown.port)
    with closing(http.client.HTTPConnection("127.0.0.1", shown.port, timeout=60)) as connection:
        response = ask(connection, "GET", "/", {"Host": named, "Authorization": f"Bearer {shown.key}"})
    assert response.status == status


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_only_get_and_head_are_answered(shown: Viewer, method: str) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", shown.port, timeout=60)) as connection:
        headers = {"Host": f"localhost:{shown.port}", "Authorization": f"Bearer {shown.key}"}
        response = ask(connection, method, "/", headers)
    assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


def test_the_printed_address_gives_a_cookie_and_goes_on_without_the_key(shown: Viewer) -> None:
    answer = shown.get(f"/open?key={shown.key}&to=/run/17ff", key="")
    assert answer.status == 303
    assert answer.headers["Location"] == "/run/17ff"
    cookie = answer.headers["Set-Cookie"]
    assert all(part in cookie for part in ("HttpOnly", "SameSite=Lax", "Path=/"))
    assert shown.get("/", key="", Cookie=cookie.partition(";")[0]).status == 200


@pytest.mark.parametrize(
    "page", ["//evil.example", "/\\evil.example", "https://evil.example", "", "evil", "/a\r\nX: y"]
)
def test_the_printed_address_leads_nowhere_else(shown: Viewer, page: str) -> None:
    answer = shown.get(f"/open?key={shown.key}&to={quote(page, safe='')}", key="")
    assert (answer.status, answer.headers["Location"]) == (303, "/")


@pytest.mark.parametrize("key", ["", "x", "ü", "%ff%fe"])
def test_a_wrong_key_opens_nothing(shown: Viewer, key: str) -> None:
    answer = shown.get(f"/open?key={key}", key="")
    assert answer.status == 401
    assert "Set-Cookie" not in answer.headers


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/run/../../etc/passwd",
        "/run/..%2f..%2fetc",
        "/run/ABCD",
        "//evil.example",
    ],
)
def test_no_address_is_a_path_of_the_disk(shown: Viewer, path: str) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", shown.port, timeout=60)) as connection:
        connection.request("GET", path, headers={"Authorization": f"Bearer {shown.key}"})
        response = connection.getresponse()
        assert response.status == 404
        assert "root:" not in response.read().decode()


def test_every_page_has_its_json(shown: Viewer) -> None:
    assert [run["target"] for run in listed(shown)] == ["two", "one"]
    assert "test-model" not in shown.get("/").text
    assert shown.get("/", "HEAD").text == ""


def test_an_unknown_run_is_a_page_that_offers_those_like_it(shown: Viewer) -> None:
    run = listed(shown)[0]["id"]
    answer = shown.get(f"/run/{run[:6]}/trials")
    assert answer.status == 404
    assert f'href="/run/{run}"' in answer.text


def test_the_key_is_private_and_stays(tmp_path: Path) -> None:
    key = read_key(tmp_path)
    assert stat.S_IMODE((tmp_path / "view.key").stat().st_mode) == 0o600
    assert read_key(tmp_path) == key
    assert [path.name for path in tmp_path.iterdir()] == ["view.key"]


def test_a_key_that_others_can_read_is_refused(folder: Path, tmp_path: Path) -> None:
    read_key(tmp_path)
    (tmp_path / "view.key").chmod(0o644)
    result = holdfast("view", "--no-open", cwd=folder, env={"HOLDFAST_HOME": str(tmp_path)}, check=2)
    assert "can be read by others" in result.stderr
    assert f"hint: Remove it: rm {tmp_path}/view.key" in result.stderr


def test_a_taken_port_falls_through_to_the_next(folder: Path, shown: Viewer) -> None:
    with viewer(folder, "--port", str(shown.port), home=folder / "home") as second:
        assert second.port > shown.port
        assert second.get("/").status == 200
        assert shown.get("/").status == 200


def test_two_runs_open_their_comparison_and_one_itself(folder: Path, shown: Viewer) -> None:
    second, first = (run["id"] for run in listed(shown))
    with viewer(folder, first, second) as both:
        assert both.page == f"/compare/{first}/{second}"
    with viewer(folder, first) as one:
        assert one.page == f"/run/{first}"


def test_a_run_from_elsewhere_is_shown_by_its_path(folder: Path, shown: Viewer, tmp_path: Path) -> None:
    path = folder / listed(shown)[0]["path"]
    path = path.rename(tmp_path / "copied")
    try:
        with viewer(tmp_path, path) as elsewhere:
            assert elsewhere.page is not None
            assert [run["path"] for run in listed(elsewhere)] == [str(path)]
    finally:
        path.rename(folder / "runs" / "e" / f"two-{elsewhere.page.rpartition('/')[2]}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ffff"], "no run 'ffff'"),
        ([""], "no run ''"),
        (["--runs-dir", "nothing"], "no runs in nothing"),
        (["--host", "0.0.0.0"], "would let other machines connect"),
        (["--host", "192.0.2.1", "--allow-network"], "cannot listen on 192.0.2.1"),
        (["--socket", "no/such/folder/socket"], "cannot listen on no/such/folder/socket"),
        (["--socket", "e.yaml"], "cannot listen on e.yaml"),
        (["--port", "0"], "0 is not in the range"),
    ],
)
def test_mistakes_say_what_to_do(folder: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    home = str(tmp_path / "home")  # without invocations of other tests, which a viewer would show
    result = holdfast("view", "--no-open", *arguments, cwd=folder, check=2, env={"HOLDFAST_HOME": home})
    assert message in result.stderr
    assert "error: " in result.stderr
    assert "hint: " in result.stderr
    assert (folder / "e.yaml").is_file()


def test_an_ambiguous_id_is_refused(folder: Path, shown: Viewer, tmp_path: Path) -> None:
    for name in ("m-abc1", "m-abc2"):
        (tmp_path / "runs" / "e" / name).mkdir(parents=True)
    result = holdfast("view", "--no-open", "abc", cwd=tmp_path, check=2)
    assert "'abc' is ambiguous" in result.stderr
    assert "hint: Give more digits." in result.stderr


def test_a_socket_is_private_and_answers_under_any_port(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "view.sock"
    for _ in range(2):  # the second finds the socket that the first left when it was killed
        process = start("view", "--socket", path, cwd=folder, env={"USER": "me"})
        address = read_address(process)
        assert "Run this on your own machine first:" in process.stdout.readline()
        assert f"ssh -N -L 4653:{path} me@{os.uname().nodename}" in process.stdout.readline()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        key = address.partition("key=")[2]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(
                f"GET /index.json HTTP/1.1\r\nHost: localhost:9999\r\nAuthorization: Bearer {key}\r\n"
                "Connection: close\r\n\r\n".encode()
            )
            assert client.makefile("rb").readline().startswith(b"HTTP/1.1 200")
        process.kill()
        process.communicate()


def test_over_ssh_the_forwarding_command_is_printed_and_no_browser_opens(folder: Path, tmp_path: Path) -> None:
    variables = {"SSH_CONNECTION": "198.51.100.7 50000 203.0.113.9 2222", "USER": "me", "BROWSER": "false"}
    process = start("view", cwd=folder, env={**variables, "HOLDFAST_HOME": str(tmp_path)})
    port = read_address(process).split(":")[2].partition("/")[0]
    process.stdout.readline()
    assert process.stdout.readline().strip() == f"ssh -N -p 2222 -L {port}:127.0.0.1:{port} me@203.0.113.9"
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert not (tmp_path / "view.html").exists()


def test_the_browser_gets_a_private_file_and_not_the_key(folder: Path, tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/opened.new && mv {tmp_path}/opened.new {tmp_path}/opened\n')
    browser.chmod(0o755)
    process = start("view", cwd=folder, env={"BROWSER": str(browser), "HOLDFAST_HOME": str(tmp_path)})
    address = read_address(process)
    wait_for((tmp_path / "opened").exists, "the browser")
    process.send_signal(signal.SIGINT)
    process.communicate()
    opened = (tmp_path / "opened").read_text().strip()
    assert opened == (tmp_path / "view.html").as_uri()
    assert stat.S_IMODE((tmp_path / "view.html").stat().st_mode) == 0o600
    assert address in (tmp_path / "view.html").read_text()


def test_names_of_the_network_are_those_that_were_asked_for() -> None:
    from aiohttp.test_utils import make_mocked_request

    from holdfast.apps.view.server import names_of

    def refused(host: str, rules: AccessRules) -> int | None:
        answer = refusal(rules, make_mocked_request("GET", "/open", headers={"Host": host}))
        return answer and answer[0]

    one = AccessRules("k", names_of("192.0.2.1"), 80)
    assert [refused(host, one) for host in ("192.0.2.1", "localhost", "192.0.2.2", "evil.example")] == [
        None,
        None,
        421,
        421,
    ]
    every = AccessRules("k", names_of("0.0.0.0"), 80, any_address=True)
    assert [refused(host, every) for host in ("192.0.2.2", "[2001:db8::1]", socket.gethostname(), "evil.example")] == [
        None,
        None,
        None,
        421,
    ]
