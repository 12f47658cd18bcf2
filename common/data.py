"""Texts of a task: who gets which rows. Everything here is a pure function of the rows and a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fedstill.common.config import DataConfig

Text = str | tuple[str, str]
Rows = NDArray[np.int64]
ATTEMPTS = 100


class DataError(ValueError):
    """The texts cannot be divided as the configuration asks."""


@dataclass(frozen=True)
class TextSet:
    """Texts in a fixed order, with a label and a domain for each where these are known."""

    texts: tuple[Text, ...]
    labels: Rows | None = None
    domains: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, column in (("labels", self.labels), ("domains", self.domains)):
            if column is not None and len(column) != len(self.texts):
                raise DataError(f"{len(self.texts)} texts but {len(column)} {name}")

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, rows: Sequence[int] | Rows) -> TextSet:
        """The given rows, in the given order."""
        rows = np.asarray(rows, dtype=np.int64)
        return TextSet(
            tuple(self.texts[row] for row in rows),
            None if self.labels is None else self.labels[rows],
            None if self.domains is None else tuple(self.domains[row] for row in rows),
        )

    def without_labels(self) -> TextSet:
        """The same texts, labels forgotten."""
        return TextSet(self.texts, None, self.domains)

    def fingerprint(self) -> str:
        """SHA-256 of the texts in order; labels and domains have no part in it."""
        digest = hashlib.sha256(b"fedstill texts 1")
        for text in self.texts:
            parts = (text,) if isinstance(text, str) else text
            digest.update(len(parts).to_bytes(1, "big"))
            for part in parts:
                raw = part.encode("utf-8", "surrogatepass")
                digest.update(len(raw).to_bytes(8, "big"))  # lengths keep ("ab", "c") apart from ("a", "bc")
                digest.update(raw)
        return digest.hexdigest()


@dataclass(frozen=True)
class Pools:
    """What a task's source holds before anybody's share is cut from it; `dropped` counts rows left out, by reason."""

    train: TextSet
    test: TextSet | None = None
    public: TextSet | None = None
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Splits:
    """The four disjoint parts of a federation's texts."""

    private: TextSet
    public: TextSet
    labelled: TextSet
    test: TextSet


def make_splits(pools: Pools, data: DataConfig, seed: int) -> Splits:
    """Cut the pools into four disjoint parts, each with the labels and domains in the pool's proportions.

    A size is a count or a fraction of the pool it is cut from. A test or public pool of its own gives at most what it
    has; what is cut from the train pool must be there in full.
    """
    train, test = _of_domains(pools.train, data.domains), _of_domains(pools.test, data.domains)
    assert train is not None
    wanted = {"private": data.private, "public": data.public, "labelled": data.labelled, "test": data.test}
    # Private comes last, so that the test and public texts stay the same when only the private size changes.
    names = ["test", "public", "labelled", "private"]
    if test is not None:
        names.remove("test")
    if pools.public is not None:
        names.remove("public")
    sizes = {name: _count(name, wanted[name], len(train)) for name in names}
    if sum(sizes.values()) > len(train):
        asked = ", ".join(f"data.{name} = {size}" for name, size in sizes.items())
        raise DataError(
            f"{asked} make {sum(sizes.values())} texts, but the training texts are {len(train)}; lower one of them"
        )
    parts, order, start = {}, _stratified_order(train, np.random.default_rng([seed, 0])), 0
    for name in names:
        chosen = order[start : start + sizes[name]]
        parts[name] = train.select(_draws(seed, name).permutation(chosen))
        start += sizes[name]
    if test is not None:
        size = min(_count("test", wanted["test"], len(test)), len(test))
        parts["test"] = test.select(_stratified_order(test, _draws(seed, "test"))[:size])
    public = parts["public"] if pools.public is None else public_texts(pools.public, data, seed)
    return Splits(parts["private"], public.without_labels(), parts["labelled"], parts["test"])


def public_texts(pool: TextSet, data: DataConfig, seed: int) -> TextSet:
    """The public texts that everybody who holds the same public file works out alike, whatever columns it reads."""
    size = min(_count("public", data.public, len(pool)), len(pool))
    return pool.select(_draws(seed, "public").permutation(len(pool))[:size]).without_labels()


