"""A task's texts and the four splits of a run. All pure functions of the rows and a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fedstill.common.config import DataConfig

Text = str | tuple[str, str]
Rows = NDArray[np.int64]


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
        """Return the same texts without labels."""
        return TextSet(self.texts, None, self.domains)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the texts in order; labels and domains do not count."""
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
    """What a task's source holds before it is split; `dropped` counts skipped rows by reason."""

    train: TextSet
    test: TextSet | None = None
    public: TextSet | None = None
    second: TextSet | None = None  # a second test set
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Splits:
    """The four parts of a federation's texts: disjoint, unless the labelled ones stand blind among the public ones."""

    private: TextSet
    public: TextSet
    labelled: TextSet
    test: TextSet
    blind: Rows = field(default_factory=lambda: np.empty(0, np.int64))  # where in `public` each labelled text stands
    second: TextSet | None = None  # a second test set: the central model's alone
    public_truth: Rows | None = None  # labels of `public`, if cut from labelled texts: to measure with, not to train


def make_splits(pools: Pools, data: DataConfig, seed: int) -> Splits:
    """Cut the pools into four disjoint parts, each with the labels and domains in the pool's proportions.

    A size is a count or a fraction of the pool it is cut from. A separate test or public pool gives at most what it
    has; what is cut from the train pool must be there in full.
    """
    train = _evened(_of_domains(pools.train, data.domains), data.domain_pool)
    test = None if pools.test is None else _of_present_domains(pools.test, data.domains)
    if test is None and data.test_alpha is not None:
        raise DataError("data.test_alpha draws from a test set, and the task has none of its own; take it out")
    if data.public_domains or data.labelled_domains:
        return _finished(_splits_by_domain(Pools(train, test, pools.public), data, seed), pools, data, seed)
    wanted = {"private": data.private, "public": data.public, "labelled": data.labelled, "test": data.test}
    # Private comes last, so that the test and public texts stay the same when only the private size changes.
    names = ["test", "public", "labelled", "private"]
    parts: dict[str, TextSet] = {}
    if test is not None:
        names.remove("test")
    elif data.test_seed is not None:  # cut first, so that it depends on no other seed
        names.remove("test")
        size = min(_count("test", data.test, len(train)), len(train))
        order = _stratified_order(train, np.random.default_rng([data.test_seed, 0]))
        parts["test"], train = train.select(order[:size]), train.select(np.sort(order[size:]))
    train = _pooled(train, data.pool)
    if pools.public is not None:
        names.remove("public")
    sizes = {name: _count(name, wanted[name], len(train)) for name in names}
    shares = [wanted[name] for name in names]
    if all(0 <= share < 1 for share in shares) and sum(shares) <= 1 + 1e-9:  # three rounded up may be one too many
        sizes["private"] -= max(0, sum(sizes.values()) - len(train))
    if sum(sizes.values()) > len(train):
        asked = ", ".join(f"data.{name} = {size}" for name, size in sizes.items())
        raise DataError(
            f"{asked} make {sum(sizes.values())} texts, but the training texts are {len(train)}; lower one of them"
        )
    order, start = _stratified_order(train, np.random.default_rng([seed, 0])), 0
    for name in names:
        chosen = order[start : start + sizes[name]]
        parts[name] = train.select(_draws(seed, name).permutation(chosen))
        start += sizes[name]
    if test is not None:
        parts["test"] = _test_texts(test, data, seed)
    public = parts["public"] if pools.public is None else _public(pools.public, data, seed)
    splits = Splits(parts["private"], public.without_labels(), parts["labelled"], parts["test"])
    return _finished(replace(splits, public_truth=public.labels), pools, data, seed)


def _finished(splits: Splits, pools: Pools, data: DataConfig, seed: int) -> Splits:
    """Add a second test set, cut as the first one, and shuffle the labelled texts among the public ones, if asked."""
    second = None if pools.second is None else _test_texts(pools.second, data, seed)
    return _blind(replace(splits, second=second), data, seed)


def _blind(splits: Splits, data: DataConfig, seed: int) -> Splits:
    """Shuffle the labelled texts among the public ones, if asked: what sites say of them is what they say unaided."""
    if not data.blind:
        return splits
    public, labelled = splits.public, splits.labelled
    order = np.random.default_rng([seed, 5]).permutation(len(public) + len(labelled))
    both = TextSet((*public.texts, *labelled.texts)).select(order)
    truth = None
    if splits.public_truth is not None and labelled.labels is not None:
        truth = np.concatenate([splits.public_truth, labelled.labels])[order]
    return replace(splits, public=both, blind=np.argsort(order)[len(public) :], public_truth=truth)


