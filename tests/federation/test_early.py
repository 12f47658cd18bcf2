"""Whole-set methods with `method.pipeline = 1`: the central model begins with the first rows that all sites sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fedstill.common.config import RunConfig
from fedstill.common.config.files import ConfigError
from fedstill.common.maths.ensemble import entropy_reduction, softmax
from fedstill.common.wire import Ask, Reply
from fedstill.server.link import LocalLink
from fedstill.strategies.early import PARTS, whole_batches
from fedstill.strategies.generic import Train, train_locally
from fedstill.strategies.predictions import Distil, distil

from .conftest import Federation, spoil, streams

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]
COMMON = (
    "rounds=2", "data.public=40", "central.batch_size=8", "report.alone=false", "report.centralized=false",
    "method.local_epochs=1", "method.distill_epochs=2",
)  # fmt: skip
METHODS = {
    "ds-fl": (),
    "mhat": (),
    "fedkd": ("rounds=1",),
    "feded": ("sites.south.model=tiny-bert",),
    "logit-fedavg": ("method.preset=authors_code",),
    "fedmd": ("method.subset=30",),
    "cronus": (),
    "adafd": ("method.preset=authors_code",),
    "sinkhorn": ("method.noise_texts=8", "method.pretrain_epochs=1"),
    "entropy": ("method.noise_texts=8", "method.pretrain_epochs=1", "method.distill_epochs=1"),
}


def test_parts_are_whole_batches_of_all_rows_in_order() -> None:
    for count, batch in ((40, 8), (600, 32), (37, 8), (5, 8), (8, 8), (0, 4)):
        rows = np.arange(100, 100 + count)
        parts = whole_batches(rows, batch)
        assert len(parts) <= PARTS
        assert np.array_equal(np.concatenate([rows[:0], *parts]), rows)
        assert all(len(part) % batch == 0 for part in parts[:-1])
        assert sum(-(-len(part) // batch) for part in parts) == -(-count // batch)  # as many steps as one pass takes


class Watched(LocalLink):
    """Notes in which order rows were asked for and learned by the central model."""

    def __init__(self, made: Federation) -> None:
        super().__init__(made.nodes)
        self.order: list[tuple[str, int]] = []
        fit = made.central.fit_public

        def noted(rows: np.ndarray, *arguments: object) -> float:
            self.order.append(("learned", len(rows)))
            return fit(rows, *arguments)  # type: ignore[arg-type]

        made.central.fit_public = noted  # type: ignore[method-assign]

    def deliver(self, parts: dict[str, Ask], deadline: float):  # type: ignore[no-untyped-def]
        ask = next(iter(parts.values()))
        if ask.verb in ("query.predictions", "train.distil"):
            self.order.append((ask.verb, len(ask.arrays["rows"])))
        return list(super().deliver(parts, deadline))


def test_each_part_is_learned_while_the_next_is_predicted_and_the_rest_while_sites_distil(
    federation: Make, small: Small
) -> None:
    asked, learned, taught = ("query.predictions", 8), ("learned", 8), ("train.distil", 40)
    whole = [("query.predictions", 40), ("learned", 40), taught]
    early = [asked, *[asked, learned] * 4, learned, taught, ("learned", 40)]
    for pipeline, expected in ((0, whole), (1, early)):
        made = federation(small(*COMMON, "rounds=1", "method.name=ds-fl", f"method.pipeline={pipeline}"))
        link = Watched(made)
        made.run(link)
        assert link.order == expected


@pytest.mark.parametrize("pipeline", [0, 1])
def test_ds_fl_is_its_loop_written_out_to_the_last_bit(federation: Make, small: Small, pipeline: int) -> None:
    config = small(*COMMON, "rounds=1", "method.name=ds-fl", f"method.pipeline={pipeline}", "method.schedule=call")
    ours, plain = federation(config), federation(config)
    ours.run()
    fed, central = plain.federation, plain.central
    fed.link = LocalLink(plain.nodes)
    fed.sites = fed.link.sites
    fed._begin(1)
    practice = fed.method.practice(fed)
    fed.ask(train_locally.ask(Train(1, practice)))

    def targets(rows: np.ndarray) -> np.ndarray:  # T = 0.1 and equal weights: the paper's
        said = [softmax(node.learner.predict(node.public, rows)).astype(np.float64) for node in plain.nodes]
        return entropy_reduction((0.5 * said[0] + 0.5 * said[1]).astype(np.float32), 0.1)

    rows = np.arange(40)
    if pipeline:
        course = central.learner.course(40, 2, "distil", practice)
        for part in np.split(rows, 5):
            central.fit_public(part, central.towards(targets(part), "soft"), 1, practice, course)
        assert (course.done, course.total) == (5, 10)
        central.fit_public(rows, central.towards(targets(rows), "soft"), 1, practice, course)
        fed._step += 4  # sites have answered five times, not once
    else:
        central.distil(rows, targets(rows), "soft", 2, practice)
    fed._step += 1
    fed.ask(distil.ask(Distil(rows, targets(rows), "soft", 2, replace(practice, dropout=False))))
    assert ours.weights() == plain.weights()


@pytest.mark.parametrize("name", METHODS)
def test_the_same_weights_on_every_link_and_others_than_without(name: str, federation: Make, small: Small) -> None:
    settings = (*COMMON, f"method.name={name}", *METHODS[name])
    early = small(*settings, "method.pipeline=1")
    local, stream, plain = federation(early), federation(early), federation(small(*settings))
    local.run()
    with streams(stream) as link:
        stream.run(link)
    plain.run()
    assert local.weights() == stream.weights()
    assert local.weights() != plain.weights()  # another order of the first epoch's rows
    summaries = [made.events("round_finished")[-1]["metrics"]["loss"] for made in (local, stream)]
    assert summaries[0] == summaries[1] > 0


def test_the_central_model_learns_before_a_site_has_sent_its_last_rows(federation: Make, small: Small) -> None:
    made = federation(small(*COMMON, "rounds=1", "method.name=mhat", "method.pipeline=1"))
    begun, waited = threading.Event(), []
    fit = made.central.fit_public

    def noted(*arguments: object) -> float:
        begun.set()
        return fit(*arguments)  # type: ignore[arg-type]

    made.central.fit_public = noted  # type: ignore[method-assign]

    def late(ask: Ask, reply: Reply) -> Reply:
        """Keep the last rows back until the central model works: for ever, if it waits for them."""
        if ask.verb == "query.predictions" and 39 in ask.arrays["rows"]:
            waited.append(begun.wait(30))
        return reply

    spoil(made.nodes[1], late)
    with streams(made) as link:
        made.run(link)
    assert waited == [True]


def test_a_site_that_misses_a_part_is_out_of_the_round_and_the_others_go_on(federation: Make, small: Small) -> None:
    made = federation(small(*COMMON, "rounds=1", "method.name=ds-fl", "method.pipeline=1", "exchange.quorum=0.5"))
    asked: list[int] = []

    def third(ask: Ask, reply: Reply) -> Reply:
        if ask.verb == "query.predictions":
            asked.append(len(ask.arrays["rows"]))
            if len(asked) == 3:
                raise RuntimeError("a hiccup")
        return reply

    spoil(made.nodes[0], third)
    link = Watched(made)
    made.run(link)
    assert asked == [8, 8, 8]
    assert link.order.count(("learned", 8)) == 5
    assert [event["site"] for event in made.events("left_out")] == ["north"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("ds-fl", "method.aggregation=krum"), "judges a site by all of its rows"),
        (("adafd", "method.beta=learned", "data.blind=true"), "weighs sites by what they say of all public texts"),
        (("evenhand", "data.blind=true"), "fits the sites' weights to blind texts among all"),
        (("fedavg", "sites.south.model=tiny-bert"), "gets no predictions row by row"),
        (("feddf",), "gets no predictions row by row"),
        (("mhat", "method.loss=kl", "exchange.secure=true"), "pipeline = 1 overlaps its Asks"),
    ],
)
def test_who_needs_all_rows_refuses_with_the_reason(
    settings: tuple[str, ...], reason: str, federation: Make, small: Small
) -> None:
    name, *changes = settings
    with pytest.raises((ConfigError, ValueError), match=reason):
        federation(small(*COMMON[:-1], f"method.name={name}", "method.pipeline=1", *changes))
