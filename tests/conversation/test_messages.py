"""`messages` instead of a prompt, with files: by content in keys, by reference in journals."""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any

import pytest

import holdfast
from holdfast.errors import DataError
from tests.support.judges import Judges, judges
from tests.support.running import lines
from tests.support.specs import command, who, write_rows, write_spec
from tests.support.viewing import viewer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PNG = b"\x89PNG\r\n\x1a\n and more"
CAT, DOG = b"\x89PNG cat", b"\x89PNG dog"
SHOWN = [{"role": "user", "content": ["What is this?", {"image": "{{ picture }}"}]}]


@pytest.fixture
def served() -> Iterator[Judges]:
    with judges(lambda _: "an animal") as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cat.png").write_bytes(CAT)
    (tmp_path / "dog.png").write_bytes(DOG)
    return tmp_path


def spec_of(served: Judges, **keys: Any) -> dict[str, Any]:
    return {
        "name": "e",
        "samples": [{"id": "a", "picture": "cat.png"}, {"id": "b", "picture": "dog.png"}],
        "target": {"model": "m", "base_url": served.base_url},
        "messages": SHOWN,
        "graders": [{"type": "text", "contains": "animal"}],
        **keys,
    }


def sent_images(served: Judges) -> list[bytes]:
    """The contents of the images of all requests."""
    parts = [part for body in served.bodies for part in body["messages"][-1]["content"] if part["type"] == "image_url"]
    return sorted(b64decode(part["image_url"]["url"].partition(",")[2]) for part in parts)


def refuse(folder: Path, **keys: Any) -> str:
    """The error of an eval that cannot be run."""
    with pytest.raises(holdfast.HoldfastError) as caught:
        who(folder, **{"prompt": None, "messages": SHOWN, "samples": [{"id": "a", "picture": "cat.png"}], **keys})
    return str(caught.value)


