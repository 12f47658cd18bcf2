"""The record of a run: one folder with its configuration, events, metrics, checkpoints, central model and summary."""

from __future__ import annotations

import contextlib
import csv
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from fedstill.common import checkpoint
from fedstill.common.checkpoint import append_line, write_atomically
from fedstill.common.config import RunConfig
from fedstill.common.models.text_model import TextModel
from fedstill.common.wire import Arrays, Facts

PROGRESS_EVERY = 0.5  # seconds between two progress events


class RecordError(RuntimeError):
    """The run's folder cannot be written; the text names it."""


class Record:
    """Everything a run writes. `events.jsonl` is append-only; progress bars, reports and tests read it."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder, self.config = folder, config
        with self._writing():
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "config.toml").exists():
                write_atomically(folder / "config.toml", config.to_toml())
        self.checkpoints = folder / "checkpoints"
        self._progress_at = 0.0

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RecordError(
                f"{self.folder}: cannot be written ({error.strerror}); free some space or check the folder's "
                f"permissions, then go on with: fedstill resume {self.folder.name}"
            ) from None

    def event(self, kind: str, **facts: object) -> None:
        """Append one line to events.jsonl."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": kind, **facts}
        with self._writing():
            append_line(self.folder / "events.jsonl", json.dumps(line))

    def progress(self, phase: str, done: int, total: int, **facts: object) -> None:
        """How far a phase is; most of these are skipped, the last one never."""
        now = time.monotonic()
        if done == total or now - self._progress_at > PROGRESS_EVERY:
            self._progress_at = now
            self.event("progress", phase=phase, done=done, total=total, **facts)

    def metrics(self, rows: list[Facts]) -> None:
        """Write metrics.csv anew from all rounds so far."""
        names = sorted({name for row in rows for name in row} - {"round", "node"})
        draft = self.folder / ".metrics.csv"
        with self._writing(), draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["round", "node", *names])
            writer.writeheader()
            writer.writerows(rows)
        draft.replace(self.folder / "metrics.csv")

    def save_round(self, number: int, arrays: Arrays, facts: Facts) -> None:
        """The server's checkpoint of a round."""
        path = checkpoint.save(self.checkpoints, number, arrays, facts)
        self.event("checkpoint", round=number, path=str(path.relative_to(self.folder)))

    def summary(self, facts: Facts) -> None:
        """summary.json, in one step."""
        with self._writing():
            write_atomically(self.folder / "summary.json", json.dumps(facts, indent=2) + "\n")

    def save_central(self, model: TextModel, summary: Facts) -> None:
        """The central model as transformers loads it, with a model card."""
        folder = self.folder / "central"
        model.save(folder)
        (folder / "README.md").write_text(_card(self.config, model, summary), encoding="utf-8")


def _card(config: RunConfig, model: TextModel, summary: Facts) -> str:
    """A model card in the form that model hubs read."""
    if config.mixed:
        return _card_of_mixed(config, model, summary)
    scores = ", ".join(f"{name} {value:.4f}" for name, value in summary["central"].items())
    sites = "\n".join(
        f"| {name} | {site['family']} | {site['texts']} | {_score(site['alone'])} | {_score(site['after'])} |"
        for name, site in summary["sites"].items()
    )
    load = "AutoModelForSeq2SeqLM" if model.writes else "AutoModelForSequenceClassification"
    return f"""---
library_name: transformers
pipeline_tag: {"text2text-generation" if model.writes else "text-classification"}
tags: [federated-learning, distillation, fedstill]
---
# {config.name}: central model of a federation

Trained by **{summary["method"]}** (preset `{summary["preset"]}`, seed {summary["seed"]}, {summary["rounds"]} rounds)
on the task `{model.task.name}` from the base model `{Path(config.central.model).name}` ({model.family}).
It never saw the private texts of a site.

* Labels: {", ".join(f"{number} = {label}" for number, label in enumerate(model.task.labels))}
* Longest text: {model.max_length} tokens
* Scores on {summary["test_texts"]} test texts: {scores}

| site | family | private texts | alone (accuracy) | after (accuracy) |
|---|---|---|---|---|
{sites}

```python
from transformers import {load}, AutoTokenizer
model, tokenizer = {load}.from_pretrained("central"), AutoTokenizer.from_pretrained("central")
```
"""


def _card_of_mixed(config: RunConfig, model: TextModel, summary: Facts) -> str:
    sites = "\n".join(
        f"| {name} | {site['texts']} | {_score(site['alone'], 'score')} | {_score(site['after'], 'score')} |"
        for name, site in summary["sites"].items()
    )
    return f"""---
library_name: transformers
pipeline_tag: feature-extraction
tags: [federated-learning, fedstill]
---
# {config.name}: what the sites of a federation share

Trained by **{summary["method"]}** (preset `{summary["preset"]}`, seed {summary["seed"]}, {summary["rounds"]} rounds)
from `{Path(config.central.model).name}` ({model.family}). Every site has a task of its own, so this is the shared
part alone: it has no head, and no score. A site's score is the mean of its task's metrics; which
these are only the site knows.

| site | private texts | alone | after |
|---|---|---|---|
{sites}
"""


def _score(metrics: Facts | None, metric: str = "accuracy") -> str:
    return "-" if not metrics else f"{metrics[metric]:.4f}"
