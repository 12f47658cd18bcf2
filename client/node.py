"""The site's model at work: answers the verbs of Asks with torch alone; independent of Flower and sockets."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedstill.client.release.approval import verbs_of
from fedstill.client.release.budget import BudgetError, BudgetSpent
from fedstill.client.release.cadence import in_time
from fedstill.client.release.ledger import Ledger, LedgerError
from fedstill.client.release.limits import Gate, NotCounted, Refused
from fedstill.client.release.noise import standard_normal
from fedstill.client.release.privacy import Guard
from fedstill.common import checkpoint
from fedstill.common.checkpoint import Nested
from fedstill.common.config import NAME, RunConfig, SiteConfig
from fedstill.common.data.allocation import site_texts
from fedstill.common.data.tasks import task_scores
from fedstill.common.maths.losses import cross_entropy
from fedstill.common.models.learner import Batches, Learner, Rows
from fedstill.common.models.loading import load_model
from fedstill.common.models.text_model import TextModel
from fedstill.common.practice import Practice
from fedstill.common.randomness import derive
from fedstill.common.wire import Ask, Facts, Reply, WireError
from fedstill.common.wire.compression import in_two_bytes, pack, unpack
from fedstill.strategies import VERBS, find_verb
from fedstill.strategies.predictions import Pending
from fedstill.strategies.secure_sum import Masking, under_masks

Loss = Callable[[Tensor, Rows], Tensor]
REASONS = (Refused, NotCounted, LedgerError, BudgetSpent, BudgetError, WireError)  # what a hidden site may give
log = logging.getLogger("flwr")


class Failed(RuntimeError):
    """An Ask failed at a site with [privacy]: the error's own text might quote what is hidden."""