class TestFiles:
    def test_files_are_sent_by_content_and_recorded_by_reference(self, folder: Path, served: Judges) -> None:
        run = holdfast.evaluate(**spec_of(served))
        assert sent_images(served) == [CAT, DOG]
        cat = next(line for line in lines(run.path / "outputs.jsonl") if line["sample"] == "a")
        [question, image] = cat["messages"][0]["content"]
        assert question == {"type": "text", "text": "What is this?"}
        assert (image["type"], image["media_type"], image["name"]) == ("image", "image/png", "cat.png")
        assert (run.path / "files" / image["digest"][7:9] / image["digest"][9:]).read_bytes() == CAT
        assert b64encode(CAT).decode() not in (run.path / "outputs.jsonl").read_text()

    def test_files_are_read_from_hugging_faces_columns_of_images(self, folder: Path, served: Judges) -> None:
        import pyarrow
        from pyarrow import parquet

        rows = [
            {"id": "a", "picture": {"bytes": PNG, "path": "whatever.jpg"}},
            {"id": "b", "picture": {"bytes": None, "path": "cat.png"}},
        ]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
        spec = spec_of(served, dataset={"path": "rows.parquet"})
        del spec["samples"]
        run = holdfast.evaluate(**spec)
        assert sent_images(served) == sorted([PNG, CAT])
        parts = {line["sample"]: line["messages"][0]["content"][1] for line in lines(run.path / "outputs.jsonl")}
        assert parts["a"]["media_type"] == "image/png" and parts["b"]["name"] == "cat.png"

    def test_files_are_shown_in_the_browser_from_the_run_directory(self, folder: Path, served: Judges) -> None:
        (folder / 'a" onerror=.png').write_bytes(PNG)
        samples = [{"id": "a", "picture": 'a" onerror=.png'}]
        run = holdfast.evaluate(**spec_of(served, samples=samples))
        with viewer(folder, run.path) as shown:
            page = shown.get(f"/run/{run.path.name.rpartition('-')[2]}/trial/a/1")
            [source] = re.findall(r'<img class="picture" loading="lazy" src="(/files/[0-9a-f]+/[0-9a-f]+)"', page.text)
            assert 'alt="a&#34; onerror=.png"' in page.text
            answer = shown.get(source)
            assert answer.headers["Content-Type"] == "image/png" and "Content-Disposition" not in answer.headers
            assert answer.text.encode(errors="surrogateescape") == PNG
            assert "sandbox" in answer.headers["Content-Security-Policy"]
            assert "attachment" in shown.get(f"{source}?download=1").headers["Content-Disposition"]

    def test_a_changed_image_reruns_only_its_row(self, folder: Path, served: Judges) -> None:
        spec = spec_of(served)
        first = holdfast.evaluate(**spec)
        assert holdfast.evaluate(**spec).path == first.path and len(served.bodies) == 2
        (folder / "dog.png").write_bytes(b"\x89PNG wolf")
        second = holdfast.evaluate(**spec)
        assert sent_images(served) == [CAT, DOG, b"\x89PNG wolf"]
        assert second.path != first.path and second.finished
        for output in lines(second.path / "outputs.jsonl"):
            digest = output["messages"][0]["content"][1]["digest"]
            assert (second.path / "files" / digest[7:9] / digest[9:]).exists()

    @pytest.mark.parametrize(("kind", "asked"), [("image", 0), ("file", 1)])
    def test_a_renamed_file_is_sent_again_only_if_the_model_sees_the_name(
        self, folder: Path, served: Judges, kind: str, asked: int
    ) -> None:
        (folder / "tiger.png").write_bytes(CAT)
        for messages in ([{"role": "user", "content": ["What?", {kind: "{{ picture }}"}]}], "talk"):
            served.bodies.clear()
            for name in ("cat.png", "tiger.png"):
                talk = [{"role": "user", "content": [{"type": kind, kind: name}]}]
                spec = spec_of(served, samples=[{"id": "a", "picture": name, "talk": talk}], messages=messages)
                assert holdfast.evaluate(**spec, runs_dir=folder / "runs").finished
            assert len(served.bodies) == 1 + asked

    def test_the_plan_says_that_a_row_has_changed(
        self, folder: Path, served: Judges, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = write_spec(folder, **{**spec_of(served), "prompt": None})
        assert command(monkeypatch, capsys, folder, "eval", path).code == 0
        (folder / "dog.png").write_bytes(b"\x89PNG wolf")
        shown = command(monkeypatch, capsys, folder, "eval", path, "--dry-run").out
        assert "1 reused, 1 to run (1 row changed)" in shown
        assert "[image: cat.png (image/png)]" in shown

    def test_may_stand_in_the_row_itself(self, folder: Path, served: Judges) -> None:
        url = f"data:image/png;base64,{b64encode(CAT).decode()}"
        sound = {"data": b64encode(b"RIFF").decode(), "format": "wav"}
        content = [
            {"type": "text", "text": "?"},
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "input_audio", "input_audio": sound},
            {"type": "image", "image": "dog.png"},
        ]
        rows = [{"id": "a", "messages": [{"role": "user", "content": content}]}]
        run = holdfast.evaluate(**spec_of(served, samples=rows, messages="{{ messages }}"))
        assert sent_images(served) == [CAT, DOG]
        [body] = served.bodies
        assert body["messages"][-1]["content"][2] == {"type": "input_audio", "input_audio": sound}
        [output] = lines(run.path / "outputs.jsonl")
        assert url not in json.dumps(output["messages"])

    def test_files_are_also_found_in_the_datasets_folder(self, folder: Path) -> None:
        write_rows(folder / "data" / "rows.jsonl", [{"id": "a", "picture": "near.png"}])
        (folder / "data" / "near.png").write_bytes(CAT)
        keys = {"samples": None, "dataset": {"path": "data/rows.jsonl"}}
        identity = who(folder, prompt=None, messages=SHOWN, graders=None, **keys)
        [sample] = identity.dataset
        assert sample.files["near.png"].read() == CAT

    def test_a_missing_file_is_refused_before_the_run_with_its_row(
        self, folder: Path, served: Judges, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_rows(folder / "rows.jsonl", [{"picture": "cat.png"}, {"picture": "cow.png"}])
        keys = {**spec_of(served), "prompt": None, "samples": None, "dataset": {"path": "rows.jsonl"}}
        ended = command(monkeypatch, capsys, folder, "eval", write_spec(folder, **keys))
        assert ended.code == 2 and not (folder / "runs").exists() and served.bodies == []
        assert f"{folder / 'rows.jsonl'}:2: image 'cow.png': no such file" in ended.err
        assert "relative to the eval file's folder" in ended.err

    @pytest.mark.parametrize(
        ("source", "reason"),
        [
            ("https://example.com/a.png", "can change at any time"),
            ("../secret.png", "outside the folders"),
            ("/etc/passwd", "outside the folders"),
            ("notes.txt", "is text/plain"),
            ("cat", "no suffix"),
            ("data:image/png;base64,§", "not of the form"),
        ],
    )
    def test_files_that_cannot_be_sent_are_refused_by_name(self, folder: Path, source: str, reason: str) -> None:
        for name in ("notes.txt", "cat"):
            (folder / name).write_text("x")
        assert reason in refuse(folder, samples=[{"id": "a", "picture": source}])

    def test_a_folder_that_the_eval_file_spells_out_may_be_anywhere(self, folder: Path) -> None:
        inside = folder / "evals"
        message = [{"role": "user", "content": [{"image": f"{folder}/{{{{ picture }}}}"}]}]
        keys = {"prompt": None, "messages": message, "graders": None}
        assert who(inside, samples=[{"picture": "cat.png"}], **keys).survey.count == 1
        with pytest.raises(DataError, match="outside the folders"):
            who(inside, samples=[{"picture": "../x.png"}], **keys)

    @pytest.mark.parametrize(
        "target",
        [
            {"http": "http://127.0.0.1:1/", "request": {"m": "{{ messages }}"}},
            {"command": ["echo", "{{ prompt }}"]},
            {"model": "m", "api": "completions"},
        ],
    )
    def test_targets_that_take_only_texts_refuse_files(self, folder: Path, target: dict[str, Any]) -> None:
        assert "takes only texts" in refuse(folder, target=target)

    def test_reach_a_python_target(self, folder: Path) -> None:
        def look(messages: list[dict[str, Any]], prompt: str, context: holdfast.Context) -> str:
            part = messages[-1]["content"][1]
            return f"{prompt} {context.read(part)!r}"

        run = holdfast.evaluate(
            name="e",
            target=look,
            samples=[{"id": "a", "picture": "cat.png"}],
            messages=SHOWN,
            graders=[{"type": "text", "contains": "What is this?\n[image: cat.png (image/png)] b'\\x89PNG cat'"}],
        )
        assert run.metrics.score == 1


class TestConversations:
    CHAT = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada, you animal."},
        {"role": "user", "content": "Who am I?"},
    )

    def test_messages_of_a_row_are_sent_unchanged(self, folder: Path, served: Judges) -> None:
        rows = [{"id": "a", "chat": self.CHAT}]
        run = holdfast.evaluate(**spec_of(served, samples=rows, messages="chat"))
        assert served.bodies[0]["messages"] == list(self.CHAT)
        [output] = lines(run.path / "outputs.jsonl")
        assert output["opening"] == 3 and output["turns"] == 1

    def test_messages_in_the_eval_file_are_templates(self, folder: Path, served: Judges) -> None:
        messages = [
            {"role": "assistant", "content": "I am {{ who }}."},
            {"role": "user", "content": "And {{ you }}?"},
        ]
        keys = {"system": "Hi {{ who }}.", "follow_ups": ["Sure?"], "samples": [{"who": "Eve", "you": "Bob"}]}
        holdfast.evaluate(**spec_of(served, messages=messages, **keys))
        first, second = served.bodies
        assert [message["content"] for message in first["messages"]] == ["Hi Eve.", "I am Eve.", "And Bob?"]
        assert second["messages"][-1]["content"] == "Sure?"

    def test_messages_before_the_prompt_are_not_replies_of_the_target(self, folder: Path, served: Judges) -> None:
        graders = [{"type": "text", "contains": "you animal", "transcript": "all"}]
        run = holdfast.evaluate(**spec_of(served, samples=[{"chat": self.CHAT}], messages="chat", graders=graders))
        assert run.metrics.score == 0

    def test_a_judge_with_transcript_all_sees_messages_before_the_prompt(self, folder: Path, served: Judges) -> None:
        judge = {"type": "prompt", "rubric": "Right?", "transcript": "all", "model": "j", "base_url": served.base_url}
        spec = spec_of(served, samples=[{"chat": self.CHAT}], messages="chat", graders=[judge])
        holdfast.evaluate(**spec, accept_errors=True)
        asked = next(body for body in served.bodies if body["model"] == "j")
        assert "Hello Ada" in asked["messages"][-1]["content"]

    @pytest.mark.parametrize(
        ("keys", "reason"),
        [
            ({"prompt": "x"}, "leave out `prompt`"),
            ({"history": "x"}, "leave out `history`"),
            ({"messages": None}, "give either `prompt` or `messages`"),
            ({"messages": [{"role": "assistant", "content": "x"}]}, "the last message is the user's"),
            ({"messages": [{"role": "user", "content": [{"image": "a", "text": "b"}]}]}, "must be one of"),
            ({"messages": "chat", "samples": [{"chat": [{"role": "assistant", "content": "x"}]}]}, "messages[:-1]"),
            ({"messages": "chat", "samples": [{"chat": "x"}]}, "not a list of messages"),
            ({"messages": "chat", "samples": [{"chat": [{"role": "you", "content": "x"}]}]}, "`role` and a `content`"),
            ({"messages": "chat", "samples": [{"id": "a"}]}, "no sample has a field 'chat'"),
            ({"messages": [{"role": "user", "content": "{{ x }}"}]}, "no sample has a field 'x'"),
        ],
    )
    def test_messages_that_do_not_form_a_conversation_are_refused(
        self, folder: Path, keys: dict[str, Any], reason: str
    ) -> None:
        assert reason in refuse(folder, **keys)

    def test_a_list_in_a_prompt_is_refused_with_the_key_to_use(
        self, folder: Path, served: Judges, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        keys = {"samples": [{"messages": self.CHAT}], "prompt": "{{ messages }}", "messages": None}
        ended = command(monkeypatch, capsys, folder, "eval", write_spec(folder, **{**spec_of(served), **keys}))
        assert ended.code == 2 and "`messages: x` instead of `prompt`" in ended.err


def test_recorded_tool_calls_before_the_prompt_are_not_the_targets(folder: Path, served: Judges) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "nothing"},
        {"role": "user", "content": "And now?"},
    ]
    graders = [{"type": "behavior", "max_tool_calls": 0}]
    run = holdfast.evaluate(**spec_of(served, samples=[{"chat": chat}], messages="chat", graders=graders))
    assert served.bodies[0]["messages"] == chat
    assert run.metrics.score == 1
