"""Sites say yes: what is announced, who approves it, and that nothing else is answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedstill.client.node import Node
from fedstill.client.release.approval import Approvals, NotApproved, announcement, require, verbs_of, why_not
from fedstill.client.release.limits import Refused
from fedstill.common.config import ApprovalConfig, RunConfig, SiteConfig
from fedstill.common.wire import Ask
from fedstill.deploy.site.client import app

Small = Callable[..., RunConfig]


def site(**rules: object) -> SiteConfig:
    return SiteConfig.model_validate({"name": "clinic", "model": "tiny-bert", "approval": {"wait": 0, **rules}})


def test_an_announcement_says_what_the_run_will_ask(small: Small, tmp_path: Path) -> None:
    told = announcement(small("method.name=ds-fl"), "demo", site(), tmp_path)
    assert (told["method"], told["rounds"], told["leaves"]) == ("ds-fl", 2, ["predictions"])
    assert "query.predictions" in told["verbs"]
    assert "train.parameters" not in told["verbs"]
    assert announcement(small("method.name=fedavg"), "demo", site(), tmp_path)["leaves"] == ["weights"]


def test_a_run_is_refused_until_its_owner_says_yes_and_then_only_as_it_was(small: Small, tmp_path: Path) -> None:
    config = small("method.name=ds-fl")
    with pytest.raises(NotApproved, match=r"has not approved run demo .* flower-client approve demo"):
        require(config, "demo", site(), tmp_path)
    assert [told["run"] for told in Approvals(tmp_path).waiting()] == ["demo"]
    Approvals(tmp_path).approve("demo", "ann")
    require(config, "demo", site(), tmp_path)
    for other in (
        small("method.name=fedavg"),
        small("method.name=ds-fl", "rounds=3"),
        small("method.name=ds-fl", "seed=2"),
    ):
        with pytest.raises(NotApproved):
            require(other, "demo", site(), tmp_path)
    with pytest.raises(NotApproved):
        require(config, "../demo", site(), tmp_path)
    require(small("rounds=9"), "other", SiteConfig(name="clinic", model="tiny-bert"), tmp_path)  # no rules, no question


def test_other_code_needs_another_yes(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small("method.name=ds-fl")
    with pytest.raises(NotApproved):
        require(config, "demo", site(), tmp_path)
    Approvals(tmp_path).approve("demo", "ann")
    monkeypatch.setattr("fedstill.client.release.approval.code_hash", lambda method: "0" * 64)
    with pytest.raises(NotApproved):
        require(config, "demo", site(), tmp_path)


def test_an_owner_may_answer_while_the_run_waits(small: Small, tmp_path: Path) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            Approvals(tmp_path).approve("demo", "ann")

    require(small("method.name=ds-fl"), "demo", site(wait=600), tmp_path, sleep)
    assert len(waited) == 3


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({}, "approval.methods has not ds-fl"),
        ({"methods": ["fedavg"]}, "approval.methods has not ds-fl"),
        ({"methods": ["ds-fl"], "most_rounds": 1}, "2 rounds, and approval.most_rounds is 1"),
        ({"methods": ["ds-fl"], "most_mb": 5}, "limits.mb_per_run lets None MB out"),
        ({"methods": ["ds-fl"], "least_epsilon": 1}, "is left of the privacy budget"),
        ({"methods": ["ds-fl"], "most_rounds": 2}, None),
    ],
)
def test_rules_approve_what_they_name(
    small: Small, tmp_path: Path, rules: dict[str, object], reason: str | None
) -> None:
    told = announcement(small("method.name=ds-fl"), "demo", site(), tmp_path)
    found = why_not(ApprovalConfig.model_validate(rules), told)
    assert found == [] if reason is None else any(reason in one for one in found)
    if reason is None:
        require(small("method.name=ds-fl"), "demo", site(**rules), tmp_path)
        assert not Approvals(tmp_path).waiting()


def test_an_approved_run_asks_what_was_announced_and_no_longer(small: Small, tmp_path: Path) -> None:
    config = small("method.name=ds-fl", 'sites.north.approval={methods=["ds-fl"]}')
    node = Node(config, config.sites[0], "demo", tmp_path)
    node.answer(Ask("train.local", settings={"epochs": 1, "round": 2}))
    with pytest.raises(Refused, match="the run was announced without it"):
        node.answer(Ask("train.parameters", settings={"epochs": 1}))
    with pytest.raises(Refused, match="announced with 2 rounds"):
        node.answer(Ask("train.local", settings={"epochs": 1, "round": 3}))
    assert "train.parameters" not in verbs_of(config)


def test_flower_client_lists_and_approves(small: Small, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(
        f'name = "clinic"\nmodel = "tiny-bert"\nstate = "{tmp_path}/state"\n[approval]\n'
    )
    folder = tmp_path / "state/clinic"
    with pytest.raises(NotApproved):
        require(small("method.name=ds-fl"), "demo", site(), folder)
    runner, where = CliRunner(), ["--site", str(tmp_path / "site.toml")]
    assert "demo: ds-fl, 2 rounds" in runner.invoke(app, ["approve", *where]).output
    assert "demo is approved" in runner.invoke(app, ["approve", "demo", *where]).output
    require(small("method.name=ds-fl"), "demo", site(), folder)
    [line] = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert (line["verb"], line["says"]["run"]) == ("approve", "demo")
    assert isinstance(runner.invoke(app, ["approve", "nothing", *where]).exception, NotApproved)
