"""The results of a run so far: the scores of every round, the sites' scores alone, and the final summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.common.config import RunConfig
from fedstill.common.maths.ensemble import softmax
from fedstill.common.wire import Facts
from fedstill.server.central import CentralModel
from fedstill.server.costs import Costs

NOT_SCORES = ("round", "node", "seconds", "loss")


class Results:
    """Rows of metrics.csv, yardsticks, and the privacy budgets that sites report as spent."""

    def __init__(self) -> None:
        self.history: list[Facts] = []  # one per row of metrics.csv
        self.alone: dict[str, Facts] = {}
        self.centralized: Facts | None = None
        self.privacy: dict[str, Facts] = {}

    def tested(self, number: int, node: str, metrics: Mapping[str, Any]) -> None:
        """Add a node's scores after a round."""
        self.history.append({"round": number, "node": node, **scores_in(metrics)})

    def central(self) -> Facts:
        """The central model's last scores."""
        rows = [row for row in self.history if row["node"] == "central"]
        return scores_in(rows[-1]) if rows else {}

    def central_by_round(self) -> dict[int, Facts]:
        """The central model's scores after each round that was tested."""
        return {row["round"]: scores_in(row) for row in self.history if row["node"] == "central"}

    def sites(self) -> dict[str, Facts]:
        """Every site's last scores."""
        return {row["node"]: scores_in(row) for row in self.history if row["node"] != "central"}

    def facts(self) -> Facts:
        """Return everything a checkpoint must hold; sites report their spent budgets again."""
        return {"history": self.history, "alone": self.alone, "centralized": self.centralized}

    def load(self, facts: Facts) -> None:
        """Restore what `facts` returned."""
        self.history, self.alone, self.centralized = facts["history"], facts["alone"], facts["centralized"]

    def summary(
        self,
        about: Facts,
        config: RunConfig,
        central: CentralModel,
        costs: Costs,
        sites: Mapping[str, Facts],
        formulas: Mapping[str, Facts],
    ) -> Facts:
        """Return summary.json: `about` the method, then the run, its scores and its costs."""
        after = self.sites()
        return {
            "status": "finished",
            **about,
            "seed": config.seed,
            "rounds": config.rounds,
            "link": config.exchange.link,
            "test_texts": len(central.test_texts),
            "central": self.central(),
            "central_model": {"family": central.learner.model.family, "model": short_name(config.central.model)},
            "sites": {
                name: {
                    "family": facts["family"],
                    "model": facts["model"],
                    "texts": facts["texts"],
                    "alone": self.alone.get(name),
                    "after": after.get(name),
                    **costs.site(name),
                    "formula": formulas[name],
                    **({"privacy": self.privacy[name]} if name in self.privacy else {}),
                }
                for name, facts in sites.items()
            },
            "centralized": self.centralized,
            "seconds": costs.seconds(),
            "phases": costs.phases,
            "asks": costs.asks,
        }


def scores_in(metrics: Mapping[str, Any]) -> Facts:
    """Return the task's scores among a row's or a Reply's metrics."""
    return {name: value for name, value in metrics.items() if name not in NOT_SCORES}


def short_name(model: str) -> str:
    """Return a model's name without folders or owner."""
    return model.rstrip("/").rpartition("/")[2]


BINS = 10  # of confidence


def judged(labels: Sequence[str], truth: NDArray[np.int64], logits: NDArray[Any]) -> Facts:
    """Return a confusion matrix (rows: true labels), and accuracy by confidence with its mean gap (ECE)."""
    probabilities = softmax(logits)
    said, sure = probabilities.argmax(axis=-1), probabilities.max(axis=-1)
    confusion = np.zeros((len(labels), len(labels)), np.int64)
    np.add.at(confusion, (truth, said), 1)
    place = np.minimum((sure * BINS).astype(int), BINS - 1)
    bins = [
        {
            "confidence": round(float(sure[place == number].mean()), 4),
            "accuracy": round(float((said == truth)[place == number].mean()), 4),
            "texts": int((place == number).sum()),
        }
        for number in range(BINS)
        if (place == number).any()
    ]
    gap = sum(each["texts"] * abs(each["confidence"] - each["accuracy"]) for each in bins) / len(truth)
    return {"labels": list(labels), "confusion": confusion.tolist(), "reliability": bins, "ece": round(gap, 4)}
