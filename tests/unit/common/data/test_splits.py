"""Splits and partitions: disjoint, reproducible, in the proportions they promise."""

import subprocess
import sys

import numpy as np
import pytest

from fedstill.common.config import DataConfig
from fedstill.common.data.partitions import PARTITIONERS, partition
from fedstill.common.data.splits import DataError, Pools, TextSet, make_splits, public_texts


def texts(count: int, classes: int = 2, domains: int = 2) -> TextSet:
    """`count` different texts; label and domain cycle, so that every combination is equally common."""
    labels = np.arange(count, dtype=np.int64) % classes
    names = tuple(f"domain{number // classes % domains}" for number in range(count))
    return TextSet(tuple(f"text {number}" for number in range(count)), labels, names)


def test_fingerprint_is_of_texts_in_order_and_of_nothing_else() -> None:
    some = texts(4)
    assert some.fingerprint() == some.without_labels().fingerprint()
    assert some.fingerprint() != some.select([1, 0, 2, 3]).fingerprint()
    assert some.fingerprint() != some.select([0, 1, 2]).fingerprint()
    assert TextSet((("ab", "c"),)).fingerprint() != TextSet((("a", "bc"),)).fingerprint()
    assert TextSet((("ab", "c"),)).fingerprint() != TextSet(("ab", "c")).fingerprint()


def test_fingerprint_does_not_change_between_versions() -> None:
    # sha256 of b"fedstill texts 1" + one part + its length in 8 bytes + b"a", by hashlib on another day
    import hashlib

    expected = hashlib.sha256(b"fedstill texts 1" + b"\x01" + bytes(7) + b"\x01" + b"a").hexdigest()
    assert TextSet(("a",)).fingerprint() == expected


def test_splits_are_disjoint_stratified_and_the_public_part_has_no_labels() -> None:
    splits = make_splits(Pools(texts(1000)), DataConfig(private=400, public=0.2, labelled=40, test=100), seed=3)
    parts = [splits.private, splits.public, splits.labelled, splits.test]
    assert [len(part) for part in parts] == [400, 200, 40, 100]
    together = [text for part in parts for text in part.texts]
    assert len(set(together)) == 740
    assert splits.public.labels is None
    for part in (splits.private, splits.labelled, splits.test):
        assert part.labels is not None
        assert part.domains is not None
        assert abs(part.labels.mean() - 0.5) <= 2 / len(part)
        assert abs(part.domains.count("domain0") - len(part) / 2) <= 2


def test_more_private_texts_leave_test_and_public_as_they_were() -> None:
    pools = Pools(texts(1000))
    few = make_splits(pools, DataConfig(private=100, public=200, labelled=40, test=100), seed=3)
    many = make_splits(pools, DataConfig(private=500, public=200, labelled=40, test=100), seed=3)
    other = make_splits(pools, DataConfig(private=500, public=200, labelled=40, test=100), seed=4)
    assert few.public.fingerprint() == many.public.fingerprint() != other.public.fingerprint()
    assert few.test.fingerprint() == many.test.fingerprint()


def test_files_of_their_own_give_test_and_public() -> None:
    own = TextSet(("p1", "p2", "p3"))
    pools = Pools(texts(100), test=texts(30), public=own)
    splits = make_splits(pools, DataConfig(private=90, public=600, labelled=10, test=20), seed=1)
    assert sorted(splits.public.texts) == ["p1", "p2", "p3"]
    assert len(splits.test) == 20
    assert len(splits.private) == 90


def test_the_test_set_may_have_a_mix_of_labels_of_its_own() -> None:
    pools = Pools(texts(50), test=texts(9000, classes=3))

    def mix(seed: int, alpha: float | None, size: int = 600) -> np.ndarray:
        data = DataConfig(private=20, public=10, labelled=10, test=size, test_alpha=alpha, test_seed=seed)
        found = make_splits(pools, data, 1).test
        assert len(set(found.texts)) == size
        return np.bincount(found.labels, minlength=3) / size

    assert np.allclose(mix(1, None), 1 / 3, atol=0.01)
    assert np.allclose(mix(1, 1e6), 1 / 3, atol=0.06)
    drawn = np.array([mix(seed, 0.8, 300) for seed in range(300)])
    assert np.allclose(drawn.mean(axis=0), 1 / 3, atol=0.05)
    # the variance of a share of Dirichlet(a, a, a): (1/3)(2/3) / (3 a + 1)
    assert drawn.var(axis=0) == pytest.approx(2 / 9 / (3 * 0.8 + 1), rel=0.25)
    assert np.allclose(mix(1, 0.01, 9000), 1 / 3)  # all there are, whatever was wished for
    with pytest.raises(DataError, match="the task has none of its own"):
        make_splits(Pools(texts(50)), DataConfig(private=20, public=5, labelled=5, test=10, test_alpha=0.8), 1)


