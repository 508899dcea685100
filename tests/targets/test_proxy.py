"""Agents that nobody can look into: their model calls go through a proxy that records, counts and replays them."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import aiohttp
import pytest
from aiohttp import web

from holdfast.engine.calls import RecordedCalls
from holdfast.engine.replay import Replay
from holdfast.spec.target_schema import CommandTarget
from holdfast.targets.proxy import Proxy
from tests.support.breaking import (
    kept,
    nothing_left,  # noqa: F401 - a fixture
)
from tests.support.lab import Lab
from tests.support.running import Server, lines, module_server, start, wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

needs_framework = pytest.mark.skipif(find_spec("pydantic_ai") is None, reason="a third-party agent framework")
KEY = "sk-a-very-secret-key"


provider = module_server(tool_calls=2)
"""A model that calls two tools before its answer, if it is offered any."""


@pytest.fixture
def lab(tmp_path: Path, provider: Server) -> Iterator[Lab]:
    provider.reset()
    yield Lab(tmp_path, provider, rows=[{"id": "a", "question": "tea", "expected": "x"}])
    provider.control(latency=0, status=200, fail={}, fail_first=0, usage=True)


CLIENT = """
import json, os, sys, time, urllib.error, urllib.request
from pathlib import Path

here = Path(__file__).parent
base = os.environ["OPENAI_BASE_URL"]

def ask(prompt, path="/chat/completions", **more):
    body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": prompt}], **more}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    with urllib.request.urlopen(request) as response:
        return response.read().decode()

def text(prompt, **more):
    return json.loads(ask(prompt, **more))["choices"][0]["message"]["content"]
