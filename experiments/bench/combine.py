"""What the server computes of many sites' predictions, rule by rule: `make bench-combine`.

512 sites, 1,000 texts, five classes, float32, one thread: logits of one hidden answer plus each site's own errors; and
the same with a fifth of the sites lying in one direction, where Cronus has a hundred sites to drop, one after another.
The median of five runs goes to experiments/bench/combine.json.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
from rich.console import Console
from rich.table import Table

from fedstill.common.maths import robust
from fedstill.common.maths.robust import Stack, combine

SITES, TEXTS, CLASSES = 512, 1000, 5
TURNS = 5
RULES: tuple[robust.Aggregation, ...] = ("mean", "median", "trimmed", "cronus", "krum", "spectral")
console = Console()


def predictions(liars: float) -> dict[str, Stack]:
    """Every site's logits; a share of the sites says the same wrong thing of every text."""
    rng = np.random.default_rng(1)
    answer = 2.0 * rng.standard_normal((TEXTS, CLASSES))
    found = answer + rng.standard_normal((SITES, TEXTS, CLASSES))
    lying = int(liars * SITES)
    found[:lying] = np.roll(answer, 1, axis=1) * 3.0 + 0.1 * rng.standard_normal((lying, TEXTS, CLASSES))
    return {f"site{number}": logits.astype(np.float32) for number, logits in enumerate(found)}


def measure(run: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
    """Milliseconds of one run, and what it found."""
    began = time.perf_counter()
    found = run()
    return 1000 * (time.perf_counter() - began), found


def main() -> None:
    """Measure, show, and write experiments/bench/combine.json."""
    table = Table(f"{SITES} sites x {TEXTS:,} texts x {CLASSES} classes", "honest (ms)", "a fifth lying (ms)")
    written: dict[str, dict[str, float]] = {}
    weights = dict.fromkeys((f"site{number}" for number in range(SITES)), 1 / SITES)
    for rule in RULES:
        for words, liars in (("honest", 0.0), ("lying", 0.2)):
            said = predictions(liars)
            times = [measure(lambda said=said, rule=rule: combine(said, weights, rule))[0] for _ in range(TURNS)]
            written.setdefault(rule, {})[words] = float(np.median(times))
        table.add_row(rule, *(f"{written[rule][words]:,.1f}" for words in ("honest", "lying")))
    console.print(table)
    Path(__file__).with_suffix(".json").write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
