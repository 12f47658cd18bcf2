"""FedDRS beside FedAvg, FedDF and FedAUX where every site holds (nearly) one class: mean, deviation, paired difference.

Film reviews dealt to four sites by Dirichlet(0.01) over classes, which is alpha -> 0 as the built-in task has it: sites
are equally large and a site draws its texts from one class as long as there are any. All rows train alike (tiny BERT
with MiniLM's word vectors, as in the demo, whose rates and lengths these are) and differ only in what the server does
with the uploaded weights. The central model is tested after the last round on 400 reviews. Every result is written to
bench/feddrs.json as soon as it is there, and a row that is there is not run again: delete the file to begin anew.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table

from fedstill.client.node import Node
from fedstill.common.checkpoint import write_atomically
from fedstill.common.config import RunConfig
from fedstill.common.data import Rows
from fedstill.common.holdings import holdings
from fedstill.server.link import LocalLink
from fedstill.server.record import Record
from fedstill.server.student import Student
from fedstill.strategies import find_method

RESULTS = Path(__file__).with_name("feddrs.json")
SEEDS = (1, 2, 3, 4, 5)
SITES, ALPHA, ROUNDS = 2, 0.01, 8
LOCAL = {"local_epochs": 1, "optimizer_state": "fresh", "participation": 1.0}
# The paper takes 64 x 64 pseudo texts and 100 updates for a model a hundred times as large on a GPU.
DRS = {
    "name": "feddrs",
    "optimizer": "adamw",
    "samples": 0,
    "pseudo_texts": 16,
    "pseudo_length": 32,
    "sample_steps": 10,
    "distill_steps": 4,
}
ROWS: dict[str, dict[str, Any]] = {
    "FedAvg": {"name": "fedavg"},
    "FedDRS (mixed)": DRS,
    "FedDRS (AdOnly)": {**DRS, "variant": "adversary_only"},
    "FedDRS (PostOnly)": {**DRS, "variant": "post_only"},
    "FedDF": {"name": "feddf", "distill_epochs": 1},
    "FedAUX": {"name": "fedaux", "preset": "feddrs", "distill_epochs": 1},
}
console = Console()


def run_config(row: str, seed: int, alpha: float = ALPHA, distill_rate: float = 1e-4) -> RunConfig:
    """The run of a row."""
    model = "tiny-bert-warm"
    return RunConfig.model_validate(
        {
            "name": "bench",
            "seed": seed,
            "rounds": ROUNDS,
            "data": {
                "private": 800,
                "public": 400,
                "labelled": 16,
                "test": 400,
                "partition": "dirichlet-clients",
                "alpha": alpha,
            },
            "train": {"learning_rate": 2e-4, "batch_size": 16, "max_length": 48, "keep": "end"},
            "method": {**LOCAL, **ROWS[row]},
            "central": {"model": model, "distill_rate": distill_rate},
            "sites": [{"name": f"site-{number}", "model": model} for number in range(1, SITES + 1)],
            "report": {"alone": False, "centralized": False, "evaluate": "end"},
        }
    )


def measure(config: RunConfig) -> dict[str, Any]:
    """One run in this process: the central model's accuracy after every round, and how the classes were dealt."""
    with tempfile.TemporaryDirectory() as folder:
        student = Student(config)
        kind, params = find_method(config.method)
        method = kind(params, config, student, Record(Path(folder) / "run", config))
        nodes = [Node(config, site, "run", Path(folder) / site.name) for site in config.sites]
        facts = method.run(LocalLink(nodes))
    held = holdings(config)
    labels = held.splits.private.labels
    assert labels is not None
    central = [row["accuracy"] for row in method.history if row["node"] == "central"]
    return {
        "accuracy": central[-1],
        "rounds": central,
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
    """Every row and seed that is not there yet, seed by seed so that rows can be compared early."""
    torch.set_num_threads(1)
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    results: dict[str, dict[str, Any]] = kept.get("runs", {})
    for seed in SEEDS:
        for row in ROWS:
            if str(seed) in results.get(row, {}):
                continue
            found = measure(run_config(row, seed))
            results.setdefault(row, {})[str(seed)] = found
            console.print(f"{row}, seed {seed}: {found['accuracy']:.3f} in {found['seconds']} s")
            settings = {"sites": SITES, "alpha": ALPHA, "rounds": ROUNDS, "rows": ROWS, "local": LOCAL}
            facts = {"settings": settings, "summary": summary(results), "runs": results}
            write_atomically(RESULTS, json.dumps(facts, indent=1) + "\n")
    table = Table(title=f"{SITES} sites, Dirichlet({ALPHA}) over classes, {ROUNDS} rounds", title_justify="left")
    for column in ("method", "accuracy", "above FedAvg", "seeds"):
        table.add_column(column)
    for row, facts in summary(results).items():
        accuracy = f"{facts['accuracy_mean']:.3f} ± {facts['accuracy_deviation']:.3f}"
        above = f"{facts['above_fedavg_mean']:+.3f} ± {facts['above_fedavg_deviation']:.3f}"
        table.add_row(row, accuracy, above, str(facts["seeds"]))
    console.print(table)


if __name__ == "__main__":
    main()