"""


def use(lab: Lab, source: str, **keys: Any) -> None:
    """A program that asks with nothing but Python."""
    (lab.folder / "client.py").write_text(CLIENT)
    (lab.folder / "agent.py").write_text("from client import *\n" + source)
    lab.spec["target"] = {
        "command": [sys.executable, "agent.py", "{{ prompt }}"],
        "base_url": lab.provider.base_url,
        **keys,
    }


THREE = "print(text(sys.argv[1]), text('b'), text('c'))\n"


def test_a_programs_calls_are_recorded_counted_and_priced(lab: Lab) -> None:
    use(lab, THREE)
    done = lab.eval(env={"OPENAI_API_KEY": KEY})
    (output,) = kept(done.run)
    assert output["output"] == "tea b c" and done.asked == 3
    assert output["usage"]["requests"] == 3
    assert (output["usage"]["input_tokens"], output["usage"]["output_tokens"]) == (3, 3)
    assert output["usage"]["cost"] == pytest.approx((3 * 0.15 + 3 * 0.60) / 1e6)
    assert [step["kind"] for step in kept(done.run, "steps")] == ["model"] * 3
    assert not [path for path in lab.folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert KEY not in done.out + done.err


def test_prices_of_the_eval_file_hold_for_agents_too(lab: Lab) -> None:
    use(lab, THREE.replace("text('b')", "text('b', model='own')"))
    lab.spec["prices"] = {"own": {"input": 1e6, "output": 0}}
    assert kept(lab.eval().run)[0]["usage"]["cost"] == pytest.approx(1, abs=0.001)


@pytest.mark.faults
def test_a_killed_programs_calls_are_answered_from_the_record(lab: Lab, provider: Server) -> None:
    use(lab, "print(text(sys.argv[1]), text('b'))\nhere.joinpath('two').touch()\nprint(text('c'))\n")
    provider.control(latency=0.3)
    lab.write()
    process = start("eval", lab.eval_file.name, cwd=lab.folder)
    wait_for(lambda: provider.requests == 3, "the third call in flight")
    process.kill()
    process.communicate()
    provider.control(latency=0)
    done = lab.eval()
    assert provider.stats()["asked"] == {"tea": 1, "b": 1, "c": 2}
    (output,) = kept(done.run)
    assert output["output"] == "tea b\nc" and output["usage"]["requests"] == 3


def test_a_program_that_fails_is_run_again_without_asking_again(lab: Lab) -> None:
    use(
        lab,
        "said = text(sys.argv[1]) + text('b')\n"
        "if not (here / 'once').exists():\n    (here / 'once').touch()\n    sys.exit('stumbled')\n"
        "print(said)\n",
    )
    done = lab.eval()
    assert done.asked == 2 and kept(done.run)[0]["output"] == "teab"
    (error,) = lines(done.run / "errors.jsonl")
    assert "stumbled" in error["message"]


STREAM = "print(ask(sys.argv[1] + ' and more', stream=True{more}))\n"


@pytest.mark.parametrize("wants_usage", [False, True])
def test_streams_are_handed_on_recorded_and_counted(lab: Lab, provider: Server, wants_usage: bool) -> None:
    use(lab, STREAM.replace("{more}", ", stream_options={'include_usage': True}" if wants_usage else ""))
    done = lab.eval()
    (output,) = kept(done.run)
    events = [json.loads(line[6:]) for line in output["output"].splitlines() if line.startswith("data: {")]
    assert output["output"].endswith("data: [DONE]")
    content = "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
    assert content.split() == ["tea", "and", "more"]
    assert any(event.get("usage") for event in events) == wants_usage, "what was not asked for does not come"
    assert output["usage"]["input_tokens"] == 3 and output["usage"]["cost"] > 0


def test_a_stream_from_the_record_is_the_stream_that_came(lab: Lab, provider: Server) -> None:
    use(
        lab,
        "said = ask(sys.argv[1] + ' and more', stream=True)\n"
        "first = here / 'first.txt'\n"
        "if not first.exists():\n    first.write_text(said)\n    sys.exit(1)\n"
        "print(said == first.read_text())\n",
    )
    done = lab.eval()
    assert done.asked == 1 and kept(done.run)[0]["output"] == "True"


def test_a_trials_url_is_of_no_use_when_the_trial_is_over(lab: Lab) -> None:
    use(
        lab,
        "import client\n"
        "urls = here / 'urls.txt'\n"
        "for client.base in urls.read_text().split() if urls.exists() else []:\n"
        "    try:\n        text('stolen')\n"
        "    except urllib.error.HTTPError as error:\n        print(error.code, error.read().decode())\n"
        "with urls.open('a') as file:\n    file.write(base + '\\n')\n",
    )
    lab.rows = [{"id": name, "question": name, "expected": "x"} for name in "ab"]
    lab.spec["limits"] = {"concurrency": 1}
    done = lab.eval()
    outputs = {output["sample"]: output["output"] for output in kept(done.run)}
    assert outputs["b"].startswith("404 ") and "a trial that is over" in outputs["b"]
    assert done.asked == 0


def test_rate_limits_reach_the_program_with_the_time_to_wait(lab: Lab, provider: Server) -> None:
    use(
        lab,
        "while True:\n"
        "    try:\n        print(text(sys.argv[1]))\n        break\n"
        "    except urllib.error.HTTPError as error:\n"
        "        print(error.code, error.headers['Retry-After'], json.load(error)['error'])\n",
    )
    provider.control(fail={"429": 1.0}, fail_first=2)
    done = lab.eval()
    assert kept(done.run)[0]["output"].splitlines() == ["429 0.05 {'message': 'told to fail'}"] * 2 + ["tea"]
    assert lines(done.run / "errors.jsonl") == []
    assert kept(done.run)[0]["usage"]["requests"] == 1


def test_an_answer_after_an_unresolved_outage_does_not_count(lab: Lab, provider: Server) -> None:
    use(lab, "try:\n    print(text(sys.argv[1]))\nexcept urllib.error.HTTPError:\n    print('I do not know')\n")
    lab.spec["limits"] = {"retries": 1}
    provider.control(status=503)
    done = lab.eval(check=3)
    assert kept(done.run) == [] and kept(done.run, "grades") == []
    assert {error["kind"] for error in lines(done.run / "errors.jsonl")} == {"server"}
    provider.control(status=200)
    assert kept(lab.eval().run)[0]["output"] == "tea"


@pytest.mark.parametrize("answers", [True, False])
def test_a_refused_key_stops_the_run_and_is_in_no_file(lab: Lab, provider: Server, answers: bool) -> None:
    body = "    print('no')\n" if answers else "    raise\n"
    use(lab, "try:\n    print(text(sys.argv[1]))\nexcept urllib.error.HTTPError:\n" + body)
    lab.rows = [{"id": str(number), "question": str(number), "expected": "x"} for number in range(30)]
    lab.spec["limits"] = {"concurrency": 1}
    provider.control(status=401)
    done = lab.eval(check=3, env={"OPENAI_API_KEY": KEY})
    assert done.asked == 1 and kept(done.run) == []
    assert "answered 401" in done.out and "Check the key in OPENAI_API_KEY" in done.out
    assert not [path for path in lab.folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_a_server_that_is_not_there_stops_the_run(lab: Lab) -> None:
    use(lab, "print(text(sys.argv[1]))\n", base_url="http://127.0.0.1:9/v1")
    done = lab.eval(check=3)
    assert "127.0.0.1:9 refuses connections" in done.out
    assert len(lines(done.run / "errors.jsonl")) == 1


def test_a_program_may_go_without_the_proxy(lab: Lab) -> None:
    use(lab, "print(base)\n", proxy=False)
    done = lab.eval(env={"OPENAI_BASE_URL": "http://127.0.0.1:1/own"})
    assert kept(done.run)[0]["output"] == "http://127.0.0.1:1/own"


# Only the proxy, in front of a server with features that the test server lacks


class Notes:
    """Stands in for the keeper: the moment of each record can be held back."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.written = asyncio.Event()

    async def step(self, record: Any) -> None:
        await self.may_write.wait()
        self.kept.append(record)
        self.written.set()


