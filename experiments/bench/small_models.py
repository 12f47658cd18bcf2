"""What the small built-in models know: `make bench-models`, about half an hour on one core, resumes run by run.

For each of the four and five seeds, on 800 film reviews of both domains, tested on 1,000 others, none of which the
pretraining read:
- a probe: logistic regression on frozen mean features (`text_features`);
- the model fine-tuned, at the rate and warm-up that it brings itself (common/models/defaults.py);
- its random twin, of the same configuration and tokenizer but with random weights, fine-tuned in the same way;
- the twin at the rate that layers drawn from a seed have by default.
The probe's strength was chosen on seed 42, which is not among the five. The table goes to
experiments/bench/small_models.json, with every run's numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from echo import write_whole
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

from fedstill.common.config import DataConfig, LearnerConfig, ModelConfig, TrainConfig
from fedstill.common.data.splits import Splits, make_splits
from fedstill.common.data.tasks import TASKS, film_reviews
from fedstill.common.models.builtin import quiet, shipped_folder
from fedstill.common.models.features import text_features
from fedstill.common.models.learner import Learner, Practice
from fedstill.common.models.loading import load_model
from fedstill.common.models.text_model import TextModel
from fedstill.common.randomness import seeded

RESULTS = Path(__file__).with_suffix(".json")
MODELS = ("small-bert", "small-roberta", "small-xlnet", "small-t5")
SEEDS = (1, 2, 3, 4, 5)
TRAIN, TEST = 800, 1000
LENGTH = 64  # and the end of a longer review, where it tells its verdict
EPOCHS, BATCH = 3, 16
STRENGTH = 0.01  # C of the probe's logistic regression, on standardised features
TUNED, TWIN, TWIN_AT_ITS_RATE = "fine-tuned by default", "random twin, same rate", "random twin, its own rate"
WAYS = ("probe", TUNED, TWIN, TWIN_AT_ITS_RATE)
TASK = TASKS["film-reviews"]
console = Console()


def texts_of(seed: int) -> Splits:
    """800 reviews with labels and 1,000 to test on."""
    return make_splits(film_reviews(), DataConfig(private=TRAIN, test=TEST, public=0, labelled=0), seed)


def load(name: str, seed: int) -> TextModel:
    """A built-in model or a folder, in single precision."""
    settings = ModelConfig(name=name, max_length=LENGTH, keep="end", precision="float32", device="cpu")
    model = load_model(settings, TASK, seed)
    model.net.set_attn_implementation("eager")  # the same sums, faster on a CPU than the fused kernel
    return model


def random_twin(name: str, seed: int) -> TextModel:
    """The same configuration and tokenizer with weights drawn from the seed."""
    source = shipped_folder(name)
    config = AutoConfig.from_pretrained(source)
    config.dtype = torch.float32
    with tempfile.TemporaryDirectory() as folder, quiet(), seeded(seed):
        (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModel).from_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        return load(folder, seed)


def probe(model: TextModel, splits: Splits, strength: float = STRENGTH) -> float:
    """Accuracy of logistic regression on the frozen features."""
    train, test = (text_features(model, part.texts) for part in (splits.private, splits.test))
    line = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=2000))
    return float(line.fit(train, splits.private.labels).score(test, splits.test.labels))


def fine_tune(model: TextModel, splits: Splits, seed: int, epochs: int = EPOCHS) -> float:
    """Accuracy after training on the reviews at the model's own rate, which falls to zero."""
    learner = Learner("bench", model, LearnerConfig(), TrainConfig(batch_size=BATCH), seed)
    labels, rows = torch.from_numpy(splits.private.labels), np.arange(len(splits.private))
    with learner.at("train"):
        learner.fit(
            model.encode(splits.private.texts),
            rows,
            lambda logits, places: torch.nn.functional.cross_entropy(logits, labels[places]),
            epochs,
            "local",
            Practice(decay=(0.0, 1.0)),
        )
    said = learner.predict(model.encode(splits.test.texts), np.arange(len(splits.test))).argmax(axis=1)
    return float((said == splits.test.labels).mean())


def run(name: str, way: str, seed: int) -> dict[str, Any]:
    """One number, with the seconds that it took."""
    splits, began = texts_of(seed), time.monotonic()
    model = random_twin(name, seed) if way in (TWIN, TWIN_AT_ITS_RATE) else load(name, seed)
    model.pretrained = way != TWIN_AT_ITS_RATE  # a folder counts as trained
    found = probe(model, splits) if way == "probe" else fine_tune(model, splits, seed)
    return {"accuracy": found, "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    """Every model, way and seed that is not yet in the file; then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())["runs"] if RESULTS.is_file() else {}
    settings = {
        "train": TRAIN, "test": TEST, "length": LENGTH, "keep": "end", "epochs": EPOCHS, "batch": BATCH,
        "rates": "each model's own", "probe C": STRENGTH, "seeds": SEEDS,
    }  # fmt: skip
    for way in WAYS:  # the quick ones first
        for name in chosen.models:
            for seed in SEEDS:
                key = f"{name} {way} {seed}"
                if key not in runs:
                    runs[key] = run(name, way, seed)
                    console.print(f"{key}: {runs[key]}", style="dim")
                    write_whole(RESULTS, {"settings": settings, "rows": rows_of(runs), "runs": runs})
    table = Table("model", *WAYS, "above the twins, points")
    for name, row in rows_of(runs).items():
        scores = [f"{row[way]['mean']:.3f} ± {row[way]['deviation']:.3f}" if way in row else "" for way in WAYS]
        twins = [row[way]["mean"] for way in (TWIN, TWIN_AT_ITS_RATE) if way in row]
        whole = TUNED in row and len(twins) == 2
        gain = ", ".join(f"{100 * (row[TUNED]['mean'] - twin):+.1f}" for twin in twins) if whole else ""
        table.add_row(name, *scores, gain)
    console.print(table)


def rows_of(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean and deviation over the seeds, by model and way."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in MODELS:
        for way in WAYS:
            scores = [runs[key]["accuracy"] for seed in SEEDS if (key := f"{name} {way} {seed}") in runs]
            if len(scores) > 1:
                mean, deviation = float(np.mean(scores)), float(np.std(scores, ddof=1))
                found.setdefault(name, {})[way] = {"mean": round(mean, 4), "deviation": round(deviation, 4)}
    return found


if __name__ == "__main__":
    sys.exit(main())
