"""The site's model at work: answers each verb of an Ask with torch alone; knows nothing of Flower or of sockets."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedstill.common import checkpoint
from fedstill.common.config import RunConfig, SiteConfig
from fedstill.common.holdings import site_texts
from fedstill.common.learner import Learner, Practice, Rows
from fedstill.common.maths.feedback import exact_surrogate, scalar_surrogate
from fedstill.common.maths.losses import LOSSES, cross_entropy, soft_cross_entropy
from fedstill.common.maths.weights import class_losses, mean_entropy
from fedstill.common.models import load_model
from fedstill.common.noise import probability_bias
from fedstill.common.randomness import derive
from fedstill.common.tasks import scores
from fedstill.common.wire import Arrays, Ask, Facts, Reply, WireError

Answer = tuple[Arrays, Facts]
MOST_NOISE = 100_000_000  # tokens that a site draws for one Ask
VERBS: dict[str, Callable[[Node, Ask], Answer]] = {}


def verb(name: str) -> Callable[[Callable[[Node, Ask], Answer]], Callable[[Node, Ask], Answer]]:
    """Register a method of Node as the answer to an Ask; the name is also the Flower message type."""

    def register(function: Callable[[Node, Ask], Answer]) -> Callable[[Node, Ask], Answer]:
        VERBS[name] = function
        return function

    return register


@dataclass
class Pending:
    """A predicted batch that waits for feedback: its rows, where in the run, and its graph if still in memory."""

    rows: Rows
    place: tuple[int, int]
    dropout: bool
    logits: Tensor | None = None


class Node:
    """One site: private texts, own tokenizer, own model, resident for the session."""

    def __init__(self, config: RunConfig, site: SiteConfig, run: str, state_root: Path) -> None:
        if site.threads is not None:
            torch.set_num_threads(site.threads)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", run):
            raise WireError(f"the run's name {run!r} is no name for a folder")
        self.config, self.site, self.name = config, site, site.name
        texts = site_texts(config, site)
        self.task = texts.task
        model = load_model(site.model_settings(config.train), self.task, derive(config.seed, site.name, "model"))
        self.learner = Learner(site.name, model, site, config.train, config.seed)
        assert texts.private.labels is not None
        self.labels = torch.from_numpy(texts.private.labels).to(model.device)
        self.private = model.encode(texts.private.texts)
        self.public = model.encode(texts.public.texts)
        self.test = model.encode(texts.test.texts)
        self.test_labels = texts.test.labels
        self.fingerprint = texts.public.fingerprint()
        self.folder = state_root / run
        self.pending: Pending | None = None

    def greeting(self) -> Facts:
        """What a site says of itself when it joins: enough to see that all mean the same; no text, no label."""
        return {
            "name": self.name,
            "family": self.learner.model.family,
            "model": Path(self.site.model).name,
            "parameters": sum(p.numel() for p in self.learner.model.parameters()),
            "texts": len(self.private),
            "labels": list(self.task.labels),
            "public": self.fingerprint,
            "public_texts": len(self.public),
            "rounds": checkpoint.rounds(self.folder / "checkpoints"),
        }

    def answer(self, ask: Ask) -> Reply:
        """Work an Ask, drawing from the seed of its place in the run."""
        if ask.verb not in VERBS:
            raise WireError(f"this site knows no verb {ask.verb!r}; known: {', '.join(sorted(VERBS))}")
        began = time.perf_counter()
        with self.learner.at(ask.settings.get("round", 0), ask.settings.get("step", 0)):
            arrays, metrics = VERBS[ask.verb](self, ask)
        return Reply(self.name, arrays, {**metrics, "seconds": time.perf_counter() - began})

    # --- verbs ---

    @verb("train.local")
    def local(self, ask: Ask) -> Answer:
        """E epochs of CE on the private texts, from the given weights if there are any (FedID eqs. 1, 2, 4)."""
        if ask.arrays:
            self.learner.load_weights(ask.arrays)
        losses = self._train_privately(int(ask.settings["epochs"]), _practice(ask))
        metrics = {"texts": len(self.private), "loss": losses[-1], "losses": losses}
        if ask.settings.get("describe") and len(self.private):
            metrics.update(self._described())
        return (self.learner.weights() if ask.settings.get("send_weights") else {}), metrics

    @verb("train.weights")
    def take_over(self, ask: Ask) -> Answer:
        """Be the model that comes back, such as FedDF's prototype."""
        self.learner.load_weights(ask.arrays)
        return {}, {}

    @verb("query.predictions")
    def predictions(self, ask: Ask) -> Answer:
        """Logits on public rows (eq. 5)."""
        rows = self._public_rows(ask.arrays["rows"])
        logits = self.learner.predict(self.public, rows, bool(ask.settings.get("dropout")))
        return {"rows": rows, "logits": logits}, {"texts": len(self.private)}

    @verb("query.bias")
    def bias(self, ask: Ask) -> Answer:
        """B_k on noise texts that are drawn here from the seed (Confident Sinkhorns 5.2); C numbers travel."""
        seed, count, length = (int(ask.settings[name]) for name in ("seed", "count", "length"))
        kind = ask.settings.get("noise", "vocabulary")
        if seed < 0 or not 1 <= count * length <= MOST_NOISE or kind not in ("vocabulary", "words"):
            raise WireError(f"no noise can be drawn for {dict(ask.settings)}; at most {MOST_NOISE:,} tokens in all")
        return {"bias": probability_bias(self.learner, seed, count, length, kind)}, {"texts": len(self.private)}

    @verb("query.counts")
    def counts(self, ask: Ask) -> Answer:
        """n_kc: how many private texts of each class, zeros included (FedKD); C numbers travel."""
        counts = torch.bincount(self.labels, minlength=len(self.task.labels))
        return {"counts": counts.cpu().numpy()}, {"texts": len(self.private)}

    @verb("train.distil")
    def distil(self, ask: Ask) -> Answer:
        """E_d epochs towards the given targets on public rows (eq. 8), among the private texts if asked (Cronus)."""
        rows = self._public_rows(ask.arrays["rows"])
        targets = self._targets(ask.arrays["targets"], len(rows))
        if ask.settings.get("private"):
            losses = self._train_on_both(rows, targets, int(ask.settings["epochs"]), _practice(ask))
            return {}, {"texts": len(self.private), "loss": losses[-1]}
        loss, temperature = LOSSES[ask.settings["loss"]], float(ask.settings.get("temperature", 1.0))
        losses = self.learner.fit(
            self.public,
            rows,
            lambda logits, places: loss(logits / temperature, targets[places]),
            int(ask.settings["epochs"]),
            "distil",
            _practice(ask),
        )
        return {}, {"loss": losses[-1]}

    @verb("query.logits")
    def logits(self, ask: Ask) -> Answer:
        """Logits of one public batch; it stays pending until its feedback comes (FedID step 2a)."""
        rows = self._public_rows(ask.arrays["rows"])
        place = (int(ask.settings.get("round", 0)), int(ask.settings.get("step", 0)))
        dropout = bool(ask.settings.get("dropout"))
        logits = self.learner.logits(self.public, rows, dropout)
        self.pending = Pending(rows, place, dropout, logits)
        return {"rows": rows, "logits": logits.detach().cpu().numpy()}, {"texts": len(self.private)}

    @verb("train.feedback")
    def feedback(self, ask: Ask) -> Answer:
        """Update on the pending batch (FedID step 2f), then predict the next one if the Ask names its rows."""
        metrics: Facts = {"texts": len(self.private)}
        pending, self.pending = self.pending, None
        if pending is not None and np.array_equal(pending.rows, ask.arrays["answered"]):
            metrics["loss"] = self._feedback_step(pending, ask)
        if "rows" not in ask.arrays:
            return {}, metrics
        arrays, _ = self.logits(ask)
        return arrays, metrics

    @verb("evaluate.test")
    def evaluate(self, ask: Ask) -> Answer:
        """The task's scores on the test texts."""
        return {}, self._test_scores()

    @verb("evaluate.alone")
    def alone(self, ask: Ask) -> Answer:
        """The yardstick of this site: a copy of its first model, trained on its own texts only, then tested."""
        before = self.learner.state()
        losses = self._train_privately(int(ask.settings["epochs"]), _practice(ask))
        metrics = {**self._test_scores(), "loss": losses[-1]}
        self.learner.load_state(before)
        return {}, metrics

    @verb("query.save")
    def save(self, ask: Ask) -> Answer:
        """Put the model and its optimizers away as the checkpoint of a round."""
        number = int(ask.settings["number"])
        checkpoint.save(self.folder / "checkpoints", number, self.learner.state(), {"site": self.name, "round": number})
        return {}, {}

    @verb("query.restore")
    def restore(self, ask: Ask) -> Answer:
        """Take up the checkpoint of a round."""
        arrays, _ = checkpoint.load(self.folder / "checkpoints", int(ask.settings["number"]))
        self.learner.load_state(arrays)
        self.pending = None
        return {}, {}

    # --- between two plain Flower messages ---

    def put_away(self, number: int) -> None:
        """Keep everything that the next message needs, since this process ends with this one."""
        pending = self.pending
        facts = {"pending": None if pending is None else [*pending.place, pending.dropout]}
        arrays = {} if pending is None else {"pending": pending.rows}
        checkpoint.save(self.folder / "work", number, {**self.learner.state(), **arrays}, facts, keep=2)

    def forget_work(self) -> None:
        """A session begins: what an earlier one put away between its messages is not this one's."""
        shutil.rmtree(self.folder / "work", ignore_errors=True)

    def take_up(self) -> None:
        """Be the node that put itself away last."""
        found = checkpoint.newest(self.folder / "work")
        if found is None:
            return
        _, arrays, facts, _ = found
        rows = arrays.pop("pending", None)
        self.learner.load_state(arrays)
        if rows is not None:
            number, step, dropout = facts["pending"]
            self.pending = Pending(rows, (number, step), dropout)

    # --- parts ---

    def _train_privately(self, epochs: int, practice: Practice) -> list[float]:
        return self.learner.fit(
            self.private,
            np.arange(len(self.private)),
            lambda logits, places: cross_entropy(logits, self.labels[places]),
            epochs,
            "local",
            practice,
        )

    def _train_on_both(self, rows: Rows, targets: Tensor, epochs: int, practice: Practice) -> list[float]:
        """Soft CE on private and public texts shuffled together; a private text's target is its label."""
        wanted = torch.cat([one_hot(self.labels, len(self.task.labels)).to(targets), targets])
        return self.learner.fit(
            self.private.followed_by(self.public),
            np.concatenate([np.arange(len(self.private)), len(self.private) + rows]),
            lambda logits, places: soft_cross_entropy(logits, wanted[places]),
            epochs,
            "local",
            practice,
        )

    def _described(self) -> Facts:
        """How the model fits the private texts, in a few numbers (AdaFD)."""
        logits, labels = self.learner.predict(self.private, np.arange(len(self.private))), self.labels.cpu().numpy()
        found = {"entropy": mean_entropy(logits), "class_losses": class_losses(logits, labels)}
        return {**found, "f1_weighted": scores("f1_weighted", labels, logits)["f1_weighted"]}

    def _feedback_step(self, pending: Pending, ask: Ask) -> float:
        """g_distill + g_feedback: CE(y, f_k) + lambda w_k <G, f_k>, or the scalar lambda w_k h CE(f_k, argmax z_k)."""
        logits = pending.logits
        if logits is None:  # another process predicted it: the same weights at the same place give the same graph
            with self.learner.at(*pending.place):
                logits = self.learner.logits(self.public, pending.rows, pending.dropout)
        loss = torch.zeros((), device=logits.device)
        if ask.settings["distil"]:
            loss = loss + LOSSES[ask.settings["loss"]](logits, self._targets(ask.arrays["ensemble"], len(logits)))
        share = float(ask.settings["weight"]) * float(ask.settings.get("lambda", 1.0))
        if ask.settings["feedback"] == "scalar":
            loss = loss + scalar_surrogate(logits, share * float(ask.settings["h"]))
        elif ask.settings["feedback"] == "exact":
            told = self._targets(ask.arrays["feedback"], len(logits))
            loss = loss + share * exact_surrogate(logits, told, ask.settings["feedback_of"])
        self.learner.one_step(loss, "distil", _practice(ask))
        return float(loss.detach())

    def _test_scores(self) -> Facts:
        logits = self.learner.predict(self.test, np.arange(len(self.test)))
        return dict(scores(self.task.metric, np.asarray(self.test_labels), logits))

    def _public_rows(self, rows: np.ndarray) -> Rows:
        if (
            rows.ndim != 1
            or rows.dtype.kind != "i"
            or (rows.size and not 0 <= rows.min() <= rows.max() < len(self.public))
        ):
            raise WireError(f"rows must be whole numbers from 0 to {len(self.public) - 1} in one list")
        return np.asarray(rows, np.int64)

    def _targets(self, targets: np.ndarray, count: int) -> Tensor:
        wanted = (count, len(self.task.labels))
        if targets.shape != wanted or not np.isfinite(targets).all():
            raise WireError(f"targets of shape {targets.shape}; {wanted} finite numbers are needed")
        return torch.from_numpy(np.array(targets, np.float32)).to(self.learner.model.device)


def _practice(ask: Ask) -> Practice:
    decay = ask.settings.get("decay")
    return Practice(
        ask.settings.get("optimizer", "adamw"), bool(ask.settings.get("fresh")), tuple(decay) if decay else None
    )
