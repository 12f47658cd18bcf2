"""A run's texts are dealt once, however many sites ask for theirs."""

from __future__ import annotations

import pytest

from fedstill.common.config import RunConfig
from fedstill.common.config.files import load_run
from fedstill.common.data import allocation
from fedstill.common.data.allocation import Allocation, site_texts

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
