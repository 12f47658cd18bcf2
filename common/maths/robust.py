"""Rules that make one prediction of many: sites x texts x classes in, texts x classes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedstill.common.maths.ensemble import Matrix, mean_predictions, precision_of

Aggregation = Literal["mean", "median", "trimmed", "cronus", "krum", "spectral"]
Stack = NDArray[Any]

SPREAD = 1.4826  # times the median distance from the median is the standard deviation of a normal sample
STEPS = 20  # of fixed-point iterations, which stand still long before


def combine(
    predictions: Mapping[str, Matrix],
    weights: Mapping[str, float],
    rule: Aggregation = "mean",
    probabilities: bool = False,
) -> Matrix:
    """One prediction of the sites in `weights`, by the rule; with `probabilities` each text's sum is 1 again.

    Only `mean` uses the weights: under the other rules each site counts once, whatever size it claims.
    """
    if rule == "mean":
        return mean_predictions(predictions, weights)
    found = RULES[rule](np.stack([predictions[name] for name in weights]))
    if not probabilities:
        return found
    found = np.maximum(found, 0)
    total = found.sum(axis=-1, keepdims=True)
    nothing = total <= 0  # such as the median of votes for three different classes
    plain = mean_predictions(predictions, dict.fromkeys(weights, 1.0 / len(weights))) if nothing.any() else found
    return np.asarray(np.where(nothing, plain, found / np.where(nothing, 1.0, total)), precision_of(found))


def median(stack: Stack) -> Matrix:
    """The middle of what the sites say, number by number."""
    return np.asarray(np.median(stack, axis=0), precision_of(stack))


def trimmed_mean(stack: Stack, share: float = 0.2) -> Matrix:
    """The mean without the `share` highest and lowest, at least one of each while a site remains, number by number."""
    sites = len(stack)
    cut = min(max(1, int(share * sites)), (sites - 1) // 2)
    return np.asarray(np.sort(stack.astype(np.float64), axis=0)[cut : sites - cut].mean(axis=0), precision_of(stack))


def cronus(stack: Stack, bound: float = 4.0) -> Matrix:
    """The mean of what the filter of Diakonikolas et al. keeps of each text's predictions."""
    kept = cronus_filter(stack, bound)[..., None]
    return np.asarray((stack * kept).sum(axis=0, dtype=np.float64) / kept.sum(axis=0), precision_of(stack))


