"""fedstill from Python: run a federation, read its results, use the central model."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fedstill.common.config import RunConfig
from fedstill.common.config.files import load_run

Where = Literal["process", "local", "simulation"]


def run(
    config: str | Path | RunConfig,
    on: Where = "process",
    set: Mapping[str, Any] | None = None,
    runs: str | Path = "runs",
    resume: Result | str | Path | None = None,
    check: bool = True,
) -> Result:
    """Run a federation and wait for it.

    `config` is a TOML file, TOML text or a RunConfig; `on` is "process" (no Flower, this process), "local" (real
    SuperLink and SuperNodes) or "simulation" (Flower's). `set` changes values by dotted keys. `resume` takes up an
    earlier run's folder where it stopped. A new run that starts processes is first examined as by
    `fedstill check`, and refused with every reason; `check=False` leaves that out.
    """
    from fedstill.deploy.launch import start

    if resume is not None:
        folder = Path(resume.folder if isinstance(resume, Result) else resume)
        settings = load_run(folder / "config.toml")
    else:
        settings = _settings(config, set or {})
        if check and on != "process":  # in this process an error shows at once
            from fedstill.deploy.launch.examination import examine

            examine(settings, on, Path(runs))
        folder = new_folder(Path(runs), settings.name)
    start(settings, folder.resolve(), on, resume=resume is not None)
    return Result(folder.resolve())


def _settings(config: str | Path | RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    if isinstance(config, RunConfig):
        return load_run(config.to_json(), changes)
    text = isinstance(config, str) and ("\n" in config or config.lstrip().startswith("{"))
    return load_run(config if text else Path(config), changes)


def new_folder(runs: Path, name: str) -> Path:
    """Return a folder that no run has yet: NAME-DATE, with a number appended where two start in one second."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder, extra = runs / f"{name}-{stamp}", 1
    while folder.exists():
        extra += 1
        folder = runs / f"{name}-{stamp}-{extra}"
    return folder


@dataclass(frozen=True)
class Result:
    """The results of a run, read from its folder."""

    folder: Path

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        return dict(json.loads((self.folder / "summary.json").read_text(encoding="utf-8")))

    @property
    def central(self) -> dict[str, float]:
        """The central model's final scores."""
        return dict(self.summary["central"])

    @property
    def sites(self) -> dict[str, dict[str, Any]]:
        """Every site: its family, texts, scores `alone` and `after`, bytes."""
        return dict(self.summary["sites"])

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """All scores after each tested round: one per row of metrics.csv."""
        with (self.folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
            rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
        return [
            {
                key: value if key == "node" else int(value) if key == "round" else float(value)
                for key, value in row.items()
            }
            for row in rows
        ]

    @cached_property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return load_run(self.folder / "config.toml")

    def _repr_html_(self) -> str:
        """The display in a notebook."""
        from fedstill.notebook import html

        return html(self)

    def model(self) -> Classifier:
        """The central model, ready to classify texts."""
        return Classifier(self.folder / "central", self.config)


class Classifier:
    """A run's central model: `classifier(["a fine film"])` gives a label and its probability for each text."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        from fedstill.common.data.tasks import TASKS, Task
        from fedstill.common.models.loading import load_model

        named = json.loads((folder / "config.json").read_text(encoding="utf-8"))["id2label"]
        self.labels = tuple(named[number] for number in sorted(named, key=int))
        known = TASKS.get(config.task.name)
        words = tuple(config.task.label_words or (known.label_words if known else ()))
        columns = known.text_columns if known else tuple(config.task.text)
        prompt = config.task.prompt or (known.prompt if known else "")
        task = Task(config.task.name, self.labels, label_words=words, text_columns=columns, prompt=prompt)
        as_saved = {"name": str(folder), "keep_head": True, "lora": False, "freeze": None, "device": "auto"}
        settings = config.central.model_settings(config.train).model_copy(update=as_saved)
        self.model = load_model(settings, task, seed=0)

    def __call__(self, texts: Sequence[str | tuple[str, str]]) -> list[dict[str, Any]]:
        """A label and its probability for each text, or pair of texts."""
        probabilities = self.probabilities(texts)
        best = probabilities.argmax(axis=-1)
        return [
            {"label": self.labels[place], "probability": float(row[place])}
            for row, place in zip(probabilities, best, strict=True)
        ]

    def probabilities(self, texts: Sequence[str | tuple[str, str]]) -> Any:
        """An array, texts x labels."""
        import numpy as np
        import torch

        from fedstill.common.maths.ensemble import softmax

        self.model.eval()
        encoded = self.model.encode(list(texts))
        with torch.inference_mode():
            parts = [
                self.model(encoded.batch(np.arange(start, min(start + 64, len(texts))))).cpu().numpy()
                for start in range(0, len(texts), 64)
            ]
        return softmax(np.concatenate(parts)) if parts else np.empty((0, len(self.labels)), np.float32)
