"""The papers' tables, at full size and in small: every row would start, and every table names rows that are there."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from fedstill.common.config import RunConfig
from fedstill.common.data.tasks import SITE_SETS, TASKS
from fedstill.experiments.bench.methods import ROWS, settings_of
from fedstill.experiments.compare.columns import COSTS, Column
from fedstill.experiments.compare.table_file import find_tables, read_tables
from fedstill.experiments.compare.tables import Table
from fedstill.server import federation
from fedstill.server.central import CentralModel, SharedModel
from fedstill.server.federation import Federation
from fedstill.strategies import METHODS, find_method
from fedstill.strategies.adafd import method as adafd

ROOT = Path(__file__).resolve().parents[3] / "experiments"
PAPERS = ("fedid", "adafd", "sinkhorn", "feddrs", "atc")
FILES = [file for paper in PAPERS for place in ("", "small") for file in find_tables(ROOT / paper / place)]
SCREEN = find_tables(ROOT / "screen")
SCORES = {"accuracy", "f1", "f1_macro", "f1_weighted", "mcc", "semantic_distance", "mean_over_tasks", "score"}
each_file = pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))


@cache
def tables(file: Path) -> list[Table]:
    return read_tables(file)


def table(name: str) -> Table:
    return next(one for file in FILES for one in tables(file) if one.name == name)


def size(share: int | float) -> int:
    return int(1000 * share) if 0 < share < 1 else int(share)


def central_without_a_model(config: RunConfig) -> MagicMock:
    """What a run's settings are checked against: hundreds of rows would take hours to load."""
    kind, data = SharedModel if config.mixed else CentralModel, config.data
    central = MagicMock(task=TASKS.get(config.task.name), classes=2)
    central.check_method = partial(kind.check_method, central)
    central.labelled, central.public = range(size(data.labelled)), range(size(data.public))
    central.blind = np.arange(size(data.labelled) if data.blind else 0)
    central.labels = np.zeros(size(data.labelled), int)
    return central


@pytest.fixture
def would_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[RunConfig], None]:
    """Goes as far as a run's start does without models: unknown parameters, and settings that do not go together."""
    monkeypatch.setattr(federation, "make_central", central_without_a_model)
    monkeypatch.setattr(adafd, "open_llm", lambda config: None)  # language models are not at hand either
    return lambda config: Federation(config, tmp_path / "run").record.event("begins")


@pytest.mark.parametrize("row", ROWS)
def test_every_row_of_the_methods_benchmark_would_start(row: str, would_start: Callable[[RunConfig], None]) -> None:
    would_start(settings_of(row, 1))


