"""Peers in the same run: FedAvg beside Flower's own strategy, and local training beside HF's Trainer and a plain loop.

`fedavg`: two sites with a tiny BERT and 320 film reviews each, one local epoch a round, in Flower's simulation on Ray.
`flower` is flwr.serverapp.strategy.FedAvg with a ClientApp that keeps its model and tokens in its actor, which Flower
does not promise; `ours` is `fedstill run --on simulation`, whose rounds also save checkpoints. Seconds are of a round,
from one's start to the next; bytes are of one site in a round, for Flower of the arrays alone.

`local`: one epoch over 640 reviews with the same model by `Learner.fit`, by transformers' Trainer and a loop of
plain torch, in turns; CPU seconds of the process, medians. Everything goes to experiments/bench/peers.json.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

from fedstill.common.config import RunConfig
from fedstill.common.config.files import load_run
from fedstill.common.data.allocation import allocate
from fedstill.common.maths.losses import cross_entropy
from fedstill.common.models.learner import Learner
from fedstill.common.models.loading import load_model
from fedstill.common.practice import Practice

ROUNDS, TURNS = 5, 3
RUN = """
rounds = ROUNDS
data = { private = 640, public = 0, labelled = 0, test = 16, partition = "iid" }
train = { max_length = 64, batch_size = 32, learning_rate = 1e-4 }
method = { name = "fedavg", local_epochs = 1, optimizer_state = "fresh" }
central = { model = "tiny-bert" }
report = { alone = false, centralized = false, evaluate = "end" }
sites = [{ name = "s", count = 2, model = "tiny-bert" }]
"""


def configured() -> RunConfig:
    """The run that both do."""
    return load_run(RUN.replace("ROUNDS", str(ROUNDS)))


def party(place: int | None) -> tuple[Learner, Any, torch.Tensor]:
    """A model at work, with one site's tokens and labels, or with everybody's."""
    config = configured()
    held = allocate(config)
    settings = config.sites[0]
    model = load_model(settings.model_settings(config.train), held.task, 1)
    texts = held.splits.private if place is None else held.splits.private.select(held.shares[place])
    assert texts.labels is not None
    return Learner("peer", model, settings, config.train, 1), model.encode(texts.texts), torch.from_numpy(texts.labels)


def fit(learner: Learner, texts: Any, labels: torch.Tensor) -> None:
    """One epoch of ours."""
    rows = np.arange(len(texts))
    learner.fit(texts, rows, lambda z, places: cross_entropy(z, labels[places]), 1, "local", Practice(fresh=True))


# --- FedAvg ---


def flower() -> dict[str, float]:
    """Flower's strategy in its simulation."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    began: list[float] = []
    size: list[int] = []

    class Watched(FedAvg):
        """Notes when a round starts, and how much comes up."""

        def configure_train(self, *arguments: Any, **settings: Any) -> Any:
            began.append(time.perf_counter())
            return super().configure_train(*arguments, **settings)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            size.append(sum(len(array.data) for array in replies[0].content["arrays"].values()))
            return super().aggregate_train(server_round, replies)

    server, client = ServerApp(), ClientApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        learner, _, _ = party(0)
        strategy = Watched(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
        strategy.start(grid, ArrayRecord(learner.model.net.state_dict()), num_rounds=ROUNDS)
        began.append(time.perf_counter())

    @client.train()
    def train(message: Message, context: Context) -> Message:
        place = int(context.node_config["partition-id"])
        kept: dict[int, Any] = torch.__dict__.setdefault("_fedstill_peers", {})  # of this actor
        if place not in kept:
            torch.set_num_threads(1)
            kept[place] = party(place)
        learner, texts, labels = kept[place]
        learner.model.net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        fit(learner, texts, labels)
        arrays = ArrayRecord(learner.model.net.state_dict())
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(texts)})})
        return Message(content=content, reply_to=message)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=2, backend_config=resources)
    rounds = [after - before for before, after in pairwise(began[1:])]  # the first one loads models
    return {"seconds": statistics.median(rounds), "bytes_up": size[-1], "bytes_down": size[-1]}