Handler: TypeAlias = "Callable[[web.Request], Awaitable[web.StreamResponse]]"


@asynccontextmanager
async def through_proxy(answer: Handler) -> AsyncIterator[tuple[aiohttp.ClientSession, str, Any, Notes]]:
    """Yield a client, the URL of a trial, the trial's calls, and its record."""
    upstream = web.Application()
    upstream.router.add_route("*", "/v1/{path:.*}", answer)
    runner = web.AppRunner(upstream)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    block = CommandTarget(command=["x"], base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    job: Any = SimpleNamespace(key="k", sample=SimpleNamespace(id="s"), trial=1)
    notes = Notes()
    replay = Replay(job, notes, [], lambda _: None)  # type: ignore[arg-type]
    calls = await RecordedCalls.begin(replay, 1)
    try:
        async with Proxy(block, {}) as proxy, aiohttp.ClientSession() as client:
            with proxy.serving(calls) as url:  # type: ignore[arg-type]
                yield client, url, calls, notes
    finally:
        await runner.cleanup()


BODY = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "?"}], "stream": True}


def chunk(content: str, **more: Any) -> bytes:
    event = {"choices": [{"index": 0, "delta": {"content": content}, **more}]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


async def test_a_stream_comes_as_it_is_made_but_ends_only_when_it_is_on_record() -> None:
    middle = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(chunk("first"))
        await middle.wait()  # until the agent has seen the first part
        await response.write(chunk("last") + chunk("", finish_reason="stop") + b"data: [DONE]\n\n")
        return response

    async with through_proxy(answer) as (client, url, _, notes):
        notes.may_write.clear()
        async with client.post(url + "/chat/completions", json=BODY) as response:
            assert b"first" in await response.content.readline()
            middle.set()
            seen = b""
            while b"last" not in seen:
                seen += await response.content.readline()
            assert b"finish_reason" not in seen and notes.kept == []
            notes.may_write.set()
            rest = await response.read()
            assert b"finish_reason" in rest and rest.endswith(b"data: [DONE]\n\n")
        (step,) = notes.kept
        assert step.kind == "model" and len(step.response["events"]) == 3


RESPONSES = {"model": "gpt-4o-mini", "input": "?", "prompt": {"id": "p"}, "stream": True}


@pytest.mark.parametrize("last", ["completed", "incomplete", "failed", None])
async def test_a_stream_of_responses_is_recorded_only_with_an_event_that_ends_an_answer(last: str | None) -> None:
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        events: list[Any] = [{"type": "response.created"}, {"type": "response.output_text.delta", "delta": "x"}]
        if last:
            events.append({"type": f"response.{last}", "response": {"status": last, "output": []}})
        data = b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), json.dumps(e).encode()) for e in events)
        return web.Response(body=data, content_type="text/event-stream")

    async with through_proxy(answer) as (client, url, _, notes):
        if last in ("failed", None):
            with pytest.raises(aiohttp.ClientError):
                async with client.post(url + "/responses", json=RESPONSES) as response:
                    await response.read()
        else:
            async with client.post(url + "/responses", json=RESPONSES) as response:
                assert f"response.{last}".encode() in await response.read()
        assert len(notes.kept) == (last in ("completed", "incomplete"))
        assert asked == [RESPONSES], "options of chat completions are unknown there"


