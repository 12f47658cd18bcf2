"""Full parameters against LoRA adapters, in bytes and in accuracy: `make bench-adapters`.

Federations in one process (LocalLink: the same Asks, the bytes of the same frames) of three sites on film reviews, with
tiny BERT models (word vectors from MiniLM) and mildly skewed shares. Per method and seed one run with all parameters
and one with adapters and head. A model this small has little to adapt: its adapters are a larger share of it, and reach
less of it, than those of a model of the usual size. The table goes to
experiments/bench/adapters.json, with every run's numbers.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from echo import write_whole
from rich.console import Console
from rich.table import Table

from fedstill.common.config import RunConfig
from fedstill.common.config.files import load_run
from fedstill.experiments.compare.worker import run_in_process

METHODS = ("fedavg", "fedprox", "fedmedian")
SEEDS = (1, 2)
RATES = {"full": 1e-3, "lora": 1e-3}  # 2e-3 and 5e-3 were no better for adapters
LORA = '{r = 16, alpha = 32, targets = ["query", "key", "value", "dense"]}'
SITES = ("north", "east", "south")
CONFIG = """
name = "adapters"
rounds = 4
[data]
private = 900
public = 40
labelled = 16
test = 400
partition = "dirichlet"
alpha = 10.0
[train]
batch_size = 16
max_length = 32
keep = "end"
[method]
local_epochs = 4
schedule = "constant"
[report]
alone = false
centralized = false
evaluate = "end"
"""
console = Console()


def config_of(method: str, way: str, seed: int) -> RunConfig:
    """One run."""
    lora = f", lora = {LORA}" if way == "lora" else ""
    sites = ", ".join(f'{{name = "{name}", model = "tiny-bert-warm"{lora}}}' for name in SITES)
    changes = [f"central={{model = 'tiny-bert-warm'{lora}}}", f"sites=[{sites}]", f"seed={seed}"]
    return load_run(CONFIG, [*changes, f"method.name={method}", f"train.learning_rate={RATES[way]}"])


def run(config: RunConfig, folder: Path) -> dict[str, float]:
    """Accuracy of the central model and of the sites, and a site's bytes of all rounds (mean over sites)."""
    summary = run_in_process(config, folder)
    sites = summary["sites"].values()
    return {
        "central": summary["central"]["accuracy"],
        "sites": float(np.mean([site["after"]["accuracy"] for site in sites])),
        "bytes_up": float(np.mean([site["bytes_up"] for site in sites])),
        "bytes_down": float(np.mean([site["bytes_down"] for site in sites])),
    }


def main() -> None:
    """Every method both ways on every seed; the table, and experiments/bench/adapters.json."""
    torch.set_num_threads(1)
    began, rows = time.monotonic(), {}
    for method in METHODS:
        for way in RATES:
            runs = []
            for seed in SEEDS:
                with tempfile.TemporaryDirectory(prefix="fedstill-bench-") as scratch:
                    runs.append(run(config_of(method, way, seed), Path(scratch)))
                console.print(f"{method} {way} seed {seed}: {runs[-1]}", style="dim", soft_wrap=True)
            mean = {name: float(np.mean([r[name] for r in runs])) for name in runs[0]}
            spread = {name: float(np.std([r[name] for r in runs], ddof=1)) for name in ("central", "sites")}
            rows[f"{method} {way}"] = {**mean, "deviation": spread, "runs": runs}
    facts = {"config": CONFIG, "lora": LORA, "rates": RATES, "seeds": SEEDS, "rows": rows}
    write_whole(Path(__file__).with_suffix(".json"), facts)
    table = Table("method", "travels", "MB up", "MB down", "central", "mean of sites")
    for name, row in rows.items():
        scores = [f"{row[who]:.3f} ± {row['deviation'][who]:.3f}" for who in ("central", "sites")]
        table.add_row(*name.split(), f"{row['bytes_up'] / 1e6:.2f}", f"{row['bytes_down'] / 1e6:.2f}", *scores)
    console.print(table)
    console.print(f"{time.monotonic() - began:.0f} s in all; {Path(__file__).with_suffix('.json')}", style="dim")


if __name__ == "__main__":
    sys.exit(main())
