"""FedDRS beside FedAvg, FedDF and FedAUX as alpha -> 0: mean, deviation, and the difference from FedAvg seed by seed.

Film reviews, two sites, in the two readings that the built-in task allows. `classes`: labels dealt by Dirichlet(1e-4),
so that each site holds one class alone. `domains`: each site holds one domain (long or short reviews) with both
classes, as the paper deals out tasks, of which a site at alpha -> 0 holds one. All rows train alike (tiny BERT with
MiniLM's word vectors) on all the texts they have, and differ only in what the server does with the uploaded weights:
FedAvg takes the mean by size, FedDRS the plain one before it distils, which is a row of its own, since domains are not
equally large (classes are). The learning rate of `classes` is the best of 1e-3, 2e-4 and 5e-5 for FedAvg in one run,
that of `domains` the demo's; distillation has the paper's rate. The central model is tested after the last round on 400
reviews. Every result is written to experiments/bench/feddrs.json as soon as it is there, and what is there is not run
again: delete the file to begin anew.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table

from fedstill.common.checkpoint import write_atomically
from fedstill.common.config import RunConfig
from fedstill.common.data.allocation import allocate
from fedstill.common.data.splits import Rows
from fedstill.experiments.compare.worker import run_in_process

RESULTS = Path(__file__).with_name("feddrs.json")
SEEDS = (1, 2, 3, 4, 5)
SITES, ROUNDS, DISTILL_RATE = 2, 6, 1e-5
SPLITS: dict[str, dict[str, Any]] = {
    "classes": {"partition": "dirichlet-clients", "alpha": 1e-4, "learning_rate": 2e-4},
    "domains": {"partition": "domain", "alpha": 1.0, "learning_rate": 1e-3},
}
LOCAL = {"local_epochs": 1, "optimizer_state": "fresh", "participation": 1.0, "schedule": "constant"}
# The paper has 64 x 64 pseudo texts, 100 updates of them, Adafactor, and the balance trick; the rest is the paper's.
DRS = {
    "name": "feddrs",
    "optimizer": "adamw",
    "samples": 0,
    "balance": False,
    "pseudo_texts": 16,
    "pseudo_length": 32,
    "sample_steps": 10,
}
ROWS: dict[str, dict[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    "FedDRS (mixed)": DRS,
    "FedAvg, plain mean": {**DRS, "variant": "post_only", "post_iterations": 0},
    "FedDRS (AdOnly)": {**DRS, "variant": "adversary_only"},
    "FedDRS (PostOnly)": {**DRS, "variant": "post_only"},
    "FedDF": {"name": "feddf", "distill_epochs": 1},
    "FedAUX": {"name": "fedaux", "preset": "feddrs", "distill_epochs": 1},
}
console = Console()


def run_config(split: str, row: str, seed: int) -> RunConfig:
    """The run of a row."""
    model, how = "tiny-bert-warm", SPLITS[split]
    sizes = {"private": 600, "public": 400, "labelled": 16, "test": 400}
    return RunConfig.model_validate(
        {
            "name": "bench",
            "seed": seed,
            "rounds": ROUNDS,
            "data": {**sizes, "partition": how["partition"], "alpha": how["alpha"]},
            "train": {"learning_rate": how["learning_rate"], "batch_size": 16, "max_length": 48, "keep": "end"},
            "method": {**LOCAL, **ROWS[row]},
            "central": {"model": model, "distill_rate": DISTILL_RATE},
            "sites": [{"name": f"site-{number}", "model": model} for number in range(1, SITES + 1)],
            "report": {"alone": False, "centralized": False, "evaluate": "end"},
        }
    )


def measure(config: RunConfig) -> dict[str, Any]:
    """One run in this process: the central model's accuracy after the last round, and how the classes were dealt."""
    with tempfile.TemporaryDirectory() as folder:
        facts = run_in_process(config, Path(folder))
    held = allocate(config)
    labels = held.splits.private.labels
    assert labels is not None
    return {
        "accuracy": facts["central"]["accuracy"],
        "positive_share": [round(_share(labels, rows), 3) for rows in held.shares],
        "seconds": round(facts["seconds"]["total"], 1),
    }


def _share(labels: Rows, rows: Rows) -> float:
    return float(labels[rows].mean())


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Mean and deviation over seeds, and the same of the difference from FedAvg, seed by seed."""
    found = {}
    for row in results:
        seeds = [seed for seed in results[row] if seed in results.get("FedAvg", {})]
        values = [results[row][seed]["accuracy"] for seed in seeds]
        beyond = [results[row][seed]["accuracy"] - results["FedAvg"][seed]["accuracy"] for seed in seeds]
        if len(values) > 1:
            found[row] = {
                "seeds": len(values),
                "accuracy_mean": round(statistics.mean(values), 4),
                "accuracy_deviation": round(statistics.stdev(values), 4),
                "above_fedavg_mean": round(statistics.mean(beyond), 4),
                "above_fedavg_deviation": round(statistics.stdev(beyond), 4),
            }
    return found


def main() -> None:
    """Every run that is not there yet: the two that matter first, seed by seed so that rows can be compared early."""
    torch.set_num_threads(1)
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    runs: dict[str, dict[str, dict[str, Any]]] = kept.get("runs", {split: {} for split in SPLITS})
    first, rest = list(ROWS)[:2], list(ROWS)[2:]
    for rows in (first, *([row] for row in rest)):
        for seed, split, row in product(SEEDS, SPLITS, rows):
            if str(seed) in runs[split].get(row, {}):
                continue
            found = measure(run_config(split, row, seed))
            runs[split].setdefault(row, {})[str(seed)] = found
            console.print(f"{split}, {row}, seed {seed}: {found['accuracy']:.3f} in {found['seconds']} s")
            settings = {"sites": SITES, "rounds": ROUNDS, "distill_rate": DISTILL_RATE, "splits": SPLITS, "rows": ROWS}
            means = {split: summary(runs[split]) for split in runs}
            facts = {"settings": {**settings, "local": LOCAL}, "summary": means, "runs": runs}
            write_atomically(RESULTS, json.dumps(facts, indent=1) + "\n")
    for split in runs:
        console.print(table(split, summary(runs[split])))


def table(split: str, found: dict[str, Any]) -> Table:
    """One split as a person reads it."""
    made = Table(title=f"{SITES} sites, split by {split}, {ROUNDS} rounds", title_justify="left")
    for column in ("method", "accuracy", "above FedAvg", "seeds"):
        made.add_column(column)
    for row, facts in found.items():
        accuracy = f"{facts['accuracy_mean']:.3f} ± {facts['accuracy_deviation']:.3f}"
        above = f"{facts['above_fedavg_mean']:+.3f} ± {facts['above_fedavg_deviation']:.3f}"
        made.add_row(row, accuracy, above, str(facts["seeds"]))
    return made


if __name__ == "__main__":
    main()
