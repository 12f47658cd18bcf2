"""Every method that exchanges predictions says how its pseudo-labels fare, and none says more than is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedstill.common.config import RunConfig

from .conftest import Federation

Make = Callable[..., Federation]
Small = Callable[..., RunConfig]
QUICK = ("rounds=1", "report.alone=false", "report.centralized=false", "method.local_epochs=1")
PASSES = {
    "fedid": 2, "adafd": 1, "ds-fl": 1, "mhat": 1, "fedkd": 1, "fedmd": 1, "cronus": 1, "logit-fedavg": 1,
    "evenhand": 1, "sinkhorn": 1, "entropy": 1, "feded": 1, "fedavg": 0, "feddf": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_every_method_that_exchanges_predictions_tells_of_each_pass(federation: Make, small: Small, name: str) -> None:
    more = {
        "sinkhorn": ("method.noise_texts=8", "method.noise_length=8", "method.pretrain_epochs=1"),
        "entropy": ("method.weighting=A", "method.pretrain_epochs=1"),
        "evenhand": ("data.blind=true",),
        **dict.fromkeys(("feded", "fedavg", "feddf"), ("sites.south.model=tiny-bert",)),
        "fedid": ("method.distill_epochs=2",),
    }
    made = federation(small(f"method.name={name}", *QUICK, *more.get(name, ())))
    made.run()
    told, right = made.events("pseudo_labels"), made.events("pseudo_label_accuracy")
    assert [event["pass"] for event in told] == list(range(1, PASSES[name] + 1))
    assert [event["pass"] for event in right] == list(range(1, PASSES[name] + 1))
    for event in told:
        assert set(event["sites"]) == {"north", "south"}
        assert all(0.5 <= site["largest"] <= 1 for site in event["sites"].values())
    if name == "fedid":
        assert "moved" not in told[0]["sites"]["north"]
        assert told[1]["sites"]["north"]["moved"] > 0


def test_accuracy_is_that_of_what_was_sent_and_labels_follow_their_texts(federation: Make, small: Small) -> None:
    made = federation(small("method.name=ds-fl", *QUICK, "data.blind=true"))
    sent: dict[str, Any] = {}
    for node in made.nodes:
        honest = node.answer

        def answer(ask: Any, honest: Any = honest) -> Any:
            reply = honest(ask)
            if ask.verb == "query.predictions":
                sent[reply.node] = reply.arrays["logits"].argmax(axis=-1)
            return reply

        node.answer = answer  # type: ignore[method-assign]
    made.run()
    truth = made.central.texts.public_truth
    assert truth is not None
    assert np.array_equal(truth[made.central.blind], np.asarray(made.central.texts.labelled.labels))
    [event] = made.events("pseudo_label_accuracy")
    assert event["sites"] == pytest.approx({n: float((c == truth).mean()) for n, c in sent.items()}, abs=1e-4)


def test_public_texts_of_a_file_have_no_labels_to_compare_with(federation: Make, small: Small, tmp_path: Any) -> None:
    (tmp_path / "public.csv").write_text("text,label\n" + "".join(f"text number {n},positive\n" for n in range(40)))
    made = federation(small("method.name=ds-fl", *QUICK, f"task.public={tmp_path / 'public.csv'}"))
    made.run()
    assert made.events("pseudo_labels")
    assert not made.events("pseudo_label_accuracy")


def test_the_losses_of_local_epochs_are_recorded_where_sites_tell_them(federation: Make, small: Small) -> None:
    made = federation(small("method.name=isolated", *QUICK[:3], "rounds=2", "method.local_epochs=2"))
    made.run()
    first, second = made.events("local_losses")
    assert [len(losses) for event in (first, second) for losses in event["sites"].values()] == [2, 2, 2, 2]
    means = [event["metrics"]["loss"] for event in made.events("round_finished")]
    assert means == pytest.approx([np.mean([losses[-1] for losses in e["sites"].values()]) for e in (first, second)])
