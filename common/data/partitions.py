"""How private texts are dealt to the sites. Pure functions of the rows and a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstill.common.data.splits import DataError, Rows, TextSet

ATTEMPTS = 100


def partition(
    private: TextSet, sites: int, how: str = "dirichlet", alpha: float = 1.0, seed: int = 0, minimum: int | float = 8
) -> list[Rows]:
    """Row numbers of each site: disjoint, at least `minimum` each, drawn again up to 100 times until that holds.

    A `minimum` below 1 is a share of an equal part.
    """
    if how not in PARTITIONERS:
        raise DataError(f"data.partition = {how!r} is not known; choose one of: {', '.join(PARTITIONERS)}")
    limit = how in ("dirichlet", "tasks-dirichlet") and alpha == 0
    if sites < 1 or not (alpha > 0 or limit):
        raise DataError(f"sites = {sites}, data.alpha = {alpha}: there must be a site, and alpha must be above 0")
    minimum = int(np.ceil(minimum * len(private) / sites)) if 0 < minimum < 1 else int(minimum)
    if sites * minimum > len(private):
        raise DataError(
            f"{sites} sites with at least {minimum} texts each need {sites * minimum}, but there are {len(private)} "
            "private texts; raise data.private, or lower data.minimum or the number of sites"
        )
    by_domain = how.startswith(("domain", "tasks"))
    if "dirichlet" in how and how != "tasks-dirichlet" and private.labels is None:
        raise DataError(f"data.partition = {how!r} divides by label, but these texts have no labels; use iid or domain")
    if by_domain and private.domains is None:
        raise DataError(f"data.partition = {how!r} divides by domain, but these texts have none; name task.domain")
    for attempt in range(ATTEMPTS):
        shares = PARTITIONERS[how](private, sites, alpha, np.random.default_rng([seed, attempt]))
        if min(map(len, shares)) >= minimum:
            return shares
    raise DataError(
        f"no draw in {ATTEMPTS} gave each of {sites} sites {minimum} texts (data.partition = {how!r}, alpha {alpha}); "
        "raise data.alpha or data.private, or lower data.minimum or the number of sites"
    )


def _iid(private: TextSet, sites: int, alpha: float, rng: np.random.Generator) -> list[Rows]:
    return np.array_split(rng.permutation(len(private)), sites)


def _dirichlet(private: TextSet, sites: int, alpha: float, rng: np.random.Generator) -> list[Rows]:
    """Equal sizes; site k's class proportions q_k ~ Dir(alpha * prior), as in FedID's text.

    At 0, the limit, a site has one class: class k modulo their number, or an equal slice of it.
    """
    if alpha == 0:
        classes = len(np.unique(_labels(private)))
        if sites < classes:
            raise DataError(f"{sites} sites cannot have one of {classes} classes each; raise data.alpha, or add sites")
        return _slices(_labels(private), sites, lambda rows, share: np.array_split(rng.permutation(rows), share))
    return _skewed(np.arange(len(private)), _labels(private), sites, alpha, rng)


def _skewed(rows: Rows, labels: Rows, sites: int, alpha: float, rng: np.random.Generator) -> list[Rows]:
    """Deal rows to sites in turn, each of a class drawn from the site's own q_k, until the rows are used up."""
    classes, counts = np.unique(labels[rows], return_counts=True)
    wishes = rng.dirichlet(alpha * counts / counts.sum(), size=sites)
    stock = [list(rng.permutation(rows[labels[rows] == label])) for label in classes]
    if sites == 1:  # all rows would be no skew at all: the most rows in which the proportions are q
        size = float((counts / np.maximum(wishes[0], 1e-12)).min())
        taken = [kind[: int(size * wish)] for kind, wish in zip(stock, wishes[0], strict=True)]
        return [rng.permutation(np.concatenate(taken).astype(np.int64))]
    shares: list[list[int]] = [[] for _ in range(sites)]
    for number, draw in enumerate(rng.random(len(rows))):
        site = number % sites
        left = np.array([wish if kind else 0.0 for wish, kind in zip(wishes[site], stock, strict=True)])
        if left.sum() <= 0:  # every class that this site wants is used up
            left = np.array([float(len(kind)) for kind in stock])
        bounds = np.cumsum(left)
        label = int(np.searchsorted(bounds, draw * bounds[-1], side="right"))
        shares[site].append(int(stock[label].pop()))
    return [np.array(share, dtype=np.int64) for share in shares]