@pytest.mark.parametrize("file", [*FILES, *SCREEN], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_row_would_start(file: Path, would_start: Callable[[RunConfig], None]) -> None:
    for one in tables(file):
        for name, config in one.rows.items():
            would_start(config)
            assert config.mixed or config.task.name in {*TASKS, "superglue"}, name
            assert config.task.public_task is None or config.task.public_task in TASKS, name
            for site in config.sites:
                assert site.task is None or site.task.train or site.task.name in {*TASKS, *SITE_SETS}, name


@each_file
def test_every_table_names_its_rows_and_scores(file: Path) -> None:
    for one in tables(file):
        settings = one.settings
        named = [*settings.baselines, *settings.bounds, *(row for row in settings.paper if row != "caption")]
        assert set(named) <= set(one.rows)
        assert all(one.title(row) != row for row in one.rows)  # every row has a title of its own
        assert len(settings.seeds) >= 3
        by_domain = {  # sites are called as their domains
            f"{score}_{domain}" for config in one.rows.values() if config.data.partition == "domain"
            for domain in (*(site.name for site in config.sites), *(config.data.domains or ()),
                           *(config.data.labelled_domains or ()))
            for score in SCORES
        }  # fmt: skip
        for column in settings.columns:
            whose, score = column.rpartition(".")[0], Column(column).score
            second = {f"{score}_{config.task.second_test}" for config in one.rows.values() for score in SCORES}
            known = {"central": SCORES | by_domain | second, "sites": SCORES}.get(whose, ())
            assert whose.startswith("own.") or score in known or column in COSTS, column
            for data_set in Column(column).data_sets if whose.startswith("own.") else ():
                sites = [site.name for config in one.rows.values() for site in config.sites]
                assert any(site.startswith(f"{data_set}-") for site in sites), column
        for value in settings.paper.values():
            assert not isinstance(value, dict) or set(value) <= set(settings.columns)
        task = next(iter(one.rows.values())).task.name
        if task in TASKS:
            assert f"central.{TASKS[task].metric}" == settings.columns[0]


def test_the_tables_of_five_papers_are_93_with_folders_of_their_own_in_few_files() -> None:
    names = [one.name for file in FILES for one in tables(file)]
    assert len(names) == len(set(names)) == 93
    assert len(list(ROOT.rglob("*.toml"))) <= 40
    assert {
        "fedid-homogeneous-sst2-alpha1",
        "feddrs-roberta-alpha0.05",
        "adafd-small-domains-original-global",
        "atc-small",
    } <= set(names)


def test_no_small_table_reports_a_seed_that_settings_were_chosen_with() -> None:
    small = [*(file for file in FILES if "small" in file.parts), *SCREEN]
    assert len(small) >= 14
    for file in small:
        for one in tables(file):
            assert min(one.settings.seeds) > 8, one.name


def test_sites_of_all_methods_step_towards_others_by_one_rule() -> None:
    """No small table sets a rate for a site's distillation, which would be right for one method only."""
    for file in FILES:
        if file.relative_to(ROOT).parts[0] in ("fedid", "adafd") and "small" in file.parts:
            for one in tables(file):
                for config in one.rows.values():
                    assert config.train.learning_rate is None
                    assert {(site.learning_rate, site.distill_rate) for site in config.sites} == {(None, None)}


def test_every_method_of_each_papers_main_table_has_a_row() -> None:
    used = {
        paper: {
            config.method.name
            for file in find_tables(ROOT / paper)  # at full size
            for one in tables(file)
            for config in one.rows.values()
        }
        for paper in PAPERS
    }
    assert used["fedid"] == {"centralized", "fedavg", "feddf", "feded", "fedkd", "ds-fl", "mhat", "fedid"}
    assert used["adafd"] == {"isolated", "centralized", "logit-fedavg", "ds-fl", "mhat", "fedkd", "adafd"}
    assert used["sinkhorn"] == {"sinkhorn", "entropy"}
    assert used["feddrs"] == {"feddrs", "fedaux", "feddf", "fedkd-mutual"}
    assert used["atc"] == {"isolated", "fedavg", "fedavg-st", "fedprox", "ditto", "fedbn", "percfl", "spfl", "atc"}
    assert set().union(*used.values()) <= set(METHODS)


def test_fedid_is_at_the_papers_settings() -> None:
    (one,) = read_tables(ROOT / "fedid/heterogeneous.toml", ["task=sst2", "alpha=1"])
    config = one.rows["fedid-exact"]
    assert (config.rounds, len(config.sites), config.data.alpha) == (10, 10, 1.0)
    assert (config.train.learning_rate, config.train.batch_size, config.train.max_length) == (2e-5, 32, 128)
    assert config.method.parameters() == {
        "local_epochs": 3,
        "distill_epochs": 3,
        "feedback": "exact",
    }
    assert len({site.model for site in config.sites}) == 4
    assert one.settings.paper["fedid"] == 91.8
    assert "fedid-exact" not in one.settings.paper


@pytest.mark.parametrize("paper", ["fedid", "adafd"])
def test_fedkd_and_dsfl_are_those_of_the_table_they_stand_in(paper: str) -> None:
    rows = [
        find_method(config.method)[1].model_dump()
        for file in FILES if file.relative_to(ROOT).parts[0] == paper
        for one in tables(file) for config in one.rows.values() if config.method.name in ("fedkd", "ds-fl")
    ]  # fmt: skip
    assert len(rows) >= 12
    assert {params["weights"] for params in rows} == {"size"}
    assert {params["loss"] for params in rows if "loss" in params} == {{"fedid": "mse", "adafd": "kl"}[paper]}
    assert {params["class_weights"] for params in rows if "loss" in params} == {False}
    sharpened = {(params["era_input"], params["target"]) for params in rows if "era_input" in params}
    assert sharpened == {("logits", {"fedid": "hard", "adafd": "soft"}[paper])}


def test_feddrs_has_a_client_for_each_task_where_tasks_are_not_mixed() -> None:
    clients = {name: len(table(f"feddrs-{name}").rows["fedavg"].sites) for name in ("t5-alpha0", "roberta-alpha0.5")}
    assert clients == {"t5-alpha0": 8, "roberta-alpha0.5": 20}


def test_every_row_of_feddrs_tables_has_its_local_training() -> None:
    wanted = {"optimizer": "adafactor", "optimizer_state": "fresh", "samples": 250, "balance": True, "local_epochs": 5}
    for name in ("roberta-alpha0", "roberta-alpha0.5", "t5-alpha0.05", "sampling"):
        for row, config in table(f"feddrs-{name}").rows.items():
            assert find_method(config.method)[1].model_dump().items() >= wanted.items(), (name, row)
            assert config.train.learning_rate == 1e-3


def test_feddrs_reports_the_last_five_rounds_and_each_kind_of_pseudo_text() -> None:
    assert [column.rounds for column in table("feddrs-roberta-alpha0").columns] == [5, 5]
    one = table("feddrs-sampling")
    variants = {row: find_method(config.method)[1].model_dump()["variant"] for row, config in one.rows.items()}
    assert variants.pop("fedavg") == "post_only"
    assert set(variants.values()) == {"random_only", "target_only", "adversary_only", "mixed"}
    assert {config.rounds for config in one.rows.values()} == {1}


@pytest.mark.parametrize("name", ["atc-main", "atc-ablation"])
def test_atcs_average_is_over_data_sets_as_in_the_paper(name: str) -> None:
    """What tables 2 and 3 print follows from their own numbers by our column's rule, to their rounding."""
    one = table(name)
    average, *parts = one.columns
    for row in one.rows:
        if name == "atc-ablation":
            means = [one.paper(row, column) for column in parts]
        else:
            of = {data: [one.paper(row, c) for c in parts if c.site == data] for data in average.data_sets}
            means = [np.mean(values) for values in of.values()]
        assert one.paper(row, average) == pytest.approx(np.mean(means), abs=0.02), row


def test_atc_deals_each_data_set_to_its_clients() -> None:
    sites = table("atc-main").rows["atc"].sites
    shares = [site.task.share for site in sites if site.task is not None]
    assert shares == [(i, n) for n in (1, 3, 3, 2, 5, 4) for i in range(1, n + 1)]
