"""What secure sums cost: bytes of a site and seconds of a run beside the plain run, over real streams on loopback.

    python experiments/bench/secure_sum.py

Five sites of tiny models, 200 public texts, two rounds. Written to experiments/bench/secure_sum.json.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the tests' streams serve here as well

from fedstill.common.config.files import load_run  # noqa: E402
from tests.conftest import SMALL  # noqa: E402
from tests.federation.conftest import Federation, streams  # noqa: E402

RESULTS = Path(__file__).with_name("secure_sum.json")
COMMON = ["rounds=2", "data.public=200", "data.private=200", "report.alone=false", "report.centralized=false",
          "sites.south.model=tiny-bert", "report.evaluate=end"]  # fmt: skip
ROWS = {
    "fedavg": ["method.name=fedavg"],
    "ds-fl": ["method.name=ds-fl", "method.distill_epochs=1"],
    "fedid, batch 32": ["method.name=fedid", "method.distill_epochs=1", "method.batch_size=32"],
}


def measure(changes: list[str], secure: bool) -> dict[str, Any]:
    """One run; a site's mean bytes, and its seconds without the set-up."""
    more = "".join(f'[[sites]]\nname = "site{n}"\nmodel = "tiny-bert"\n' for n in range(3))
    text = SMALL.replace("[exchange]", f"{more}[exchange]")
    config = load_run(text, [*COMMON, *changes, f"exchange.secure={str(secure).lower()}"])
    with tempfile.TemporaryDirectory() as folder:
        made = Federation(config, Path(folder))
        with streams(made) as link:
            began = time.perf_counter()
            summary = made.run(link)
            seconds = time.perf_counter() - began
    sites = list(summary["sites"].values())
    found = {way: round(sum(site[f"bytes_{way}"] for site in sites) / len(sites)) for way in ("up", "down")}
    return {**found, "seconds": round(seconds, 2), "accuracy": summary["central"]["accuracy"]}


def main() -> None:
    """Every row, plain and secure."""
    kinds = ("plain", "secure")
    results = {row: {kind: measure(changes, kind == "secure") for kind in kinds} for row, changes in ROWS.items()}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print("| method | bytes up: plain, secure | bytes down: plain, secure | seconds: plain, secure |")
    print("|---|---|---|---|")
    for row, both in results.items():
        cells = [f"{both['plain'][key]:,}, {both['secure'][key]:,}" for key in ("up", "down", "seconds")]
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
