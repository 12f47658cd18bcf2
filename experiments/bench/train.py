"""One FedID round in CPU seconds, ours beside a lean loop of plain torch that does the same steps to the last bit.

    python experiments/bench/train.py [--models tiny-bert minilm] [--repeats 3]

Four sites, 640 private and 576 public texts, batch 32, length 64, one thread, one local epoch and one pass over the
public texts. Ours is the real method with real nodes in this process; texts are tokenised once by each party, batches
padded to their longest text, and nothing is tested or saved inside. The two take turns; medians of process CPU time.
Every repetition ends with a check that both have the same weights. Writes experiments/bench/train.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from fedstill.client.node import Node
from fedstill.common.config import RunConfig
from fedstill.common.models import text_model as models
from fedstill.common.models.loading import load_model
from fedstill.common.randomness import derive
from fedstill.common.wire import Ask, Failure, Reply
from fedstill.deploy.launch.process import assemble
from fedstill.server.link import LocalLink

RESULTS = Path(__file__).resolve().parent / "train.json"
PHASES = ("tokenise", "local", "sites", "central")
SITES = ("north", "east", "south", "west")
BATCH, LENGTH, RATE, SEED = 32, 64, 1e-4, 1
TARGET = 1.15


def settings(model: str) -> RunConfig:
    """The round that is measured."""
    return RunConfig.model_validate(
        {
            "seed": SEED,
            "rounds": 1,
            "data": {"private": 640, "public": 576, "labelled": 64, "test": 8, "partition": "iid"},
            "train": {"learning_rate": RATE, "batch_size": BATCH, "max_length": LENGTH},
            "method": {
                "name": "fedid",
                "local_epochs": 1,
                "distill_epochs": 1,
                "optimizer_state": "persistent",
                "schedule": "constant",
            },
            "central": {"model": model},
            "sites": [{"name": name, "model": model} for name in SITES],
            "report": {"alone": False, "centralized": False, "evaluate": "end"},
        }
    )


class Clock(dict[str, float]):
    """CPU seconds by phase."""

    @contextmanager
    def at(self, phase: str) -> Iterator[None]:
        """Count what happens inside for a phase."""
        began = time.process_time()
        yield
        self[phase] = self.get(phase, 0.0) + time.process_time() - began


# --- ours ----------------------------------------------------------------------------------------------------------


class ClockedLink(LocalLink):
    """Counts what the sites do."""

    def __init__(self, nodes: list[Node], clock: Clock) -> None:
        super().__init__(nodes)
        self.clock = clock

    def deliver(self, parts: dict[str, Ask], deadline: float) -> Iterator[Reply | Failure]:
        verb = next(iter(parts.values())).verb
        with self.clock.at("local" if verb == "train.local" else "sites"):
            found = list(super().deliver(parts, deadline))
        return iter(found)


def ours(config: RunConfig, folder: Path) -> tuple[Clock, dict[str, Any]]:
    """The round as a run has it, and every model after it."""
    clock, plain = Clock(), models.encode

    def encode(*args: Any) -> Any:
        with clock.at("tokenise"):
            return plain(*args)

    models.encode = encode
    try:
        here = assemble(config, folder / "run", folder)
    finally:
        models.encode = plain
    fed, nodes = here.federation, here.nodes
    fed.link = ClockedLink(nodes, clock)
    fed.sites = fed.link.sites
    fed._begin(1)
    began = time.process_time()
    fed._drive(fed.method.round(fed))
    clock["central"] = time.process_time() - began - clock["local"] - clock["sites"]
    return clock, {"central": fed.central.learner.model.net, **{node.name: node.learner.model.net for node in nodes}}


# --- the yardstick -------------------------------------------------------------------------------------------------


class Party:
    """A model with its optimizers, nothing else."""

    def __init__(self, name: str, net: Any) -> None:
        self.name, self.net = name, net
        self.local, self.distil = (
            torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.0, fused=True) for _ in range(2)
        )

    def logits(self, texts: list[torch.Tensor], rows: Any, train: bool = False) -> torch.Tensor:
        """One batch, padded to its longest text."""
        self.net.train(train)
        picked = [texts[row] for row in rows]
        lengths = torch.tensor([len(tokens) for tokens in picked])
        ids = pad_sequence(picked, batch_first=True)
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return self.net(input_ids=ids, attention_mask=mask).logits

    def step(self, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        """One step down a loss."""
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


def seed(name: str, *place: int) -> None:
    """The dropout and the order that ours draws there."""
    torch.manual_seed(derive(SEED, name, *place))


def lean(nets: dict[str, Any], tokenizer: Any, texts: dict[str, Any]) -> tuple[Clock, dict[str, Any]]:
    """The same round: the same steps and passes, in a plain loop."""
    clock, parties = Clock(), {name: Party(name, net) for name, net in nets.items()}
    central, sites = parties["central"], [parties[name] for name in SITES]

    def tokens(some: Any) -> list[torch.Tensor]:
        found = tokenizer(list(some), truncation=True, max_length=LENGTH, verbose=False)["input_ids"]
        return [torch.tensor(ids) for ids in found]

    with clock.at("tokenise"):  # each party for itself, as they are in different places
        private = {site.name: tokens(texts[site.name].texts) for site in sites}
        public = {name: tokens(texts["public"].texts) for name in parties}
        labelled = tokens(texts["labelled"].texts)
    labels = {name: torch.from_numpy(texts[name].labels) for name in (*SITES, "labelled")}

    with clock.at("local"):
        for site in sites:
            seed(site.name, 1, 0)
            order = torch.randperm(len(private[site.name])).numpy()
            total = torch.zeros(())
            for start in range(0, len(order), BATCH):
                rows = order[start : start + BATCH]
                loss = cross_entropy(site.logits(private[site.name], rows, train=True), labels[site.name][rows])
                site.step(site.local, loss)
                total += loss.detach() * len(rows)

    batches = [range(start, min(start + BATCH, 576)) for start in range(0, 576, BATCH)]
    weight = 1 / len(sites)
    place = 0
    for number, rows in enumerate(batches):
        with clock.at("sites"):
            said = {site.name: site.logits(public[site.name], rows) for site in sites}
        with clock.at("central"):
            y = _mean([said[site.name].detach().numpy() for site in sites], weight)
            rng = np.random.default_rng(derive(SEED, "labelled", 1, number))
            query = rng.choice(len(labelled), size=min(len(rows), len(labelled)), replace=False)
            before = _validate(central, labelled, labels["labelled"], query)
            seed("central", 1, place + 1)
            wanted = torch.from_numpy(y)
            loss = _soft(central.logits(public["central"], rows, train=True), wanted)
            central.step(central.distil, loss)
            h = before - _validate(central, labelled, labels["labelled"], query)
            place += 3
        with clock.at("sites"):
            for site in sites:
                z = said[site.name]
                loss = _soft(z, wanted) + weight * h * cross_entropy(z, z.detach().argmax(dim=-1))
                site.step(site.distil, loss)
    return clock, nets


def _mean(logits: list[np.ndarray], weight: float) -> np.ndarray:
    total: Any = 0.0
    for z in logits:
        powers = np.exp(z.astype(np.float64) - z.max(axis=-1, keepdims=True))
        total = total + weight * (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32).astype(np.float64)
    return np.asarray(total, np.float32)


def _soft(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return -(wanted * logits.log_softmax(dim=-1)).sum(dim=-1).mean()


def _validate(central: Party, texts: list[torch.Tensor], labels: torch.Tensor, rows: np.ndarray) -> float:
    with torch.inference_mode():
        return float(cross_entropy(central.logits(texts, rows), labels[rows]))


# --- both ----------------------------------------------------------------------------------------------------------


def begin(config: RunConfig) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Every party's model as it begins, the tokenizer, and who holds which texts."""
    from fedstill.common.data.allocation import allocate

    held, nets, tokenizer = allocate(config), {}, None
    for name, learner in [("central", config.central), *((site.name, site) for site in config.sites)]:
        model = load_model(learner.model_settings(config.train), held.task, derive(SEED, name, "model"))
        nets[name], tokenizer = model.net, model.tokenizer
    texts = {name: held.splits.private.select(rows) for name, rows in zip(SITES, held.shares, strict=True)}
    return nets, tokenizer, {**texts, "public": held.splits.public, "labelled": held.splits.labelled}


def difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    """The largest difference of any weight of any party."""
    pairs = ((first[name].state_dict(), second[name].state_dict()) for name in first)
    return max(float((a[key].float() - b[key].float()).abs().max()) for a, b in pairs for key in a)


def measure(model: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Medians over the turns of both so far, after every turn."""
    config = settings(model)
    nets, tokenizer, texts = begin(config)
    clocks: dict[str, list[Clock]] = {"ours": [], "lean": []}
    worst = 0.0
    for turn in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            found = {}
            for who in ("ours", "lean") if turn % 2 else ("lean", "ours"):
                if who == "ours":
                    clock, found[who] = ours(config, Path(folder))
                else:
                    clock, found[who] = lean(copy.deepcopy(nets), tokenizer, texts)
                clocks[who].append(clock)
                print(
                    f"{model} {who}: "
                    + ", ".join(f"{p} {clock[p]:.2f}" for p in PHASES)
                    + f" | {sum(clock.values()):.2f} s",
                    flush=True,
                )
            worst = max(worst, difference(found["ours"], found["lean"]))
        yield _medians(clocks, worst)


def _medians(clocks: dict[str, list[Clock]], worst: float) -> dict[str, Any]:
    totals = {who: statistics.median(sum(c.values()) for c in made) for who, made in clocks.items()}
    phases = {
        phase: {who: round(statistics.median(c[phase] for c in made), 3) for who, made in clocks.items()}
        for phase in PHASES
    }
    ratio = statistics.median(
        sum(a.values()) / sum(b.values()) for a, b in zip(clocks["ours"], clocks["lean"], strict=True)
    )
    return {
        "lean": round(totals["lean"], 3),
        "ours": round(totals["ours"], 3),
        "ratio": round(ratio, 3),
        "repeats": len(clocks["ours"]),
        "largest_difference_of_weights": worst,
        "phases": phases,
    }


def main() -> int:
    """Measure and write; not zero if a ratio is above the target or the two disagree."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=["tiny-bert", "minilm"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", help="write a profile of one round of ours to this file and leave")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.profile:
        import cProfile

        with tempfile.TemporaryDirectory() as folder, cProfile.Profile() as profile:
            ours(settings(args.models[0]), Path(folder))
        profile.dump_stats(args.profile)
        return 0
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for model in args.models:
        for found in measure(model, args.repeats):
            results[model] = found
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(model, json.dumps(results[model]))
    bad = [name for name in args.models if results[name]["ratio"] > TARGET]
    wrong = [name for name in args.models if results[name]["largest_difference_of_weights"] > 1e-5]
    for name in bad:
        print(f"{name}: {results[name]['ratio']} times the lean loop, above {TARGET}", file=sys.stderr)
    for name in wrong:
        print(f"{name}: the two do not end at the same weights", file=sys.stderr)
    return 1 if bad or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