@pytest.mark.parametrize("event", [b"data: 7\n\n", b'data: {"choices": 7}\n\n', b"data: {{\n\n"])
async def test_a_stream_of_something_else_is_an_outage_and_no_crash(event: bytes, caplog: Any) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=event + b"data: [DONE]\n\n", content_type="text/event-stream")

    async with through_proxy(answer) as (client, url, _, notes):
        async with client.post(url + "/chat/completions", json=BODY) as response:
            assert response.status == 502
        assert notes.kept == []
    assert caplog.records == []


async def test_the_list_of_models_is_free_and_known_to_be() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "gpt-4o-mini"}], "asked": request.query_string})

    async with through_proxy(answer) as (client, url, calls, _):
        async with client.get(url + "/models?limit=3") as response:
            assert (await response.json())["asked"] == "limit=3"
        assert calls.usage.cost == 0 and calls.usage.input_tokens == 0


async def test_other_paths_and_what_they_used_go_through_too() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.path == "/v1/responses"
        return web.json_response({"output": [], "usage": {"input_tokens": 5, "output_tokens": 7}})

    async with through_proxy(answer) as (client, url, calls, _):
        async with client.post(url + "/responses", json={"model": "gpt-4o-mini", "input": "?"}) as response:
            assert response.status == 200
        async with client.post(url + "/responses", data=b"not json") as response:
            assert response.status == 400
        assert (calls.usage.input_tokens, calls.usage.output_tokens) == (5, 7) and calls.usage.cost > 0
        calls.raise_outage()  # a wrong request is the agent's own affair


def upstream(request: web.Request, body: Any) -> web.StreamResponse | dict[str, Any]:
    """A server as others are: models, embeddings, and its own words for what it refuses."""
    path = request.path.removeprefix("/v1/")
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    if path == "models":
        return {"object": "list", "data": [{"id": "gpt-4o-mini", "object": "model", "created": 1, "owned_by": "x"}]}
    if path == "embeddings":
        return {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}], "usage": usage}
    if path != "chat/completions":
        return web.json_response({"detail": "Not Found"}, status=404)
    if "long" in str(body):
        error = {"message": "too long", "type": "invalid_request_error", "param": "messages", "code": "too_long"}
        return web.json_response({"error": error}, status=400)
    message = {"role": "assistant", "content": f"{len(str(body))} {request.query_string}"}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    about = {"id": "r", "created": 1, "model": "gpt-4o-mini", "object": "chat.completion"}
    return {**about, "choices": choices, "usage": {**usage, "completion_tokens": 1}}


