"""A table's file of four rows, whole and in its parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstill.experiments.compare.table_file import read_tables
from fedstill.experiments.compare.tables import Table

HEAD = """
title = "A table"
seeds = [1, 2, 3]
columns = ["central.accuracy", "bytes_up"]
baselines = ["ds-fl", "mhat"]
bounds = ["isolated"]
"""
BASE = """
[base]
rounds = 1
method.local_epochs = 2
sites = [{ name = "north" }]
"""
ROWS = """
[rows.ds-fl]
method.name = "ds-fl"
[rows.isolated]
method.name = "isolated"
[rows.mhat]
title = "MHAT"
method.name = "mhat"
[rows.ours]
method.name = "fedid"
"""
PAPER = """
[paper]
caption = "figures"
ours = 80
mhat = 85.5
ds-fl = 70
"""
TABLE = HEAD + BASE + ROWS + PAPER


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "table.toml"
    made.write_text(TABLE)
    return made


def read_table(file: Path, *only: str) -> Table:
    (table,) = read_tables(file, only)
    return table
