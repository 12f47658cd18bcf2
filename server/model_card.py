"""Model cards, in the form that model hubs read."""

from __future__ import annotations

from pathlib import Path

from fedstill.common.config import RunConfig
from fedstill.common.models.causal import CausalModel
from fedstill.common.models.frozen import FrozenEncoder
from fedstill.common.models.text_model import TextModel
from fedstill.common.wire import Facts


def classifier(config: RunConfig, model: TextModel, summary: Facts) -> str:
    """Write the card of a central model that classifies."""
    scores = ", ".join(f"{name} {value:.4f}" for name, value in summary["central"].items())
    sites = "\n".join(
        f"| {name} | {site['family']} | {site['texts']} | {_score(site['alone'])} | {_score(site['after'])} |"
        for name, site in summary["sites"].items()
    )
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
{_how_to_load(model)}
```
"""


def _how_to_load(model: TextModel) -> str:
    if isinstance(model, FrozenEncoder):  # transformers knows no such head
        return """from pathlib import Path
import fedstill
classify = fedstill.Result(Path("RUN")).model()  # RUN: the folder of the run, in which this `central` is
classify(["a text"])"""
    kind = "AutoModelForSequenceClassification"
    if model.writes:
        kind = "AutoModelForSeq2SeqLM"
    elif isinstance(model, CausalModel):
        kind = "AutoModelForCausalLM"
    return f"""from transformers import {kind}, AutoTokenizer
model, tokenizer = {kind}.from_pretrained("central"), AutoTokenizer.from_pretrained("central")"""


def shared_part(config: RunConfig, model: TextModel, summary: Facts) -> str:
    """Write the card of what sites with private tasks share."""
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
    return "-" if not metrics or metric not in metrics else f"{metrics[metric]:.4f}"
