"""Whether a text was among a site's private ones, told from the predictions that it sends, with and without noise.

    python experiments/bench/membership.py [--seeds 1 2]

A site trains on its private texts. The public set is made half of these and half of texts that it never saw, all with
known labels, as an attacker would choose them; the attack is the threshold on the loss of Yeom et al. (2018). AUC 0.5
is a coin's. Written to experiments/bench/membership.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "membership.json"
TEXTS = 300  # private ones, and as many unseen ones
EPOCHS = 8  # enough to learn the private texts by heart
EPSILONS = (None, 1000.0, 100.0, 10.0, 1.0)  # budgets for all 2 x TEXTS predictions; None: no noise


def auc(members: np.ndarray, others: np.ndarray) -> float:
    """The chance that a member's score is above another text's (ties count half)."""
    difference = members[:, None] - others[None]
    return float((difference > 0).mean() + (difference == 0).mean() / 2)


def attack(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The log-probability of the true label: high for texts that were learned by heart."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return np.asarray(wide[np.arange(len(labels)), labels] - np.log(np.exp(wide).sum(axis=1)))


def run(seed: int) -> list[dict[str, Any]]:
    """A site is trained once, and asked under every budget."""
    from fedstill.client.node import Node
    from fedstill.client.release.privacy import Guard
    from fedstill.common.config import PrivacyConfig
    from fedstill.common.config.files import load_run
    from fedstill.common.wire import Ask

    demo = (HERE / "tiny.toml").read_text(encoding="utf-8").split("[[sites]]")[0]
    site = '[[sites]]\nname = "site"\nmodel = "tiny-bert-warm"\n'
    sizes = [
        f"data.private={TEXTS}",
        f"data.public={TEXTS}",
        "data.partition=iid",
        "data.labelled=16",
        "data.test=1000",
    ]
    config = load_run(demo + site, [*sizes, f"seed={seed}"])
    found = []
    with tempfile.TemporaryDirectory() as folder:
        node = Node(config, config.sites[0], "run", Path(folder))
        unseen = node.texts.test  # the sites' public texts have no labels, these have
        texts = [*node.texts.private.texts, *unseen.texts[:TEXTS]]
        assert node.texts.private.labels is not None
        assert unseen.labels is not None
        labels = np.concatenate([node.texts.private.labels, unseen.labels[:TEXTS]])
        member = np.arange(len(texts)) < len(node.texts.private.texts)
        node.answer(Ask("train.local", settings={"epochs": EPOCHS, "round": 1}))
        node.public = node.learner.model.encode(texts)
        for epsilon in EPSILONS:
            node.guard = None
            if epsilon is not None:
                settings = PrivacyConfig(epsilon=epsilon, predictions=len(texts), clip=2.0)
                node.guard = Guard(settings, Path(folder) / f"epsilon-{epsilon:g}")
            reply = node.answer(Ask("query.predictions", {"rows": np.arange(len(texts))}, {"round": 1, "step": 1}))
            logits = reply.arrays["logits"]
            score, right = attack(logits, labels), logits.argmax(axis=1) == labels
            row = {
                "seed": seed,
                "epsilon": epsilon,
                "noise_multiplier": None if node.guard is None else round(node.guard.multiplier, 3),
                "auc": round(auc(score[member], score[~member]), 4),
                "accuracy_private": round(float(right[member].mean()), 4),
                "accuracy_unseen": round(float(right[~member].mean()), 4),
            }
            print(row, flush=True)
            found.append(row)
    return found


def main() -> None:
    """All seeds, then the table."""
    import torch

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    rows = [row for seed in parser.parse_args().seeds for row in run(seed)]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print("| epsilon for 600 predictions | noise multiplier | AUC | right on private | right on unseen |")
    print("|---|---|---|---|---|")
    for epsilon in EPSILONS:
        of = [row for row in rows if row["epsilon"] == epsilon]
        mean = {name: np.mean([row[name] for row in of]) for name in ("auc", "accuracy_private", "accuracy_unseen")}
        noise = "-" if epsilon is None else f"{of[0]['noise_multiplier']:g}"
        shown = " | ".join(f"{value:.3f}" for value in mean.values())
        print(f"| {'no noise' if epsilon is None else f'{epsilon:g}'} | {noise} | {shown} |")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
