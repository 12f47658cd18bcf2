"""Files that extend files, and sites that are counted out."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstill.common.config import ConfigError
from fedstill.common.config.files import load_run

# --- extends ---


def test_a_file_has_what_it_extends_key_by_key_and_lists_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "up").mkdir()
    (tmp_path / "far.toml").write_text(
        'rounds = 9\n[data]\ntest = 7\nprivate = 50\n[[sites]]\nname = "a"\n[[sites]]\nname = "b"'
    )
    (tmp_path / "up/near.toml").write_text('extends = "../far.toml"\nseed = 4\n[data]\ntest = 8\n')
    (tmp_path / "up/run.toml").write_text('extends = "near.toml"\n[data]\nalpha = 0.5\n[[sites]]\nname = "c"\n')
    config = load_run(tmp_path / "up/run.toml", ["rounds=3"])
    assert (config.rounds, config.seed, config.data.test, config.data.private, config.data.alpha) == (3, 4, 8, 50, 0.5)
    assert [site.name for site in config.sites] == ["c"]


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('extends = "b.toml"')
    (tmp_path / "b.toml").write_text('extends = "./a.toml"')
    with pytest.raises(ConfigError, match=r"extends: .* circle \(a\.toml -> b\.toml -> a\.toml\)"):
        load_run(tmp_path / "a.toml")


@pytest.mark.parametrize("text", ['extends = "none.toml"', "extends = 3"])
def test_what_cannot_be_extended_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.toml:\n  extends: "):
        load_run(tmp_path / "run.toml")


def test_a_configuration_without_a_file_extends_nothing() -> None:
    with pytest.raises(ConfigError, match="extends"):
        load_run('extends = "base.toml"\nrounds = 1\n')


# --- count ---

COUNTED = """
[[sites]]
name = "client"
count = 3
model = "tiny-bert"
privacy = { epsilon = 2.0, predictions = 10 }
[[sites]]
name = "hospital"
model = "tiny-t5"
"""


def test_a_count_makes_equal_sites_that_differ_in_their_names_alone() -> None:
    config = load_run(COUNTED)
    assert [site.name for site in config.sites] == ["client-1", "client-2", "client-3", "hospital"]
    first, *others = (site.model_copy(update={"name": "client"}) for site in config.sites[:3])
    assert others == [first, first]
    assert load_run(config.to_toml()) == config  # what is written down has no count any more


def test_an_override_reaches_one_of_the_counted_sites_or_brings_a_count_itself() -> None:
    config = load_run(COUNTED, ["sites.client-2.model=tiny-roberta", "sites.client-2.privacy.epsilon=4.0"])
    assert [site.model for site in config.sites] == ["tiny-bert", "tiny-roberta", "tiny-bert", "tiny-t5"]
    assert [site.privacy and site.privacy.epsilon for site in config.sites] == [2.0, 4.0, 2.0, None]
    assert [site.name for site in load_run(COUNTED, ['sites=[{name="s", count=2}]']).sites] == ["s-1", "s-2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("count = 3", "count = 0"),
            "sites.0.count: write how many equal sites there are, from 1 on: count = 10 (got 0)",
        ),
        (("count = 3", "count = true"), "sites.0.count: write how many equal sites"),
        (("count = 3", 'count = "3"'), "sites.0.count: write how many equal sites"),
        (('name = "client"\n', ""), "sites.0.name: a site with a count needs one"),
        (
            ('"hospital"', '"client-2"'),
            "sites: count = 3 makes client-1 to client-3 of the site 'client', and there is another 'client-2'",
        ),
        (('"hospital"', '"client"\ncount = 1'), "there is another 'client-1'; give one of them another name"),
    ],
)
def test_a_count_that_cannot_be_meant_names_the_file_the_key_and_the_cure(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    assert change[0] in COUNTED
    file = tmp_path / "run.toml"
    file.write_text(COUNTED.replace(*change))
    with pytest.raises(ConfigError) as error:
        load_run(file)
    assert str(error.value).startswith(f"{file}:\n  ")
    assert message in str(error.value)


def test_a_site_and_a_counted_one_may_share_a_beginning() -> None:
    names = [site.name for site in load_run(COUNTED.replace('"hospital"', '"client"')).sites]
    assert names == ["client-1", "client-2", "client-3", "client"]


def test_a_table_is_no_run_and_the_error_lists_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "table.toml"
    file.write_text('title = "T"\n[rows]\nfedid = {}\nmhat = {}\n')
    with pytest.raises(ConfigError) as error:
        load_run(file)
    assert str(error.value) == (
        f"{file}: is a table of runs, not one run; name a row with --row (rows: fedid, mhat), "
        "or run all of it: fedstill compare"
    )
