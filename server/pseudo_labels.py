"""What sites say of the public texts, pass by pass: how sure of one class, how far moved, how right (FedID's claim)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedstill.common.maths.ensemble import softmax
from fedstill.common.wire import Facts

Labels = NDArray[np.int64]
Floats = NDArray[np.floating]
NOBODY = -1  # in place of a class: nothing was said of the text in this pass


@dataclass
class Pass:
    """One pass over the public texts, as far as a site has come."""

    probabilities: Floats
    said: NDArray[np.bool_]

    @property
    def first(self) -> Labels:
        """The class that is put first."""
        return np.asarray(np.where(self.said, self.probabilities.argmax(axis=-1), NOBODY))


@dataclass(frozen=True)
class Compared:
    """The mean of the sites' probabilities beside the best site, on public texts whose labels the server knows."""

    texts: int
    site: str  # the best one
    best: float  # its accuracy
    together: float  # that of the mean
    error: float  # standard error of the difference


@dataclass
class PseudoLabels:
    """Collects predictions of public rows; a site begins its next pass when it predicts a row again.

    `truth` has the labels that the public texts really have. Only an experiment knows them, one whose public texts
    were cut from labelled ones; nothing is trained with them. `known` are the labels of the blind texts, by their rows.
    """

    classes: int
    texts: int
    truth: Labels | None = None
    known: Mapping[int, int] = field(default_factory=dict)
    before: dict[str, Pass] = field(default_factory=dict)  # each site's last pass of an earlier round
    passes: dict[str, list[Pass]] = field(default_factory=dict)  # of this round

    def observe(self, site: str, rows: Labels, logits: Floats) -> None:
        """Take in what a site says of public rows."""
        if logits.shape != (len(rows), self.classes):
            return
        mine = self.passes.setdefault(site, [])
        if not mine or mine[-1].said[rows].any():
            empty = np.zeros((self.texts, self.classes), np.float32)
            mine.append(Pass(empty, np.zeros(self.texts, bool)))
        mine[-1].probabilities[rows] = softmax(logits)
        mine[-1].said[rows] = True

    def compared(self, sizes: Mapping[str, int]) -> Compared | None:
        """Compare the sites' mean with the best site, on what all of them said last; None without labels.

        Of two means, by the sites' sizes and plain, the better one counts, whichever the method takes.
        """
        now = {site: mine[-1] for site, mine in self.passes.items()}
        labels = np.full(self.texts, NOBODY) if self.truth is None else self.truth.copy()
        labels[list(self.known)] = list(self.known.values())
        asked = np.logical_and.reduce([labels != NOBODY, *(one.said for one in now.values())])
        if len(now) < 2 or not asked.any():
            return None
        truth, said = labels[asked], np.stack([one.probabilities[asked] for one in now.values()])
        right = {site: one.first[asked] == truth for site, one in now.items()}
        site = max(right, key=lambda name: right[name].mean())
        weights = np.array([[1] * len(now), [sizes[name] for name in now]], float)
        together = max(np.einsum("wk,knc->wnc", weights, said).argmax(axis=-1) == truth, key=np.mean)
        # of the same texts: only those count that one of the two has right (McNemar)
        error = float(np.sqrt((right[site] != together).mean() / len(truth)))
        return Compared(len(truth), site, float(right[site].mean()), float(together.mean()), error)

    def after_round(self) -> list[tuple[Facts, Facts | None]]:
        """Return each pass of the round: movement and largest class, and how right they are where that is known."""
        if self.classes < 2 or not self.passes:
            return []
        number = max(map(len, self.passes.values()))
        found = [self._facts(place) for place in range(number)]
        self.before.update({site: mine[-1] for site, mine in self.passes.items()})
        self.passes = {}
        return found

    def _facts(self, place: int) -> tuple[Facts, Facts | None]:
        now = {site: mine[place] for site, mine in self.passes.items() if len(mine) > place}
        earlier = {site: self.passes[site][place - 1] if place else self.before.get(site) for site in now}
        said = np.stack([each.said for each in now.values()])
        summed = np.stack([each.probabilities for each in now.values()]).sum(axis=0)
        together = np.where(said.any(axis=0), summed.argmax(axis=-1), NOBODY)
        sites = {site: {"largest": self._largest(one.first), **_moved(one, earlier[site])} for site, one in now.items()}
        which = {"pass": place + 1, "texts": int(said.any(axis=0).sum())}
        facts = {**which, "sites": sites, "together": {"largest": self._largest(together)}}
        if self.truth is None:
            return facts, None
        right = {site: _right(one.first, self.truth) for site, one in now.items()}
        return facts, {**which, "sites": right, "together": _right(together, self.truth)}

    def _largest(self, first: Labels) -> float:
        counts = np.bincount(first[first != NOBODY], minlength=self.classes)
        return round(float(counts.max() / counts.sum()), 4)


def _moved(now: Pass, before: Pass | None) -> Facts:
    """Share of texts with another first class than before, and half the L1 distance of the probabilities."""
    both = now.said & before.said if before is not None else now.said & False
    if before is None or not both.any():
        return {}
    apart = 0.5 * np.abs(now.probabilities[both] - before.probabilities[both]).sum(axis=-1)
    changed = float((now.first[both] != before.first[both]).mean())
    return {"changed": round(changed, 4), "moved": round(float(apart.mean()), 4)}


def _right(first: Labels, truth: Labels) -> float:
    said = first != NOBODY
    return round(float((first[said] == truth[said]).mean()), 4)
