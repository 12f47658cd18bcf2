"""Sites with tasks of their own: what they draw, they draw by shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedstill.client.own_task import make_node
from fedstill.common.config.files import load_run

RUN = """
[task]
name = "mixed"
[train]
max_length = 16
[method]
name = "fedavg"
[central]
model = "tiny-bert"
[[sites]]
name = "ann"
model = "tiny-bert"
task = {{ kind = "classification", train = "{0}", labels = ["a", "b"] }}
[[sites]]
name = "ben"
model = "tiny-bert"
task = {{ kind = "classification", train = "{0}", labels = ["a", "b"] }}
[[sites]]
name = "cay"
model = "tiny-bert"
task = {{ kind = "classification", train = "{0}", labels = ["a", "b", "c"] }}
"""


def test_sites_with_heads_of_one_shape_begin_with_the_same_head(tmp_path: Path) -> None:
    file = tmp_path / "texts.csv"
    rows = [f"a film of {i} words,{'ab'[i % 2]}" for i in range(20)]
    file.write_text("text,label\n" + "\n".join(rows) + "\n")
    config = load_run(RUN.format(file))
    ann, ben, cay = (make_node(config, site, "run", tmp_path / site.name).learner.whole() for site in config.sites)
    assert all(np.array_equal(value, ben[name]) for name, value in ann.items())
    assert ann["classifier.weight"].shape != cay["classifier.weight"].shape