def _dirichlet_clients(private: TextSet, sites: int, alpha: float, rng: np.random.Generator) -> list[Rows]:
    """Each class is cut over the sites by p ~ Dir(alpha * 1_K), as in FedID's code; sizes differ too."""
    labels = _labels(private)
    shares: list[list[Rows]] = [[] for _ in range(sites)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        cuts = np.rint(np.cumsum(rng.dirichlet(np.full(sites, alpha)))[:-1] * len(rows)).astype(np.int64)
        for share, part in zip(shares, np.split(rows, cuts), strict=True):
            share.append(part)
    return [rng.permutation(np.concatenate(share)) for share in shares]


def _domain(private: TextSet, sites: int, alpha: float, rng: np.random.Generator) -> list[Rows]:
    """Site k gets domain k, or an equal slice of domain k modulo the number of domains."""
    return _by_domain(private, sites, lambda rows, share: np.array_split(rng.permutation(rows), share))


def _domain_dirichlet(private: TextSet, sites: int, alpha: float, rng: np.random.Generator) -> list[Rows]:
    """By domain, and inside a domain with class proportions q_k ~ Dir(alpha * the domain's prior)."""
    labels = _labels(private)
    return _by_domain(private, sites, lambda rows, share: _skewed(rows, labels, share, alpha, rng))


def _tasks_dirichlet(private: TextSet, sites: int, alpha: float, rng: np.random.Generator) -> list[Rows]:
    """Site k wants domains by q_k ~ Dir(alpha * 1); a domain is divided among the sites in proportion.

    At 0, the limit, a site has one domain, as in `domain`.
    """
    if alpha == 0:
        return _domain(private, sites, alpha, rng)
    names, domains = np.array(private.domains), sorted(set(private.domains or ()))
    wishes = rng.dirichlet(np.full(len(domains), alpha), size=sites)
    shares: list[list[Rows]] = [[] for _ in range(sites)]
    for domain, wish in zip(domains, wishes.T, strict=True):
        rows = rng.permutation(np.flatnonzero(names == domain))
        wish = wish if wish.sum() > 0 else np.ones(sites)
        cuts = np.rint(np.cumsum(wish / wish.sum())[:-1] * len(rows)).astype(np.int64)
        for share, part in zip(shares, np.split(rows, cuts), strict=True):
            share.append(part)
    return [rng.permutation(np.concatenate(share)) for share in shares]


def _by_domain(private: TextSet, sites: int, cut: Callable[[Rows, int], list[Rows]]) -> list[Rows]:
    names = np.array(private.domains)
    domains = sorted(set(private.domains or ()))
    if sites < len(domains):
        raise DataError(
            f"{sites} sites for {len(domains)} domains ({', '.join(domains)}): name the ones to use in data.domains"
        )
    return _slices(names, sites, cut)


def _slices(kinds: NDArray[Any], sites: int, cut: Callable[[Rows, int], list[Rows]]) -> list[Rows]:
    """Site k gets kind k modulo their number; sites of one kind share it by `cut`."""
    distinct = np.unique(kinds)
    shares: list[Rows] = [np.empty(0, np.int64)] * sites
    for number, kind in enumerate(distinct):
        members = range(number, sites, len(distinct))
        for site, share in zip(members, cut(np.flatnonzero(kinds == kind), len(members)), strict=True):
            shares[site] = share
    return shares


def _quantity(private: TextSet, sites: int, alpha: float, rng: np.random.Generator) -> list[Rows]:
    """Deal at random, with sizes ~ Dir(alpha * 1)."""
    return _of_sizes(len(private), rng.dirichlet(np.full(sites, alpha)), rng)


def _power_law(private: TextSet, sites: int, alpha: float, rng: np.random.Generator) -> list[Rows]:
    """Deal at random; the k-th largest site has 1/k^alpha of the largest's texts, in a random order of sites."""
    sizes = rng.permutation(np.arange(1, sites + 1) ** -alpha)
    return _of_sizes(len(private), sizes / sizes.sum(), rng)


def _of_sizes(texts: int, sizes: NDArray[np.float64], rng: np.random.Generator) -> list[Rows]:
    cuts = np.rint(np.cumsum(sizes)[:-1] * texts).astype(np.int64)
    return list(np.split(rng.permutation(texts), cuts))


def _labels(private: TextSet) -> Rows:
    assert private.labels is not None
    return private.labels


PARTITIONERS: dict[str, Callable[[TextSet, int, float, np.random.Generator], list[Rows]]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "dirichlet-clients": _dirichlet_clients,
    "domain": _domain,
    "domain-dirichlet": _domain_dirichlet,
    "tasks-dirichlet": _tasks_dirichlet,
    "quantity": _quantity,
    "power-law": _power_law,
}


def counts(kinds: Sequence[Any] | Rows, shares: Sequence[Rows], known: Sequence[Any]) -> NDArray[np.int64]:
    """Count the rows of each known kind (label, domain) at each site: sites x kinds."""
    column = np.asarray(kinds)
    return np.array([[int((column[share] == kind).sum()) for kind in known] for share in shares], np.int64)