async def answer_as_others_do(request: web.Request) -> web.StreamResponse:
    reply = upstream(request, await request.json() if request.can_read_body else None)
    return web.json_response(reply) if isinstance(reply, dict) else reply


@needs_framework
async def test_the_openai_client_works_with_the_proxy() -> None:
    import openai

    async with through_proxy(answer_as_others_do) as (_, url, calls, _):
        client: Any = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        async with client:
            assert [model.id async for model in client.models.list()] == ["gpt-4o-mini"]
            vectors = await client.embeddings.create(model="gpt-4o-mini", input="?", encoding_format="float")
            assert vectors.data[0].embedding == [0.5]
            assert (calls.usage.input_tokens, calls.usage.output_tokens) == (3, 0) and calls.usage.cost > 0
            big = [{"role": "user", "content": "x" * 500_000}]
            many = await asyncio.gather(
                *(client.chat.completions.create(model="m", messages=big, seed=number) for number in range(8))
            )
            assert [int(one.choices[0].message.content.split()[0]) > 500_000 for one in many] == [True] * 8
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "long"}])
            assert (refused.value.code, refused.value.param) == ("too_long", "messages")
            with pytest.raises(openai.NotFoundError) as missing:
                await client.responses.create(model="m", input="?")
            assert missing.value.response.json() == {"detail": "Not Found"}
            with pytest.raises(openai.APIStatusError, match="only GET and POST") as method:
                await client.files.delete("file-1")
            assert method.value.status_code == 405
        calls.raise_outage()  # none of it is an outage: an agent may try what there is


async def test_refusals_of_the_proxy_have_the_shape_that_clients_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.targets.proxy._MOST_BYTES", 1000)

    async with through_proxy(answer_as_others_do) as (client, url, calls, notes):

        async def refused(method: str, path: str, **keys: Any) -> tuple[int, str]:
            async with client.request(method, path, **keys) as response:
                error = (await response.json())["error"]
                assert error.keys() == {"message", "type", "param", "code"}
                return response.status, error["message"]

        base = url.removesuffix("/v1")
        status, message = await refused("POST", f"{base}x/v1/chat/completions", json={})
        assert status == 404 and "x/v1/chat/completions: this is no base URL" in message
        assert (await refused("POST", f"{base}/v1/", json={}))[0] == 404
        async with client.head(base) as response:
            assert response.status == 200
        async with client.options(f"{url}/messages") as response:
            assert response.status == 200 and "POST" in response.headers["Allow"]
        assert await refused("PUT", f"{url}/models", json={}) == (405, "PUT is not passed on: only GET and POST are")
        assert (await refused("POST", f"{url}/files", data=b"--form"))[0] == 400
        status, message = await refused("POST", f"{url}/chat/completions", data=b'"' + b"x" * 2000 + b'"')
        assert status == 413 and "more than 1,000 bytes" in message
        calls.raise_outage()
        assert notes.kept == []


async def test_requests_in_pieces_and_with_a_query_go_through_as_they_are() -> None:
    async with through_proxy(answer_as_others_do) as (client, url, _, _):

        async def pieces() -> Any:
            for piece in (b'{"model": "m", ', b'"messages": []}'):
                yield piece

        async with client.post(f"{url}//chat/completions?api-version=2", data=pieces()) as response:
            assert (await response.json())["choices"][0]["message"]["content"].endswith(" api-version=2")


@pytest.mark.parametrize("options", [None, {"chunk_size": 1}, "all"])
async def test_options_of_a_stream_are_kept(options: Any) -> None:
    seen: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append((await request.json())["stream_options"])
        return web.Response(body=chunk("a", finish_reason="stop"), content_type="text/event-stream")

    body = {**BODY, "stream_options": options}
    async with (
        through_proxy(answer) as (client, url, _, _),
        client.post(url + "/chat/completions", json=body) as response,
    ):
        assert response.status == 200 and b"finish_reason" in await response.read()
    assert seen == ["all" if options == "all" else {**(options or {}), "include_usage": True}]


