"""Many sites in one process: few in memory, the same weights; a round saves those that it asked, and resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedstill.client import node
from fedstill.client.residents import Kept
from fedstill.common.checkpoint import flat
from fedstill.common.config import RunConfig
from fedstill.common.config.files import load_run
from fedstill.common.models.loading import load_model
from fedstill.common.wire import Ask
from fedstill.deploy.launch.process import InProcess, assemble
from fedstill.server.link import LocalLink

Small = Callable[..., RunConfig]
MANY = """
rounds = 3
data = { private = 96, public = 16, labelled = 8, test = 16 }
train = { learning_rate = 1e-3, max_length = 8, batch_size = 8 }
method = { name = "METHOD", local_epochs = 1, participation = 0.34, schedule = "constant" }
central = { model = "tiny-bert" }
report = { alone = false, centralized = false, evaluate = "end" }
sites = [{ name = "s", count = 6, model = "tiny-bert" }]
"""


def made(folder: Path, method: str, *changes: str) -> InProcess:
    config = load_run(MANY.replace("METHOD", method), changes)
    return assemble(config, folder / "run", folder / "sites", "run")


def central(run: InProcess) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in run.federation.central.learner.weights().items()}


@pytest.mark.parametrize("method", ["fedid", "fedmd", "fedavg"])
def test_sites_that_are_swapped_end_in_the_same_weights(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(
        node, "load_model", lambda config, *rest: loaded.append(config.name) or load_model(config, *rest)
    )
    all_here, swapped = made(tmp_path / "a", method), made(tmp_path / "b", method, "simulation.resident=2")
    scores = [run.federation.run(run.link()) for run in (all_here, swapped)]
    assert central(all_here) == central(swapped)
    assert scores[0]["sites"]["s-1"]["after"] == scores[1]["sites"]["s-1"]["after"]
    residents = swapped.swapped[0]._residents
    assert len(residents._here) == 2
    assert residents.swaps > 6
    assert len(loaded) == 12  # each site's once in either run: the swapped ones take over each other's


def test_sites_of_several_kinds_take_over_only_their_own(tmp_path: Path) -> None:
    lora, lower = (["sites.s-1", "sites.s-2"], ["sites.s-3", "sites.s-4"])
    kinds = [
        *(f"{site}.lora.r=2" for site in lora),
        *(f"{site}.freeze=1" for site in lower),
        "sites.s-5.freeze=encoder",
    ]
    kinds += ["sites.s-6.freeze=encoder"]  # whose heads alone are handed on
    all_here, swapped = (made(tmp_path / name, "ds-fl", *kinds, *more) for name, more in
                         (("a", []), ("b", ["simulation.resident=1"])))  # fmt: skip
    scores = [run.federation.run(run.link()) for run in (all_here, swapped)]
    assert central(all_here) == central(swapped)
    for site in scores[0]["sites"]:
        assert scores[0]["sites"][site]["after"] == scores[1]["sites"][site]["after"], site


def test_optimizers_on_disk_are_those_that_trained_last(tmp_path: Path) -> None:
    """All sites train in every round, each with the optimizer that it had before others took its place."""
    changes = ["method.participation=1"]
    all_here, swapped = (
        made(tmp_path / "a", "ds-fl", *changes),
        made(tmp_path / "b", "ds-fl", *changes, "simulation.resident=2"),
    )
    for run in (all_here, swapped):
        run.federation.run(run.link())
    assert central(all_here) == central(swapped)
    residents = swapped.residents
    assert residents is not None
    for site in all_here.nodes:
        expected, found = flat(site.state()), flat(residents.node(site.name).state())
        assert any("distil-adamw" in name for name in expected)
        assert {name: value.tobytes() for name, value in expected.items()} == {
            name: value.tobytes() for name, value in found.items()
        }, site.name


def test_sites_in_memory_are_asked_before_others_take_their_places(tmp_path: Path) -> None:
    run = made(tmp_path, "ds-fl", "simulation.resident=2")
    link = run.link()
    before = run.swapped[0]._residents.swaps
    for _ in range(3):
        replies = link.deliver({name: Ask("evaluate.test", {}, {}) for name in link.sites}, 60)
        assert {reply.node for reply in replies} == set(link.sites)
    assert run.swapped[0]._residents.swaps - before == 3 * 4  # of six; asked in their order, each would be swapped


def test_a_site_whose_state_cannot_be_read_does_not_begin_anew(tmp_path: Path) -> None:
    run = made(tmp_path, "ds-fl", "simulation.resident=2")
    run.link()
    for path in (tmp_path / "sites/s-1/run/away").iterdir():
        path.unlink()
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            run.swapped[0].greeting()
    assert run.swapped[1].greeting()["name"] == "s-2"


def test_an_optimizer_that_cannot_be_read_does_not_begin_anew(tmp_path: Path) -> None:
    run = made(tmp_path, "ds-fl", "simulation.resident=2", "method.participation=1", "rounds=1")
    run.federation.run(run.link())
    site = run.swapped[0]  # the sites asked after it took its place
    for path in (tmp_path / "sites/s-1/run/away").glob("*-[0-9]"):
        path.unlink()
    train = Ask("train.local", {}, {"epochs": 1, "round": 2, "step": 1})
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            site.answer(train)


def test_a_round_saves_the_sites_that_it_asked_and_a_run_resumes_from_them(tmp_path: Path) -> None:
    whole, first = made(tmp_path / "whole", "fedid"), made(tmp_path / "cut", "fedid", "rounds=2")
    whole.federation.run(whole.link())
    asked: list[tuple[str, int]] = []

    class Noting(LocalLink):
        def deliver(self, parts, deadline):  # type: ignore[no-untyped-def]
            asked.extend((ask.verb, len(parts)) for ask in list(parts.values())[:1])
            return super().deliver(parts, deadline)

    first.federation.run(Noting(first.nodes))
    assert [count for verb, count in asked if verb == "query.save"] == [6, 2, 2]
    second = made(tmp_path / "cut", "fedid")
    assert len({tuple(facts["rounds"]) for facts in second.link().sites.values()}) > 1  # some were never drawn
    second.federation.run(second.link(), resume=True)
    assert central(second) == central(whole)
    for one, two in zip(second.nodes, whole.nodes, strict=True):
        assert all((one.learner.weights()[n] == v).all() for n, v in two.learner.weights().items()), one.name


def test_a_kept_site_counts_only_while_its_state_is_the_newest(tmp_path: Path, small: Small) -> None:
    """Two actors, one site: whoever was not asked last loads what the other left."""
    config = small()
    site, place = config.sites[0], {"round": 1, "step": 1}
    actors, train = (Kept(), Kept()), Ask("train.local", {}, {"epochs": 1, **place})
    weights = []
    for number, actor in enumerate([actors[0], actors[0], actors[1], actors[0]], 1):
        taken = actor.take(config, site, "run", tmp_path)
        taken.answer(train)
        taken.put_away(number)
        actor.keep(taken, number, 8)
        weights.append(taken.learner.weights())
    assert [actor.loads for actor in actors] == [2, 1]  # the second message found it in memory, the fourth did not
    alone = Kept().take(config, site, "other", tmp_path)
    for number, expected in enumerate(weights):
        alone.answer(train)
        for name, value in alone.learner.weights().items():
            assert (value == expected[name]).all(), (number, name)
    one, two = (actors[0].take(config, site, f"run{n}", tmp_path) for n in (1, 2))
    actors[0].keep(one, 1, 1)
    actors[0].keep(two, 1, 1)
    assert len(actors[0]._nodes) == 1
