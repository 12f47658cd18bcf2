"""Robust aggregation of predictions: sites x texts x classes in, texts x classes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedstill.common.maths.ensemble import Matrix, mean_predictions, precision_of

Aggregation = Literal["mean", "median", "trimmed", "cronus", "krum", "spectral"]
Stack = NDArray[Any]

SPREAD = 1.4826  # times the median distance from the median is the standard deviation of a normal sample
STEPS = 20  # fixed-point iterations; they converge long before
TEXTS = 64  # that Cronus filters at a time
FEW, POWERS = 32, 100  # sites up to which all eigenvectors are as fast as one; powers of a matrix that are tried


def combine(
    predictions: Mapping[str, Matrix],
    weights: Mapping[str, float],
    rule: Aggregation = "mean",
    probabilities: bool = False,
) -> Matrix:
    """Combine the predictions of the sites in `weights` by the rule; with `probabilities` each text sums to 1 again.

    Only `mean` uses the weights: under the other rules each site counts once, whatever size it claims.
    """
    if rule == "mean":
        return mean_predictions(predictions, weights)
    combined = RULES[rule](np.stack([predictions[name] for name in weights]))
    if not probabilities:
        return combined
    combined = np.maximum(combined, 0)
    total = combined.sum(axis=-1, keepdims=True)
    nothing = total <= 0  # such as the median of votes for three different classes
    plain = mean_predictions(predictions, dict.fromkeys(weights, 1.0 / len(weights))) if nothing.any() else combined
    return np.asarray(np.where(nothing, plain, combined / np.where(nothing, 1.0, total)), precision_of(combined))


def median(stack: Stack) -> Matrix:
    """Return the median of the sites' predictions, number by number."""
    middle = _middle(_by_number(stack)).reshape(stack.shape[1:])
    return np.asarray(middle, precision_of(stack))


