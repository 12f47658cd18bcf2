"""From `pip install` to the first federation on a csv file of one's own, as a new user types it: `make bench-first`.

A wheel is built (not timed); then, in an empty folder: a new virtual environment, `pip install` of the wheel with its
dependencies, `fedstill new`, `fedstill run` with real processes. The csv file has 2,000 film reviews. Seconds of each
step and the scores at the end go to experiments/bench/first.json.
"""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TEXTS = 2000


def export(path: Path) -> None:
    """Film reviews as a file that a user might have."""
    from fedstill.common.data.tasks.film import film_rows

    rows = list(film_rows())
    random.Random(0).shuffle(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["review", "verdict"])
        writer.writerows((row["text"], "good" if str(row["label"]) == "1" else "bad") for row in rows[:TEXTS])


def main() -> None:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        here, seconds = Path(folder), dict[str, float]()
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "wheel"]
        subprocess.run([*build, str(ROOT)], cwd=here, check=True)
        [wheel] = here.glob("wheel/*.whl")
        export(here / "reviews.csv")
        env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env["FEDSTILL_CACHE"] = str(here / "cache")  # a new user has no features yet
        fedstill = str(here / "venv/bin/fedstill")
        steps = {
            "environment": [sys.base_prefix + "/bin/python3", "-m", "venv", "venv"],
            "pip install": ["venv/bin/pip", "install", "--quiet", str(wheel), "-c", str(ROOT / "constraints.txt")],
            "fedstill new": [fedstill, "new", "mine", "--data", "reviews.csv", "--yes"],
            "fedstill run": [fedstill, "run", "mine/run.toml", "--json"],
        }
        printed = ""
        for name, command in steps.items():
            began = time.monotonic()
            done = subprocess.run(command, cwd=here, env=env, stdout=subprocess.PIPE, text=True, check=True)
            seconds[name], printed = time.monotonic() - began, done.stdout
            print(f"{name:<14} {seconds[name]:6.1f} s", flush=True)
        lines = (here / "mine/run.toml").read_text().splitlines()
    summary = json.loads(printed)
    sites = {name: [site["alone"]["accuracy"], site["after"]["accuracy"]] for name, site in summary["sites"].items()}
    facts = {
        "date": str(date.today()),
        "load before": load,
        "seconds": {**seconds, "all": sum(seconds.values())},
        "lines of TOML": sum(1 for line in lines if line and not line.startswith("#")),
        "central": summary["central"],
        "sites, alone and after": sites,
    }
    print(json.dumps(facts, indent=1))
    (HERE / "first.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
