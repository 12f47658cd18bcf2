"""Scores of written answers: exact match and F1 (SQuAD), ROUGE, BLEU-4 and METEOR; all between 0 and 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

Answers = Sequence[Sequence[str]]  # for every item, the answers that count as right


def normal(text: str) -> str:
    """SQuAD's normal form: lower case, without punctuation, articles and double blanks."""
    bare = "".join(sign for sign in text.lower() if sign not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def exact_match(guess: str, right: str) -> float:
    """Return 1 if both have the same normal form."""
    return float(normal(guess) == normal(right))


def token_f1(guess: str, right: str) -> float:
    """The harmonic mean of precision and recall of words in normal form."""
    guessed, true = normal(guess).split(), normal(right).split()
    if not guessed or not true:
        return float(guessed == true)
    common = sum((Counter(guessed) & Counter(true)).values())
    return 2 * common / (len(guessed) + len(true))


def answer_scores(guesses: Sequence[str], answers: Answers) -> dict[str, float]:
    """Return exact match and F1, each against the closest right answer, as SQuAD's own scripts do.

    Right answers of no words do not count beside others; alone, only an answer of no words is right (SQuAD 2.0).
    """
    pairs = [
        (guess, [right for right in every if normal(right)] or [""])
        for guess, every in zip(guesses, answers, strict=True)
    ]
    best = {
        "exact_match": [max(exact_match(guess, right) for right in every) for guess, every in pairs],
        "f1": [max(token_f1(guess, right) for right in every) for guess, every in pairs],
    }
    return {name: sum(values) / max(1, len(values)) for name, values in best.items()}


def rouge(guesses: Sequence[str], references: Sequence[str], kinds: Sequence[str]) -> dict[str, float]:
    """Mean F of ROUGE, with stemming, by the rouge-score package."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(kinds), use_stemmer=True)
    scored = [scorer.score(right, guess) for guess, right in zip(guesses, references, strict=True)]
    return {kind: float(sum(one[kind].fmeasure for one in scored) / max(1, len(scored))) for kind in kinds}


def bleu4(guesses: Sequence[str], references: Sequence[str]) -> float:
    """BLEU-4 of the whole set, by sacrebleu with its standard tokens and lower case."""
    from sacrebleu.metrics.bleu import BLEU

    return float(BLEU(lowercase=True).corpus_score(list(guesses), [list(references)]).score / 100)


def meteor(guesses: Sequence[str], references: Sequence[str]) -> float:
    """Mean METEOR by nltk, with exact and stem matches. Synonyms would need a WordNet download, so there are none."""
    from nltk.translate.meteor_score import meteor_score

    none: Any = _NoSynonyms()
    pairs = zip(guesses, references, strict=True)
    values = [meteor_score([_words(right)], _words(guess), wordnet=none) for guess, right in pairs]
    return float(sum(values) / max(1, len(values)))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.lower())


class _NoSynonyms:
    """Replaces WordNet where nltk looks up synonyms."""

    def synsets(self, word: str) -> list[Any]:
        return []


def summary_scores(guesses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """ROUGE-1, -2 and -L."""
    return rouge(guesses, references, ("rouge1", "rouge2", "rougeL"))


def question_scores(guesses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """ROUGE-L, BLEU-4 and METEOR."""
    scores = rouge(guesses, references, ("rougeL",))
    return {**scores, "bleu4": bleu4(guesses, references), "meteor": meteor(guesses, references)}