def trimmed_mean(stack: Stack, share: float = 0.2) -> Matrix:
    """Return the mean without the `share` highest and lowest, at least one of each while a site remains."""
    sites = len(stack)
    cut = min(max(1, int(share * sites)), (sites - 1) // 2)
    kept = np.sort(_by_number(stack), axis=-1)[:, cut : sites - cut]
    return np.asarray(kept.mean(axis=-1, dtype=np.float64).reshape(stack.shape[1:]), precision_of(stack))


def _middle(rows: Stack) -> NDArray[Any]:
    """Return the median of each row; numpy's own looks for it, which takes longer than to sort short rows."""
    count, ordered = rows.shape[1], np.sort(rows, axis=1)
    found: NDArray[Any] = ordered[:, (count - 1) // 2 : count // 2 + 1].mean(axis=1)
    return found


def _by_number(stack: Stack) -> Stack:
    """Return a row for each number, with what all sites say of it side by side: sorting columns takes far longer."""
    return np.ascontiguousarray(stack.reshape(len(stack), -1).T)


def cronus(stack: Stack, bound: float = 4.0) -> Matrix:
    """Return the mean of what the filter of Diakonikolas et al. keeps of each text's predictions."""
    kept = cronus_filter(stack, bound)[..., None]
    return np.asarray((stack * kept).sum(axis=0, dtype=np.float64) / kept.sum(axis=0), precision_of(stack))


def cronus_filter(stack: Stack, bound: float = 4.0) -> NDArray[np.bool_]:
    """Return which sites are kept on which text (sites x texts).

    While the variance along the top direction of the centred predictions is large, the farthest one is dropped. Large
    means more than `bound` times the variance estimated from the median distance from the median; a majority stays.
    """
    parts = [_kept(stack[:, first : first + TEXTS], bound) for first in range(0, stack.shape[1], TEXTS)]
    return np.concatenate(parts).T if parts else np.ones(stack.shape[:2], bool)


def _kept(stack: Stack, bound: float) -> NDArray[np.bool_]:
    """Filter a few texts at a time, so that they stay in the processor's cache (texts x sites)."""
    sites, texts = stack.shape[:2]
    kept, left = np.ones((texts, sites), bool), np.arange(texts)  # the texts whose variance is still large
    points = stack.astype(np.float64).transpose(1, 2, 0).copy()  # texts x classes x sites; those still there come first
    who = np.tile(np.arange(sites), (texts, 1))  # whose point stands where
    for count in range(sites, sites - (sites - 1) // 2, -1):
        centred = points[..., :count] - points[..., :count].mean(axis=-1, keepdims=True)
        values, vectors = np.linalg.eigh(centred @ centred.transpose(0, 2, 1) / count)
        projection = (vectors[:, None, :, -1] @ centred)[:, 0]
        distance = np.abs(projection - _middle(projection)[:, None])
        expected = (SPREAD * _middle(distance)) ** 2
        large = values[:, -1] > np.maximum(bound * expected, 1e-12)
        if not large.any():
            break
        if not large.all():
            left, points, who = left[large], points[large], who[large]
        rows, farthest = np.arange(len(left)), np.argmax(distance[large], axis=1)
        kept[left, who[rows, farthest]] = False
        points[rows, :, farthest], who[rows, farthest] = points[..., count - 1], who[:, count - 1]
    return kept


def krum(stack: Stack, liars: int | None = None) -> Matrix:
    """Return the mean of the sites whose predictions are nearest to their neighbours' (Blanchard et al. 2017)."""
    scores = krum_scores(stack, liars)
    lied = _liars(len(stack), liars)
    kept = np.sort(np.argsort(scores, kind="stable")[: len(stack) - lied])
    return np.asarray(stack[kept].mean(axis=0, dtype=np.float64), precision_of(stack))


def krum_scores(stack: Stack, liars: int | None = None) -> NDArray[np.float64]:
    """Return each site's sum of squared distances to its n - f - 2 nearest, where f sites may be malicious."""
    flat = stack.reshape(len(stack), -1).astype(np.float64)
    flat -= _middle(np.ascontiguousarray(flat.T))  # so that |a|^2 + |b|^2 - 2ab cancels less; no liar can move it far
    inner = flat @ flat.T
    squares = np.diag(inner)
    distances = np.maximum(squares[:, None] + squares - 2 * inner, 0.0)
    np.fill_diagonal(distances, 0.0)
    near = max(1, len(stack) - _liars(len(stack), liars) - 2)
    return np.asarray(np.sort(distances, axis=1)[:, 1 : near + 1].sum(axis=1))


def _liars(sites: int, liars: int | None) -> int:
    """Return how many malicious sites Krum tolerates: at most (n - 3) / 2 of n."""
    most = max(0, (sites - 3) // 2)
    return most if liars is None else min(liars, most)


def spectral(stack: Stack) -> Matrix:
    """Average the sites that agree with each other, with a typical site's mean and spread.

    Each site's mean over the texts and its spread are removed first, so that no site can shift or scale the result.
    Sites whose `agreement` is not positive are dropped; the others are averaged with it as weight. The result gets back
    the mean and spread that are usual among them, by the same weights: a site that knows little also counts little for
    the classes' shares.
    """
    logits = stack.astype(np.float64)
    offset = logits.mean(axis=1)
    rest = logits - offset[:, None]
    spread = _spread(rest)
    kept = np.arange(len(stack))
    while ((weights := agreement(stack[kept])) <= 0).any():  # again without the sites that skewed the agreement
        kept = kept[weights > 0]
    unit = rest[kept] / np.where(spread[kept] > 0, spread[kept], 1.0)[:, None, None]
    mean = np.tensordot(weights / weights.sum(), unit, axes=1)
    middle = biweight(np.column_stack([offset, spread])[kept], weights)
    return np.asarray(middle[:-1] + middle[-1] * mean, precision_of(stack))


def biweight(values: NDArray[np.float64], weights: NDArray[np.float64], reach: float = 4.685) -> NDArray[np.float64]:
    """Return Tukey's biweight location of each column: a mean in which values count less the farther out they are."""
    middle = weighted_median(values, weights)
    spread = SPREAD * weighted_median(np.abs(values - middle), weights)
    where = np.where(spread > 0, spread, np.inf)  # where more than half are equal, the median is the location
    location = middle
    for _ in range(STEPS):
        counted = weights[:, None] * (1 - np.minimum(1, np.abs(values - location) / (reach * where)) ** 2) ** 2
        location = (counted * values).sum(axis=0) / counted.sum(axis=0)
    return np.asarray(np.where(spread > 0, location, middle))


def weighted_median(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each column's value with half of the weight on either side; between two values, their mean."""
    order = np.argsort(values, axis=0, kind="stable")
    ordered, below = np.take_along_axis(values, order, axis=0), np.cumsum(weights[order], axis=0)
    half = below[-1] / 2
    low = (below < half * (1 - 1e-9)).sum(axis=0)
    high = (below <= half * (1 + 1e-9)).sum(axis=0)
    columns = np.arange(values.shape[1])
    return np.asarray((ordered[low, columns] + ordered[high, columns]) / 2)


def agreement(stack: Stack) -> NDArray[np.float64]:
    """Estimate from the sites' agreement how accurate each is, up to a factor (Parisi et al. 2014).

    If sites err independently, their correlations are those of one hidden answer: a matrix of rank one, except for its
    diagonal. Entry i of its eigenvector grows with the accuracy of site i, and is negative for a site that says the
    opposite. The majority is taken to be honest. Two sites, or a single text, reveal nothing.
    """
    logits = stack.astype(np.float64)
    rest = logits - logits.mean(axis=1, keepdims=True)
    rest -= rest.mean(axis=-1, keepdims=True)  # a constant added to all classes carries no information
    spread = _spread(rest)
    flat = (rest / np.where(spread > 0, spread, 1.0)[:, None, None]).reshape(len(stack), -1)
    correlation = flat @ flat.T / flat.shape[1]
    if len(stack) < 3 or np.abs(correlation - np.diag(np.diag(correlation))).max() < 1e-6:
        return np.ones(len(stack))
    first = np.random.default_rng(1).standard_normal(len(stack))  # in no direction that data could avoid
    shared = np.zeros(len(stack))  # of a site's variance: agreeing with itself in its errors must not count
    for _ in range(STEPS):
        np.fill_diagonal(correlation, shared)
        value, first = _top(correlation, first)
        shared = np.minimum(value * first**2, 1.0)
    first[np.abs(first) < 1e-9] = 0.0
    return first if (np.sign(first).sum(), first.sum()) >= (0, 0) else -first


def _top(matrix: NDArray[np.float64], start: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """Return the largest eigenvalue and its vector, of a matrix without eigenvalues below -1.

    Of many sites by powers from a vector near it, in a thousandth of the time, where a few dozen of them suffice.
    """
    if len(matrix) > FEW:
        vector = start / np.linalg.norm(start)
        for _ in range(POWERS):
            image = matrix @ vector
            value = float(vector @ image)
            if np.linalg.norm(image - value * vector) <= 1e-12 * max(1.0, abs(value)):
                return value, vector
            vector = image + vector  # the matrix plus one has no negative eigenvalue that could win
            vector /= np.linalg.norm(vector)
    values, vectors = np.linalg.eigh(matrix)
    return float(values[-1]), np.array(vectors[:, -1])


def _spread(rest: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each site's spread between classes; a constant added to all of them does not count."""
    centred = rest - rest.mean(axis=-1, keepdims=True)
    return np.asarray(np.sqrt(np.einsum("ktc,ktc->k", centred, centred) / centred[0].size))


RULES: dict[str, Callable[[Stack], Matrix]] = {
    "median": median,
    "trimmed": trimmed_mean,
    "cronus": cronus,
    "krum": krum,
    "spectral": spectral,
}