def ours() -> dict[str, float]:
    """The same by `fedstill run --on simulation`."""
    import tomli_w

    with tempfile.TemporaryDirectory() as folder:
        file, runs = Path(folder) / "run.toml", Path(folder) / "runs"
        file.write_text(tomli_w.dumps(json.loads(configured().model_dump_json(exclude_none=True))))
        command = [str(Path(sys.executable).parent / "fedstill"), "run", str(file), "--on", "simulation", "--no-check"]
        subprocess.run([*command, "--runs", str(runs)], stdout=subprocess.DEVNULL, check=True)
        summary = json.loads((runs / "latest/summary.json").read_text())
        events = [json.loads(line) for line in (runs / "latest/events.jsonl").read_text().splitlines()]
    from scale import stamp

    starts = [stamp(event["time"]) for event in events if event["event"] == "round_started"]
    rounds = [after - before for before, after in pairwise(starts[1:])]
    site = next(iter(summary["sites"].values()))
    return {
        "seconds": statistics.median(rounds),
        "bytes_up": site["bytes_up"] / ROUNDS,
        "bytes_down": site["bytes_down"] / ROUNDS,
    }


# --- local training ---


def by_trainer(learner: Learner, rows: list[dict[str, Any]], folder: str) -> Callable[[], None]:
    """One epoch of transformers' Trainer."""
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=32, num_train_epochs=1, learning_rate=1e-4, max_grad_norm=0.0,
        lr_scheduler_type="constant", save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, optim="adamw_torch_fused", seed=1,
    )  # fmt: skip
    trainer = Trainer(
        model=learner.model.net, args=arguments, train_dataset=rows,
        data_collator=DataCollatorWithPadding(learner.model.tokenizer),
    )  # fmt: skip
    return lambda: trainer.train() and None


def by_loop(learner: Learner, rows: list[dict[str, Any]]) -> None:
    """One epoch of plain torch."""
    net, tokenizer = learner.model.net, learner.model.tokenizer
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    net.train()
    order = torch.randperm(len(rows)).tolist()
    for start in range(0, len(order), 32):
        batch = tokenizer.pad([rows[row] for row in order[start : start + 32]], return_tensors="pt")
        optimizer.zero_grad(set_to_none=True)
        net(**batch).loss.backward()
        optimizer.step()


def local() -> dict[str, float]:
    """CPU seconds of one epoch, three ways in turns."""
    torch.set_num_threads(1)
    learner, texts, labels = party(None)
    every = texts.batch(np.arange(len(texts)))
    lengths = every["attention_mask"].sum(dim=1).tolist()
    rows = [
        {"input_ids": ids[:length].tolist(), "attention_mask": [1] * length, "labels": int(label)}
        for ids, length, label in zip(every["input_ids"], lengths, labels, strict=True)
    ]
    first = copy.deepcopy(learner.model.net.state_dict())
    taken: dict[str, list[float]] = {"ours": [], "trainer": [], "loop": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(-1, TURNS):
            for way, seconds in taken.items():
                learner.model.net.load_state_dict(first)
                work = {
                    "ours": lambda: fit(learner, texts, labels),
                    "trainer": by_trainer(learner, rows, folder),
                    "loop": lambda: by_loop(learner, rows),
                }[way]
                began = time.process_time()
                work()
                if turn >= 0:
                    seconds.append(time.process_time() - began)
    return {way: statistics.median(seconds) for way, seconds in taken.items()}


def main() -> None:
    """Measure, print and write experiments/bench/peers.json; each way of FedAvg in a process of its own."""
    target = Path(__file__).with_suffix(".json")
    found: dict[str, Any] = {"load": os.getloadavg()[0], "local": local(), "fedavg": {}}
    for way in ("flower", "ours"):
        said = subprocess.run([sys.executable, __file__, way], stdout=subprocess.PIPE, text=True, check=True)
        found["fedavg"][way] = json.loads(said.stdout.splitlines()[-1])
    target.write_text(json.dumps(found, indent=1) + "\n")
    for way, seconds in found["local"].items():
        print(f"one epoch by {way}: {seconds:.2f} CPU s, {seconds / found['local']['loop']:.2f} x the plain loop")
    for way, row in found["fedavg"].items():
        print(f"FedAvg by {way}: {row['seconds']:.2f} s a round, {row['bytes_up']:,.0f} bytes up, "
              f"{row['bytes_down']:,.0f} down")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps({"flower": flower, "ours": ours}[sys.argv[1]]()))
    else:
        main()