def _draws(seed: int, name: str) -> np.random.Generator:
    """Draws that depend on the seed and on which part is cut, not on which other parts there are."""
    return np.random.default_rng([seed, 1 + ("test", "public", "labelled", "private").index(name)])


def _of_domains(pool: TextSet | None, domains: list[str] | None) -> TextSet | None:
    # A pool that names no domains (a public file, say) belongs to all of them.
    if pool is None or not domains or pool.domains is None:
        return pool
    there = sorted(set(pool.domains))
    absent = [domain for domain in domains if domain not in there]
    if absent:
        raise DataError(f"data.domains names {', '.join(absent)}, but the texts have only: {', '.join(there)}")
    return pool.select([row for row, domain in enumerate(pool.domains) if domain in domains])


def _count(name: str, wanted: int | float, available: int) -> int:
    if wanted < 0 or (isinstance(wanted, float) and wanted >= 1 and not wanted.is_integer()):
        raise DataError(f"data.{name} = {wanted}: give a number of texts, or a fraction between 0 and 1")
    return round(wanted * available) if 0 < wanted < 1 else int(wanted)


def _stratified_order(texts: TextSet, rng: np.random.Generator) -> Rows:
    """A random order in which every run of rows has about the same mix of labels and domains as the whole."""
    place = np.empty(len(texts))
    for rows in _strata(texts):
        place[rng.permutation(rows)] = (np.arange(len(rows)) + rng.random()) / len(rows)
    return np.argsort(place, kind="stable")


def _strata(texts: TextSet) -> list[Rows]:
    labels = np.zeros(len(texts), np.int64) if texts.labels is None else texts.labels
    domains = texts.domains or ("",) * len(texts)
    groups: dict[tuple[str, int], list[int]] = {}
    for row, key in enumerate(zip(domains, labels.tolist(), strict=True)):
        groups.setdefault(key, []).append(row)
    return [np.array(groups[key], dtype=np.int64) for key in sorted(groups)]


def partition(
    private: TextSet, sites: int, how: str = "dirichlet", alpha: float = 1.0, seed: int = 0, minimum: int = 8
) -> list[Rows]:
    """Row numbers of each site: disjoint, at least `minimum` each, drawn again up to 100 times until that holds."""
    if how not in PARTITIONERS:
        raise DataError(f"data.partition = {how!r} is not known; choose one of: {', '.join(PARTITIONERS)}")
    limit = how == "tasks-dirichlet" and alpha == 0
    if sites < 1 or not (alpha > 0 or limit):
        raise DataError(f"sites = {sites}, data.alpha = {alpha}: there must be a site, and alpha must be above 0")
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
    """Equal sizes; site k's class proportions q_k ~ Dir(alpha * prior), as in FedID's text."""
    return _skewed(np.arange(len(private)), _labels(private), sites, alpha, rng)


def _skewed(rows: Rows, labels: Rows, sites: int, alpha: float, rng: np.random.Generator) -> list[Rows]:
    """Sites take one row each in turn, of a class drawn from their own q_k, until the rows are used up."""
    classes, counts = np.unique(labels[rows], return_counts=True)
    wishes = rng.dirichlet(alpha * counts / counts.sum(), size=sites)
    stock = [list(rng.permutation(rows[labels[rows] == label])) for label in classes]
    if sites == 1:  # all rows would be no skew at all: the most rows in which the proportions are q
        size = float((counts / np.maximum(wishes[0], 1e-12)).min())
        taken = [kind[: int(size * wish)] for kind, wish in zip(stock, wishes[0], strict=True)]
        return [rng.permutation(np.concatenate(taken).astype(np.int64))]
    shares: list[list[int]] = [[] for _ in range(sites)]
    for number, draw in enumerate(rng.random(len(rows) // sites * sites)):
        site = number % sites
        left = np.array([wish if kind else 0.0 for wish, kind in zip(wishes[site], stock, strict=True)])
        if left.sum() <= 0:  # every class this site wished for is used up
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
    """Site k wishes for domains by q_k ~ Dir(alpha * 1); a domain is cut over the sites as they wish for it.

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
    shares: list[Rows] = [np.empty(0, np.int64)] * sites
    for number, domain in enumerate(domains):
        members = range(number, sites, len(domains))
        for site, share in zip(members, cut(np.flatnonzero(names == domain), len(members)), strict=True):
            shares[site] = share
    return shares


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
}
