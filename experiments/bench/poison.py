"""How much accuracy poisoned predictions and updates cost, by attack, share of liars and rule.

    python experiments/bench/poison.py [--seeds 1] [--shares 30 10 20 40] [--only predictions updates]

Ten sites train alone once a seed; what they predict is the same for all rows and is kept under build/bench-poison. In a
row some of the sites lie, one rule combines what all say, and the central model is distilled from it (predictions). For
updates the sites go on for two epochs from the central model that nobody lied to, and the central model of a row is the
combination of what they send: the mean of ten models that began at random would be at chance. Beside the attacks stands
`left out`: the mean of those who do not lie, which is the best that a rule can hope for. Each row is written to
experiments/bench/poison.json as soon as it is done and is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "poison.json"
CACHE = HERE.parent / "build" / "bench-poison"
SITES = 10
SHARES = (10, 20, 30, 40)
ATTACKS = ("flip", "noise", "scale", "shift", "collude")
RULES = ("mean", "median", "trimmed", "cronus", "krum", "spectral")
UPDATE_RULES = ("mean", "fedmedian", "fedtrimmedavg", "krum", "multikrum", "bulyan")
COMMON = [
    "rounds=1",
    "data.private=8000",
    "data.test=1000",
    "method.name=feddf",
    "report.centralized=false",
    "report.alone=false",
]


def config_of(seed: int) -> Any:
    """The demo's task and training with ten sites of one family, which both predictions and updates need."""
    from fedstill.common.config.files import load_run

    demo = (HERE / "tiny.toml").read_text(encoding="utf-8").split("[[sites]]")[0]
    demo = demo.replace("distill_epochs = 2\n", "").replace('name = "fedid"', 'name = "feddf"')
    sites = "".join(f'[[sites]]\nname = "site-{n}"\nmodel = "tiny-bert-warm"\n' for n in range(SITES))
    return load_run(demo + sites, [*COMMON, f"seed={seed}", "method.local_epochs=6"])


@lru_cache(1)
def honest(seed: int) -> dict[str, Any]:
    """The sites' predictions on the public texts, after training alone."""
    return trained(seed, "alone", student_of(seed).weights(), 6)


@lru_cache(1)
def updated(seed: int) -> dict[str, Any]:
    """The sites' weights after two epochs from the central model that nobody lied to, and that model's."""
    student, path = student_of(seed), CACHE / f"seed-{seed}-begin.npz"
    if not path.exists():
        distilled(seed, "none", 0, "mean")
        np.savez(path, **student.weights())
    with np.load(path) as file:
        begin = {name: file[name] for name in file.files}
    return trained(seed, "further", begin, 2) | {f"begin/{name}": value for name, value in begin.items()}


def trained(seed: int, stage: str, begin: dict[str, np.ndarray], epochs: int) -> dict[str, Any]:
    """Weights and predictions of every site after some epochs from `begin`; each site is kept as soon as it is done."""
    from fedstill.client.node import Node
    from fedstill.common.wire import Ask

    config, kept = config_of(seed), dict[str, Any]()
    CACHE.mkdir(parents=True, exist_ok=True)
    for site in config.sites:
        path = CACHE / f"seed-{seed}-{stage}-{site.name}.npz"
        if not path.exists():
            with tempfile.TemporaryDirectory() as folder:
                node = Node(config, site, "run", Path(folder))
                settings = {"epochs": epochs, "decay": [0.0, 1.0], "round": 1}
                done = node.answer(Ask("train.parameters", begin, settings))
                predicted = node.answer(Ask("query.predictions", {"rows": np.arange(len(node.public))}, {"round": 1}))
                accuracy = node.test_scores()["accuracy"]
            found = {f"w/{name}": value for name, value in done.arrays.items()}
            draft = CACHE / f"draft-{os.getpid()}.npz"
            np.savez(draft, logits=predicted.arrays["logits"], accuracy=accuracy, **found)
            draft.replace(path)
            print(f"seed {seed}: {site.name} {stage} {accuracy:.3f}", flush=True)
        with np.load(path) as file:
            kept |= {f"{site.name}/{name}": file[name] for name in file.files}
    return kept


@lru_cache(1)
def first_student(seed: int) -> tuple[Any, dict[str, Any]]:
    """The central model and the state that it begins with."""
    from fedstill.server.central import CentralModel

    student = CentralModel(config_of(seed))
    return student, student.learner.state()


