"""A table's file: rows over a base, families by a grid, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedstill.cli import app
from fedstill.common.config import ConfigError
from fedstill.experiments.compare.table_file import find_tables, load_row, read_tables
from fedstill.experiments.compare.tables import check_tasks
from tests.unit.experiments.conftest import BASE, HEAD, ROWS, TABLE, read_table

FAMILY = """
title = "{task}, alpha {alpha}"
caption = "Dealt with {alpha}."
seeds = [5, 6]
columns = ["central.accuracy"]
baselines = ["mhat", "fedavg"]
[base]
rounds = 1
sites = [{ name = "client", count = 2 }]
[rows]
mhat = { title = "MHAT", method.name = "mhat" }
fedavg = { only = ["task=short"], method.name = "fedavg" }
ours = { method = { name = "fedid", distill_epochs = 4 } }
exact = { extends = "ours", only = ["task=short,alpha=1", "task=long,alpha=0.5"], method.feedback = "exact" }
[grid.task.short]
title = "Short reviews"
rounds = 2
[grid.task.long]
columns = ["central.f1", "central.accuracy"]
caption = "Long ones."
train.max_length = 64
[grid.alpha.1]
data.alpha = 1.0
[grid.alpha."0.5"]
data.alpha = 0.5
rounds = 3
[paper]
caption = "figures for {alpha}"
"task=short" = { mhat = 50, fedavg = 40 }
"task=long,alpha=1" = { mhat = [60, 70], caption = "the long table" }
"""


@pytest.fixture
def family(tmp_path: Path) -> Path:
    made = tmp_path / "experiments/paper/reviews.toml"
    made.parent.mkdir(parents=True)
    made.write_text(FAMILY)
    return made


def refused(file: Path, *only: str) -> str:
    with pytest.raises(ConfigError) as error:
        read_tables(file, only)
    return str(error.value)


# --- one table ---


def test_a_table_is_read_with_its_rows_in_the_files_order(file: Path) -> None:
    table = read_table(file)
    assert list(table.rows) == ["ds-fl", "isolated", "mhat", "ours"]
    assert table.rows["ours"].method.parameters() == {"local_epochs": 2}
    assert table.config("mhat", 3).seed == 3
    assert [table.title(row) for row in ("mhat", "ours")] == ["MHAT", "ours"]
    first, second = table.columns
    assert (table.paper("mhat", first), table.paper("isolated", first), table.paper("ours", second)) == (
        85.5,
        None,
        None,
    )


def test_a_run_is_called_as_its_table_unless_the_base_names_it(file: Path, family: Path) -> None:
    assert read_table(file).rows["ours"].name == read_table(file).name == "table"
    assert read_table(family, "task=long", "alpha=1").rows["ours"].name == "paper-reviews-long-alpha1"
    file.write_text('name = "short"\n' + TABLE.replace("rounds = 1", 'rounds = 1\nname = "mine"'))
    assert (read_table(file).name, read_table(file).rows["ours"].name) == ("short", "mine")


def test_a_row_has_the_base_key_by_key_and_lists_as_a_whole(file: Path) -> None:
    file.write_text(HEAD + BASE + ROWS + 'data.alpha = 0.5\nsites = [{ name = "a" }, { name = "b" }]\n')
    ours, mhat = (read_table(file).rows[row] for row in ("ours", "mhat"))
    assert (ours.rounds, ours.data.alpha, [site.name for site in ours.sites]) == (1, 0.5, ["a", "b"])
    assert (mhat.data.alpha, [site.name for site in mhat.sites]) == (1.0, ["north"])


def test_a_table_has_what_its_file_extends(file: Path) -> None:
    other = file.with_name("other.toml")
    other.write_text('extends = "table.toml"\ntitle = "Another"\nbase.rounds = 7\n[paper]\nours = 81\n')
    table = read_table(other)
    assert (table.settings.title, table.settings.seeds, table.rows["mhat"].rounds) == ("Another", [1, 2, 3], 7)
    assert (table.paper("ours", table.columns[0]), table.paper("mhat", table.columns[0])) == (81, 85.5)


def test_the_papers_numbers_may_stand_in_a_line_in_the_order_of_the_columns(file: Path) -> None:
    file.write_text(HEAD + BASE + ROWS + "[paper]\nours = [80, 12]\n")
    assert read_table(file).settings.paper == {"ours": {"central.accuracy": 80, "bytes_up": 12}}
    file.write_text(HEAD + BASE + ROWS + '[paper]\ncolumns = ["bytes_up"]\nours = [12]\n')
    assert read_table(file).settings.paper == {"ours": {"bytes_up": 12}}


def test_a_folder_stands_for_the_tables_in_it(file: Path) -> None:
    file.with_name("common.toml").write_text("[base]\nrounds = 3\n")
    file.with_name("a.toml").write_text(TABLE)
    assert find_tables(file.parent) == [file.with_name("a.toml"), file]
    assert find_tables(file) == [file]
    (file.parent / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: no TOML file in it has a title; give a table's file"):
        find_tables(file.parent / "empty")
    with pytest.raises(ConfigError, match=r"none\.toml: there is no such file; give a table's TOML file"):
        find_tables(file.parent / "none.toml")


# --- a wrong table ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seeds = [1, 2, 3]\n", ""), "seeds: Field required"),
        (("seeds = [1, 2, 3]", "seeds = []"), "seeds: List should have at least 1 item"),
        (("seeds = [1, 2, 3]", "seeds = [1, 1]"), "seeds: seeds are different whole numbers"),
        (("seeds = [1, 2, 3]", 'seeds = ["1"]'), "seeds.0: Input should be a valid integer"),
        (("title =", "tilte =", 1), "tilte: unknown key; did you mean 'title'?"),
        (("central.accuracy", "centre.accuracy"), "columns: 'centre.accuracy' is no column; write central.SCORE"),
        (('"ds-fl", "mhat"]', '"ds-fl", "mhta"]'), "baselines: 'mhta' is no row; did you mean 'mhat'?"),
        (("ours = 80", "outs = 80"), "paper: 'outs' is no row; did you mean 'ours'?"),
        (("ours = 80", 'ours = "80"'), "paper.ours: a row has a number"),
        (("ours = 80", 'ours = {"central.f1" = 8}'), "paper.ours: 'central.f1' is no column of this table"),
        (("ours = 80", "ours = [80]"), "paper.ours: 1 numbers for 2 columns; write one for each of central.accuracy, "),
        (("ours = 80", 'columns = ["central.f1"]'), "paper.columns: 'central.f1' is no column of this table"),
        (("ours = 80", '"task=x" = { ours = 80 }'), 'paper."task=x": the table has no [grid]'),
        (('"A table"', '"A table of {task}"'), "title: {task} stands for an axis, and there is no axis 'task'"),
        (('title = "MHAT"', "title = 3"), "rows.mhat.title: Input should be a valid string"),
        (('title = "MHAT"', 'extends = "outs"'), "rows.mhat.extends: 'outs' is no row; did you mean 'ours'?"),
        (('title = "MHAT"', 'extends = "mhat"'), "rows.mhat.extends: the rows extend each other in a circle"),
        (("[rows.ours]", '[rows."our s"]'), "rows: 'our s' has other signs than letters, digits and . _ -; rename"),
    ],
)
def test_a_wrong_table_names_its_file_the_key_and_the_cure(file: Path, change: tuple[str, ...], message: str) -> None:
    assert change[0] in TABLE
    file.write_text(TABLE.replace(*change))
    found = refused(file)
    assert found.startswith(f"{file}:\n")
    assert message in found


def test_a_table_without_rows_is_refused(file: Path) -> None:
    file.write_text(HEAD + BASE)
    assert f"{file}:\n  rows: the table has no rows; write [rows.NAME] for each, over what is in [base]" == refused(
        file
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('method.name = "fedit"', "\n  method.name: there is no method 'fedit'; did you mean 'fedid'?"),
        ("method.distil_epochs = 2", "distil_epochs: unknown key; did you mean 'distill_epochs'?"),
        ("ronds = 3", "\n  ronds: unknown key; did you mean 'rounds'?"),
        ("sites = []", "\n  sites: the row names no sites; write [[base.sites]], or sites in the row"),
        ('sites = [{ name = "a", count = 0 }]', "\n  sites.0.count: write how many equal sites"),
    ],
)
def test_a_row_that_could_not_run_is_named_with_its_file(file: Path, row: str, message: str) -> None:
    file.write_text(HEAD + BASE + ROWS.replace('method.name = "fedid"', row))
    assert refused(file).startswith(f"{file}, row ours:\n")
    assert message in refused(file)


def test_an_unknown_task_and_an_absent_file_name_the_row(file: Path) -> None:
    file.write_text(HEAD + BASE + ROWS + 'task.name = "film-revews"\n')
    with pytest.raises(ConfigError, match=r"table\.toml, row ours:\n  task: .*film-revews"):
        check_tasks(read_table(file))
    file.write_text(HEAD + BASE + ROWS + 'task = { name = "files", train = "nowhere.csv" }\n')
    with pytest.raises(ConfigError, match=r"table\.toml, row ours:\n  task: .*nowhere\.csv"):
        check_tasks(read_table(file))


# --- a family of tables ---


def test_a_grid_makes_a_table_of_every_combination(family: Path) -> None:
    tables = read_tables(family)
    assert {table.name: table.settings.title for table in tables} == {
        "paper-reviews-short-alpha1": "Short reviews, alpha 1",
        "paper-reviews-short-alpha0.5": "Short reviews, alpha 0.5",
        "paper-reviews-long-alpha1": "long, alpha 1",
        "paper-reviews-long-alpha0.5": "long, alpha 0.5",
    }
    assert [table.settings.caption for table in tables] == ["Dealt with 1.", "Dealt with 0.5.", *["Long ones."] * 2]
    assert [table.settings.columns[0] for table in tables] == [*["central.accuracy"] * 2, *["central.f1"] * 2]


def test_a_later_axis_goes_before_an_earlier_one_and_the_row_before_both(family: Path) -> None:
    family.write_text(FAMILY.replace('method.name = "mhat" }', 'method.name = "mhat", rounds = 8 }'))
    rounds = {table.name[14:]: {row: run.rounds for row, run in table.rows.items()} for table in read_tables(family)}
    assert rounds["short-alpha1"] == {"mhat": 8, "fedavg": 2, "ours": 2, "exact": 2}
    assert rounds["short-alpha0.5"] == {"mhat": 8, "fedavg": 3, "ours": 3}
    assert rounds["long-alpha1"] == {"mhat": 8, "ours": 1}
    assert rounds["long-alpha0.5"] == {"mhat": 8, "ours": 3, "exact": 3}


def test_a_row_extends_another_and_may_be_in_some_tables_only(family: Path) -> None:
    short, long = read_table(family, "task=short", "alpha=1"), read_table(family, "task=long", "alpha=1")
    assert short.rows["exact"].method.parameters() == {"distill_epochs": 4, "feedback": "exact"}
    assert (short.title("exact"), short.title("mhat")) == ("exact", "MHAT")
    assert (short.settings.baselines, long.settings.baselines) == (["mhat", "fedavg"], ["mhat"])


def test_a_family_may_lack_combinations(family: Path) -> None:
    family.write_text('only = ["task=short", "task=long,alpha=1"]\n' + FAMILY)
    assert [table.combination for table in read_tables(family)] == [
        {"task": "short", "alpha": "1"},
        {"task": "short", "alpha": "0.5"},
        {"task": "long", "alpha": "1"},
    ]
    assert refused(family, "task=long", "alpha=0.5") == (
        f"{family}:\n  --only task=long --only alpha=0.5: the table has no such combination"
    )


def test_the_papers_numbers_belong_to_the_combinations_that_their_key_fits(family: Path) -> None:
    papers = [table.settings.paper for table in read_tables(family)]
    assert papers == [
        {"caption": "figures for 1", "mhat": 50, "fedavg": 40},
        {"caption": "figures for 0.5", "mhat": 50, "fedavg": 40},
        {"caption": "the long table", "mhat": {"central.f1": 60, "central.accuracy": 70}},
        {"caption": "figures for 0.5"},
    ]


def test_only_chooses_by_every_axis_and_any_of_one_axis_values(family: Path) -> None:
    chosen = [table.name[14:] for table in read_tables(family, ["alpha=1"])]
    assert chosen == ["short-alpha1", "long-alpha1"]
    assert len(read_tables(family, ["alpha=1", "alpha=0.5", "task=long"])) == 2


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("taks=short", "--only taks=short: there is no axis 'taks'; axes: task, alpha"),
        ("task=sst2", "--only task=sst2: task has no value 'sst2'; values: short, long"),
        ("short", "--only short: write AXIS=VALUE, such as task=short (got 'short')"),
    ],
)
def test_only_names_the_known_axes_and_values(family: Path, only: str, message: str) -> None:
    assert refused(family, only) == f"{family}:\n  {message}"


def test_only_has_no_use_for_a_table_without_a_grid(file: Path) -> None:
    assert refused(file, "task=short") == (
        f"{file}:\n  --only task=short: the table has no [grid], so there is nothing to choose; leave 'task=short' out"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[grid.alpha.1]", '[grid.alpha."1,0"]'), ":\n  grid.alpha: '1,0' has other signs than letters, digits"),
        (
            ("[grid.task.short]", "[grid.size]\n[grid.task.short]"),
            ":\n  grid.size: the axis has no value; write [grid.",
        ),
        (
            ('only = ["task=short"]', 'only = ["task=shrt"]'),
            ":\n  rows.fedavg.only: task has no value 'shrt'; values: ",
        ),
        (('"task=short" =', '"size=1" ='), ":\n  paper.\"size=1\": there is no axis 'size'; axes: task, alpha"),
        (
            ("data.alpha = 1.0", "data.alpa = 1.0"),
            ", task=short, alpha=1, row mhat:\n  data.alpa: unknown key; did you",
        ),
        (('"central.f1", ', '"f1", '), ", task=long, alpha=1:\n  columns: 'f1' is no column; write central.SCORE"),
    ],
)
def test_a_wrong_grid_names_its_file_the_key_and_the_cure(family: Path, change: tuple[str, str], message: str) -> None:
    assert change[0] in FAMILY
    family.write_text(FAMILY.replace(*change))
    assert refused(family).startswith(f"{family}{message}")


def test_a_table_that_no_row_belongs_to_is_refused(family: Path) -> None:
    rows = FAMILY[FAMILY.index("[rows]") : FAMILY.index("[grid.task.short]")]
    family.write_text(
        FAMILY.replace(rows, '[rows]\nmhat = { only = ["task=short"] }\n')
        .replace(', "fedavg"]', "]")
        .replace(", fedavg = 40", "")
    )
    assert refused(family).startswith(
        f"{family}, task=long, alpha=1:\n  rows: every row's `only` leaves this table out"
    )


def test_the_example_in_the_docs_is_a_family_of_tables(tmp_path: Path) -> None:
    docs = Path(__file__).parents[3] / "docs/EXPERIMENTS.md"
    example = tmp_path / "example.toml"
    example.write_text(docs.read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0])
    tables = read_tables(example)
    assert [table.name for table in tables] == [
        f"example-{task}-alpha{alpha}" for task in ("sst2", "mrpc") for alpha in (1, 100)
    ]
    assert all(len(config.sites) == 10 for table in tables for config in table.rows.values())


# --- one row, by `fedstill run` ---


def test_one_row_has_the_first_seed_and_takes_overrides(family: Path) -> None:
    run = load_row(family, "exact", ["task=short", "alpha=1"], ["rounds=7", "sites.client-2.model=tiny-t5"])
    assert (run.name, run.seed, run.rounds) == ("paper-reviews-short-alpha1", 5, 7)
    assert [site.model for site in run.sites] == [run.central.model, "tiny-t5"]
    assert load_row(family, "exact", ["task=short", "alpha=1"], ["seed=3"]).seed == 3


def said_by(*command: str) -> str:
    """What `fedstill` refuses a command with."""
    result = CliRunner().invoke(app, list(command))
    assert result.exit_code == 1
    return str(result.exception)


@pytest.mark.parametrize("command", ["run", "partition"])
def test_a_table_without_a_row_named_lists_its_rows(family: Path, command: str) -> None:
    assert said_by(command, str(family)) == (
        f"{family}: is a table of runs, not one run; name a row with --row (rows: mhat, fedavg, ours, exact), "
        "or run all of it: fedstill compare"
    )
    assert said_by(command, str(family), "--only", "task=long", "--only", "alpha=1") == (
        f"{family}, task=long, alpha=1:\n  --row: the file is a table; name a row of it; rows: mhat, ours"
    )


def test_a_row_of_a_family_wants_its_combination(family: Path) -> None:
    assert said_by("run", str(family), "--row", "ours", "--only", "alpha=1") == (
        f"{family}:\n  --only: 2 tables of the file are left; choose one with --only task=VALUE (task: short, long)"
    )
    assert said_by("run", str(family), "--row", "exact", "--only", "task=long", "--only", "alpha=1") == (
        f"{family}, task=long, alpha=1:\n  --row: there is no row 'exact'; rows: mhat, ours"
    )


def test_a_run_has_no_rows_to_choose_from(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('rounds = 1\n[[sites]]\nname = "a"\n')
    assert said_by("run", str(run), "--row", "fedid") == (
        f"{run}: is no table: it has no [rows]; leave --row and --only out to run it"
    )


def test_partition_shows_the_texts_of_a_row(family: Path) -> None:
    sizes = ["data.private=40", "data.public=8", "data.labelled=4", "data.test=8"]
    changes = [part for size in sizes for part in ("--set", size)]
    chosen = ["--row", "ours", "--only", "task=long", "--only", "alpha=1"]
    result = CliRunner().invoke(app, ["partition", str(family), *chosen, *changes, "--json"])
    assert result.exit_code == 0, result.exception
    assert '"client-2"' in result.stdout


def test_compare_takes_a_file_or_a_folder_and_only(family: Path, tmp_path: Path) -> None:
    runs = ["--runs", str(tmp_path / "runs"), "--report-only"]
    assert CliRunner().invoke(app, ["compare", str(family), "--only", "task=long", *runs]).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "runs/compare").iterdir()) == [
        "paper-reviews-long-alpha0.5",
        "paper-reviews-long-alpha1",
    ]
    assert CliRunner().invoke(app, ["compare", str(family.parent), *runs]).exit_code == 0
    assert len(list((tmp_path / "runs/compare").iterdir())) == 4
    assert said_by("compare", str(family), "--only", "tusk=long", *runs) == (
        f"{family}:\n  --only tusk=long: there is no axis 'tusk'; axes: task, alpha"
    )
