"""AdaFD, one round written out plainly, and its weights when something is missing."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score

from fedstill.common.config import ConfigError, RunConfig
from fedstill.common.practice import Practice
from fedstill.common.wire import Ask, Reply
from fedstill.strategies import find_method
from fedstill.strategies.adafd.method import BETAS
from tests.unit.strategies.test_llm import Oracle

from .conftest import Federation, precise, spoil, streams, with_nan
from .test_methods import flat

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]

QUICK = ("method.name=adafd", "rounds=1", "report.alone=false", "report.centralized=false")


def train(two: Federation, epochs: int, authors: bool) -> list[list[float]]:
    """Step 1 at every site; the mean loss of each epoch. The authors make a new AdamW for each."""
    losses = []
    for node in two.nodes:
        if authors:
            found = []
            for step in range(epochs):
                with node.learner.at(1, step):
                    found += node.train_privately(1, Practice(fresh=True, decay=(0.0, 1 / epochs)))
        else:
            with node.learner.at(1, 0):
                found = node.train_privately(epochs, Practice())
        losses.append(found)
    return losses


def plain_round(two: Federation, *, rule: str, authors: bool, tau: float) -> list[float]:
    rows = np.arange(40)
    losses = [min(found) for found in train(two, 2, authors)]
    with torch.no_grad():
        z = []
        for node in two.nodes:
            node.learner.model.eval()
            z.append(node.learner.model(node.public.batch(rows)).double())
    if rule == "rnwc":
        raw = [1 / (loss + (1e-6 if authors else 0)) for loss in losses]  # eq. 6
    else:
        raw = [np.exp(-5 * loss) for loss in losses]  # eq. 7
    w = [r / sum(raw) for r in raw]
    zhat = w[0] * z[0] + w[1] * z[1]  # eq. 8
    two.central.begin_round(1)

    def distance(logits: torch.Tensor, i: np.ndarray) -> torch.Tensor:
        apart = (logits - zhat[i]).square()
        return apart.mean() if authors else apart.sum(-1).mean()  # eq. 10

    practices = [(1, Practice(fresh=True, decay=(0.0, 0.5)))] * 2 if authors else [(2, Practice())]
    for epochs, practice in practices:
        two.central.fit_public(rows, distance, epochs, practice)
    two.central.learner.model.eval()
    with torch.no_grad():
        y = (two.central.learner.model(two.central.public.batch(rows)) / tau).softmax(-1)
    first = 3 if authors else 2  # Asks before the first one to distil
    for node in two.nodes:
        for call, (epochs, practice) in enumerate(practices):
            with node.learner.at(1, first + call):
                node.learner.fit(
                    node.public,
                    rows,
                    lambda s, i: F.kl_div((s / tau).log_softmax(-1), y[i], reduction="batchmean"),
                    epochs,
                    "distil",
                    practice,
                )
    return w


@pytest.mark.parametrize("rule", ["rnwc", "enwc"])
@pytest.mark.parametrize("authors", [False, True], ids=["paper", "authors_code"])
def test_a_round_is_the_algorithm_written_out(federation: Make, small: Small, rule: str, authors: bool) -> None:
    preset = "authors_code" if authors else "paper"
    changes = (*QUICK, f"method.preset={preset}", f"method.weighting={rule}", "method.local_epochs=2",
               "method.distill_epochs=2", "method.temperature=2.0", "method.distill_dropout=true")  # fmt: skip
    one, two = federation(precise(small(*changes))), federation(precise(small(*changes)))
    one.run()
    weights = plain_round(two, rule=rule, authors=authors, tau=2.0)
    told = one.events("weights")[0]["weights"]
    assert [told["north"], told["south"]] == pytest.approx(weights, rel=1e-6)
    assert told["north"] != told["south"]
    assert torch.allclose(flat(one.central.learner), flat(two.central.learner), atol=1e-9)
    for node, other in zip(one.nodes, two.nodes, strict=True):
        assert torch.allclose(flat(node.learner), flat(other.learner), atol=1e-9)


def test_without_a_site_the_other_has_all_the_weight(federation: Make, small: Small) -> None:
    made = federation(small(*QUICK, "exchange.quorum=0.5"))
    spoil(made.nodes[0], with_nan)
    made.run()
    assert made.events("weights")[0]["weights"] == {"south": 1.0}
    assert made.events("left_out")[0]["site"] == "north"


@pytest.mark.parametrize(
    ("losses", "reason"),
    [([float("nan")], "'losses' is float 'nan'"), ([], "are no losses"), ([-1.0], "are no losses")],
)
def test_losses_that_are_none_are_left_out(federation: Make, small: Small, losses: list[float], reason: str) -> None:
    def endless(ask: Ask, reply: Reply) -> Reply:
        changed = {**reply.metrics, "losses": losses} if ask.verb == "train.local" else reply.metrics
        return Reply(reply.node, reply.arrays, changed)

    made = federation(small(*QUICK, "exchange.quorum=0.5"))
    spoil(made.nodes[1], endless)
    made.run()
    assert made.events("weights")[0]["weights"] == {"north": 1.0}
    assert reason in made.events("left_out")[0]["reason"]


def test_a_site_describes_itself_only_when_asked(federation: Make, small: Small) -> None:
    node = federation(small(*QUICK)).nodes[0]
    settings = {"epochs": 1, "round": 1, "step": 0}
    assert "f1_weighted" not in node.answer(Ask("train.local", settings=settings)).metrics
    said = node.answer(Ask("train.described", settings=settings)).metrics
    logits = node.learner.predict(node.private, np.arange(len(node.private)))
    labels = node.labels.numpy()
    p = torch.from_numpy(logits).double().softmax(-1)
    assert said["f1_weighted"] == pytest.approx(f1_score(labels, logits.argmax(1), average="weighted"))
    assert said["entropy"] == pytest.approx(float(-(p * p.log()).sum(-1).mean()))
    each = F.cross_entropy(torch.from_numpy(logits).double(), node.labels, reduction="none").numpy()
    assert said["class_losses"] == pytest.approx([each[labels == c].mean() for c in range(2)])


LLM = ('method.llm={{url="{url}", wait=0, retries=1, key_name="ORACLE_KEY"}}', "method.weighting=llmwc")


def test_llmwc_takes_the_language_models_weights_over_real_streams(
    federation: Make, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("ORACLE_KEY", "sk-secret-of-the-test")
    oracle = Oracle()
    oracle.answers = ["0.9, 0.3"]
    made = federation(small(*QUICK, LLM[0].format(url=oracle.url), LLM[1]))
    with streams(made) as link:
        made.run(link)
    oracle.stop()
    assert made.events("weights")[0]["weights"] == pytest.approx({"north": 0.75, "south": 0.25})
    (event,) = made.events("llm")
    assert event["answer"] == "0.9, 0.3"
    assert event["question"] == oracle.asked[0]["messages"]
    asked = oracle.asked[0]["messages"][1]["content"]
    assert all(word in asked for word in ("Model 1", "Model 2", "training loss", "weighted F1", "entropy", "logits"))
    assert "north" not in json.dumps(oracle.asked)
    for path in (made.folder / "run").rglob("*"):
        assert not path.is_file() or b"sk-secret-of-the-test" not in path.read_bytes(), path


def test_llmwc_falls_back_to_enwc(federation: Make, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("ORACLE_KEY", "sk-secret-of-the-test")
    oracle = Oracle()
    oracle.answers = ["The first one is better.", "1, 2, 3"]
    made, plain = federation(small(*QUICK, LLM[0].format(url=oracle.url), LLM[1])), federation(small(*QUICK))
    made.run()
    plain.run()
    oracle.stop()
    assert made.events("weights")[0]["weights"] == plain.events("weights")[0]["weights"]
    assert made.weights() == plain.weights()
    first, second, last = made.events("llm")
    assert "not a number" in first["problem"]
    assert "3 numbers instead of 2" in second["problem"]
    assert last["fallback"] == "enwc"


def test_each_class_is_weighed_by_the_losses_on_it(federation: Make, small: Small) -> None:
    made = federation(small(*QUICK, "method.per_class=true"))
    heard: dict[str, list[float]] = {}

    def listen(ask: Ask, reply: Reply) -> Reply:
        if ask.verb == "train.described":
            heard[reply.node] = reply.metrics["class_losses"]
        return reply

    for node in made.nodes:
        spoil(node, listen)
    made.run()
    told = made.events("weights")[0]["weights"]
    for c in range(2):
        raw = {name: np.exp(-5 * row[c]) for name, row in heard.items()}
        assert told["north"][c] == pytest.approx(raw["north"] / sum(raw.values()))
        assert told["north"][c] + told["south"][c] == pytest.approx(1.0)


def test_the_learned_beta_is_best_on_labelled_texts_that_sites_saw_blind(federation: Make, small: Small) -> None:
    made = federation(small(*QUICK, "method.beta=learned", "data.blind=true", "method.local_epochs=2"))
    losses: dict[str, float] = {}
    z: dict[str, torch.Tensor] = {}

    def listen(ask: Ask, reply: Reply) -> Reply:
        if ask.verb == "train.local":
            losses[reply.node] = min(reply.metrics["losses"])
        elif ask.verb == "query.predictions":
            z[reply.node] = torch.from_numpy(reply.arrays["logits"].copy()).double()
        return reply

    for node in made.nodes:
        spoil(node, listen)
    made.run()
    public, labelled = made.central.texts.public.texts, made.central.texts.labelled
    where = [public.index(text) for text in labelled.texts]
    costs = []
    for beta in BETAS:
        w = torch.tensor([-beta * losses[name] for name in z]).double().softmax(0)
        zhat = sum((w[k] * logits[where] for k, logits in enumerate(z.values())), torch.zeros(()))
        costs.append(float(F.cross_entropy(zhat, torch.tensor(labelled.labels))))
    assert made.events("beta")[0]["beta"] == BETAS[int(np.argmin(costs))]
    assert max(costs) > min(costs) + 1e-6


def test_a_learned_beta_needs_blind_texts(federation: Make, small: Small) -> None:
    with pytest.raises(ValueError, match=r"set data.blind = true"):
        federation(small(*QUICK, "method.beta=learned"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weighting": "llmwc"}, r"\[method.llm\]"),
        ({"weighting": "llmwc", "per_class": True, "llm": {"local": "tiny-t5"}}, "per_class weights come from losses"),
        ({"beta": -1.0}, "beta"),
        ({"beta": "guessed"}, "beta"),
        ({"llm": {"url": "ftp://a"}}, "url"),
    ],
)
def test_what_does_not_go_together_is_refused(small: Small, settings: dict[str, object], message: str) -> None:
    config = small("method.name=adafd").method
    with pytest.raises(ConfigError, match=message):
        find_method(config.model_copy(update=settings))
