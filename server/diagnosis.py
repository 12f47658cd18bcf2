"""Says when a federation does not learn, from what the server sees anyway: a likely cause, and the key to change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fedstill.common.config import RunConfig
from fedstill.common.models.defaults import WARMUP
from fedstill.common.models.learner import CENTRAL
from fedstill.common.wire import Facts, Reply
from fedstill.server.central import CentralModel
from fedstill.server.pseudo_labels import Compared
from fedstill.strategies import Method

ENOUGH = 30  # predictions, or texts of its own, without which nothing is said of a site
SURE = 3.0  # standard errors that a share must be away before chance is ruled out
ONE_CLASS = 0.97  # share of one class in a site's predictions
AGREE = 0.15  # of the way from chance to full agreement between sites: the mean of Cohen's kappa over pairs
BEHIND = 0.15  # accuracy below the median of the sites
WORSE = 0.1  # accuracy of the central model, or of the ensemble, below the best site's
MATRIX = 20  # sites whose agreement is recorded pair by pair
BROKEN = "training broke down"  # in the reason of a site whose loss is not finite any more
STILL = 0.995  # of the first loss, at the end: after three rounds, or after a site's own epochs
KNOWN = 0.5  # of the loss of guessing: a site below knows its own texts
GUESSING = 1.1  # of the loss of guessing: above it a site is worse than that, after epochs of its own


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
    tests: int = 0  # texts that everybody is tested on; 0: any difference counts
    usual: float = 0.0  # share of the largest class among the labels that the server holds
    warm: int = 1  # the first round at whose end rates have long stopped rising
    predicted: dict[str, list[NDArray[np.int64]]] = field(default_factory=dict)  # of this round
    tested: NDArray[np.int64] | None = None  # the central model's classes of this round's test texts
    in_a_row: dict[str, int] = field(default_factory=dict)  # rounds, by what was seen
    losses: list[float] = field(default_factory=list)
    agreement: Facts = field(default_factory=dict)  # of the last round, for its event
    kappa: float = 0.0  # of the last round

    @property
    def guess(self) -> float:
        """The loss of a site that takes every class for equally likely."""
        return math.log(max(1, self.classes))

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

    def after_round(
        self,
        metrics: Facts,
        central: Mapping[str, float],
        sites: Mapping[str, Facts],
        number: int = 0,
        last: bool = False,
        losses: Mapping[str, Sequence[float]] | None = None,
        compared: Compared | None = None,
    ) -> list[Finding]:
        """What is to be said after a round, from its metrics, the last scores and the losses of local epochs.

        A sign that may pass is told of when it comes two rounds in a row, or in the `last` round: none follows.
        """
        votes = {site: np.concatenate(parts) for site, parts in self.predicted.items()}
        votes = {site: classes for site, classes in votes.items() if len(classes) >= ENOUGH}
        own, tested, self.predicted, self.tested = losses or {}, self.tested, {}, None
        self.agreement = self._agreement(votes)
        if tested is not None and len(tested) >= ENOUGH:
            votes[CENTRAL] = tested
        return [
            *self._one_class(votes, own, last),
            *self._disagreement(last),
            *self._own_losses(own, number == self.warm, last),
            *self._loss(metrics),
            *self._ensemble(compared, last),
            *self._behind(central, sites, last),
        ]

    def _lasts(self, sign: str, seen: bool, last: bool) -> bool:
        """Whether this is the second round in a row with the sign, or the first one and no other follows."""
        self.in_a_row[sign] = rounds = self.in_a_row.get(sign, 0) + 1 if seen else 0
        return rounds == 2 or (rounds == 1 and last)

    def _one_class(
        self, votes: Mapping[str, NDArray[np.int64]], losses: Mapping[str, Sequence[float]], last: bool
    ) -> list[Finding]:
        found = []
        for who, classes in votes.items():
            share = float(np.bincount(classes, minlength=self.classes).max() / len(classes))
            chance = math.sqrt(self.usual * (1 - self.usual) / len(classes))  # the labels may be as skewed as that
            seen = share >= ONE_CLASS and share > self.usual + SURE * chance
            # One round cannot tell collapse from skewed labels, but a site that knows its own texts has not collapsed.
            knows = who in losses and losses[who][-1] < KNOWN * self.guess
            if not self._lasts(f"{who} one class", seen, last and not knows):
                continue
            often = ", two rounds in a row" if self.in_a_row[f"{who} one class"] == 2 else ""
            what = f"it has put one class first for {share:.0%} of the {{}} texts{often}"
            if who == CENTRAL:
                likely = (
                    "the ensemble has hardly any other class, or its rate is too low to learn or too high to settle"
                )
                change = "central.learning_rate, central.distill_rate; method.distill_epochs higher"
                found.append(Finding(what.format("test"), who, likely, change))
            else:
                likely = (
                    "its own texts have hardly any other label, or its steps towards the ensemble are too large "
                    "or its own learning too slow"
                )
                change = "data.alpha or data.partition for the labels; sites.distill_rate lower, learning_rate higher"
                found.append(Finding(what.format("public"), who, likely, change))
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

    def _disagreement(self, last: bool) -> list[Finding]:
        if not self._lasts("disagreement", bool(self.agreement) and self.kappa < AGREE, last):
            return []
        agreement, chance = float(self.agreement["mean"]), float(self.agreement["chance"])
        return [
            Finding(
                f"the sites agree on {agreement:.0%} of the public texts, and {chance:.0%} would be chance",
                "all sites",
                "the public texts are unlike the sites' own, or the sites have not learned yet",
                "task.public or data.public; method.local_epochs or learning_rate higher",
            )
        ]

    def _own_losses(self, losses: Mapping[str, Sequence[float]], warm: bool, last: bool) -> list[Finding]:
        found = []
        for site, epochs in losses.items():
            if len(epochs) < 2 or self.classes < 2:
                continue
            first, now = epochs[0], epochs[-1]
            still = warm and now >= STILL * first and now >= KNOWN * self.guess
            if self._lasts(f"{site} worse than guessing", now > GUESSING * self.guess, last) or still:
                found.append(
                    Finding(
                        f"its loss on its own texts went from {first:.4f} to {now:.4f} in the round's {len(epochs)} "
                        f"epochs, and guessing has {self.guess:.4f}",
                        site,
                        "its rate is too low to learn, or so high that it does not settle",
                        f"sites.{site}.learning_rate; method.local_epochs higher",
                    )
                )
        return found

    def _ensemble(self, compared: Compared | None, last: bool) -> list[Finding]:
        if compared is None or compared.texts < ENOUGH:
            return []
        behind = compared.best - compared.together
        if not self._lasts("ensemble", behind > max(WORSE, SURE * compared.error), last):
            return []
        return [
            Finding(
                f"together they are right on {compared.together:.0%} of {compared.texts} public texts with known "
                f"labels, and {compared.site} alone on {compared.best:.0%}",
                "all sites",
                "sites that have learned little, or the same mistake, count as much as those that know better",
                "method.weights or method.aggregation; learning_rate of the weak sites, method.local_epochs higher",
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

    def _behind(self, central: Mapping[str, float], sites: Mapping[str, Facts], last: bool) -> list[Finding]:
        accuracy = {site: float(scores["accuracy"]) for site, scores in sites.items() if "accuracy" in scores}
        if len(accuracy) < 2:
            return []
        median, best = float(np.median(list(accuracy.values()))), max(accuracy.values())
        # Everybody answers the same texts, so that a difference varies about as one score does.
        low, below = (
            value - max(margin, SURE * math.sqrt(value * (1 - value) / self.tests) if self.tests else 0.0)
            for value, margin in ((median, BEHIND), (best, WORSE))
        )
        found = [
            Finding(
                f"its accuracy is {value:.3f}, and the sites' median {median:.3f}",
                site,
                "its model learns too slowly, or its texts are few or labelled otherwise",
                f"sites.{site}.learning_rate, method.local_epochs; check its labels",
            )
            for site, value in accuracy.items()
            if self._lasts(f"{site} behind", value < low, last)
        ]
        if self._lasts("central behind", central.get("accuracy", best) < below, last):
            found.append(
                Finding(
                    f"its accuracy is {central['accuracy']:.3f}, and the best site's {best:.3f}",
                    "central",
                    "the ensemble is worse than its best site, or the central model has not learned it",
                    ("method.schedule = 'run', so that its rate falls; " if self.constant_rate else "")
                    + "method.aggregation or method.weights; central.distill_rate, method.distill_epochs higher",
                )
            )
        return found


def diagnosis_of(config: RunConfig, method: Method, central: CentralModel) -> Diagnosis:
    """Return the diagnosis of a run, with what can be known before it."""
    schedule, warmup = method.p.schedule, WARMUP if config.train.warmup is None else config.train.warmup
    return Diagnosis(
        central.classes,
        constant_rate=schedule == "constant",
        tests=len(central.test_texts),
        usual=central.largest_class,
        warm=min(config.rounds, max(1, math.ceil(2 * warmup * config.rounds))) if schedule == "run" else 1,
    )
