"""Configuration: what is wrong, where, and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstill.common.config import ConfigError, RunConfig
from fedstill.common.config.files import load_run, load_site
from fedstill.strategies import METHODS, find_method


def refused(text: str, *changes: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_run(text + "\n", changes)
    return str(error.value)


def test_an_unknown_key_is_named_with_the_near_one() -> None:
    said = refused("[train]\nlearning_rat = 1")
    assert "train.learning_rat" in said
    assert "did you mean 'learning_rate'?" in said


def test_an_unknown_key_of_a_site_is_named_with_its_place() -> None:
    said = refused('[[sites]]\nname = "a"\n[[sites]]\nname = "b"\nmodle = "x"')
    assert "sites.1.modle" in said
    assert "'model'" in said


def test_a_wrong_type_names_the_key_and_the_value() -> None:
    said = refused('rounds = "many"')
    assert "rounds" in said
    assert "integer" in said
    assert "'many'" in said


def test_every_wrong_key_is_listed_at_once() -> None:
    said = refused('rounds = 0\n[data]\nalpha = -1\npartition = "odd"')
    assert all(key in said for key in ("rounds", "data.alpha", "data.partition"))


def test_a_missing_file_and_broken_toml_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        load_run(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("rounds = = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML"):
        load_run(broken)


def test_two_sites_of_one_name_are_refused() -> None:
    assert "'a'" in refused('[[sites]]\nname = "a"\n[[sites]]\nname = "a"')


def test_a_site_name_cannot_leave_its_folder() -> None:
    assert "sites.0.name" in refused('[[sites]]\nname = "../a"')


def test_overrides_reach_tables_lists_and_sites_by_name() -> None:
    text = '[[sites]]\nname = "north"\n[[sites]]\nname = "south"\n'
    changes = ["rounds=7", "method.name=ds-fl", "sites.south.model=minilm", "sites.0.threads=2", "data.alpha=0.5"]
    config = load_run(text, changes)
    assert (config.rounds, config.method.name, config.data.alpha) == (7, "ds-fl", 0.5)
    assert (config.sites[1].model, config.sites[0].threads) == ("minilm", 2)


@pytest.mark.parametrize("change", ["rounds", "=3", "sites.nobody.model=x", "rounds.deep=1"])
def test_an_override_that_cannot_be_meant_is_refused(change: str) -> None:
    assert "--set" in refused('rounds = 1\n[[sites]]\nname = "a"', change)


def test_what_was_resolved_reads_back_the_same() -> None:
    config = load_run('[[sites]]\nname = "a"\nmodel = "tiny-t5"\n[sites.lora]\nr = 4\n[method]\ndistill_epochs = 5\n')
    assert load_run(config.to_json()) == config
    assert load_run(config.to_toml()) == config
    assert config.method.parameters() == {"distill_epochs": 5}


def test_a_site_file_is_read_by_the_same_rules(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('name = "clinic"\nmodel = "minilm-2"\n[data]\nprivate = "notes.csv"\ntext = "note"\n')
    site = load_site(path)
    assert site.data is not None
    assert site.data.text == ["note"]
    path.write_text('name = "clinic"\n[data]\nprivat = "notes.csv"\n')
    with pytest.raises(ConfigError, match=r"data\.privat: unknown key; did you mean 'private'"):
        load_site(path)


def test_a_method_its_preset_and_its_parameters_are_checked() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fedid'"):
        find_method(RunConfig.model_validate({"method": {"name": "fediid"}}).method)
    with pytest.raises(ConfigError, match="known: paper, authors_code"):
        find_method(RunConfig.model_validate({"method": {"name": "fedid", "preset": "mine"}}).method)
    with pytest.raises(ConfigError, match="distil_epochs: unknown key; did you mean 'distill_epochs'"):
        find_method(RunConfig.model_validate({"method": {"name": "fedid", "distil_epochs": 2}}).method)


def test_a_preset_is_a_start_that_the_configuration_changes() -> None:
    _, params = find_method(RunConfig.model_validate({"method": {"name": "fedid", "preset": "authors_code"}}).method)
    values = params.model_dump()
    assert (values["average"], values["target"], values["dropout"]) == ("logits", "votes", True)
    settings = {"name": "fedid", "preset": "authors_code", "dropout": False}
    _, params = find_method(RunConfig.model_validate({"method": settings}).method)
    assert params.model_dump()["dropout"] is False


def test_every_method_has_both_presets_and_each_is_valid() -> None:
    for name, method in METHODS.items():
        assert {"paper", "authors_code"} <= set(method.presets), name
        for preset in method.presets:
            find_method(RunConfig.model_validate({"method": {"name": name, "preset": preset}}).method)