def cronus_filter(stack: Stack, bound: float = 4.0) -> NDArray[np.bool_]:
    """Which sites stay on which text (sites x texts).

    While the variance along the top direction of the centred predictions is large, the one farthest out on it goes.
    Large is more than `bound` times the variance that their median distance from the median tells; a majority stays.
    """
    sites, texts = stack.shape[:2]
    points = stack.astype(np.float64).transpose(1, 0, 2)  # texts x sites x classes
    kept = np.ones((texts, sites), bool)
    for _ in range((sites - 1) // 2):
        count = kept.sum(axis=1)
        centre = (points * kept[..., None]).sum(axis=1) / count[:, None]
        centred = (points - centre[:, None]) * kept[..., None]
        values, vectors = np.linalg.eigh(centred.transpose(0, 2, 1) @ centred / count[:, None, None])
        along = np.where(kept, (centred @ vectors[..., -1:])[..., 0], np.nan)
        distance = np.abs(along - np.nanmedian(along, axis=1, keepdims=True))
        usual = (SPREAD * np.nanmedian(distance, axis=1)) ** 2
        large = values[:, -1] > np.maximum(bound * usual, 1e-12)
        if not large.any():
            break
        kept[large, np.nanargmax(distance, axis=1)[large]] = False
    return kept.T


def krum(stack: Stack, liars: int | None = None) -> Matrix:
    """The mean of the sites whose predictions of all texts are nearest to their neighbours' (Blanchard et al. 2017)."""
    scores = krum_scores(stack, liars)
    lied = _liars(len(stack), liars)
    kept = np.sort(np.argsort(scores, kind="stable")[: len(stack) - lied])
    return np.asarray(stack[kept].mean(axis=0, dtype=np.float64), precision_of(stack))


def krum_scores(stack: Stack, liars: int | None = None) -> NDArray[np.float64]:
    """Of each site the sum of squared distances to its n - f - 2 nearest, f being how many may lie."""
    flat = stack.reshape(len(stack), -1).astype(np.float64)
    distances = ((flat[:, None] - flat[None]) ** 2).sum(axis=-1)
    near = max(1, len(stack) - _liars(len(stack), liars) - 2)
    return np.asarray(np.sort(distances, axis=1)[:, 1 : near + 1].sum(axis=1))


def _liars(sites: int, liars: int | None) -> int:
    """As many as Krum can stand: fewer than half by one and a half."""
    most = max(0, (sites - 3) // 2)
    return most if liars is None else min(liars, most)


def spectral(stack: Stack) -> Matrix:
    """What a middling site would say if it knew what those know who agree with each other.

    Each site's mean over the texts and its spread are put aside, so that no site can shift or scale the result.
    Sites whose `agreement` is not positive are left out; what the others say is averaged by it, and gets a mean and
    spread back that are usual among them, by the same weights: who knows little has little to say about the classes'
    shares too.
    """
    said = stack.astype(np.float64)
    offset = said.mean(axis=1)
    rest = said - offset[:, None]
    spread = _spread(rest)
    kept = np.arange(len(stack))
    while ((weights := agreement(stack[kept])) <= 0).any():  # then by how the others agree, whom liars no longer skew
        kept = kept[weights > 0]
    unit = rest[kept] / np.where(spread[kept] > 0, spread[kept], 1.0)[:, None, None]
    mean = np.tensordot(weights / weights.sum(), unit, axes=1)
    middle = biweight(np.column_stack([offset, spread])[kept], weights)
    return np.asarray(middle[:-1] + middle[-1] * mean, precision_of(stack))


def biweight(values: NDArray[np.float64], weights: NDArray[np.float64], reach: float = 4.685) -> NDArray[np.float64]:
    """Of each column Tukey's location: a mean in which values count less the farther out they are, far ones nothing."""
    middle = weighted_median(values, weights)
    spread = SPREAD * weighted_median(np.abs(values - middle), weights)
    where = np.where(spread > 0, spread, np.inf)  # where more than half are the same, that is it
    found = middle
    for _ in range(STEPS):
        counted = weights[:, None] * (1 - np.minimum(1, np.abs(values - found) / (reach * where)) ** 2) ** 2
        found = (counted * values).sum(axis=0) / counted.sum(axis=0)
    return np.asarray(np.where(spread > 0, found, middle))


def weighted_median(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each column: half of the weight lies on either side; between two values their mean."""
    order = np.argsort(values, axis=0, kind="stable")
    ordered, below = np.take_along_axis(values, order, axis=0), np.cumsum(weights[order], axis=0)
    half = below[-1] / 2
    low = (below < half * (1 - 1e-9)).sum(axis=0)
    high = (below <= half * (1 + 1e-9)).sum(axis=0)
    columns = np.arange(values.shape[1])
    return np.asarray((ordered[low, columns] + ordered[high, columns]) / 2)


def agreement(stack: Stack) -> NDArray[np.float64]:
    """How well each site knows the answers, up to a factor, seen from how they agree (Parisi et al. 2014).

    If they err independently, the correlations between them are those of one hidden answer: a matrix of rank one, but
    for its diagonal. Entry i of its eigenvector goes with how right site i is, and is negative for one that says the
    opposite. The side of most sites is taken for the honest one. Two sites, or a single text, tell nothing.
    """
    said = stack.astype(np.float64)
    rest = said - said.mean(axis=1, keepdims=True)
    rest -= rest.mean(axis=-1, keepdims=True)  # a number added to all classes says nothing
    spread = _spread(rest)
    flat = (rest / np.where(spread > 0, spread, 1.0)[:, None, None]).reshape(len(stack), -1)
    correlation = flat @ flat.T / flat.shape[1]
    if len(stack) < 3 or np.abs(correlation - np.diag(np.diag(correlation))).max() < 1e-6:
        return np.ones(len(stack))
    shared = np.zeros(len(stack))  # of a site's variance: it agrees with itself in its errors too, which must not count
    for _ in range(STEPS):
        np.fill_diagonal(correlation, shared)
        values, vectors = np.linalg.eigh(correlation)
        shared = np.minimum(values[-1] * vectors[:, -1] ** 2, 1.0)
    first = np.asarray(vectors[:, -1], np.float64)
    first[np.abs(first) < 1e-9] = 0.0
    return first if (np.sign(first).sum(), first.sum()) >= (0, 0) else -first


def _spread(rest: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each site, between classes: a number added to all of them does not count."""
    centred = rest - rest.mean(axis=-1, keepdims=True)
    return np.asarray(np.sqrt((centred**2).mean(axis=(1, 2))))


RULES: dict[str, Callable[[Stack], Matrix]] = {
    "median": median,
    "trimmed": trimmed_mean,
    "cronus": cronus,
    "krum": krum,
    "spectral": spectral,
}