def _splits_by_domain(pools: Pools, data: DataConfig, seed: int) -> Splits:
    """Take public and labelled texts from domains that no site has; each part gets at most what its domains have.

    The public domains are not tested: they have no labels.
    """
    train, apart = pools.train, [*(data.public_domains or ()), *(data.labelled_domains or ())]
    if len(set(apart)) < len(apart):
        raise DataError("data.public_domains and data.labelled_domains name the same domain; give it to one of them")
    if train.domains is None:
        raise DataError("data.public_domains and data.labelled_domains need texts with domains; name task.domain")
    if pools.public is not None and data.public_domains:
        raise DataError("data.public_domains, and the public texts come from elsewhere; take one of them out")
    _of_domains(train, apart)  # refuses unknown domains
    rest = [domain for domain in dict.fromkeys(train.domains) if domain not in apart]
    tested = [domain for domain in dict.fromkeys(train.domains) if domain not in (data.public_domains or ())]
    free = np.ones(len(train), bool)

    def cut(name: str, domains: Sequence[str], size: int | float) -> TextSet:
        rows = np.flatnonzero(free & np.isin(np.array(train.domains), domains))
        part = train.select(rows)
        chosen = _stratified_order(part, _draws(seed, name))[: _count(name, size, len(part))]
        free[rows[chosen]] = False
        return part.select(_draws(seed, name).permutation(chosen))

    if pools.test is None:
        test = cut("test", tested, data.test)
    else:
        pool = pools.test
        pool = pool if pool.domains is None else pool.select(np.flatnonzero(np.isin(np.array(pool.domains), tested)))
        test = _test_texts(pool, data, seed)
    if pools.public is None:
        public = cut("public", data.public_domains or rest, data.public)
    else:
        public = _public(pools.public, data, seed)
    labelled = cut("labelled", data.labelled_domains or rest, data.labelled)
    private = cut("private", rest, data.private)
    return Splits(private, public.without_labels(), labelled, test, public_truth=public.labels)


def _evened(train: TextSet, size: int | None) -> TextSet:
    """Return so many texts of each domain, in the domain's mix of labels, the same on every call (AdaFD, VII A)."""
    if size is None:
        return train
    if train.domains is None:
        raise DataError("data.domain_pool takes as many texts of each domain, and these have none; name task.domain")
    domains, kept = np.array(train.domains), []
    for domain in dict.fromkeys(train.domains):
        rows = np.flatnonzero(domains == domain)
        kept.append(rows[_stratified_order(train.select(rows), np.random.default_rng(0))[:size]])
    return train.select(np.sort(np.concatenate(kept)))


def _pooled(train: TextSet, size: int | None) -> TextSet:
    """Return so many of the texts, in the pool's mix of labels and domains, the same on every call."""
    if size is None or size >= len(train):
        return train
    return train.select(np.sort(_stratified_order(train, np.random.default_rng(0))[:size]))


def _test_texts(pool: TextSet, data: DataConfig, seed: int) -> TextSet:
    """Take at most the whole pool, in its mix of labels and domains, or with labels mixed by Dirichlet(test_alpha)."""
    size = min(_count("test", data.test, len(pool)), len(pool))
    fixed = 0 if data.test_alpha is not None else seed
    rng = _draws(fixed if data.test_seed is None else data.test_seed, "test")
    if data.test_alpha is None:
        return pool.select(_stratified_order(pool, rng)[:size])
    if pool.labels is None:
        raise DataError("data.test_alpha mixes labels, and the test texts have none; take it out")
    _, classes, counts = np.unique(pool.labels, return_inverse=True, return_counts=True)
    shares = rng.dirichlet([data.test_alpha] * len(counts))
    # Draw without replacement, each text in proportion to its class's share (Efraimidis and Spirakis 2006).
    turns = rng.exponential(size=len(pool)) / np.maximum(shares / counts, 1e-300)[classes]
    return pool.select(np.argsort(turns)[:size])


def public_texts(pool: TextSet, data: DataConfig, seed: int) -> TextSet:
    """Return the public texts, the same for everybody with the same public file, whatever columns are read."""
    return _public(pool, data, seed).without_labels()


def _public(pool: TextSet, data: DataConfig, seed: int) -> TextSet:
    size = min(_count("public", data.public, len(pool)), len(pool))
    return pool.select(_draws(seed, "public").permutation(len(pool))[:size])


def _draws(seed: int, name: str) -> np.random.Generator:
    """Return a generator that depends on the seed and the part, not on which other parts exist."""
    return np.random.default_rng([seed, 1 + ("test", "public", "labelled", "private").index(name)])


def _of_domains(pool: TextSet, domains: list[str] | None) -> TextSet:
    # A pool without domains (a public file, say) belongs to all of them.
    if not domains or pool.domains is None:
        return pool
    present = sorted(set(pool.domains))
    absent = [domain for domain in domains if domain not in present]
    if absent:
        raise DataError(f"data.domains names {', '.join(absent)}, but the texts have only: {', '.join(present)}")
    return pool.select([row for row, domain in enumerate(pool.domains) if domain in domains])


def _of_present_domains(pool: TextSet, domains: list[str] | None) -> TextSet:
    """As `_of_domains`, for a test pool that may lack some of them, but not all."""
    present = None if not domains or pool.domains is None else [name for name in domains if name in pool.domains]
    return _of_domains(pool, domains if present == [] else present)


def _count(name: str, wanted: int | float, available: int) -> int:
    if wanted < 0 or (isinstance(wanted, float) and wanted >= 1 and not wanted.is_integer()):
        raise DataError(f"data.{name} = {wanted}: give a number of texts, or a fraction between 0 and 1")
    return round(wanted * available) if 0 < wanted < 1 else int(wanted)


def _stratified_order(texts: TextSet, rng: np.random.Generator) -> Rows:
    """Return a random order in which every stretch of rows has about the whole's mix of labels and domains."""
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
