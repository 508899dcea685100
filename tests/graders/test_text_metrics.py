"""Text metrics: the numbers of the libraries that define them, for each answer and for the whole run."""

from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.errors import AttemptError, ConfigError
from holdfast.graders.build import build_graders
from tests.support.lazy import LazyModule
from tests.support.running import lines
from tests.support.specs import grade, load

levenshtein = LazyModule("rapidfuzz.distance.Levenshtein")
sacrebleu = LazyModule("sacrebleu.metrics")

SAID = ["the cat sat on a mat", "it rains", "a completely different answer"]
REFERENCES = [
    ["the cat sat on the mat", "a cat was sitting on the mat"],
    ["it is raining", "it rains today"],
    ["the right answer", "another right answer"],
]


class TestOneAnswer:
    @pytest.mark.parametrize(
        ("block", "answer", "expected", "score"),
        [
            ({"type": "bleu"}, "the cat sat on the mat", REFERENCES[0], 1),
            ({"type": "bleu"}, "nothing", REFERENCES[0], 0),
            ({"type": "bleu", "ignore_case": True}, "The Cat sat on the mat", REFERENCES[0], 1),
            ({"type": "chrf"}, "it rains today", REFERENCES[1], 1),
            ({"type": "chrf", "word_order": 2}, "it rains today", REFERENCES[1], 1),
            ({"type": "rouge"}, "the cat", "the cat sat", 0.8),
            ({"type": "rouge", "variant": "rouge1"}, "sat the cat", "the cat sat", 1),
            ({"type": "rouge", "variant": "rouge2"}, "sat the cat", "the cat sat", 0.5),
            ({"type": "rouge", "stem": True}, "cats sit", "cat sits", 1),
            ({"type": "rouge", "tokenize": "characters"}, "東京", "東京都庁", 2 / 3),
            ({"type": "rouge", "tokenize": "whitespace"}, "東京 は 雨", "東京 は 晴れ", 2 / 3),
            ({"type": "rouge", "tokenize": "whitespace"}, "The cat", "the cat", 0.5),
            ({"type": "rouge", "tokenize": "whitespace", "ignore_case": True}, "The cat", "the cat", 1),
            ({"type": "char_f1"}, "abcd", ["abcd", "ABCD"], 1),
            ({"type": "char_f1"}, " abc\n", "abc", 1),
            ({"type": "char_f1", "strip": False}, " abc\n", "abc", 0.75),
            ({"type": "char_f1"}, "efgh", ["efGH"], 0.5),
            ({"type": "wer"}, "the cat sat", "the cat sat down", 0.75),
            ({"type": "wer"}, "a b c d e f", "x", 0),
            ({"type": "cer"}, "abxd", ["zzzz", "abcd"], 0.75),
        ],
    )
    def test_the_score_of_an_answer(self, tmp_path: Path, block: Any, answer: str, expected: Any, score: Any) -> None:
        verdict = grade(tmp_path, block, answer, expected=expected)
        assert not isinstance(verdict, AttemptError), verdict
        assert verdict.score == pytest.approx(score)

    def test_japanese_words_are_sacrebleus(self, tmp_path: Path) -> None:
        pytest.importorskip("MeCab", reason="pip install 'sacrebleu[ja]'")
        block = {"type": "rouge", "variant": "rouge1", "tokenize": "ja-mecab"}
        # 東京 都庁 に 行く, and 東京 に 住む
        assert grade(tmp_path, block, "東京都庁に行く", expected="東京に住む").score == pytest.approx(4 / 7)

    def test_japanese_words_without_the_packages_name_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
        with pytest.raises(ConfigError, match="ja-mecab") as caught:
            build_graders(load(tmp_path, graders=[{"type": "rouge", "tokenize": "ja-mecab"}]))
        assert caught.value.remedy == "pip install 'sacrebleu[ja]'"

    def test_stems_are_for_words(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="stem is for `tokenize: words`"):
            load(tmp_path, graders=[{"type": "rouge", "tokenize": "whitespace", "stem": True}])

    def test_sentence_scores_are_the_librarys(self, tmp_path: Path) -> None:
        for answer, references in zip(SAID, REFERENCES, strict=True):
            bleu = sacrebleu.BLEU(effective_order=True).sentence_score(answer, references).score / 100
            chrf = sacrebleu.CHRF().sentence_score(answer, references).score / 100
            assert grade(tmp_path, {"type": "bleu"}, answer, expected=references).score == pytest.approx(bleu)
            assert grade(tmp_path, {"type": "chrf"}, answer, expected=references).score == pytest.approx(chrf)

    @pytest.mark.parametrize(
        ("block", "length"),
        [
            ({"type": "rouge"}, 30_000),
            ({"type": "rouge", "tokenize": "characters"}, 30_000),
            ({"type": "char_f1"}, 160_000),
            ({"type": "cer"}, 160_000),
        ],
    )
    def test_texts_that_would_hold_up_the_run_are_not_compared(self, tmp_path: Path, block: Any, length: int) -> None:
        error = grade(tmp_path, block, "a b " * (length // 4), expected="b a " * (length // 4))
        assert isinstance(error, AttemptError) and "too long to compare by" in error.message

    def test_an_error_rate_above_1_is_in_the_details(self, tmp_path: Path) -> None:
        verdict = grade(tmp_path, {"type": "wer"}, "a b c", expected="x")
        assert verdict.score == 0 and verdict.details == {"error_rate": 3.0}

    @pytest.mark.parametrize("kind", ["bleu", "chrf", "rouge", "char_f1", "wer", "cer"])
    @pytest.mark.parametrize("expected", ["  ", [], ["a", ""], None])
    def test_a_missing_reference_is_an_error(self, tmp_path: Path, kind: str, expected: Any) -> None:
        assert isinstance(grade(tmp_path, {"type": kind}, "x", expected=expected), AttemptError)

    @pytest.mark.parametrize("kind", ["bleu", "chrf", "rouge", "char_f1", "wer", "cer"])
    def test_an_empty_answer_scores_nothing(self, tmp_path: Path, kind: str) -> None:
        assert grade(tmp_path, {"type": kind}, "", expected="some words").score == 0

    def test_rouge_reports_that_it_finds_no_words_in_other_scripts(self, tmp_path: Path) -> None:
        error = grade(tmp_path, {"type": "rouge"}, "東京", expected="東京都庁")
        assert isinstance(error, AttemptError) and "tokenize: characters" in error.message

    def test_a_missing_package_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("holdfast.graders.build.find_spec", lambda _: None)
        with pytest.raises(ConfigError) as caught:
            build_graders(load(tmp_path, graders=[{"type": "rouge"}]))
        assert caught.value.remedy == "pip install rouge-score"


def test_run_wide_metrics_are_computed_from_summed_counts(tmp_path: Path) -> None:
    rows = [
        {"id": str(n), "say": answer, "expected": refs}
        for n, (answer, refs) in enumerate(zip(SAID, REFERENCES, strict=True))
    ]
    graders = [{"type": kind} for kind in ("bleu", "chrf", "rouge", "wer", "cer")]

    def evaluate(rows: Any, **keys: Any) -> Any:
        return holdfast.evaluate(
            name="overlap",
            samples=rows,
            prompt="{{ say }}",
            target={"command": ["printf", "%s", "{{ prompt }}"]},
            graders=graders,
            runs_dir=tmp_path / "runs",
            **keys,
        )

    run = evaluate(rows)
    by_grader = run.metrics.graders
    transposed = [list(column) for column in zip(*REFERENCES, strict=True)]
    assert by_grader["bleu"].totals["corpus"] == pytest.approx(
        sacrebleu.BLEU().corpus_score(SAID, transposed).score / 100
    )
    assert by_grader["chrf"].totals["corpus"] == pytest.approx(
        sacrebleu.CHRF().corpus_score(SAID, transposed).score / 100
    )
    best = [
        min((levenshtein.distance(ref.split(), answer.split()) / len(ref.split()), len(ref.split())) for ref in refs)
        for answer, refs in zip(SAID, REFERENCES, strict=True)
    ]
    rate = sum(share * length for share, length in best) / sum(length for _, length in best)
    assert by_grader["wer"].totals["error_rate"] == pytest.approx(rate) and by_grader["wer"].totals[
        "corpus"
    ] == pytest.approx(max(0, 1 - rate))
    assert not by_grader["rouge"].totals and all(
        "counts" not in line for line in lines(run.path / "grades.jsonl") if line["type"] == "rouge"
    )
    (run.path / "metrics.json").unlink()
    again = evaluate(rows)
    assert again.metrics.graders == by_grader, "rebuilt from the journals"
    more = evaluate([*rows, {"id": "3", "say": "yes", "expected": "yes"}])
    assert (
        more.metrics.graders["bleu"].n == 4
        and more.metrics.graders["bleu"].totals["corpus"] > by_grader["bleu"].totals["corpus"]
    )
