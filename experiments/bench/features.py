"""One FedID round on cached features beside the same round with the whole model trained: seconds, side by side.

    python experiments/bench/features.py [--model minilm] [--turns 3]

Two sites and a central model of the same kind, 256 private and 256 public texts of 64 tokens, one local epoch, one
pass over the public texts, one thread. Three ways take turns in one run: everything trained; upper layers on cached
states of the lower ones; a head on cached vectors. Texts are tokenized, and features cached, before the clock starts;
how long the cache takes to fill is printed beside it. Writes experiments/bench/features.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from fedstill.common.config import RunConfig
from fedstill.deploy.launch.process import assemble

RESULTS = Path(__file__).resolve().parent / "features.json"
TARGET = 30.0


def settings(model: str, freeze: str | int | None) -> RunConfig:
    """The round that is measured."""
    learner = {"model": model, **({} if freeze is None else {"freeze": freeze})}
    return RunConfig.model_validate(
        {
            "rounds": 1,
            "data": {"private": 512, "public": 256, "labelled": 64, "test": 8, "partition": "iid"},
            "train": {"batch_size": 32, "max_length": 64, "learning_rate": 1e-4},
            "method": {"name": "fedid", "local_epochs": 1, "distill_epochs": 1},
            "central": learner,
            "report": {"alone": False, "centralized": False, "evaluate": "end"},
            "sites": [{"name": name, **learner} for name in ("north", "south")],
        }
    )


def one_round(config: RunConfig, folder: Path) -> tuple[float, float]:
    """Seconds to set up (with the cache, if it is empty) and seconds of the round."""
    began = time.perf_counter()
    made = assemble(config, folder)
    ready = time.perf_counter() - began
    began = time.perf_counter()
    made.run()
    return ready, time.perf_counter() - began


def main() -> None:
    """Measure, print, write."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--model", default="minilm")
    arguments.add_argument("--turns", type=int, default=3)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    ways: dict[str, str | int | None] = {"whole model": None, "upper half": 3, "head": "encoder"}
    rounds: dict[str, list[float]] = {way: [] for way in ways}
    fill: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["FEDSTILL_CACHE"] = str(Path(scratch) / "cache")
        for turn in range(options.turns):
            for way, freeze in ways.items():
                folder = Path(scratch) / "run"
                shutil.rmtree(folder, ignore_errors=True)
                ready, seconds = one_round(settings(options.model, freeze), folder)
                fill.setdefault(way, ready)
                rounds[way].append(seconds)
                print(f"turn {turn + 1}, {way}: ready in {ready:.1f} s, round {seconds:.2f} s", flush=True)
    medians = {way: statistics.median(values) for way, values in rounds.items()}
    ratios = {way: medians["whole model"] / value for way, value in medians.items()}
    for way, ratio in ratios.items():
        print(f"{way:12} {medians[way]:7.2f} s   {ratio:6.1f}x as fast   first set-up {fill[way]:.1f} s")
    verdict = "reached" if ratios["head"] >= TARGET else "missed"
    print(f"target: a head at least {TARGET:.0f}x: {verdict}")
    about = {"model": options.model, "seconds": rounds, "medians": medians, "ratios": ratios, "first_setup": fill}
    RESULTS.write_text(json.dumps({**about, "target": TARGET}, indent=1) + "\n")


if __name__ == "__main__":
    main()
