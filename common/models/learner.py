"""A model at work: training, prediction, saving and restoring its state. Independent of Flower."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedstill.common.checkpoint import Nested
from fedstill.common.config import LearnerConfig, TrainConfig
from fedstill.common.models.defaults import defaults_of
from fedstill.common.models.text_model import ModelError, TextModel
from fedstill.common.models.tokens import Encoded
from fedstill.common.practice import Practice
from fedstill.common.randomness import derive, seeded
from fedstill.common.states import State
from fedstill.common.wire import Arrays

Rows = NDArray[np.int64]
CENTRAL = "central"  # the name of the server's own model


class Batches(Protocol):
    """Texts that can be read batch by batch."""

    def __len__(self) -> int: ...
    def batch(self, rows: Rows) -> dict[str, Tensor]: ...


Purpose = Literal["local", "distil", "interact", "assign"]
Loss = Callable[[Tensor, Rows], Tensor]  # of logits, and of their positions among the rows


@dataclass
class Course:
    """One training, which may come in several calls of `fit`: its optimizer, its steps, and how many are done."""

    optimizer: torch.optim.Optimizer
    total: int
    done: int = 0


class Learner:
    """One model, its optimizers and its random draws."""

    def __init__(self, name: str, model: TextModel, settings: LearnerConfig, train: TrainConfig, seed: int) -> None:
        self.name, self.model, self.seed = name, model, seed
        self.batch_size = settings.batch_size or train.batch_size
        self.accumulate = settings.accumulate
        defaults, rate = defaults_of(model, central=name == CENTRAL), settings.learning_rate or train.learning_rate
        rates = {
            "local": defaults.local,
            "distil": defaults.distil,
            "interact": defaults.interact,
            "assign": defaults.local,
        }
        self.rates: dict[Purpose, float] = {purpose: rate or rates[purpose] for purpose in get_args(Purpose)}
        if settings.distill_rate:
            self.rates["distil"] = self.rates["interact"] = settings.distill_rate
        own = (0.0, 1.0) if rate else (defaults.warmup, defaults.fall)  # rates that somebody set bring their own course
        self.warmup = own[0] if train.warmup is None else train.warmup
        self.fall = min(own[1] if train.fall is None else train.fall, 1.0 - self.warmup)
        self.weight_decay, self.clip = train.weight_decay, train.clip
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.compute_seconds = 0.0
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._kept: dict[str, Nested] = {}  # optimizer states read from a checkpoint, until their optimizer is created

    @contextmanager
    def at(self, *place: object) -> Iterator[None]:
        """Seed the draws by this place in the run, and count the time spent computing."""
        began = time.perf_counter()
        with seeded(derive(self.seed, self.name, *place)):
            try:
                yield
            finally:
                self.compute_seconds += time.perf_counter() - began

    def fit(
        self,
        texts: Batches,
        rows: Rows,
        loss: Loss,
        epochs: int,
        purpose: Purpose,
        practice: Practice,
        shuffle: bool = True,
        steps: int | None = None,
        course: Course | None = None,
    ) -> list[float]:
        """Train epochs over `rows` of `texts`; `loss` gets logits and positions in `rows`. Return each mean loss.

        With `steps`, as many epochs as these take, the last one cut short. With a course, a part of that.
        """
        starts, means = range(0, len(rows), self.batch_size), []
        if course is None:
            course = self.course(len(rows), epochs, purpose, practice)
        if steps is not None:
            course.total, epochs = steps, -(-steps // len(starts)) if starts else 1
        optimizer = course.optimizer
        self.model.train(practice.dropout)
        for _ in range(epochs):
            order = torch.randperm(len(rows)).numpy() if shuffle else np.arange(len(rows))
            summed, seen = torch.zeros((), device=self.model.device), 0
            for start in starts[: course.total - course.done]:
                places = order[start : start + self.batch_size]
                self.set_rate(optimizer, purpose, practice, course.done / course.total)
                if self.accumulate == 1:
                    value = loss(self.model(texts.batch(rows[places])), places)
                    self.step(optimizer, value)
                    summed += value.detach() * len(places)
                else:
                    summed += self._step_in_parts(optimizer, texts, rows, places, loss)
                seen += len(places)
                course.done += 1
            means.append(float(summed) / max(1, seen))
            if not math.isfinite(means[-1]):
                raise ModelError(
                    f"training broke down: the loss is {means[-1]} after {course.done} steps at a rate of "
                    f"{self.rates[purpose]:g}; lower learning_rate (or distill_rate), or set train.clip"
                )
        optimizer.zero_grad(set_to_none=True)  # gradients would take a model's size until the next training
        if not all(bool(value.isfinite().all()) for value in self.parameters):  # by the last step's gradients
            raise ModelError(
                f"training broke down: a weight is not finite after {course.done} steps at a rate of "
                f"{self.rates[purpose]:g}; lower learning_rate (or distill_rate), or set train.clip"
            )
        return means

    def course(self, texts: int, epochs: int, purpose: Purpose, practice: Practice) -> Course:
        """Return a training of so many epochs over so many texts, none of which is done."""
        return Course(self.optimizer(purpose, practice), max(1, epochs * -(-texts // self.batch_size)))

    def _step_in_parts(
        self,
        optimizer: torch.optim.Optimizer,
        texts: Batches,
        rows: Rows,
        places: Rows,
        loss: Loss,
    ) -> Tensor:
        """Take one step on a batch, one part of its graph in memory at a time; return the sum of its losses."""
        optimizer.zero_grad(set_to_none=True)
        summed = torch.zeros((), device=self.model.device)
        for part in np.array_split(places, min(self.accumulate, len(places))):
            value = loss(self.model(texts.batch(rows[part])), part)
            (value * (len(part) / len(places))).backward()  # type: ignore[no-untyped-call]
            summed += value.detach() * len(part)
        self.clip_gradients()
        optimizer.step()
        return summed

    def logits(self, texts: Encoded, rows: Rows, dropout: bool = False) -> Tensor:
        """Return logits of `rows` with their graph, as one batch."""
        self.model.train(dropout)
        logits: Tensor = self.model(texts.batch(rows))
        return logits

    def predict(self, texts: Encoded, rows: Rows, dropout: bool = False) -> NDArray[Any]:
        """Return logits of `rows`, computed in larger batches of similar length, in the order of `rows`."""
        self.model.train(dropout)
        order = np.argsort(texts.lengths()[rows], kind="stable")
        logits: NDArray[Any] | None = None
        with torch.inference_mode():
            for start in range(0, len(rows), 4 * self.batch_size):
                places = order[start : start + 4 * self.batch_size]
                part = self.model(texts.batch(rows[places])).cpu().numpy()
                if logits is None:
                    logits = np.empty((len(rows), part.shape[1]), part.dtype)
                logits[places] = part
        return np.empty((0, len(self.model.task.labels)), np.float32) if logits is None else logits

    def step(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        """Take one optimizer step down `loss`."""
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.clip_gradients()
        optimizer.step()

    def clip_gradients(self) -> None:
        """Scale the gradients down to `train.clip`, if that is set."""
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)

    def one_step(self, loss: Tensor, purpose: Purpose, practice: Practice) -> None:
        """Take one step outside `fit`, for methods that train batch by batch."""
        optimizer = self.optimizer(purpose, practice)
        self.set_rate(optimizer, purpose, practice, 0.0)
        self.step(optimizer, loss)

    def descend(
        self, losses: Callable[[], Iterable[Tensor]], steps: int, purpose: Purpose, practice: Practice
    ) -> list[float]:
        """Take steps down a sum of losses, one graph in memory at a time; return the sum before each step."""
        optimizer, sums = self.optimizer(purpose, practice), []
        for done in range(steps):
            self.set_rate(optimizer, purpose, practice, done / steps)
            optimizer.zero_grad(set_to_none=True)
            total = 0.0
            for loss in losses():
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
            self.clip_gradients()
            optimizer.step()
            sums.append(total)
        return sums

    def optimizer(self, purpose: Purpose, practice: Practice) -> torch.optim.Optimizer:
        """Return the optimizer of this purpose: a new one if the practice says fresh, else the persistent one."""
        key = f"{purpose}-{practice.optimizer}"
        if practice.fresh:
            return self._make(purpose, practice)
        if key not in self._optimizers:
            made = self._make(purpose, practice)
            if key in self._kept:
                self._fill(made, self._kept[key])  # may be on disk: what cannot be read must not begin anew
                del self._kept[key]
            self._optimizers[key] = made
        return self._optimizers[key]

    def _make(self, purpose: Purpose, practice: Practice) -> torch.optim.Optimizer:
        rate = self.rates[purpose]
        if practice.optimizer == "sgd":
            return torch.optim.SGD(self.parameters, lr=rate, weight_decay=self.weight_decay)
        if practice.optimizer.startswith("adafactor"):  # with a rate of its own, by default scaled by the weights
            from transformers.optimization import Adafactor

            scaled = practice.optimizer == "adafactor"
            fixed = {"scale_parameter": scaled, "relative_step": False, "weight_decay": self.weight_decay}
            made: torch.optim.Optimizer = Adafactor(self.parameters, lr=rate, **fixed)  # type: ignore[no-untyped-call]
            return made
        return torch.optim.AdamW(self.parameters, lr=rate, weight_decay=self.weight_decay, fused=True)

    def set_rate(self, optimizer: torch.optim.Optimizer, purpose: Purpose, practice: Practice, share: float) -> None:
        """Set the optimizer's rate for when `share` of a call is done."""
        for group in optimizer.param_groups:
            group["lr"] = self.rate(purpose, practice, share)

    def rate(self, purpose: Purpose, practice: Practice, share: float = 0.0) -> float:
        """Return the rate when `share` of a call is done: it warms up, stays, and falls to zero if it is to."""
        if practice.decay is None:
            return self.rates[purpose]
        start, end = practice.decay
        at = start + share * (end - start)
        return self.rates[purpose] * (at / self.warmup if at < self.warmup else min(1.0, (1.0 - at) / self.fall))

    # --- states ---

    def weights(self, copy: bool = True) -> Arrays:
        """Return the travelling weights as arrays: copies, or views that change with the model."""
        return {name: tensor.numpy() for name, tensor in self.model.trainable_state(copy).items()}

    def load_weights(self, arrays: State) -> None:
        """Load weights that match by name and shape."""
        self.model.load_trainable_state(arrays)

    def frozen_sum(self) -> str:
        """Return a checksum of what adapters leave frozen: it does not travel, so it must be the same everywhere."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.frozen_state().items()):
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def whole(self, copy: bool = True) -> Arrays:
        """Return the whole model, private parts included, as copies or views; it does not travel."""
        return {name: tensor.numpy() for name, tensor in self.model.whole_state(copy).items()}

    def load_whole(self, arrays: State) -> None:
        """Load the model that `whole` returned."""
        self.model.load_whole_state(arrays)

    def state(self, copy: bool = True) -> Nested:
        """Return the whole model and persistent optimizers, for a checkpoint, as copies or views."""
        taken = np.array if copy else np.asarray
        optimizers: dict[str, Any] = {
            key: {
                str(index): {name: taken(torch.as_tensor(value).cpu()) for name, value in entry.items()}
                for index, entry in optimizer.state_dict()["state"].items()
            }
            for key, optimizer in self._optimizers.items()
        }
        return {"model": self.whole(copy), "optimizer": {**optimizers, **self._kept}}

    def load_state(self, arrays: Nested) -> None:
        """Restore a checkpoint made by `state`."""
        self.load_whole(arrays["model"])
        self._optimizers, self._kept = {}, dict(arrays.get("optimizer", {}))

    def _fill(self, optimizer: torch.optim.Optimizer, entries: Nested) -> None:
        state = {
            int(index): {name: torch.from_numpy(np.array(value)) for name, value in entry.items()}
            for index, entry in entries.items()
        }
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def together(learners: Sequence[Learner], purpose: Purpose, practice: Practice, total: int) -> Callable[[Tensor], None]:
    """Return a function that steps all learners down a shared loss, rates falling over `total` steps as in `fit`."""
    optimizers, done = [learner.optimizer(purpose, practice) for learner in learners], 0

    def step(loss: Tensor) -> None:
        nonlocal done
        for learner, optimizer in zip(learners, optimizers, strict=True):
            learner.set_rate(optimizer, purpose, practice, done / max(1, total))
            optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        for learner, optimizer in zip(learners, optimizers, strict=True):
            learner.clip_gradients()
            optimizer.step()
        done += 1

    return step