def test_another_mix_of_test_labels_is_drawn_once_for_all_seeds() -> None:
    data = DataConfig(private=20, public=10, labelled=10, test=300, test_alpha=0.8)
    pools = Pools(texts(50), test=texts(9000, classes=3))
    assert make_splits(pools, data, 1).test.texts == make_splits(pools, data, 2).test.texts


@pytest.mark.parametrize("own", [True, False])
def test_all_seeds_can_be_tested_alike_and_draw_from_one_pool(own: bool) -> None:
    pools = Pools(texts(900), test=texts(90) if own else None)
    data = DataConfig(private=100, public=40, labelled=10, test=50, test_seed=4, pool=200)
    one, two = make_splits(pools, data, 1), make_splits(pools, data, 2)
    assert one.test.texts == two.test.texts
    assert len(one.test) == 50
    assert one.private.texts != two.private.texts
    drawn = {text for seed in range(40) for text in make_splits(pools, data, seed).private.texts}
    assert len(drawn) == 200
    if not own:
        assert not drawn & set(one.test.texts)


def test_a_domain_pool_takes_as_many_of_each_domain_in_its_own_mix_of_labels() -> None:
    """AdaFD's downsampled scale: 40 of 100 and 40 of 200, with shares of 1/2 and 1/4 of class 1, whatever the seed."""
    labels = np.array([0, 1] * 50 + [0, 0, 0, 1] * 50)
    pool = TextSet(tuple(f"text {n}" for n in range(300)), labels, ("a",) * 100 + ("b",) * 200)
    used = []
    for seed in (1, 2):
        splits = make_splits(Pools(pool), DataConfig(private=60, public=10, labelled=0, test=10, domain_pool=40), seed)
        parts = [splits.private, splits.public, splits.test]
        used.append({text for part in parts for text in part.texts})
        domains = [domain for part in parts for domain in part.domains or ()]
        assert (domains.count("a"), domains.count("b")) == (40, 40)
    assert used[0] == used[1]
    chosen = np.array([int(str(text).split()[1]) for text in used[0]])
    assert labels[chosen[chosen < 100]].sum() == 20
    assert labels[chosen[chosen >= 100]].sum() == 10
    with pytest.raises(DataError, match=r"data.domain_pool.*name task.domain"):
        make_splits(Pools(TextSet(pool.texts, labels)), DataConfig(domain_pool=40), 1)


def test_labelled_texts_can_stand_blind_among_the_public_ones() -> None:
    data = DataConfig(private=20, public=40, labelled=10, test=20)
    open_, blind = (make_splits(Pools(texts(100)), data.model_copy(update={"blind": b}), 1) for b in (False, True))
    assert not len(open_.blind)
    assert blind.labelled.texts == open_.labelled.texts
    assert [blind.public.texts[row] for row in blind.blind] == list(blind.labelled.texts)
    assert sorted(blind.public.texts) == sorted([*open_.public.texts, *open_.labelled.texts])
    assert blind.public.labels is None
    assert not np.array_equal(np.sort(blind.blind), np.arange(40, 50))  # not all at the end, where a site would look


def test_who_knows_labels_and_domains_of_a_public_file_and_who_does_not_agree_on_its_texts() -> None:
    data = DataConfig(private=90, public=20, labelled=10, test=20, domains=["domain1"])
    pools = Pools(texts(400), public=texts(50))
    at_coordinator = make_splits(pools, data, seed=1).public
    at_site = public_texts(TextSet(texts(50).texts), data, seed=1)
    assert len(at_site) == 20
    assert at_coordinator.fingerprint() == at_site.fingerprint()


def test_only_the_named_domains_are_used() -> None:
    data = DataConfig(private=50, public=50, labelled=10, test=50, domains=["domain1"])
    splits = make_splits(Pools(texts(400)), data, seed=1)
    assert set(splits.private.domains or ()) == {"domain1"}
    with pytest.raises(DataError, match=r"data\.domains names books, but the texts have only: domain0, domain1"):
        make_splits(Pools(texts(400)), DataConfig(domains=["books"]), seed=1)


def test_too_large_sizes_are_refused_with_the_numbers() -> None:
    with pytest.raises(DataError, match=r"data\.private = 90.* make 120 texts, but the training texts are 100"):
        make_splits(Pools(texts(100)), DataConfig(private=90, public=10, labelled=10, test=10), seed=1)


