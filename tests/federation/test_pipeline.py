"""FedID with overlapping rounds: one batch late, the same on every link, and the loop of the docstring written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedstill.common.config import RunConfig
from fedstill.common.maths.ensemble import softmax
from fedstill.common.wire import Ask, Reply
from fedstill.server.link import LocalLink

from .conftest import Federation, precise, spoil, streams

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]
COMMON = (
    "method.name=fedid", "method.batch_size=8", "data.public=40", "rounds=2", "method.distill_epochs=2",
    "method.local_epochs=1", "report.alone=false", "report.centralized=false",
)  # fmt: skip


class Watched(LocalLink):
    """Notes, for each Ask, what had been done when it was sent and when it was answered."""

    def __init__(self, made: Federation) -> None:
        super().__init__(made.nodes)
        self.made, self.order = made, list[str]()
        step = made.central.step

        def central_step(*arguments: object) -> float:
            self.order.append("central")
            return step(*arguments)  # type: ignore[arg-type]

        made.central.step = central_step  # type: ignore[method-assign]

    def deliver(self, parts: dict[str, Ask], deadline: float):  # type: ignore[no-untyped-def]
        verb = next(iter(parts.values())).verb if parts else ""
        self.order += ["ask"] * (verb in ("query.logits", "train.feedback"))
        return list(super().deliver(parts, deadline))


def test_the_central_model_learns_a_batch_while_the_sites_predict_the_next(federation: Make, small: Small) -> None:
    one_by_one, overlapped = ["ask", "central"] * 5 + ["ask"], ["ask"] + ["ask", "central"] * 5 + ["ask"]
    for pipeline, expected in ((0, one_by_one), (1, overlapped)):
        made = federation(small(*COMMON, "rounds=1", "method.distill_epochs=1", f"method.pipeline={pipeline}"))
        link = Watched(made)
        made.run(link)
        assert link.order == expected


def test_overlapped_rounds_end_in_the_same_weights_on_every_link(federation: Make, small: Small) -> None:
    config = small(*COMMON, "method.pipeline=1")
    local, stream = federation(config), federation(config)
    local.run()
    with streams(stream) as link:
        stream.run(link)
    assert local.weights() == stream.weights()
    plain = federation(small(*COMMON))
    plain.run()
    assert plain.weights() != local.weights()  # late feedback is another algorithm


def test_a_batch_learned_late_is_the_papers_loop_with_feedback_moved_by_one(federation: Make, small: Small) -> None:
    """Plain torch beside it: distillation alone, so that a site's step is CE(y, f) at the weights it then has."""
    changes = ("rounds=1", "method.distill_epochs=1", "method.pipeline=1", "method.feedback=none", "train.dropout=0")
    config = precise(small(*COMMON, *(change for change in changes if change != "train.dropout=0")))
    ours, plain = federation(config), federation(config)
    ours.run()
    nodes, central = plain.nodes, plain.central
    plain.federation.link = LocalLink(nodes)
    plain.federation.sites = plain.federation.link.sites
    plain.federation._begin(1)
    plain.federation.ask(plain.federation.method.train_locally(plain.federation))
    batches = [np.arange(start, start + 8) for start in range(0, 40, 8)]
    sizes = np.array([len(node.private) for node in nodes], float)
    said: dict[int, list[np.ndarray]] = {}
    taught: dict[int, np.ndarray] = {}

    def predict(i: int) -> None:
        said[i] = [node.learner.logits(node.public, batches[i], False).detach().numpy() for node in nodes]

    def site_steps(i: int) -> None:
        for node in nodes:
            logits = node.learner.logits(node.public, batches[i], False)
            loss = -(torch.from_numpy(taught[i]) * logits.log_softmax(-1)).sum(-1).mean()
            node.learner.one_step(loss, "distil", plain.federation.method.practice(plain.federation))

    for i in range(len(batches)):
        if i == 0:
            predict(0)
        if i > 0:
            site_steps(i - 1)
        if i + 1 < len(batches):
            predict(i + 1)
        taught[i] = sum(w * softmax(z) for w, z in zip(sizes / sizes.sum(), said[i], strict=True))
        practice = plain.federation.method.practice(plain.federation)
        central.step(batches[i], taught[i], replace(practice, optimizer="adamw"))
    site_steps(len(batches) - 1)
    for one, two in zip([ours.central.learner, *(n.learner for n in ours.nodes)],
                        [central.learner, *(n.learner for n in nodes)], strict=True):  # fmt: skip
        for name, value in one.weights().items():
            assert np.allclose(value, two.weights()[name], atol=1e-9), name


def test_a_site_that_misses_a_batch_goes_on_with_the_next(federation: Make, small: Small) -> None:
    made = federation(small(*COMMON, "method.pipeline=1", "exchange.quorum=0.5"))
    calls = []

    def sometimes(ask: Ask, reply: Reply) -> Reply:
        calls.append(ask.verb)
        if ask.verb == "train.feedback" and calls.count("train.feedback") == 3:
            raise RuntimeError("a hiccup")
        return reply

    spoil(made.nodes[0], sometimes)
    summary = made.run()
    assert summary["central"]["accuracy"] > 0
    assert len(made.events("left_out")) == 1


def test_a_secure_sum_cannot_overlap(federation: Make, small: Small) -> None:
    with pytest.raises(ValueError, match="pipeline = 1 overlaps its Asks"):
        federation(small(*COMMON, "method.pipeline=1", "exchange.secure=true"))
