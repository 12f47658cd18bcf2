"""Default settings on four families, six tasks and three methods: does any federation stay at chance?

    python experiments/bench/defaults.py [--families small-bert ...] [--tasks sst2 ...]

Three sites and a central model of one family, 200 labels a site, 240 public and 400 test texts (500, 480 and 1,000
where there are four or five classes), one round of six local epochs, texts of 32 tokens; no rate, no schedule, nothing
is set but sizes. A run is at chance if its central model's accuracy is within two standard errors of what the commonest
class would get. Texts come from ../shared/data, or from FEDSTILL_DATA. The three methods of a task and family share the
sites' local training. Resumes; writes experiments/bench/defaults.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

from fedstill.common.config import RunConfig
from fedstill.deploy.launch.process import assemble
from fedstill.experiments.compare.shared_training import reuse_first_training

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
RESULTS = Path(__file__).resolve().parent / "defaults.json"
FAMILIES = ("small-bert", "small-roberta", "small-xlnet", "small-t5")
MANY_CLASSES = {"private": 1500, "public": 480, "test": 1000}
TASKS: dict[str, dict[str, Any]] = {
    "film-reviews": {"train": {"keep": "end"}, "data": {"test_seed": 1}},  # whose texts the small models never read
    "sst2": {},
    "ag_news": {"data": MANY_CLASSES},
    "amazon": {"train": {"keep": "end"}},
    "sst5": {"data": MANY_CLASSES},
    "graded": {"data": MANY_CLASSES},
}
METHODS = ("fedid", "ds-fl", "mhat")
SIZES = {"private": 600, "public": 240, "labelled": 64, "test": 400, "test_seed": 0, "alpha": 3.0}


def settings(family: str, task: str, method: str, seed: int) -> RunConfig:
    """A run in which nothing is tuned."""
    change = TASKS[task]
    return RunConfig.model_validate(
        {
            "seed": seed,
            "rounds": 1,
            "task": {"name": task},
            "data": {**SIZES, **change.get("data", {})},
            "train": {"max_length": 32, "batch_size": 16, **change.get("train", {})},
            "method": {"name": method, "local_epochs": 6, "distill_epochs": 3},
            "central": {"model": family},
            "report": {"alone": False, "centralized": False, "evaluate": "end"},
            "sites": [{"name": name, "model": family} for name in ("north", "east", "south")],
        }
    )


def main() -> None:
    """Run what is missing, then print the table."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--families", nargs="*", default=list(FAMILIES))
    arguments.add_argument("--tasks", nargs="*", default=list(TASKS))
    arguments.add_argument("--seed", type=int, default=3)  # settings were chosen on 1 and 2
    options = arguments.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("FEDSTILL_DATA", str(DATA))
    done: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for task, family in itertools.product(options.tasks, options.families):
        with tempfile.TemporaryDirectory() as trained:
            for method in METHODS:
                key = f"{task}/{method}/{family}/{options.seed}"
                if key not in done:
                    done[key] = one(settings(family, task, method, options.seed), Path(trained))
                    RESULTS.write_text(json.dumps(done, indent=1) + "\n")
                found = done[key]
                print(
                    f"{key:45} central {found['central']:.3f}  sites {found['sites']:.3f}  "
                    f"commonest class {found['chance']:.3f}{'' if found['learned'] else '   AT CHANCE'}",
                    flush=True,
                )
    print(f"{sum(not run['learned'] for run in done.values())} of {len(done)} runs are at chance")


def one(config: RunConfig, trained: Path) -> dict[str, Any]:
    """Run, and say what was reached; local training is kept in `trained`."""
    with tempfile.TemporaryDirectory() as scratch:
        made = assemble(config, Path(scratch) / "run")
        for node in made.nodes:
            reuse_first_training(node, trained)
        summary = made.run()
        labels = np.asarray(made.federation.central.texts.test.labels)
        shutil.rmtree(scratch, ignore_errors=True)
    chance = float(np.bincount(labels).max() / len(labels))
    central = float(summary["central"]["accuracy"])
    limit = chance + 2 * math.sqrt(chance * (1 - chance) / len(labels))
    sites = [float(site["after"]["accuracy"]) for site in summary["sites"].values()]
    return {"central": central, "sites": float(np.mean(sites)), "chance": chance, "learned": central > limit}


if __name__ == "__main__":
    main()