def student_of(seed: int) -> Any:
    """The central model as it begins."""
    student, state = first_student(seed)
    student.learner.load_state({"model": {name: value.copy() for name, value in state["model"].items()}})
    student.begin_round(1)
    return student


def liars_of(share: int, seed: int) -> list[int]:
    """Which sites lie: the same ones under every attack and rule."""
    return sorted(np.random.default_rng([seed, 77]).permutation(SITES)[: share * SITES // 100].tolist())


def poisoned_predictions(attack: str, logits: np.ndarray, liars: list[int], seed: int) -> np.ndarray:
    """What the sites say (sites x texts x classes) when some of them lie."""
    said, rng = logits.copy(), np.random.default_rng([seed, 5])
    scale = float(np.abs(logits).mean())
    for liar in liars:
        if attack == "flip":  # as if trained on flipped labels
            said[liar] = said[liar][:, ::-1]
        elif attack == "noise":
            said[liar] = rng.normal(scale=10 * scale, size=said[liar].shape)
        elif attack == "scale":
            said[liar] = -20 * said[liar]
        elif attack == "shift":  # towards one class, whatever the text
            said[liar] = said[liar] + np.array([20 * scale] + [0.0] * (said.shape[-1] - 1))
    if attack == "collude" and liars:  # all say the same: the honest mean turned round, just inside the honest spread
        others = np.delete(logits, liars, axis=0)
        centre, spread = others.mean(axis=0), others.std(axis=0)
        said[liars] = centre - 1.5 * spread * np.sign(centre - centre.mean(axis=-1, keepdims=True))
    return said.astype(np.float32)


def poisoned_updates(attack: str, updates: np.ndarray, liars: list[int], seed: int) -> np.ndarray:
    """What the sites send (sites x numbers) when some of them lie."""
    sent, rng = updates.copy(), np.random.default_rng([seed, 6])
    for liar in liars:
        norm = float(np.sqrt(np.mean(updates[liar] ** 2)))
        if attack == "flip":
            sent[liar] = -sent[liar]
        elif attack == "noise":
            sent[liar] = rng.normal(scale=10 * norm, size=sent[liar].shape)
        elif attack == "scale":
            sent[liar] = -20 * sent[liar]
        elif attack == "shift":
            sent[liar] = sent[liar] + 5 * norm
    if attack == "collude" and liars:
        others = np.delete(updates, liars, axis=0)
        sent[liars] = others.mean(axis=0) - 1.5 * others.std(axis=0)
    return sent.astype(np.float32)


def distilled(seed: int, attack: str, share: int, rule: str) -> float:
    """Accuracy of the central model that is taught by what the sites say."""
    from fedstill.common.maths.ensemble import softmax
    from fedstill.common.maths.robust import combine
    from fedstill.common.practice import Practice

    kept = honest(seed)
    logits = np.stack([kept[f"site-{n}/logits"] for n in range(SITES)])
    said = poisoned_predictions(attack, logits, liars_of(share, seed), seed)
    sites = {f"site-{n}": said[n] for n in range(SITES) if attack != "left out" or n not in liars_of(share, seed)}
    y = softmax(combine(sites, dict.fromkeys(sites, 1.0 / len(sites)), rule))  # type: ignore[arg-type]
    student = student_of(seed)
    student.distil(np.arange(len(y)), y, "kl", 6, Practice(fresh=True, decay=(0.0, 1.0)))
    return float(student.test()["accuracy"])


def averaged(seed: int, attack: str, share: int, rule: str) -> float | None:
    """Accuracy of the combination of the sites' updates; None where the rule needs more sites."""
    import fedstill.strategies.flower_rules as flower_rules
    from fedstill.common.wire import Reply

    kept, lied = updated(seed), liars_of(share, seed)
    names = [name.removeprefix("begin/") for name in kept if name.startswith("begin/")]
    floats = [name for name in names if kept[f"begin/{name}"].dtype.kind == "f"]
    rows = [
        np.concatenate([(kept[f"site-{n}/w/{name}"] - kept[f"begin/{name}"]).ravel() for name in floats])
        for n in range(SITES)
    ]
    sent = poisoned_updates(attack, np.stack(rows), lied, seed)
    if attack == "left out":
        sent = np.delete(sent, lied, axis=0)
    if rule == "mean":
        found = sent.astype(np.float64).mean(axis=0)
    else:
        kinds = {"krum": "Krum", "multikrum": "MultiKrum", "bulyan": "Bulyan", "fedmedian": "FedMedian",
                 "fedtrimmedavg": "FedTrimmedAvg"}  # fmt: skip
        kind = getattr(flower_rules, kinds[rule])
        told: dict[str, Any] = {"beta": 0.3} if rule == "fedtrimmedavg" else {}
        if rule in ("krum", "multikrum", "bulyan"):
            told["num_malicious_nodes"] = share * SITES // 100
        made = object.__new__(kind)
        made.p = kind.parameters(**told)
        if rule in ("krum", "multikrum", "bulyan") and made.needed > SITES:
            return None
        replies = [Reply(f"site-{n}", {}, {"texts": 100}) for n in range(SITES)]
        found = made.apply(1, {f"site-{n}": {"u": sent[n]} for n in range(SITES)}, replies)["u"]
    student, new, at = student_of(seed), {}, 0
    for name in names:
        value = kept[f"begin/{name}"]
        new[name] = value
        if name in floats:
            new[name] = (value + found[at : at + value.size].reshape(value.shape)).astype(value.dtype)
            at += value.size
    student.load_weights(new)
    return float(student.test()["accuracy"])


def rows_of(seed: int, kinds: list[str], shares: list[int]) -> list[tuple[str, str, int, str, int]]:
    """All rows: first those without liars, which the others are measured against."""
    rules = {"predictions": RULES, "updates": UPDATE_RULES}
    found = [(kind, "none", 0, rule, seed) for kind in kinds for rule in rules[kind]]
    for share in shares:
        for kind in kinds:
            found += [(kind, "left out", share, "mean", seed)]
            found += [(kind, attack, share, rule, seed) for attack in ATTACKS for rule in rules[kind]]
    return found


def table(results: dict[str, float | None]) -> str:
    """Points of accuracy lost against the mean without liars (mean over seeds), a table for predictions and updates."""
    lines = []
    for kind, rules in (("predictions", RULES), ("updates", UPDATE_RULES)):
        seeds = sorted({key.split("/")[4] for key in results if key.startswith(f"{kind}/none/0/mean/")})
        if not seeds:
            continue

        def lost(attack: str, share: int, rule: str, kind: str = kind, seeds: list[str] = seeds) -> float:
            cells = [
                results[f"{kind}/none/0/mean/{s}"] - value  # type: ignore[operator]
                for s in seeds
                if (value := results.get(f"{kind}/{attack}/{share}/{rule}/{s}")) is not None
            ]
            return 100 * float(np.mean(cells)) if cells else math.nan

        base = np.mean([results[f"{kind}/none/0/mean/{s}"] for s in seeds])  # type: ignore[misc]
        lines += ["", f"{kind}: points lost against the unpoisoned mean ({base:.3f}; seeds {', '.join(seeds)})", ""]
        lines += [f"| attack | liars | {' | '.join(rules)} |", "|---|---|" + "---|" * len(rules)]
        for attack, share in [("none", 0), *((a, share) for a in ("left out", *ATTACKS) for share in SHARES)]:
            cells = [lost(attack, share, rule) for rule in rules]
            if not all(math.isnan(cell) for cell in cells):
                shown = ["-" if math.isnan(cell) else f"{cell:+.1f}" for cell in cells]
                lines.append(f"| {attack} | {share} % | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, then print the tables."""
    import torch

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--shares", type=int, nargs="+", default=[30, 10, 20, 40], help="per cent of liars")
    parser.add_argument("--only", nargs="+", default=["predictions", "updates"], choices=["predictions", "updates"])
    asked = parser.parse_args()
    results: dict[str, float | None] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for kind, attack, share, rule, seed in (
        row for one in asked.seeds for row in rows_of(one, asked.only, asked.shares)
    ):
        key = f"{kind}/{attack}/{share}/{rule}/{seed}"
        if key in results:
            continue
        began = time.perf_counter()
        results[key] = (distilled if kind == "predictions" else averaged)(seed, attack, share, rule)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{key}: {results[key]} ({time.perf_counter() - began:.1f} s)", flush=True)
    print(table(results))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
