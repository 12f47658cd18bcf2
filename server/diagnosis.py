"""Says when a federation does not learn, from what the server sees anyway: a likely cause, and the key to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fedstill.common.wire import Facts, Reply

ENOUGH = 30  # predictions without which nothing is said of a site
ONE_CLASS = 0.97  # share of one class in a site's predictions
AGREE = 0.15  # of the way from chance to full agreement between sites: the mean of Cohen's kappa over pairs
BEHIND = 0.15  # accuracy below the median of the sites
WORSE = 0.1  # accuracy of the central model below the best site's
MATRIX = 20  # sites whose agreement is recorded pair by pair
BROKEN = "training broke down"  # in the reason of a site whose loss is not finite any more
STILL = 0.995  # of the first round's loss, after the third


@dataclass(frozen=True)
class Finding:
    """What is wrong, whose it is, why that may be, and what to change."""

    what: str
    who: str
    likely: str
    change: str

    def facts(self) -> Facts:
        """As an event."""
        return {"what": self.what, "who": self.who, "likely": self.likely, "change": self.change}


@dataclass
class Diagnosis:
    """Watches predictions, losses and scores of a run."""

    classes: int
    constant_rate: bool = False  # then a central model stays where its last batches left it
    predicted: dict[str, list[NDArray[np.int64]]] = field(default_factory=dict)  # of this round
    one_class: dict[str, int] = field(default_factory=dict)  # rounds in a row
    losses: list[float] = field(default_factory=list)
    agreement: Facts = field(default_factory=dict)  # of the last round, for its event
    kappa: float = 0.0  # of the last round

    def observe(self, replies: Sequence[Reply]) -> None:
        """Keep which classes the sites put first."""
        for reply in replies:
            logits = reply.arrays.get("logits")
            if logits is not None and logits.ndim == 2:
                self.predicted.setdefault(reply.node, []).append(logits.argmax(axis=-1))

    def broke_down(self, site: str, reason: str) -> list[Finding]:
        """What is to be said of a site that was left out, if its training broke down."""
        if BROKEN not in reason:
            return []
        return [
            Finding(
                "its training broke down: its loss or gradients were no longer finite, and it was left out",
                site,
                "its rate is too high, or half precision overflowed",
                f"sites.{site}.learning_rate lower, train.clip, precision = 'float32'",
            )
        ]

    def after_round(self, metrics: Facts, central: Mapping[str, float], sites: Mapping[str, Facts]) -> list[Finding]:
        """What is to be said after a round, from its metrics and the last scores."""
        votes = {site: np.concatenate(parts) for site, parts in self.predicted.items()}
        votes = {site: classes for site, classes in votes.items() if len(classes) >= ENOUGH}
        self.predicted = {}
        self.agreement = self._agreement(votes)
        warnings = [*self._one_class(votes), *self._disagreement(votes), *self._loss(metrics)]
        return [*warnings, *_behind(central, sites, self.constant_rate)]

    def _one_class(self, votes: Mapping[str, NDArray[np.int64]]) -> list[Finding]:
        found = []
        for site, classes in votes.items():
            share = float(np.bincount(classes, minlength=self.classes).max() / len(classes))
            self.one_class[site] = self.one_class.get(site, 0) + 1 if share >= ONE_CLASS else 0
            if self.one_class[site] == 2:
                found.append(
                    Finding(
                        f"it has put one class first for {share:.0%} of the public texts, two rounds in a row",
                        site,
                        "its own texts have hardly any other label, or its steps towards the ensemble are too large "
                        "or its own learning too slow",
                        "data.alpha or data.partition for the labels; sites.distill_rate lower, learning_rate higher",
                    )
                )
        return found

    def _agreement(self, votes: Mapping[str, NDArray[np.int64]]) -> Facts:
        """How often two sites put the same class first, and how often each site puts each class first."""
        pairs = {
            (a, b): float((votes[a] == votes[b]).mean())
            for a, b in combinations(votes, 2)
            if len(votes[a]) == len(votes[b])
        }
        if not pairs or self.classes < 2:
            return {}
        shares = {site: np.bincount(seen, minlength=self.classes) / len(seen) for site, seen in votes.items()}
        classes = {site: [round(float(share), 4) for share in each] for site, each in shares.items()}
        # Sites with other mixes of labels agree less often by chance than sites with the same one.
        chance = {(a, b): float(shares[a] @ shares[b]) for a, b in pairs}
        self.kappa = float(np.mean([(pairs[one] - by) / (1 - by) if by < 1 else 1.0 for one, by in chance.items()]))
        shown = {} if len(votes) > MATRIX else {f"{a} {b}": round(share, 4) for (a, b), share in pairs.items()}
        mean = float(np.mean(list(pairs.values())))
        by_chance = round(float(np.mean(list(chance.values()))), 4)
        return {"mean": round(mean, 4), "chance": by_chance, "pairs": shown, "classes": classes}

    def _disagreement(self, votes: Mapping[str, NDArray[np.int64]]) -> list[Finding]:
        if not self.agreement:
            return []
        agreement, chance = float(self.agreement["mean"]), float(self.agreement["chance"])
        if self.kappa >= AGREE:
            return []
        return [
            Finding(
                f"the sites agree on {agreement:.0%} of the public texts, and {chance:.0%} would be chance",
                "all sites",
                "the public texts are unlike the sites' own, or the sites have not learned yet",
                "task.public or data.public; method.local_epochs or learning_rate higher",
            )
        ]

    def _loss(self, metrics: Facts) -> list[Finding]:
        loss = metrics.get("loss")
        if isinstance(loss, int | float):
            self.losses.append(float(loss))
        if len(self.losses) != 3 or self.losses[-1] < STILL * self.losses[0]:
            return []
        return [
            Finding(
                f"the loss has not fallen in three rounds ({self.losses[0]:.4f}, now {self.losses[-1]:.4f})",
                "central",
                "its rate is too low to learn, or so high that it does not settle",
                "central.learning_rate, central.distill_rate",
            )
        ]


def _behind(central: Mapping[str, float], sites: Mapping[str, Facts], constant_rate: bool) -> list[Finding]:
    accuracy = {site: float(scores["accuracy"]) for site, scores in sites.items() if "accuracy" in scores}
    if len(accuracy) < 2:
        return []
    median, best = float(np.median(list(accuracy.values()))), max(accuracy.values())
    found = [
        Finding(
            f"its accuracy is {value:.3f}, and the sites' median {median:.3f}",
            site,
            "its model learns too slowly, or its texts are few or labelled otherwise",
            f"sites.{site}.learning_rate, method.local_epochs; check its labels",
        )
        for site, value in accuracy.items()
        if value < median - BEHIND
    ]
    if central.get("accuracy", best) < best - WORSE:
        found.append(
            Finding(
                f"its accuracy is {central['accuracy']:.3f}, and the best site's {best:.3f}",
                "central",
                "the ensemble is worse than its best site, or the central model has not learned it",
                ("method.schedule = 'run', so that its rate falls; " if constant_rate else "")
                + "method.aggregation or method.weights; central.distill_rate, method.distill_epochs higher",
            )
        )
    return found
