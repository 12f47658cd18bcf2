"""Two ways to hide a site's texts at the same epsilon: DP-SGD in training, or noise on every prediction.

    python experiments/bench/dp.py [--seeds 1 2 3 4 5] [--models frozen-minilm]

A site trains on its private film reviews and predicts 300 of them and 300 it never saw. Shown: how often it is right on
unseen texts, and the AUC of the membership attack of bench/membership.py. Two kinds of site: a head on a frozen MiniLM
with 1,500 reviews, and a small BERT trained whole on 300. Settings were chosen on seed 42, which is not among the five.
Every row is written to experiments/bench/dp.json as soon as it is known; a second start goes on where the first was
cut.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "dp.json"
ASKED = 300  # private texts that the attacker asks for, and as many others
MODELS: dict[str, dict[str, Any]] = {
    "frozen-minilm": {
        "site": 'model = "minilm"\nfreeze = "encoder"\nbatch_size = 256\nlearning_rate = 3e-3\n',
        "texts": 1500,
        "epochs": 20,
    },
    "small-bert": {"site": 'model = "small-bert"\n', "texts": 300, "epochs": 8},
}
EPSILONS = (None, 16.0, 8.0, 3.0, 1.0)
WAYS = ("dp-sgd", "predictions")


def run(seed: int, model: str, way: str, epsilon: float | None) -> dict[str, Any]:
    """One site, trained and asked under one budget."""
    from membership import attack, auc

    from fedstill.client.node import Node
    from fedstill.common.config import PrivacyConfig
    from fedstill.common.config.files import load_run
    from fedstill.common.wire import Ask

    demo = (HERE / "tiny.toml").read_text(encoding="utf-8").split("[[sites]]")[0]
    kind = MODELS[model]
    sizes = [f"data.private={kind['texts']}", "data.public=300", "data.partition=iid", "data.test=1000", f"seed={seed}"]
    config = load_run(f'{demo}[[sites]]\nname = "site"\n{kind["site"]}', sizes)
    site = config.sites[0]
    if epsilon is not None:
        dp_sgd: dict[str, Any] = {"train": "dp-sgd", "epochs": kind["epochs"]}
        lasting = dp_sgd if way == "dp-sgd" else {"predictions": 2 * ASKED}
        clip = 1.0 if way == "dp-sgd" else 2.0
        site = site.model_copy(update={"privacy": PrivacyConfig(epsilon=epsilon, clip=clip, **lasting)})
    with tempfile.TemporaryDirectory() as folder:
        node = Node(config, site, "run", Path(folder))
        unseen, private = node.texts.test, node.texts.private
        assert private.labels is not None
        assert unseen.labels is not None
        texts = [*private.texts[:ASKED], *unseen.texts[:ASKED]]
        labels = np.concatenate([private.labels[:ASKED], unseen.labels[:ASKED]])
        member = np.arange(len(texts)) < ASKED
        node.answer(Ask("train.local", settings={"epochs": kind["epochs"], "round": 1}))
        node.public = node.learner.model.encode(texts)
        logits = node.answer(Ask("query.predictions", {"rows": np.arange(len(texts))}, {"round": 1})).arrays["logits"]
    score, right = attack(logits, labels), logits.argmax(axis=1) == labels
    return {
        "seed": seed,
        "model": model,
        "way": way,
        "epsilon": epsilon,
        "noise_multiplier": None if node.guard is None else round(node.guard.multiplier, 3),
        "auc": round(auc(score[member], score[~member]), 4),
        "accuracy_unseen": round(float(right[~member].mean()), 4),
    }


def main() -> None:
    """All rows that are missing, then the table."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["frozen-minilm"])
    options = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    wanted = [
        (seed, model, way, epsilon)
        for model in options.models
        for seed in options.seeds
        for epsilon in EPSILONS
        for way in (WAYS if epsilon is not None else WAYS[:1])
    ]
    for seed, model, way, epsilon in wanted:
        if not any((r["seed"], r["model"], r["way"], r["epsilon"]) == (seed, model, way, epsilon) for r in rows):
            rows.append(run(seed, model, way, epsilon))
            print(rows[-1], flush=True)
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    for model in options.models:
        print(f"\n{model}, {MODELS[model]['texts']} texts\n")
        print("| epsilon | DP-SGD: right on unseen | AUC | noise on 600 predictions: right on unseen | AUC |")
        print("|---|---|---|---|---|")
        for epsilon in EPSILONS:
            cells = []
            for way in WAYS:
                of = [r for r in rows if (r["model"], r["epsilon"], r["way"]) == (model, epsilon, way)]
                for name in ("accuracy_unseen", "auc"):
                    values = [row[name] for row in of]
                    cells.append(f"{np.mean(values):.3f} ± {np.std(values):.3f}" if values else "")
            print(f"| {'none' if epsilon is None else f'{epsilon:g}'} | {' | '.join(cells)} |")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