def test_shares_that_are_the_whole_fit_however_they_round() -> None:
    data = DataConfig(private=0.5, public=0.45, labelled=0.05, test=20)
    splits = make_splits(Pools(texts(635), test=texts(30)), data, seed=1)  # 317.5, 285.75 and 31.75
    assert [len(splits.private), len(splits.public), len(splits.labelled)] == [317, 286, 32]


@pytest.mark.parametrize("how", PARTITIONERS)
@pytest.mark.parametrize("sites", [2, 5])
def test_shares_are_disjoint_large_enough_and_reproducible(how: str, sites: int) -> None:
    private = texts(400, classes=3)
    shares = partition(private, sites, how, alpha=1.0, seed=7, minimum=10)
    rows = np.concatenate(shares)
    assert len(shares) == sites
    assert len(set(rows.tolist())) == len(rows)
    assert min(map(len, shares)) >= 10
    assert rows.min() >= 0
    assert rows.max() < 400
    again = partition(private, sites, how, alpha=1.0, seed=7, minimum=10)
    assert all(np.array_equal(a, b) for a, b in zip(shares, again, strict=True))
    other = partition(private, sites, how, alpha=1.0, seed=8, minimum=10)
    assert not all(np.array_equal(a, b) for a, b in zip(shares, other, strict=True))


def test_dirichlet_sites_are_of_equal_size_and_more_alike_with_a_large_alpha() -> None:
    private = texts(1000)
    assert private.labels is not None

    def spread(alpha: float) -> float:
        shares = partition(private, 5, "dirichlet", alpha, seed=1, minimum=1)
        assert {len(share) for share in shares} == {200}
        return float(np.std([private.labels[share].mean() for share in shares]))

    assert spread(100.0) < 0.1 < spread(0.5)


def test_dirichlet_shares_have_the_spread_of_their_distribution() -> None:
    # q ~ Dir(1 * (1/2, 1/2)) has variance (1/2)(1/2) / (1 + 1) = 1/8. With many rows left over by exhausted classes
    # the spread can only shrink, so that a site's share of class 1 stays within it and well above the IID spread.
    private = texts(4000)
    assert private.labels is not None
    means = [private.labels[s].mean() for seed in range(30) for s in partition(private, 4, "dirichlet", 1.0, seed)]
    assert 0.05 < float(np.var(means)) < 0.14


def test_dirichlet_clients_differ_in_size_too() -> None:
    sizes = [len(share) for share in partition(texts(1000), 5, "dirichlet-clients", 1.0, seed=1)]
    assert sum(sizes) == 1000
    assert max(sizes) > 1.5 * min(sizes)


def test_domain_sites_see_one_domain_and_share_it_equally() -> None:
    private = texts(402)
    shares = partition(private, 4, "domain", seed=1)
    seen = [{(private.domains or ())[row] for row in share} for share in shares]
    assert seen == [{"domain0"}, {"domain1"}, {"domain0"}, {"domain1"}]
    assert [len(share) for share in shares] == [101, 100, 101, 100]


def test_domain_dirichlet_skews_the_labels_of_a_single_site() -> None:
    private = texts(400)
    assert private.labels is not None
    shares = partition(private, 2, "domain-dirichlet", alpha=0.5, seed=2)
    assert any(abs(private.labels[share].mean() - 0.5) > 0.1 for share in shares)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sites": 50, "minimum": 10}, "need 500, but there are 400 private texts; raise data.private"),
        ({"how": "dirichlet-clients", "sites": 20, "alpha": 0.01, "minimum": 15}, "no draw in 100 .*raise data.alpha"),
        ({"how": "by-moon"}, "'by-moon' is not known; choose one of: iid, dirichlet"),
        ({"how": "domain", "sites": 1}, "1 sites for 2 domains .*data.domains"),
        ({"how": "dirichlet-clients", "alpha": 0.0}, "alpha must be above 0"),
        ({"sites": 1, "alpha": 0.0}, "1 sites cannot have one of 2 classes each; raise data.alpha"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_a_cure(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        partition(texts(400), **{"sites": 4, **arguments})  # type: ignore[arg-type]


def test_texts_without_labels_or_domains_cannot_be_divided_by_them() -> None:
    with pytest.raises(DataError, match="no labels; use iid or domain"):
        partition(texts(40).without_labels(), 2, "dirichlet")
    with pytest.raises(DataError, match=r"name task\.domain"):
        partition(TextSet(texts(40).texts, texts(40).labels), 2, "domain")


def test_hash_randomisation_changes_nothing() -> None:
    program = (
        "from tests.unit.common.data.test_splits import texts, partition\n"
        "print([share.tolist() for share in partition(texts(60), 3, 'domain-dirichlet', 1.0, 5, 1)])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
