"""The central model: predicts, distils, validates on the server's labelled texts, and is tested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedstill.common.config import LearnerConfig, RunConfig
from fedstill.common.data.allocation import allocate
from fedstill.common.data.splits import Splits, TextSet
from fedstill.common.data.tasks import domain_scores, task_scores
from fedstill.common.maths.feedback import Jacobian, directional_derivative, exact_feedback, through_adamw
from fedstill.common.maths.losses import LOSSES, cross_entropy, soft_cross_entropy
from fedstill.common.models.bert2bert import GROUPS, MixedModel, load_mixed
from fedstill.common.models.learner import CENTRAL, Course, Learner, Loss, Rows
from fedstill.common.models.loading import load_model
from fedstill.common.models.tokens import Encoded
from fedstill.common.practice import Practice
from fedstill.common.randomness import derive
from fedstill.common.states import State
from fedstill.common.wire import Arrays, Facts
from fedstill.server import model_card
from fedstill.strategies import Method


class CentralModel:
    """The central model with the texts that the server holds: public, labelled and test."""

    def __init__(self, config: RunConfig) -> None:
        if config.central.threads is not None:
            torch.set_num_threads(config.central.threads)
        held = allocate(config)
        self.config, self.task = config, held.task
        self.texts = held.splits
        self.fingerprint = self.texts.public.fingerprint()
        self.learner = self._new_learner()
        model = self.learner.model
        self.public = model.encode(self.texts.public.texts)
        self.labelled = model.encode(self.texts.labelled.texts)
        self.labels = self._labels_of(self.texts.labelled)
        self.blind = self.texts.blind  # public rows whose labels the server knows, one for each labelled text
        self.test_texts = model.encode(self.texts.test.texts)
        self.tested = np.empty(0, np.int64)  # the classes of the test texts, as of the last test
        self._place = (0, 0)

    def _new_learner(self) -> Learner:
        config = self.config
        model = load_model(
            config.central.model_settings(config.train), self.task, derive(config.seed, CENTRAL, "model")
        )
        return Learner(CENTRAL, model, config.central, config.train, config.seed)

    def _labels_of(self, texts: TextSet) -> Tensor:
        assert texts.labels is not None
        return torch.from_numpy(texts.labels)

    def begin_round(self, number: int) -> None:
        """Seed the draws of this round by its number."""
        self._place = (number, 0)

    @contextmanager
    def _next_place(self) -> Iterator[None]:
        number, step = self._place
        self._place = (number, step + 1)
        with self.learner.at(number, step):
            yield

    def check_method(self, method: Method) -> None:
        """Refuse a method that does not work with this central model."""
        if method.own_tasks == "needed":
            raise ValueError(
                f'{method.name} is for sites with tasks of their own: set task.name = "mixed", and [sites.task]'
            )

    def another(self, settings: LearnerConfig) -> CentralModel:
        """Build a second server model of another kind, on the same texts."""
        return CentralModel(self.config.model_copy(update={"central": settings}))

    def card(self, summary: Facts) -> str:
        """Return the model card of the final model."""
        return model_card.classifier(self.config, self.learner.model, summary)

    @property
    def labels_agreed(self) -> list[str] | None:
        """The labels that every site must have, in this order."""
        return list(self.task.labels)

    @property
    def classes(self) -> int:
        """The number of classes of the task."""
        return len(self.task.labels)

    @property
    def largest_class(self) -> float:
        """The share of the largest class among the labelled or the test texts, whichever is larger."""
        held = [np.asarray(each.labels) for each in (self.texts.labelled, self.texts.test) if len(each)]
        return max((float(np.bincount(labels).max() / len(labels)) for labels in held), default=0.0)

    def predict(self, rows: Rows) -> np.ndarray:
        """Return logits on public rows."""
        with self._next_place():
            return self.learner.predict(self.public, rows)

    def distil(self, rows: Rows, targets: np.ndarray, loss: str, epochs: int, practice: Practice) -> float:
        """Train E_d epochs towards the targets on public rows (FedID eq. 7); return the last epoch's mean loss."""
        return self.fit_public(rows, self.towards(targets, loss), epochs, practice)

    def towards(self, targets: np.ndarray, loss: str) -> Loss:
        """Return the loss of that name against targets, one for each row."""
        wanted = self._tensor(targets)
        return lambda logits, places: LOSSES[loss](logits, wanted[places])

    def fit_public(
        self, rows: Rows, loss: Loss, epochs: int, practice: Practice, course: Course | None = None
    ) -> float:
        """Train on any loss of logits on public rows and their positions in `rows`; return the last epoch's mean."""
        with self._next_place():
            return self.learner.fit(self.public, rows, loss, epochs, "distil", practice, course=course)[-1]

    def fit_labelled(self, epochs: int, practice: Practice) -> float:
        """Train epochs of CE on the server's labelled texts; return the last epoch's mean loss."""
        with self._next_place():
            return self._fit_labelled(self.learner, epochs, practice)

    def step(self, rows: Rows, targets: np.ndarray, practice: Practice) -> float:
        """Take one step on soft CE(y, f(x0)) (FedID eq. 11); return the loss before it."""
        wanted = self._tensor(targets)
        with self._next_place():
            loss = soft_cross_entropy(self.learner.logits(self.public, rows, dropout=True), wanted)
            self.learner.one_step(loss, "distil", practice)
        return float(loss.detach())

    def step_with_feedback(
        self,
        rows: Rows,
        targets: np.ndarray,
        query: Rows,
        practice: Practice,
        eta: float,
        dropout: bool,
        jacobian: Jacobian,
    ) -> tuple[Tensor, float]:
        """Take one step as `step` does; also return G = dL_val / dy through it (FedID eq. 14, factored).

        Through a plain gradient step G is exact; AdamW's second moment is taken as a constant.
        """
        model, place = self.learner.model, self._place
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        old = {name: value.detach().clone() for name, value in trained.items()}
        loss = self.step(rows, targets, practice)
        with self._next_place():  # v, at the new weights
            logits = self.learner.logits(self.labelled, query, dropout)
            value = cross_entropy(logits, self.labels.to(logits.device)[query])
            gradients = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        v = {n: torch.zeros_like(old[n]) if g is None else g for n, g in zip(trained, gradients, strict=True)}
        if practice.optimizer == "adamw":
            v = self._through_adamw(v, trained, practice)
        model.train()  # as in `step`: the same place draws the same dropout mask again
        batch = self.public.batch(rows)
        derivative = directional_derivative(
            lambda theta: torch.func.functional_call(model, theta, (batch,)).log_softmax(dim=-1),
            old,
            v,
            jacobian,
            lambda: self.learner.at(*place),
        )
        return exact_feedback(derivative, eta), loss

    def _through_adamw(
        self, v: dict[str, Tensor], trained: dict[str, torch.nn.Parameter], practice: Practice
    ) -> dict[str, Tensor]:
        """Pass v through the step that AdamW has just taken; parameters that it did not move get zero."""
        optimizer = self.learner.optimizer("distil", practice)
        group = optimizer.param_groups[0]
        moved = {
            name: optimizer.state[parameter] for name, parameter in trained.items() if parameter in optimizer.state
        }
        return {
            name: through_adamw(
                value, moved[name]["exp_avg_sq"], int(moved[name]["step"]), group["betas"], group["eps"]
            )
            if name in moved
            else torch.zeros_like(value)
            for name, value in v.items()
        }

    def validate(self, rows: Rows, dropout: bool) -> float:
        """Return L_val: CE on rows of the server's labelled texts (FedID eq. 12)."""
        with self._next_place(), torch.inference_mode():
            logits = self.learner.logits(self.labelled, rows, dropout)
            return float(cross_entropy(logits, self.labels.to(logits.device)[rows]))

    def draw_labelled(self, count: int, *place: object) -> Rows:
        """Draw a batch of the server's labelled texts for a place in the run."""
        rng = np.random.default_rng(derive(self.config.seed, "labelled", *place))
        return rng.choice(len(self.labelled), size=min(count, len(self.labelled)), replace=False)

    def test(self) -> dict[str, float]:
        """Return the task's scores on the test texts, and its metric for each domain."""
        logits = self._test_logits(self.learner)
        self.tested = logits.argmax(axis=-1)
        return self._scores(self.learner, logits)

    def _test_logits(self, learner: Learner) -> np.ndarray:
        with learner.at("test"):
            return learner.predict(self.test_texts, np.arange(len(self.test_texts)))

    def _scores(self, learner: Learner, logits: np.ndarray) -> dict[str, float]:
        arguments = (self.task, np.asarray(self.texts.test.labels), logits, self.texts.test.domains)
        return task_scores(*arguments) | domain_scores(*arguments) | self._second_test(learner)

    def _second_test(self, learner: Learner) -> dict[str, float]:
        """Return the scores on the second test set, under its name."""
        second = self.texts.second
        if second is None:
            return {}
        with learner.at("test"):
            logits = learner.predict(learner.model.encode(second.texts), np.arange(len(second)))
        found = task_scores(self.task, np.asarray(second.labels), logits, second.domains)
        return {f"{name}_{self.config.task.second_test}": value for name, value in found.items()}

    def centralized(self, epochs: int, practice: Practice) -> dict[str, float]:
        """Train the same model on all private texts in one place, as a yardstick, and test it."""
        learner = self._new_learner()
        with learner.at("centralized"):
            self._fit_private(learner, epochs, practice)
        return self._scores(learner, self._test_logits(learner))

    def fit_private(self, epochs: int, practice: Practice) -> float:
        """Train CE on all private texts, where the run holds them; return the last epoch's mean loss."""
        with self._next_place():
            return self._fit_private(self.learner, epochs, practice)[-1]

    @cached_property
    def private(self) -> Encoded:
        """All sites' private texts; empty where the sites bring their own."""
        return self.learner.model.encode(self.texts.private.texts)

    def _fit_private(self, learner: Learner, epochs: int, practice: Practice) -> list[float]:
        labels = self._labels_of(self.texts.private).to(learner.model.device)
        return learner.fit(
            self.private,
            np.arange(len(self.private)),
            lambda logits, places: cross_entropy(logits, labels[places]),
            epochs,
            "local",
            practice,
        )

    def weights(self) -> Arrays:
        """Return the central model's weights, as they travel."""
        return self.learner.weights()

    def load_weights(self, arrays: State) -> None:
        """Load weights, such as an average."""
        self.learner.load_weights(arrays)

    def _fit_labelled(self, learner: Learner, epochs: int, practice: Practice) -> float:
        labels, rows = self.labels.to(learner.model.device), np.arange(len(self.labelled))
        losses = learner.fit(
            self.labelled,
            rows,
            lambda logits, places: cross_entropy(logits, labels[places]),
            epochs,
            "local",
            practice,
        )
        return losses[-1]

    def _tensor(self, targets: np.ndarray) -> Tensor:
        model = self.learner.model
        return torch.from_numpy(np.asarray(targets)).to(model.device, model.dtype)


