"""Every method's central model beside the mean of the isolated sites, on the built-in task with four families.

    python experiments/bench/methods.py [--seeds 1 2 3] [--jobs 2] [--only fedid ds-fl]

The federation is that of tiny.toml, in one process, with one round of six local epochs, so that all rows begin at the
same local models. Each (row, seed) is written to experiments/bench/methods.json as soon as it
is done and is not run again; delete the file, or give --again, to measure anew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from fedstill.common.config import RunConfig
from fedstill.common.config.files import load_run
from fedstill.common.data.splits import Text
from fedstill.common.models import text_model as models
from fedstill.common.models.tokens import Encoded

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "methods.json"
CACHE = HERE.parent / "build" / "bench-methods"
ONE_KIND = [f"sites.{number}.model=tiny-bert-warm" for number in range(4)]
SHOT = ["method.distill_epochs=6"]  # what is learned once, or by regression, needs more than three
WARM = ["method.warmup_epochs=6", "method.local_epochs=1"]
# The paper's 100,000 noise texts of 200 tokens take hours here; and 128 labelled texts make no global model that could
# be a teacher. Transport is as steep far from the target as near it, so it wants smaller steps, and more of them.
NOISE = ["method.noise_texts=1000", "method.noise_length=48"]
NOISE += ["method.pretrain_epochs=0", "method.without_forgetting=false"]


def of(name: str, *settings: str) -> list[str]:
    """A row: the demo's settings under another method."""
    return [f"method.name={name}", *settings]


ROWS: dict[str, list[str]] = {
    "isolated": of("isolated"),
    "centralized": of("centralized"),
    "fedid, scalar": of("fedid"),
    "fedid, scalar, float16": of("fedid", "exchange.predictions=float16"),
    "fedid, scalar, int8": of("fedid", "exchange.predictions=int8"),
    "fedid, exact": of("fedid", "method.feedback=exact"),
    "fedkd": of("fedkd", *SHOT),
    "ds-fl": of("ds-fl"),
    "mhat": of("mhat"),
    "feddf": of("feddf"),
    "fedmd": of("fedmd", *WARM, *SHOT),
    "cronus": of("cronus", *WARM),
    "logit-fedavg": of("logit-fedavg"),
    "adafd, enwc": of("adafd", *SHOT),
    "sinkhorn-E": of("sinkhorn", *NOISE, "method.distill_epochs=15", "central.distill_rate=3e-4"),
    "entropy-E": of("entropy", *SHOT, *NOISE),
    "feded (one family)": of("feded", *ONE_KIND),
    "isolated (one family)": of("isolated", *ONE_KIND),
}


def tokenise_once() -> None:
    """Rows of one process share the texts in numbers: the same tokenizer gives the same."""
    known: dict[tuple[object, ...], Encoded] = {}
    plain = models.encode

    def encode(tokenizer: Any, texts: Sequence[Text], max_length: int) -> Encoded:
        rules = tokenizer.backend_tokenizer.to_str(), str(tokenizer.model_input_names), tokenizer.truncation_side
        key = (rules, max_length, hash(tuple(texts)))
        if key not in known:
            known[key] = plain(tokenizer, texts, max_length)
        return known[key]

    if plain.__module__ != __name__:
        models.encode = encode


def settings_of(row: str, seed: int) -> RunConfig:
    """The configuration of a row's run."""
    common = [
        "rounds=1",
        "method.local_epochs=6",
        f"seed={seed}",
        "report.centralized=false",
        "report.evaluate=end",
        "report.alone=false",
        "data.test=1000",
    ]
    demo = (HERE / "tiny.toml").read_text(encoding="utf-8")
    demo = demo.replace("distill_epochs = 2\n", "")  # not every method has it; those that do mean 3
    return load_run(demo, [*common, *ROWS[row]])


def run(row: str, seed: int) -> dict[str, object]:
    """One run of a row."""
    from fedstill.experiments.compare.worker import run_in_process

    tokenise_once()
    isolated, config = row.startswith("isolated"), settings_of(row, seed)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        facts = run_in_process(config, Path(folder), reuse=CACHE)
    sites = facts["sites"].values()
    return {
        "central": None if isolated else facts["central"]["accuracy"],
        "sites": float(np.mean([site["after"]["accuracy"] for site in sites])),
        "bytes_up": int(np.mean([site["bytes_up"] for site in sites])),
        "bytes_down": int(np.mean([site["bytes_down"] for site in sites])),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """The results as Markdown."""
    lines = [
        "| method | seeds | central | above the isolated mean, by seed | sites after | up, kB/site | down, kB/site |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        found = results.get(row)
        if not found:
            continue
        base = results.get("isolated (one family)" if "one family" in row else "isolated", {})
        seeds = sorted(found)
        up, down = (np.mean([found[s][key] for s in seeds]) / 1e3 for key in ("bytes_up", "bytes_down"))
        central, above = "-", "-"
        if found[seeds[0]]["central"] is not None:
            central = spread([found[s]["central"] for s in seeds])
            above = " ".join(f"{100 * (found[s]['central'] - base[s]['sites']):+.1f}" for s in seeds if s in base)
        after = spread([found[s]["sites"] for s in seeds])
        lines.append(f"| {row} | {len(seeds)} | {central} | {above} | {after} | {up:,.1f} | {down:,.1f} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    deviation = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{deviation}"


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted = [(row, s) for s in asked.seeds for row in asked.only if asked.again or str(s) not in results.get(row, {})]
    with ProcessPoolExecutor(asked.jobs) as pool:
        working = {pool.submit(run, row, seed): (row, seed) for row, seed in wanted}
        for number, done in enumerate(as_completed(working), 1):
            row, seed = working[done]
            try:
                found = done.result()
            except Exception as error:
                print(f"{number}/{len(wanted)}  {row}, seed {seed} failed: {error}", file=sys.stderr, flush=True)
                continue
            results.setdefault(row, {})[str(seed)] = found
            RESULTS.write_text(json.dumps({name: results[name] for name in ROWS if name in results}, indent=1) + "\n")
            print(f"{number}/{len(wanted)}  {row}, seed {seed}: {found}", flush=True)
    print(table(results))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
