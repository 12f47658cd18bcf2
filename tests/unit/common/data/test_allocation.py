"""A run's texts are dealt once, however many sites ask for theirs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedstill.common.config import ConfigError, RunConfig, SiteConfig
from fedstill.common.config.files import load_run
from fedstill.common.data import allocation
from fedstill.common.data.allocation import Allocation, site_texts
from fedstill.common.data.splits import TextSet
from fedstill.common.data.tasks import Task

RUN = """
data = { private = 48, public = 8, labelled = 4, test = 4 }
method = { name = "fedmd" }
central = { model = "tiny-bert" }
sites = [{ name = "s", count = 6 }]
"""


def test_sites_of_one_run_share_an_allocation_and_another_run_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    allocate = allocation._allocate

    def noted(config: RunConfig) -> Allocation:
        made.append(config.seed)
        return allocate(config)

    monkeypatch.setattr(allocation, "_allocate", noted)
    one, two = load_run(RUN, ["seed=1"]), load_run(RUN, ["seed=2"])
    first = [site_texts(one, site).private.texts for site in one.sites]
    second = [site_texts(two, site).private.texts for site in two.sites]
    assert made == [1, 2]
    assert first != second
    assert len({text for texts in first for text in texts}) == 48
    assert [site_texts(one, site).private.texts for site in one.sites] == first


def labels_by_text(config: RunConfig) -> list[dict[object, int]]:
    """Each site's texts with their labels."""
    texts = [site_texts(config, site).private for site in config.sites]
    return [dict(zip(held.texts, np.asarray(held.labels).tolist(), strict=True)) for held in texts]


@pytest.mark.parametrize("task", ["film-reviews", "files"])
def test_label_noise_changes_the_exact_share_of_a_sites_labels_to_wrong_ones(task: str, tmp_path: Path) -> None:
    rows = "\n".join(f"text {n},{'abcd'[n % 4]}" for n in range(100))
    (tmp_path / "texts.csv").write_text(f"text,label\n{rows}\n")
    run = [f"task.name={task}", *([f"task.train='{tmp_path / 'texts.csv'}'"] if task == "files" else [])]
    noisy = [*run, "data.label_noise={ s-2 = 0.4, s-5 = 1.0 }"]
    true, wrong = labels_by_text(load_run(RUN, run)), labels_by_text(load_run(RUN, noisy))
    assert [list(texts) for texts in wrong] == [list(texts) for texts in true]  # nobody's texts change
    changed = [sum(wrong[k][text] != true[k][text] for text in true[k]) for k in range(6)]
    assert changed == [0, round(0.4 * len(true[1])), 0, 0, len(true[4]), 0]
    classes = 4 if task == "files" else 2
    assert {label for texts in wrong for label in texts.values()} == set(range(classes))
    allocation._deal.cache_clear()
    assert labels_by_text(load_run(RUN, noisy)) == wrong  # drawn by the seed
    alone = [*run, "data.label_noise={ s-5 = 1.0 }"]
    assert labels_by_text(load_run(RUN, alone))[4] == wrong[4]  # and by the site alone


def test_noise_stays_among_the_classes_of_a_texts_own_task() -> None:
    texts = TextSet(("a", "b", "c", "d") * 5, np.array([0, 1, 2, 3] * 5), ("x", "x", "y", "y") * 5)
    task = Task("two", ("0", "1", "2", "3"), choices=(("x", (0, 1)), ("y", (2, 3))))
    noisy = allocation.with_wrong_labels(texts, np.arange(20), 1.0, task, np.random.default_rng(0))
    assert noisy.labels is not None
    assert noisy.labels.tolist() == [1, 0, 3, 2] * 5


def test_a_sites_own_files_have_no_noise(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("text,label\n" + "\n".join(f"text {n},positive" for n in range(20)))
    run = load_run(RUN, ["data.label_noise={ s-2 = 1.0 }"])
    own = SiteConfig.model_validate({"name": "s-2", "data": {"private": tmp_path / "own.csv"}})  # from its site.toml
    assert set(np.asarray(site_texts(run, own).private.labels).tolist()) == {1}
    with pytest.raises(ConfigError, match=r"label_noise names 's-2': a site's own files are never changed; take it"):
        load_run(RUN, ["data.label_noise={ s-2 = 1.0 }", f"sites.s-2.data={{ private = '{tmp_path / 'own.csv'}' }}"])
    with pytest.raises(ConfigError, match="label_noise names 's-7': no site of this run is called so: s-1, s-2"):
        load_run(RUN, ["data.label_noise={ s-7 = 0.4 }"])
    with pytest.raises(ConfigError, match=r"label_noise.s-2: Input should be less than or equal to 1"):
        load_run(RUN, ["data.label_noise={ s-2 = 40 }"])


def test_a_run_without_noise_is_written_as_before() -> None:
    assert "label_noise" not in load_run(RUN).to_toml()
    assert "[data.label_noise]\ns-2 = 0.4" in load_run(RUN, ["data.label_noise={ s-2 = 0.4 }"]).to_toml()