class SharedModel(CentralModel):
    """A central model that is neither trained nor tested: the sites' initial state, and the mean of what they share."""

    def __init__(self, config: RunConfig) -> None:
        if config.central.threads is not None:
            torch.set_num_threads(config.central.threads)
        none = TextSet((), np.empty(0, np.int64))
        self.config = config
        self.texts = Splits(none, none, none, none)
        self.fingerprint = none.fingerprint()
        self.model = load_mixed(config.central.model_settings(config.train), 0, derive(config.seed, CENTRAL, "model"))
        self.learner = Learner(CENTRAL, self.model, config.central, config.train, config.seed)
        self.public = self.labelled = self.test_texts = self.model.encode([])
        self.labels = torch.empty(0, dtype=torch.long)
        self.blind = np.empty(0, np.int64)
        self._place = (0, 0)

    model: MixedModel

    def check_method(self, method: Method) -> None:
        """Refuse a method that needs one common task."""
        if method.own_tasks == "refused":
            raise ValueError(
                f'{method.name} needs texts and labels that all sites share, and with task.name = "mixed" they have '
                "tasks of their own: choose a method that exchanges parameters, such as atc or fedavg"
            )

    def card(self, summary: Facts) -> str:
        """Return the card of a shared part without a task."""
        return model_card.shared_part(self.config, self.model, summary)

    @property
    def labels_agreed(self) -> list[str] | None:
        """None: the sites' labels are private."""
        return None

    @property
    def classes(self) -> int:
        """None: the server does not know the tasks."""
        return 0

    @property
    def width(self) -> int:
        """The width of the encoder's hidden states."""
        return self.model.width

    def test(self) -> dict[str, float]:
        """Return nothing: the sites test their own tasks."""
        return {}

    def shared(self) -> Arrays:
        """Return encoder, decoder and MLM head as every site starts with them."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self.model.group(GROUPS).items()}

    def load_shared(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Load a state of encoder, decoder and MLM head, such as a mean."""
        self.model.fill(
            self.model.group(GROUPS), {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}
        )

    def read_tokens(self, features: np.ndarray) -> np.ndarray:
        """Return the argmax of the held MLM head for features (items x positions)."""
        self.model.eval()
        with self._next_place(), torch.inference_mode():
            rows = (torch.from_numpy(item).to(self.model.device) for item in features)
            return np.stack([self.model.tokens(row).argmax(dim=-1).cpu().numpy().astype(np.int32) for row in rows])


def make_central(config: RunConfig) -> CentralModel:
    """Build the server's model for the run's task."""
    return SharedModel(config) if config.mixed else CentralModel(config)
