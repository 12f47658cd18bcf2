"""Statistics over seeds: means and deviations, paired differences, and whether two orders of methods agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from scipy import optimize, stats


@dataclass(frozen=True)
class Spread:
    """Mean and sample deviation (over n - 1); one value alone has no deviation."""

    mean: float
    deviation: float | None
    n: int


@dataclass(frozen=True)
class Difference:
    """The mean difference of pairs, its deviation, and p of the two-sided paired t-test where there is one.

    `corrected` is that p by Holm's procedure, as one of all the tests of its table.
    """

    mean: float
    deviation: float | None
    p: float | None
    n: int
    corrected: float | None = None

    @property
    def says(self) -> str:
        """The test in words."""
        if self.n < 2:
            return "one seed"
        if self.p is None:
            return f"no spread, n = {self.n}"
        told = "" if self.corrected is None else f", Holm {_shown(self.corrected)}"
        return f"p {_shown(self.p)}{told}, n = {self.n}"

    @property
    def sure(self) -> bool:
        """Whether the corrected test tells it from no difference, at 5 %."""
        return self.corrected is not None and self.corrected < 0.05

    @property
    def detectable(self) -> float | None:
        """The true difference that such a test, alone and at 5 %, would have found four times in five."""
        return None if self.deviation is None or self.n < 3 else detectable(self.deviation, self.n)


def _shown(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def detectable(deviation: float, n: int, level: float = 0.05, power: float = 0.8) -> float:
    """The difference whose paired t-test over n pairs has this power, by the noncentral t distribution."""
    freedom, edge = n - 1, stats.t.ppf(1 - level / 2, n - 1)

    def missed(shift: float) -> float:
        return float(stats.nct.sf(edge, freedom, shift)) - power  # the other tail is empty at such shifts

    return float(optimize.brentq(missed, 1e-6, 2.0 * edge + 4.0)) * deviation / math.sqrt(n)


def holm(tests: Mapping[str, Difference]) -> dict[str, Difference]:
    """Correct the tests of one table by Holm's step-down procedure; what has no p keeps none."""
    order = sorted((name for name, test in tests.items() if test.p is not None), key=lambda name: tests[name].p or 0.0)
    corrected, floor = dict(tests), 0.0
    for place, name in enumerate(order):
        floor = max(floor, min(1.0, (len(order) - place) * (tests[name].p or 0.0)))
        corrected[name] = replace(tests[name], corrected=floor)
    return corrected


@dataclass(frozen=True)
class Agreement:
    """Kendall's tau-b of two orders, and the pairs that they order differently."""

    tau: float | None
    discordant: list[tuple[str, str]]
    rows: int

    @property
    def pairs(self) -> int:
        """The number of pairs."""
        return self.rows * (self.rows - 1) // 2


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample deviation."""
    numbers = np.asarray(values, np.float64)
    return Spread(float(numbers.mean()), float(numbers.std(ddof=1)) if len(numbers) > 1 else None, len(numbers))


def paired(values: Sequence[float], base: Sequence[float]) -> Difference:
    """Test values - base, pair by pair. If all pairs differ by the same amount there is no test."""
    differences = np.asarray(values, np.float64) - np.asarray(base, np.float64)
    summary = spread(differences.tolist())
    p = None
    if summary.deviation is not None and summary.deviation > 1e-12 * max(1.0, abs(summary.mean)):
        p = float(stats.ttest_rel(values, base).pvalue)
    return Difference(summary.mean, summary.deviation, p, summary.n)


def agreement(ours: Mapping[str, float], theirs: Mapping[str, float]) -> Agreement:
    """Compare two orders of the rows that both have; a tie is no disagreement."""
    names = [name for name in ours if name in theirs]
    a, b = ({name: scores[name] for name in names} for scores in (ours, theirs))
    discordant = [(x, y) for x, y in combinations(names, 2) if (a[x] - a[y]) * (b[x] - b[y]) < 0]
    tau = float(stats.kendalltau(list(a.values()), list(b.values())).statistic) if len(names) > 1 else math.nan
    return Agreement(None if math.isnan(tau) else tau, discordant, len(names))
