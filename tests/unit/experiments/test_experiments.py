"""The papers' tables, at full size and in small: every row would start, and every table names rows that are there."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedstill.common.config import RunConfig
from fedstill.common.config.files import check
from fedstill.common.data.tasks import SITE_SETS, TASKS
from fedstill.experiments.compare.tables import COSTS
from fedstill.strategies import METHODS, find_method

ROOT = Path(__file__).resolve().parents[3] / "experiments"
PAPERS = ("fedid", "adafd", "sinkhorn", "feddrs", "atc")
EVERY = sorted(path.parent for paper in PAPERS for path in (ROOT / paper).rglob("table.toml"))
TABLES = [path for path in EVERY if "small" not in path.parts]  # at full size
KEYS = {"title", "caption", "seeds", "columns", "baselines", "bounds", "order", "titles", "paper"}
SCORES = {"accuracy", "f1", "f1_macro", "f1_weighted", "mcc", "semantic_distance", "mean_over_tasks", "score"}


def merged(path: Path) -> dict[str, Any]:
    """A file over what it extends, tables key by key."""
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    further = values.pop("extends", None)
    return values if further is None else over(merged(path.parent / further), values)


def over(under: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    found = dict(under)
    for key, value in upper.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = over(found[key], value) if both else value
    return found


def rows(table: Path) -> dict[str, RunConfig]:
    files = [path for path in sorted(table.glob("*.toml")) if path.name not in ("base.toml", "table.toml")]
    return {path.stem: check(RunConfig, merged(path), str(path)) for path in files}


def named(head: dict[str, Any]) -> Iterator[str]:
    for key in ("baselines", "bounds", "order"):
        yield from head.get(key, [])
    yield from head["titles"]
    yield from (row for row in head.get("paper", {}) if row != "caption")


@pytest.mark.parametrize("table", EVERY, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_row_would_start(table: Path) -> None:
    for name, config in rows(table).items():
        find_method(config.method)  # refuses unknown methods, presets and parameters
        assert config.mixed or config.task.name in {*TASKS, "superglue"}, name
        assert config.task.public_task is None or config.task.public_task in TASKS, name
        for site in config.sites:
            assert site.task is None or site.task.train or site.task.name in {*TASKS, *SITE_SETS}, name


@pytest.mark.parametrize("table", EVERY, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_table_names_its_rows_and_scores(table: Path) -> None:
    head, there = tomllib.loads((table / "table.toml").read_text(encoding="utf-8")), rows(table)
    assert set(head) <= KEYS
    assert set(named(head)) <= set(there)
    assert set(head["order"]) == set(there)
    assert len(head["seeds"]) >= 3
    by_domain = {  # sites are called as their domains
        f"{score}_{site.name}" for config in there.values() if config.data.partition == "domain"
        for site in config.sites for score in SCORES
    }  # fmt: skip
    for column in head["columns"]:
        whose, _, score = column.rpartition(".")
        known = {"central": SCORES | by_domain, "sites": SCORES}.get(whose, ())
        assert whose.startswith("own.") or score in known or column in COSTS, column
        assert not whose.startswith("own.") or any(
            site.name.startswith(whose.removeprefix("own.") + "-") for config in there.values() for site in config.sites
        )
    for value in head.get("paper", {}).values():
        assert not isinstance(value, dict) or set(value) <= set(head["columns"])
    task = next(iter(there.values())).task.name
    if task in TASKS:
        assert f"central.{TASKS[task].metric}" == head["columns"][0]


def test_every_method_of_each_papers_main_table_has_a_row() -> None:
    used = {
        paper: {c.method.name for t in TABLES if t.parent.name == paper for c in rows(t).values()} for paper in PAPERS
    }
    assert used["fedid"] == {"centralized", "fedavg", "feddf", "feded", "fedkd", "ds-fl", "mhat", "fedid"}
    assert used["adafd"] == {"centralized", "logit-fedavg", "ds-fl", "mhat", "fedkd", "adafd"}
    assert used["sinkhorn"] == {"sinkhorn", "entropy"}
    assert used["feddrs"] == {"feddrs", "fedaux", "feddf", "fedkd-mutual"}
    assert used["atc"] == {"isolated", "fedavg", "fedavg-st", "fedprox", "ditto", "fedbn", "percfl", "spfl", "atc"}
    assert set().union(*used.values()) <= set(METHODS)


def test_fedid_is_at_the_papers_settings() -> None:
    config = rows(ROOT / "fedid/heterogeneous-sst2-alpha1")["fedid-exact"]
    assert (config.rounds, len(config.sites), config.data.alpha) == (10, 10, 1.0)
    assert (config.train.learning_rate, config.train.batch_size, config.train.max_length) == (2e-5, 32, 128)
    assert config.method.parameters() == {
        "local_epochs": 3,
        "distill_epochs": 3,
        "feedback": "exact",
        "lambda": "1/eta",
    }
    assert len({site.model for site in config.sites}) == 4
    head = tomllib.loads((ROOT / "fedid/heterogeneous-sst2-alpha1/table.toml").read_text())
    assert head["paper"]["fedid"] == 91.8
    assert "fedid-exact" not in head["paper"]


def test_atc_deals_each_data_set_to_its_clients() -> None:
    sites = rows(ROOT / "atc/main")["atc"].sites
    shares = [site.task.share for site in sites if site.task is not None]
    assert shares == [(i, n) for n in (1, 3, 3, 2, 5, 4) for i in range(1, n + 1)]