class Node:
    """One site: its private texts, tokenizer and model, kept in memory for the session.

    It may be given the model of another site, of the same kind: `go_on` then fills in its own weights.
    """

    task_is_secret: ClassVar[bool] = False  # whether the site's task must stay secret

    def __init__(
        self, config: RunConfig, site: SiteConfig, run: str, state_root: Path, model: TextModel | None = None
    ) -> None:
        if site.threads is not None:
            torch.set_num_threads(site.threads)
        if len(run) > 128 or not re.fullmatch(NAME, run):
            raise WireError(f"the run's name {run!r} is no name for a folder")
        self.config, self.site, self.name = config, site, site.name
        self.folder = state_root / run
        self.checkpoints = self.folder / "checkpoints"
        self.place = (0, 0)  # round and step of the current Ask
        self.pending: tuple[Pending, ...] = ()  # FedID: batches that wait for their feedback, oldest first
        self.masking: Masking | None = None  # of the secure sum that is going on
        self.second: Any = None  # a second model beside the site's own, if the method uses one
        self.kept: dict[str, Any] = {}  # what verbs keep between rounds beside the model; part of every checkpoint
        self.ledger = Ledger(state_root / "ledger.jsonl", run)
        self.guard = None if site.privacy is None else Guard(site.privacy, state_root)
        asked = None if site.approval is None else verbs_of(config)
        self.gate = Gate(site, run, state_root, self._work, asked, None if asked is None else config.rounds)
        self._load(config, site, model)
        if self.guard is not None:
            self.guard.settle(len(self.private), self.learner.batch_size)

    def _load(self, config: RunConfig, site: SiteConfig, model: TextModel | None) -> None:
        """Load the site's texts and, unless there is one to take over, its model."""
        self.texts = texts = site_texts(config, site)
        self.task = texts.task
        if model is None:
            model = load_model(site.model_settings(config.train), self.task, derive(config.seed, site.name, "model"))
        self.learner = Learner(site.name, model, site, config.train, config.seed)
        assert texts.private.labels is not None
        self.labels = torch.from_numpy(texts.private.labels).to(model.device)
        self.private = model.encode(texts.private.texts)
        self.lessons: Batches = self.private  # the inputs of private training
        self.public = model.encode(texts.public.texts)
        self.test = model.encode(texts.test.texts)
        self.test_labels = texts.test.labels
        self.fingerprint = texts.public.fingerprint()

    def greeting(self) -> Facts:
        """Describe the site when it joins: enough to check that all parties agree; no text and no text's label."""
        return {
            "name": self.name,
            "family": self.learner.model.family,
            "model": Path(self.site.model).name,
            "parameters": sum(p.numel() for p in self.learner.model.parameters()),
            "travelling": sum(p.numel() for p in self.learner.parameters),
            "rates": {**self.learner.rates, "warmup": self.learner.warmup, "fall": self.learner.fall},
            "texts": self.size,
            "labels": list(self.task.labels),
            "public": self.fingerprint,
            "public_texts": len(self.public),
            "rounds": checkpoint.whole_rounds(self.checkpoints),
            **({} if self.guard is None else {"privacy": "dp-sgd" if self.guard.trains else "noise"}),
        }

    @property
    def size(self) -> int:
        """n_k: how many private texts the site has."""
        return len(self.private)

    def answer(self, ask: Ask) -> Reply:
        """Work on an Ask; whatever leaves the site is entered in its ledger first, and an error leaves no sooner."""
        cadence = None if self.site.privacy is None else self.site.privacy.cadence
        with contextlib.nullcontext() if cadence is None else in_time(cadence):
            return self._answered(ask)

    def _answered(self, ask: Ask) -> Reply:
        try:
            reply = self.gate.answer(ask)
        except Exception as error:
            self.ledger.refused(ask, error)
            if self.guard is not None and not isinstance(error, REASONS):
                log.error("site %s: %s of run %s failed", self.name, ask.verb, self.folder.name, exc_info=error)
                raise Failed(f"{ask.verb} failed; the site's own log says why, since its texts are hidden") from None
            raise
        self.ledger.leaves(ask, reply, reply.metrics.get("privacy"))
        return reply

    def _work(self, ask: Ask) -> Reply:
        """Work with random draws seeded by the Ask's place in the run."""
        verb = VERBS.get(ask.verb) or find_verb(ask.verb)
        began = time.perf_counter()
        if self.guard is not None:
            self.guard.admit(verb)
        mask = ask.settings.get("mask")
        settings = {name: value for name, value in ask.settings.items() if name != "mask"}
        ask = Ask(ask.verb, unpack(ask.arrays), settings)
        self.place = (int(ask.settings.get("round", 0)), int(ask.settings.get("step", 0)))
        with self.learner.at(*self.place):
            answer = verb.answered(self, ask)
        if self.guard is not None:
            answer, budget = self.guard.cover(verb, answer)
            added: Facts = {} if budget is None else {"privacy": budget}
        else:
            added = {"seconds": in_two_bytes(time.perf_counter() - began)}
        arrays, metrics = answer.to_wire()
        if mask is not None:
            arrays = under_masks(self, arrays, dict(mask))
        elif self.site.limits.sums_only and any(value.dtype.kind == "f" for value in arrays.values()):
            raise Refused("limits.sums_only lets answers out in secure sums only; set exchange.secure in the run")
        return Reply(self.name, pack(arrays, self.config.exchange.predictions), {**metrics, **added})

    # --- between two plain Flower messages ---

    def put_away(self, number: int) -> None:
        """Save everything that the next message needs; this process ends with the current one."""
        checkpoint.save(self.folder / "work", number, *self.midway(), keep=2)

    def midway(self) -> tuple[Nested, Facts]:
        """Return what it takes to go on between two Asks: arrays, which may be views of the model, and facts."""
        facts = {"pending": [[*one.place, one.dropout] for one in self.pending], "trained": self.trained_by}
        rows = {f"pending.{place}": one.rows for place, one in enumerate(self.pending)}
        return {**self.state(copy=False), **rows}, facts

    def close(self) -> None:
        """Free the model and the texts now; Python would wait for its collector, since the site's parts know it."""
        vars(self).clear()

    def forget_work(self) -> None:
        """Discard what an earlier session saved between its messages."""
        shutil.rmtree(self.folder / "work", ignore_errors=True)

    def take_up(self) -> None:
        """Restore the node that `put_away` saved last."""
        newest = checkpoint.newest(self.folder / "work")
        if newest is None:
            return
        _, arrays, facts, _ = newest
        self.go_on(arrays, facts)

    def go_on(self, arrays: dict[str, Any], facts: Facts) -> None:
        """Restore what `midway` returned."""
        self.check_origin(facts)
        rows = [arrays.pop(f"pending.{place}") for place in range(len(facts["pending"]))]
        self.load_state(arrays)
        self.pending = tuple(
            Pending(batch, (number, step), dropout)
            for batch, (number, step, dropout) in zip(rows, facts["pending"], strict=True)
        )

    # --- parts that verbs share ---

    def draw_noise(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draw noise that the server cannot: it knows the run's seed."""
        return standard_normal(shape)

    def state(self, copy: bool = True) -> dict[str, Any]:
        """Return what a checkpoint holds: the model, its optimizers, and what verbs keep in `kept`."""
        return {**self.learner.state(copy), "kept": self.kept}

    @property
    def trained_by(self) -> str:
        """How the model came to know the private texts: a checkpoint says it."""
        return "dp-sgd" if self.guard is not None and self.guard.trains else "plain"

    def check_origin(self, facts: Facts) -> None:
        """Refuse a checkpoint that plain training has seen, at a site whose model must not have had any."""
        if self.trained_by == "dp-sgd" and facts.get("trained") != "dp-sgd":
            raise WireError("this checkpoint is of a model that was trained without noise, and [privacy] forbids it")

    def load_state(self, state: Nested) -> None:
        """Restore what `state` returned."""
        self.kept = dict(state.get("kept", {}))
        self.learner.load_state(state)
        self.pending = ()

    def train_privately(
        self, epochs: int, practice: Practice, loss: Loss | None = None, most: int | None = None
    ) -> list[float]:
        """Train on the private texts, each epoch one pass or `train.epoch_steps`; return each epoch's mean loss.

        `most`: on at most so many of them, drawn for this call.
        """
        steps, value = self.config.train.epoch_steps, loss or self.private_loss
        drawn = np.arange(len(self.private))
        if most is not None and most < len(drawn):
            if self.guard is not None and self.guard.trains:
                raise WireError("this site trains by DP-SGD, which draws its own texts; it takes no method.samples")
            drawn = torch.randperm(len(drawn)).numpy()[:most]
        if self.guard is not None and self.guard.trains:
            from fedstill.client.release.dp_training import fit_privately  # Opacus takes a second to import

            batch, total = self.learner.batch_size, None if steps is None else steps * epochs
            plan, multiplier = self.guard.charge_training(len(self.private), batch, epochs, total)
            clip = self.guard.settings.clip
            return fit_privately(self.learner, self.lessons, value, plan, practice, clip, multiplier)
        return self.learner.fit(
            self.lessons,
            drawn,
            lambda outputs, places: value(outputs, drawn[places]),
            epochs,
            "local",
            practice,
            steps=None if steps is None else steps * epochs,
        )

    def private_loss(self, outputs: Tensor, places: Rows) -> Tensor:
        """Return the task's loss of the model's outputs at these positions of the private texts."""
        return cross_entropy(outputs, self.labels[places])

    def test_scores(self) -> Facts:
        """Return the task's scores on the test texts."""
        logits = self.learner.predict(self.test, np.arange(len(self.test)))
        return dict(task_scores(self.task, np.asarray(self.test_labels), logits, self.texts.test.domains))

    def own_scores(self) -> dict[str, float]:
        """Return scores that only this site may see; empty where the task is shared."""
        return {}

    def public_rows(self, rows: np.ndarray) -> Rows:
        """Validate row numbers received over the wire."""
        if (
            rows.ndim != 1
            or rows.dtype.kind != "i"
            or (rows.size and not 0 <= rows.min() <= rows.max() < len(self.public))
        ):
            raise WireError(f"rows must be whole numbers from 0 to {len(self.public) - 1} in one list")
        return np.asarray(rows, np.int64)

    def targets(self, targets: np.ndarray, count: int) -> Tensor:
        """Validate targets received over the wire."""
        wanted = (count, len(self.task.labels))
        if targets.shape != wanted or not np.isfinite(targets).all():
            raise WireError(f"targets of shape {targets.shape}; {wanted} finite numbers are needed")
        model = self.learner.model
        return torch.from_numpy(np.array(targets)).to(model.device, model.dtype)
