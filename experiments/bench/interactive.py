"""How much of FedID's interactive phase is not model compute: one real run on the demo's models, four sites.

Part of `make bench-exchange`. The time outside compute is what is left of each exchange's wall time after the slowest
site's own computing; experiments/bench/interactive.json has {seconds, sites, central, exchange, share}.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHANGES = (
    "method.name=fedid",
    "report.alone=false",
    "report.centralized=false",
    "report.evaluate=end",
    "rounds=1",
    "method.local_epochs=1",
)


def main() -> None:
    """Run the demo's federation without its yardsticks and read where the time went."""
    with tempfile.TemporaryDirectory() as runs:
        command = [str(Path(sys.executable).parent / "fedstill"), "run", str(ROOT / "experiments/demo.toml")]
        options = [option for change in CHANGES for option in ("--set", change)]
        subprocess.run([*command, "--runs", runs, *options], check=True)
        spent = json.loads((Path(runs) / "latest/summary.json").read_text())["phases"]["interactive"]
    share = spent["exchange"] / spent["total"]
    found = {"seconds": spent["total"], **{k: spent[k] for k in ("sites", "central", "exchange")}, "share": share}
    (ROOT / "experiments/bench/interactive.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"outside model compute: {100 * share:.1f} % of the interactive phase (to reach: at most 10 %)")


if __name__ == "__main__":
    main()