async def test_a_call_that_an_agent_does_not_wait_for_is_recorded(caplog: Any) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.set()
        await gone.wait()
        body = chunk("first") + chunk("", finish_reason="stop") + b"data: [DONE]\n\n"
        return web.Response(body=body, content_type="text/event-stream")

    async with through_proxy(answer) as (client, url, calls, notes):
        impatient = asyncio.create_task(client.post(url + "/chat/completions", json=BODY).__aenter__())
        await asked.wait()
        impatient.cancel()
        await asyncio.wait({impatient})
        gone.set()
        await notes.written.wait()
        calls.raise_outage()
        async with client.get(url + "/gone") as response:
            assert response.status == 502  # the server has no JSON there; and the proxy goes on serving
    assert caplog.records == []


# A third-party framework

FRAMEWORK = '''
import sys
from pathlib import Path
from pydantic_ai import Agent

agent = Agent("openai-chat:test-model", system_prompt="Be brief.")

@agent.tool_plain
def price(thing: str) -> str:
    """What something costs."""
    with Path(__file__).with_name("calls.txt").open("a") as file:
        file.write(thing + "\\n")
    return f"{thing} costs 1"

print(agent.run_sync(sys.argv[1]).output)
'''


def use_framework(lab: Lab) -> None:
    (lab.folder / "agent.py").write_text(FRAMEWORK)
    lab.rows[0]["expected"] = "tea: tea 0 costs 1; tea 1 costs 1"
    command = [sys.executable, "agent.py", "{{ prompt }}"]
    lab.spec["target"] = {"command": command, "base_url": lab.provider.base_url}


@pytest.mark.faults
@needs_framework
def test_a_killed_framework_from_pypi_resumes_in_the_middle(lab: Lab, provider: Server) -> None:
    use_framework(lab)
    lab.write()
    provider.control(latency=0.5)
    process = start("eval", lab.eval_file.name, cwd=lab.folder)
    wait_for(lambda: provider.requests == 2, "the call after the first that was recorded")
    process.kill()
    process.communicate()
    provider.control(latency=0)
    run = lab.eval().run
    assert provider.stats()["asked"] == {"tea": 1, "tea #1": 2, "tea #2": 1}
    assert json.loads((run / "results.json").read_text())["trials"][0]["status"] == "passed"
    (output,) = kept(run)
    messages = output["messages"]
    assert [message["role"] for message in messages] == ["user", *["assistant", "tool"] * 2, "assistant"]
    assert messages[1]["tool_calls"][0]["function"]["name"] == "price"
    assert messages[2]["content"] == "tea 0 costs 1"
    assert output["usage"]["requests"] == 3


@needs_framework
def test_a_framework_inside_a_python_agent_is_recorded_through_the_trials_url(lab: Lab, provider: Server) -> None:
    (lab.folder / "agent.py").write_text(
        "from pydantic_ai import Agent\n"
        "from pydantic_ai.models.openai import OpenAIChatModel\n"
        "from pydantic_ai.providers.openai import OpenAIProvider\n"
        "async def reply(prompt, context):\n"
        "    provider = OpenAIProvider(base_url=context.base_url, api_key='none')\n"
        "    agent = Agent(OpenAIChatModel('gpt-4o-mini', provider=provider))\n"
        "    async with agent.run_stream(prompt + ' and more') as result:\n"
        "        return await result.get_output()\n"
    )
    lab.spec["target"] = {"python": "agent.py:reply", "base_url": provider.base_url}
    done = lab.eval()
    (output,) = kept(done.run)
    assert output["output"].split() == ["tea", "and", "more"]
    assert output["usage"]["requests"] == 1 and output["usage"]["cost"] > 0
    assert [step["kind"] for step in kept(done.run, "steps")] == ["model"]
