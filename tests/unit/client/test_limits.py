"""What a site lets out: kinds, verbs, bytes; a refusal says why to the coordinator and is written down at the site."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedstill.client.node import Node
from fedstill.client.release.limits import Gate, Refused, check_files
from fedstill.common.config import ConfigError, LimitsConfig, RunConfig, SiteConfig
from fedstill.common.config.files import load_run
from fedstill.common.wire import Ask, Reply
from fedstill.strategies import VERBS

ROWS = np.arange(4)


def gate(folder: Path, answer: Callable[[Ask], Reply], run: str = "run", **limits: object) -> Gate:
    site = SiteConfig(name="clinic", limits=LimitsConfig.model_validate(limits))
    return Gate(site, run, folder, answer)


def numbers(ask: Ask) -> Reply:
    return Reply("clinic", {"logits": np.zeros((250, 2), np.float32)}, {"texts": 3})


def never(ask: Ask) -> Reply:
    raise AssertionError("a refused Ask was worked on")


def test_verbs_declare_what_real_answers_hold(small: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = small()
    node = Node(config, config.sites[0], "run", tmp_path)
    noise = {"seed": 1, "count": 2, "length": 4}
    asks = [
        Ask("query.predictions", {"rows": ROWS}),
        Ask("query.logits", {"rows": ROWS}),
        Ask("query.bias", settings=noise),
        Ask("query.counts"),
        Ask("query.trained"),
        Ask("query.shapes"),
        Ask("train.local", settings={"epochs": 1}),
        Ask("train.parameters", settings={"epochs": 1}),
        Ask("evaluate.test"),
    ]
    kinds = {"logits": "predictions", "items": "predictions", "bias": "predictions", "counts": "counts"}
    for ask in asks:
        held = {"counts" if name == "gamma" else kinds.get(name, "weights") for name in node.answer(ask).arrays}
        assert held == set(VERBS[ask.verb].leaves), ask.verb


def test_predictions_only_refuses_weights_before_any_work(tmp_path: Path) -> None:
    strict = gate(tmp_path, never, leave=["predictions"])
    for verb in ("train.parameters", "query.trained", "query.counts", "query.features"):
        with pytest.raises(Refused, match=r"site clinic refuses .*limits\.leave has only predictions.*site\.toml"):
            strict.answer(Ask(verb))
    with pytest.raises(Refused, match=r"query\.unheard-of: no method that is installed here has this verb"):
        gate(tmp_path, never).answer(Ask("query.unheard-of"))
    with pytest.raises(Refused, match=r"clinic refuses query\.\(red\) \[2J: no method"):  # it styles no log of the site
        gate(tmp_path, never).answer(Ask("query.[red]\x1b[2J"))
    assert gate(tmp_path, numbers, leave=["predictions"]).answer(Ask("query.predictions")).metrics == {"texts": 3}


def test_an_answer_that_holds_more_than_its_verb_should_is_kept_back(tmp_path: Path) -> None:
    def sly(ask: Ask) -> Reply:
        return Reply("clinic", {"encoder.weight": np.zeros(3, np.float32)})

    with pytest.raises(Refused, match=r"the answer holds .encoder\.weight., and evaluate\.test does not declare it"):
        gate(tmp_path, sly, leave=["predictions"]).answer(Ask("evaluate.test"))


def test_a_refusal_is_in_the_ledger_and_nothing_that_was_kept_back(
    small: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = small()
    limits = LimitsConfig(verbs=["query.predictions", "query.counts"], leave=["predictions"])
    node = Node(config, config.sites[0].model_copy(update={"limits": limits}), "run", tmp_path)
    for verb in ("evaluate.test", "query.counts"):
        with pytest.raises(Refused, match=r"limits\.(verbs has only query\.predictions|leave has only predictions)"):
            node.answer(Ask(verb))
    node.answer(Ask("query.predictions", {"rows": ROWS}))
    noted = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [line["verb"] for line in noted] == ["evaluate.test", "query.counts", "query.predictions"]
    assert "limits.verbs" in noted[0]["refused"]
    assert "limits.leave" in noted[1]["refused"]
    assert "arrays" not in noted[1]
    assert noted[2]["arrays"]["logits"]["shape"] == [4, 2]


def test_bytes_are_counted_by_run_and_by_day_and_outlive_the_process(tmp_path: Path) -> None:
    one = numbers(Ask("")).size
    most = 2.5 * one / 1e6
    first = gate(tmp_path, numbers, mb_per_run=most)
    first.answer(Ask("query.predictions"))
    gate(tmp_path, numbers, mb_per_run=most).answer(Ask("query.predictions"))  # as after a restart
    with pytest.raises(Refused, match=r"limits\.mb_per_run is"):
        first.answer(Ask("query.predictions"))
    assert json.loads((tmp_path / "sent.json").read_text())["runs"] == {"run": 2 * one}
    other = gate(tmp_path, numbers, run="other", mb_per_run=most, mb_per_day=most)
    with pytest.raises(Refused, match=r"limits\.mb_per_day is"):
        other.answer(Ask("query.predictions"))


def test_a_limit_that_is_reached_costs_no_work(tmp_path: Path) -> None:
    one = numbers(Ask("")).size
    gate(tmp_path, numbers, mb_per_run=one / 1e6).answer(Ask("query.predictions"))
    with pytest.raises(Refused):
        gate(tmp_path, never, mb_per_run=one / 1e6).answer(Ask("query.predictions"))


def test_a_run_names_no_files_on_a_sites_disk(tmp_path: Path) -> None:
    run = load_run('[task]\nname = "files"\ntrain = "/etc/notes.csv"\nlabels = ["a", "b"]\n')
    site = SiteConfig(name="clinic")
    with pytest.raises(ConfigError, match=r"names files on this site's disk \(task\.train\).*limits\.run_files"):
        check_files(run, site)
    check_files(run, site.model_copy(update={"limits": LimitsConfig(run_files=True)}))
    own = SiteConfig.model_validate({"name": "clinic", "data": {"private": "mine.csv", "public": "public.csv"}})
    check_files(run, own)
    with pytest.raises(ConfigError):
        check_files(run.model_copy(update={"task": run.task.model_copy(update={"labels": None})}), own)
    check_files(load_run("rounds = 1\n"), site)
