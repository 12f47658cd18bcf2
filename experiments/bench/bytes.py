"""Bytes that each method sends and is sent, beside its paper's arithmetic: real streams through a counted TCP line.

2,048 public texts, two classes, two sites of tiny models; one round. A row is a site's mean, by phase and direction.
"frames" is what the run's summary counts, "socket" what went over TCP in all phases together. The file
experiments/bench/bytes.json has {row: {phase: {direction: {formula, frames, ratio}}, socket: {up, down}}}.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the tests' line and streams serve here as well

from fedstill.common.config.files import load_run  # noqa: E402
from tests.conftest import SMALL  # noqa: E402
from tests.federation.cable import Cable  # noqa: E402
from tests.federation.conftest import Federation, streams  # noqa: E402

COMMON = ("rounds=1", "data.public=2048", "train.max_length=8", "report.alone=false", "report.centralized=false")
ALIKE = ("sites.south.model=tiny-bert",)
ONCE = ("method.distill_epochs=1",)
ROWS: dict[str, tuple[str, ...]] = {
    "fedid, batch 32": ("method.name=fedid", "method.batch_size=32", *ONCE),
    "fedid, batch 32, float16": ("method.name=fedid", "method.batch_size=32", "exchange.predictions=float16", *ONCE),
    "fedid, batch 32, int8": ("method.name=fedid", "method.batch_size=32", "exchange.predictions=int8", *ONCE),
    "fedid, batch 1024": ("method.name=fedid", "method.batch_size=1024", *ONCE),
    "fedid, exact, batch 1024": ("method.name=fedid", "method.batch_size=1024", "method.feedback=exact", *ONCE),
    "fedkd": ("method.name=fedkd", *ONCE),
    "ds-fl": ("method.name=ds-fl", *ONCE),
    "ds-fl, float16": ("method.name=ds-fl", "exchange.predictions=float16", *ONCE),
    "ds-fl, int8": ("method.name=ds-fl", "exchange.predictions=int8", *ONCE),
    "mhat": ("method.name=mhat", *ONCE),
    "logit-fedavg": ("method.name=logit-fedavg", *ONCE),
    "fedmd, 1,500 drawn": ("method.name=fedmd", "method.subset=1500", *ONCE),
    "cronus": ("method.name=cronus", *ONCE),
    "adafd": ("method.name=adafd", *ONCE),
    "sinkhorn": ("method.name=sinkhorn", "method.noise_texts=16", *ONCE),
    "feded": ("method.name=feded", *ALIKE, *ONCE),
    "feddf": ("method.name=feddf", *ONCE),
    "fedavg": ("method.name=fedavg", *ALIKE),
}


def measure(changes: tuple[str, ...]) -> dict[str, object]:
    """One round of a row."""
    cables: list[Cable] = []

    def through(port: int) -> int:
        cables.append(Cable(port))
        return cables[0].port

    with tempfile.TemporaryDirectory() as folder:
        made = Federation(load_run(SMALL, [*COMMON, *changes]), Path(folder))
        with streams(made, through) as link:
            sites = list(made.run(link)["sites"].values())
    found: dict[str, object] = {}
    for phase, formula in sites[0]["formula"].items():
        for way in ("up", "down"):
            wanted = sum(site["formula"][phase][way] for site in sites) / len(sites)
            sent = sum(site["bytes"][phase][way] for site in sites) / len(sites)
            if formula[way]:
                facts = {"formula": wanted, "frames": sent, "ratio": round(sent / wanted, 4)}
                found.setdefault(phase, {})[way] = facts  # type: ignore[attr-defined]
    found["socket"] = {way: round(getattr(cables[0], way) / len(sites)) for way in ("up", "down")}
    found["frames"] = {way: round(sum(s[f"bytes_{way}"] for s in sites) / len(sites)) for way in ("up", "down")}
    return found


def main() -> None:
    """Measure every row, print the table, write the figures."""
    results = {}
    print("| method | phase | direction | formula | frames | frames / formula | socket / frames, whole run |")
    print("|---|---|---|---|---|---|---|")
    for row, changes in ROWS.items():
        found = results[row] = measure(changes)
        for phase, ways in found.items():
            if phase in ("socket", "frames"):
                continue
            for way, facts in ways.items():  # type: ignore[attr-defined]
                line = found["socket"][way] / found["frames"][way]  # type: ignore[index]
                print(f"| {row} | {phase} | {way} | {facts['formula']:,.0f} | {facts['frames']:,.0f} | "
                      f"{facts['ratio']:.3f} | {line:.3f} |", flush=True)  # fmt: skip
    (ROOT / "experiments/bench/bytes.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
