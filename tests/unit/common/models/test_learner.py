"""A learner's optimizers, schedules and states, against plain torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedstill.common.config import LearnerConfig, ModelConfig, TrainConfig
from fedstill.common.data.tasks import TASKS
from fedstill.common.maths.losses import cross_entropy
from fedstill.common.models.learner import Learner, together
from fedstill.common.models.loading import load_model
from fedstill.common.models.text_model import ModelError
from fedstill.common.models.tokens import Encoded
from fedstill.common.practice import Practice

TEXTS = ["a fine film", "dull and long", "I loved it, truly", "no", "a waste of an evening"] * 2
LABELS = torch.tensor([1, 0, 1, 0, 0] * 2)


def make(dropout: float = 0.0) -> tuple[Learner, Encoded]:
    model = load_model(ModelConfig(name="tiny-bert", max_length=16), TASKS["film-reviews"], seed=3)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    train = TrainConfig(learning_rate=1e-3, batch_size=4, max_length=16)
    return Learner("north", model, LearnerConfig(), train, seed=5), model.encode(TEXTS)


def fit(learner: Learner, texts: Encoded, epochs: int, practice: Practice, *place: object) -> list[float]:
    with learner.at(*place):
        return learner.fit(
            texts, np.arange(10), lambda z, rows: cross_entropy(z, LABELS[rows]), epochs, "local", practice
        )


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in learner.parameters])


def test_an_epoch_is_plain_adamw_over_shuffled_batches() -> None:
    learner, texts = make()
    other, _ = make()
    losses = fit(learner, texts, 2, Practice(fresh=True, decay=(0.0, 1.0)), 1, 0)
    optimizer = torch.optim.AdamW(other.parameters, lr=1e-3, weight_decay=0.0, fused=True)
    with other.at(1, 0):
        other.model.train()
        done, means = 0, []
        for _ in range(2):
            order, total = torch.randperm(10).numpy(), 0.0
            for start in (0, 4, 8):
                rows = order[start : start + 4]
                for group in optimizer.param_groups:
                    group["lr"] = 1e-3 * (1 - done / 6)
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(other.model(texts.batch(rows)), LABELS[rows])
                loss.backward()
                optimizer.step()
                total += loss.item() * len(rows)
                done += 1
            means.append(total / 10)
    assert torch.allclose(weights(learner), weights(other), atol=1e-6)
    assert losses == pytest.approx(means, rel=1e-5)


def test_a_living_optimizer_remembers_and_a_fresh_one_does_not() -> None:
    ends = {}
    for fresh in (True, False):
        learner, texts = make()
        for call in range(2):
            fit(learner, texts, 1, Practice(fresh=fresh), 1, call)
        ends[fresh] = weights(learner)
    assert not torch.equal(ends[True], ends[False])


@pytest.mark.parametrize("fresh", [True, False])
def test_a_state_put_away_and_taken_up_goes_on_to_the_same_bit(fresh: bool) -> None:
    learner, texts = make(dropout=0.1)
    fit(learner, texts, 1, Practice(fresh=fresh), 1, 0)
    state = learner.state()
    fit(learner, texts, 1, Practice(fresh=fresh), 2, 0)
    other, _ = make(dropout=0.1)
    other.load_state(state)
    assert other.state().keys() == state.keys()
    fit(other, texts, 1, Practice(fresh=fresh), 2, 0)
    assert torch.equal(weights(learner), weights(other))


def test_draws_follow_from_the_place_and_not_from_what_happened_before() -> None:
    learner, texts = make(dropout=0.1)
    with learner.at(1, 7):
        first = learner.predict(texts, np.arange(10), dropout=True)
    torch.manual_seed(99)
    outside = torch.rand(1)
    with learner.at(1, 7):
        again = learner.predict(texts, np.arange(10), dropout=True)
    with learner.at(1, 8):
        elsewhere = learner.predict(texts, np.arange(10), dropout=True)
    torch.manual_seed(99)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, elsewhere)
    assert torch.equal(outside, torch.rand(1))


def test_predictions_keep_the_order_of_the_rows(make_rows: Callable[[], np.ndarray]) -> None:
    learner, texts = make()
    rows = make_rows()
    one_by_one = np.concatenate([learner.predict(texts, rows[i : i + 1]) for i in range(len(rows))])
    assert np.allclose(learner.predict(texts, rows), one_by_one, atol=1e-5)
    assert learner.predict(texts, rows[:0]).shape == (0, 2)


@pytest.fixture
def make_rows() -> Callable[[], np.ndarray]:
    return lambda: np.array([7, 1, 3, 0, 9, 2])


def test_an_epoch_may_be_a_number_of_steps_and_the_rate_rises_before_it_falls() -> None:
    model = load_model(ModelConfig(name="tiny-bert", max_length=16), TASKS["film-reviews"], seed=3)
    train = TrainConfig(learning_rate=1.0, batch_size=4, warmup=0.25, clip=0.5)
    learner = Learner("north", model, LearnerConfig(), train, seed=5)
    rates: list[float] = []
    moves: list[float] = []
    plain = learner.step

    def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        before = weights(learner)
        plain(optimizer, loss)
        rates.append(optimizer.param_groups[0]["lr"])
        moves.append(float((weights(learner) - before).norm()))

    learner.step = step  # type: ignore[method-assign]
    practice, rows = Practice(optimizer="sgd", decay=(0.0, 1.0)), np.arange(10)
    with learner.at("test"):
        loss = learner.fit(model.encode(TEXTS), rows, lambda z, i: z.pow(2).sum(), 9, "local", practice, steps=8)
    assert len(loss) == 3  # three batches a pass, so eight steps are three passes, whatever `epochs` says
    assert rates == pytest.approx([0, 0.5, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert max(moves) <= 0.5 + 1e-4  # plain steps are rate times gradient, and the gradient is cut
    assert moves[1] == pytest.approx(0.25, abs=1e-3)


def test_adafactor_steps_shrink_with_the_weights_unless_it_is_told_not_to() -> None:
    """A gradient of ones gives an update of 1, times the rate, and scaled times the root mean square of w."""
    model = load_model(ModelConfig(name="tiny-bert", device="cpu"), TASKS["film-reviews"], seed=1)
    learner = Learner("a", model, LearnerConfig(), TrainConfig(learning_rate=0.1), 1)
    matrix = next(value for value in learner.parameters if value.ndim == 2)
    for kind, size in (("adafactor", float(matrix.detach().square().mean().sqrt())), ("adafactor_unscaled", 1.0)):
        before = matrix.detach().clone()
        optimizer = learner.optimizer("local", Practice(fresh=True, optimizer=kind))  # type: ignore[arg-type]
        matrix.grad = torch.ones_like(matrix)
        optimizer.step()
        torch.testing.assert_close(before - matrix.detach(), torch.full_like(before, 0.1 * size), atol=1e-5, rtol=1e-3)
        with torch.no_grad():
            matrix.copy_(before)


def test_every_way_to_train_clips() -> None:
    model = load_model(ModelConfig(name="tiny-bert", max_length=16), TASKS["film-reviews"], seed=3)
    learner = Learner("north", model, LearnerConfig(), TrainConfig(learning_rate=1.0, clip=0.5), seed=5)
    texts, practice = model.encode(TEXTS), Practice(optimizer="sgd")

    def loss() -> torch.Tensor:
        return 100 * model(texts.batch(range(4))).pow(2).sum()

    before = weights(learner)
    learner.descend(lambda: [loss()], 1, "local", practice)
    assert float((weights(learner) - before).norm()) == pytest.approx(0.5, abs=1e-3)
    before = weights(learner)
    together([learner], "local", practice, 1)(loss())
    assert float((weights(learner) - before).norm()) == pytest.approx(0.5, abs=1e-3)


def test_a_call_without_dropout_trains_as_it_predicts() -> None:
    model = load_model(ModelConfig(name="tiny-bert", max_length=16), TASKS["film-reviews"], seed=3)
    learner = Learner("north", model, LearnerConfig(), TrainConfig(learning_rate=0.1), seed=5)
    texts, seen = model.encode(TEXTS), []

    def loss(logits: torch.Tensor, places: np.ndarray) -> torch.Tensor:
        seen.append(logits.detach().numpy()[np.argsort(places)])
        return 0.0 * logits.sum()

    for dropout in (False, True):
        with learner.at("test", dropout):
            learner.fit(texts, np.arange(4), loss, 1, "local", Practice(optimizer="sgd", dropout=dropout))
    predicted = learner.predict(texts, np.arange(4))
    assert np.allclose(seen[0], predicted, atol=1e-6)
    assert not np.allclose(seen[1], predicted, atol=1e-3)


def test_a_loss_that_is_no_number_stops_with_the_key_to_change() -> None:
    model = load_model(ModelConfig(name="tiny-bert", max_length=16), TASKS["film-reviews"], seed=3)
    learner = Learner("north", model, LearnerConfig(), TrainConfig(learning_rate=1e30), seed=5)
    with pytest.raises(ModelError, match=r"training broke down: the loss is .* lower learning_rate"):
        learner.fit(model.encode(TEXTS), np.arange(10), lambda z, i: z.pow(2).sum(), 9, "local", Practice("sgd"))
