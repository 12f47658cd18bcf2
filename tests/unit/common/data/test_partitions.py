"""Partitions as properties, over many draws; and what a person sees of one."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedstill.cli import app
from fedstill.common.config import DataConfig
from fedstill.common.data.partitions import PARTITIONERS, counts, partition
from fedstill.common.data.splits import DataError, Pools, TextSet, make_splits

ALL = sorted(PARTITIONERS)


def some(rows: int, classes: int, domains: int, seed: int = 0) -> TextSet:
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(classes, size=rows - classes)]).astype(np.int64)
    names = tuple(f"d{n}" for n in [*range(domains), *rng.integers(domains, size=rows - domains)])
    return TextSet(tuple(map(str, range(rows))), labels, names)


@settings(max_examples=60, deadline=None)
@given(
    how=st.sampled_from(ALL),
    rows=st.integers(200, 400),
    classes=st.integers(2, 5),
    sites=st.integers(4, 8),
    alpha=st.floats(0.5, 100),
    seed=st.integers(0, 10_000),
)
def test_every_row_once_and_the_minimum_kept(
    how: str, rows: int, classes: int, sites: int, alpha: float, seed: int
) -> None:
    private = some(rows, classes, 2, seed)
    alpha = min(alpha, 1.0) if how == "power-law" else alpha
    shares = partition(private, sites, how, alpha, seed, minimum=2)
    assert len(shares) == sites
    assert min(map(len, shares)) >= 2
    assert sorted(np.concatenate(shares).tolist()) == list(range(rows))
    again = partition(private, sites, how, alpha, seed, minimum=2)
    assert all(np.array_equal(a, b) for a, b in zip(shares, again, strict=True))


@settings(max_examples=20, deadline=None)
@given(how=st.sampled_from(ALL), seed=st.integers(0, 1000))
def test_a_minimum_share_is_one_of_an_equal_part(how: str, seed: int) -> None:
    shares = partition(some(400, 2, 2, seed), 4, how, 1.0, seed, minimum=0.3)
    assert min(map(len, shares)) >= 0.3 * 400 / 4


@settings(max_examples=20, deadline=None)
@given(how=st.sampled_from(["dirichlet", "dirichlet-clients", "quantity", "iid"]), seed=st.integers(0, 1000))
def test_a_large_alpha_gives_every_site_the_overall_shares(how: str, seed: int) -> None:
    private = some(4000, 3, 2, seed)
    table = counts(np.asarray(private.labels), partition(private, 4, how, 1e5, seed), range(3))
    assert np.allclose(table / table.sum(axis=1, keepdims=True), table.sum(axis=0) / 4000, atol=0.08)
    assert np.allclose(table.sum(axis=1), 1000, atol=40)


@settings(max_examples=20, deadline=None)
@given(classes=st.integers(2, 4), more=st.integers(0, 4), seed=st.integers(0, 1000))
def test_at_alpha_0_a_site_has_one_class_and_near_it_one_class_has_one_site(classes: int, more: int, seed: int) -> None:
    private = some(400, classes, 2, seed)
    labels = np.asarray(private.labels)
    table = counts(labels, partition(private, classes + more, "dirichlet", 0, seed), range(classes))
    assert ((table > 0).sum(axis=1) == 1).all()
    assert table.sum() == 400
    near = counts(labels, partition(private, 2, "dirichlet-clients", 1e-4, seed), range(classes))
    assert (near.max(axis=0) >= 0.99 * near.sum(axis=0)).all()


def test_near_alpha_0_a_sites_first_texts_are_of_one_class() -> None:
    private = some(3000, 3, 2)
    first = [np.asarray(private.labels)[share[:100]] for share in partition(private, 3, "dirichlet", 1e-3, 1)]
    assert [len(set(labels.tolist())) for labels in first] == [1, 1, 1]


def test_power_law_sizes_are_those_of_the_law() -> None:
    # 1, 1/2, 1/3, 1/4 of the largest: 480, 240, 160, 120 of 1000
    sizes = sorted((len(share) for share in partition(some(1000, 2, 2), 4, "power-law", 1.0, 3)), reverse=True)
    assert sizes == [480, 240, 160, 120]
    orders = {tuple(len(s) for s in partition(some(1000, 2, 2), 4, "power-law", 1.0, seed)) for seed in range(8)}
    assert len(orders) > 1


def test_quantity_sizes_have_the_spread_of_their_distribution() -> None:
    # a share of Dir(1, 1, 1, 1) has mean 1/4 and variance (1/4)(3/4)/5 = 0.0375
    shares = [len(s) / 1000 for n in range(100) for s in partition(some(1000, 2, 2), 4, "quantity", 1.0, n, minimum=1)]
    assert np.var(shares) == pytest.approx(0.0375, rel=0.2)


def test_public_and_labelled_texts_from_domains_of_their_own() -> None:
    pool = some(1000, 3, 4)
    sizes = {"private": 200, "public": 5000, "labelled": 0.5, "test": 100}
    data = DataConfig.model_validate({**sizes, "public_domains": ["d3"], "labelled_domains": ["d2"]})
    splits = make_splits(Pools(pool), data, seed=1)
    parts = [splits.private, splits.public, splits.labelled, splits.test]
    assert [set(part.domains or ()) for part in parts] == [{"d0", "d1"}, {"d3"}, {"d2"}, {"d0", "d1", "d2"}]
    texts = [text for part in parts for text in part.texts]
    assert len(texts) == len(set(texts))
    assert len(splits.public) == (pool.domains or ()).count("d3")
    assert len(splits.private) == 200
    assert splits.public.labels is None
    again = make_splits(Pools(pool), data, seed=1)
    assert again.private.texts == splits.private.texts
    own_test = make_splits(Pools(pool, test=some(80, 3, 4, 5)), data, seed=1).test
    assert set(own_test.domains or ()) == {"d0", "d1", "d2"}


def test_a_test_pool_may_lack_a_domain_but_not_all() -> None:
    pool, test = some(100, 2, 3), some(60, 2, 2)
    data = DataConfig(private=20, public=10, labelled=5, test=60, domains=["d1", "d2"])
    assert set(make_splits(Pools(pool, test=test), data, seed=1).test.domains or ()) == {"d1"}
    with pytest.raises(DataError, match="names d2, but the texts have only: d0, d1"):
        make_splits(Pools(pool, test=test), data.model_copy(update={"domains": ["d2"]}), seed=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"public_domains": ["d9"]}, "names d9, but the texts have only: d0, d1"),
        ({"public_domains": ["d0"], "labelled_domains": ["d0"]}, "name the same domain"),
    ],
)
def test_domains_that_cannot_be_kept_apart(changes: dict[str, list[str]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_splits(Pools(some(100, 2, 2)), DataConfig.model_validate(changes), seed=1)
    with pytest.raises(DataError, match="need texts with domains"):
        make_splits(Pools(TextSet(("a", "b"), np.array([0, 1]))), DataConfig(public_domains=["d0"]), seed=1)


def test_the_command_counts_and_draws(small_file: Path, tmp_path: Path) -> None:
    picture, runner = tmp_path / "pictures/split.png", CliRunner()
    found = runner.invoke(app, ["partition", str(small_file), "--picture", str(picture), "--json"])
    rows = json.loads(found.output)
    assert [row["site"] for row in rows] == ["north", "south"]
    assert [row["negative"] + row["positive"] for row in rows] == [row["texts"] for row in rows] == [32, 32]
    assert picture.read_bytes().startswith(b"\x89PNG")
    by = runner.invoke(
        app, ["partition", str(small_file), "--by", "domain", "--set", "data.partition=domain", "--json"]
    )
    assert [(row["imdb"] > 0, row["rotten_tomatoes"] > 0) for row in json.loads(by.output)] == [
        (True, False),
        (False, True),
    ]
    shown = runner.invoke(app, ["partition", str(small_file), "--set", "data.alpha=0"])
    assert "dirichlet, alpha 0, seed 1" in shown.output
    wrong = runner.invoke(app, ["partition", str(small_file), "--by", "moon"])
    assert "write label or domain" in str(wrong.exception)
