"""Scores of written answers, against numbers by hand and independent libraries."""

from __future__ import annotations

import re

import pytest

from fedstill.common.data.answer_scores import answer_scores, bleu4, meteor, question_scores, summary_scores

GUESSES = ["the small dog runs over the green hill today", "what is the name of the river in france ?"]
RIGHT = ["a small dog runs over the hill today", "what is the longest river in france called ?"]


def test_exact_match_and_f1_follow_squad() -> None:
    found = answer_scores(
        ["The Eiffel Tower!", "in 1887", "red"], [("eiffel tower",), ("1889", "1887 to 1889"), ("blue",)]
    )
    assert found["exact_match"] == pytest.approx(1 / 3)
    # second: {in, 1887} and {1887, to, 1889} share one word: precision 1/2, recall 1/3, F1 0.4
    assert found["f1"] == pytest.approx((1 + 0.4 + 0) / 3)
    assert answer_scores(["the"], [("the",)])["exact_match"] == 1.0


def test_no_answer_is_right_where_there_is_none_and_wrong_where_there_is_one() -> None:
    """SQuAD 2.0's rules: F1 without words on one side is 1 if both have none, else 0."""
    found = answer_scores(["", "Bob", "", "Bob Dylan"], [("",), ("",), ("Bob",), ("Bob", "the")])
    assert found["exact_match"] == pytest.approx(1 / 4)
    # last: {bob, dylan} against {bob}: precision 1/2, recall 1; `the` has no words and does not count
    assert found["f1"] == pytest.approx((1 + 0 + 0 + 2 / 3) / 4)
    assert answer_scores([""], [("Bob", "the")])["f1"] == 0.0


def test_rouge_by_hand() -> None:
    found = summary_scores(["police kill the gunman", "one"], ["police killed the gunman quickly", "two"])
    # stemmed: 4 of 4 and 4 of 5 words; bigrams 3 of 3 and 3 of 4; the longest common sequence is all four
    assert found == {name: pytest.approx(value / 2) for name, value in {
        "rouge1": 8 / 9, "rouge2": 6 / 7, "rougeL": 8 / 9}.items()}  # fmt: skip


def test_bleu_is_what_nltk_says() -> None:
    from nltk.translate.bleu_score import corpus_bleu

    split = [re.findall(r"\w+|[^\w\s]", text) for text in GUESSES]
    expected = corpus_bleu([[re.findall(r"\w+|[^\w\s]", text)] for text in RIGHT], split)
    assert bleu4(GUESSES, RIGHT) == pytest.approx(expected, abs=1e-6)


def test_meteor_by_hand() -> None:
    # all words, one chunk: 1 * (1 - 0.5 * (1 / 3) ** 3)
    assert meteor(["the cat sat"], ["The cat sat"]) == pytest.approx(1 - 0.5 / 27)
    # `walks` meets `walking` by its stem: 2 of 2 and 2 of 3 words, F = P R / (0.9 P + 0.1 R), one chunk of two
    precision, recall = 1.0, 2 / 3
    f = precision * recall / (0.9 * precision + 0.1 * recall)
    assert meteor(["she walks"], ["she walking home"]) == pytest.approx(f * (1 - 0.5 / 8))
    assert meteor(["dog"], ["hound"]) == 0.0  # a synonym, which only WordNet would know
    assert set(question_scores(GUESSES, RIGHT)) == {"rougeL", "bleu4", "meteor"}
