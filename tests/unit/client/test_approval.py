"""Sites say yes: what is announced, who approves it, and that nothing else is answered."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from typer.testing import CliRunner

from fedstill.client.app import join
from fedstill.client.node import Node
from fedstill.client.release.approval import (
    Approvals,
    NotApproved,
    announcement,
    code_hash,
    require,
    verbs_of,
    why_not,
)
from fedstill.client.release.limits import Refused
from fedstill.common.config import ApprovalConfig, RunConfig, SiteConfig
from fedstill.common.maths.privacy import Use, epsilon_of
from fedstill.common.wire import Ask, from_records, to_records
from fedstill.deploy.site.client import app

Small = Callable[..., RunConfig]
ROOMS = ("client", "common", "deploy", "fedstill", "server", "strategies")  # all that an app's process imports


def site(**rules: object) -> SiteConfig:
    return SiteConfig.model_validate({"name": "clinic", "model": "tiny-bert", "approval": {"wait": 0, **rules}})


def test_an_announcement_says_what_the_run_will_ask(small: Small, tmp_path: Path) -> None:
    told = announcement(small("method.name=ds-fl"), "demo", site(), tmp_path)
    assert (told["method"], told["rounds"], told["leaves"]) == ("ds-fl", 2, ["predictions"])
    assert "query.predictions" in told["verbs"]
    assert "train.parameters" not in told["verbs"]
    assert announcement(small("method.name=fedavg"), "demo", site(), tmp_path)["leaves"] == ["weights"]


@pytest.mark.parametrize(
    ("method", "predictions", "mb"),
    [
        ("method.name=ds-fl", 2 * 40, 2 * 40 * 2 * 4 / 1e6),  # rounds x texts; x classes x bytes of a number
        ("method.name=fedid", 2 * 3 * 40, 2 * 3 * 40 * 2 * 4 / 1e6),  # as often as there are passes
        ("method.name=fedavg", None, None),  # weights: how many, only the loaded model tells
    ],
)
def test_an_announcement_says_how_much_and_at_what_cost(
    small: Small, tmp_path: Path, method: str, predictions: int | None, mb: float | None
) -> None:
    config = small(method, *(["method.distill_epochs=3"] if "fedid" in method else []))
    hides = {"epsilon": 50.0, "noise_multiplier": 4.0}
    own = SiteConfig.model_validate({**site().model_dump(exclude_unset=True), "privacy": hides})
    told = announcement(config, "demo", own, tmp_path)
    assert (told.get("predictions"), told.get("mb")) == (predictions, None if mb is None else round(mb, 3))
    assert (told["privacy"]["spent"], told["privacy"]["left"]) == (0, 50)
    if predictions is not None:
        cost = epsilon_of({Use(4.0): predictions}, 1e-5)
        assert told["privacy"]["left_after"] == pytest.approx(50 - cost, abs=1e-3)
        rules = ApprovalConfig.model_validate({"methods": ["ds-fl", "fedid"], "least_epsilon": 50 - cost / 2})
        assert why_not(rules, told)  # enough is left now, and not after the run
        assert not why_not(rules.model_copy(update={"least_epsilon": 50 - cost - 0.01}), told)


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
        require(config, "demo", site(), tmp_path)  # each time as the owner said yes to it
        with pytest.raises(NotApproved):
            require(other, "demo", site(), tmp_path)
        Approvals(tmp_path).announce(announcement(config, "demo", site(), tmp_path))
        Approvals(tmp_path).approve("demo", "ann")
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


def test_the_yes_is_for_what_was_announced_when_it_was_given(small: Small, tmp_path: Path) -> None:
    book = Approvals(tmp_path)
    told = announcement(small("method.name=ds-fl"), "demo", site(), tmp_path)
    book.announce(told)
    assert not book.approved(told)
    book.approve("demo", "ann")
    assert book.approved(told)
    assert not book.approved(announcement(small("method.name=ds-fl", "seed=2"), "demo", site(), tmp_path))
    assert not book.approved({**told, "run": "other"})


def test_another_configuration_under_the_same_name_waits_again(small: Small, tmp_path: Path) -> None:
    book = Approvals(tmp_path)
    first = announcement(small("method.name=ds-fl"), "demo", site(), tmp_path)
    second = announcement(small("method.name=fedavg"), "demo", site(), tmp_path)
    book.announce(first)
    book.approve("demo", "ann")
    book.announce(first)  # as when the site's process is started again
    assert book.approved(first)
    book.announce(second)
    assert [told["method"] for told in book.waiting()] == ["fedavg"]  # what an owner is shown is what a yes is for
    book.approve("demo", "ann")
    assert book.approved(second)


def test_the_hash_of_the_code_changes_with_any_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fedstill

    root = Path(fedstill.__file__).parents[1]
    for room in ROOMS:
        shutil.copytree(root / room, tmp_path / room, ignore=shutil.ignore_patterns("weights", "__pycache__"))
    monkeypatch.setattr(fedstill, "__path__", [str(tmp_path)])
    found = [code_hash.__wrapped__("fedstill.strategies.dsfl")]
    for room in ROOMS:
        file = sorted((tmp_path / room).rglob("*.py"))[-1]
        file.write_text(file.read_text() + "\n# changed\n")
        found.append(code_hash.__wrapped__("fedstill.strategies.dsfl"))
    assert len(set(found)) == 1 + len(ROOMS)
    (tmp_path / "client/more.py").write_text("")
    assert code_hash.__wrapped__("fedstill.strategies.dsfl") not in found


def test_a_join_waits_for_the_sites_yes_and_a_refused_one_is_in_the_ledger(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)  # as in a ClientApp's process
    (tmp_path / "site.toml").write_text(
        f'name = "north"\nmodel = "tiny-bert"\nstate = "{tmp_path}/state"\n[approval]\nwait = 0\n'
    )
    config = small("method.name=ds-fl").to_json()
    asked = to_records({}, {"config": config, "run": "demo", "link": "messages"})
    context = Context(1, 1, {"site": str(tmp_path / "site.toml")}, RecordDict(), {})
    message = Message(asked, 1, "query.join")
    ledger = tmp_path / "state/north/ledger.jsonl"
    with pytest.raises(RuntimeError, match="site north has not approved run demo"):
        join(message, context)
    [line] = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert (line["verb"], line["refused"][:11]) == ("join", "NotApproved")
    assert not (tmp_path / "state/north/demo").exists()  # no model was loaded, no folder made for the run
    Approvals(tmp_path / "state/north").approve("demo", "ann")
    assert from_records(join(message, context).content)[1]["name"] == "north"
    assert json.loads(ledger.read_text().splitlines()[-1])["says"]["name"] == "north"


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
    listed = runner.invoke(app, ["approve", *where]).output
    [told] = Approvals(folder).waiting()
    assert f"demo {told['hash'][:16]}: ds-fl, 2 rounds" in listed
    assert '"predictions": 80' in listed
    with pytest.raises(NotApproved):  # the coordinator announces another run under this name, after the owner looked
        require(small("method.name=ds-fl", "rounds=9"), "demo", site(), folder)
    other = runner.invoke(app, ["approve", "demo", told["hash"][:16], *where])
    assert "was announced anew with another configuration" in str(other.exception)
    with pytest.raises(NotApproved):
        require(small("method.name=ds-fl"), "demo", site(), folder)
    assert "demo is approved" in runner.invoke(app, ["approve", "demo", told["hash"][:16], *where]).output
    require(small("method.name=ds-fl"), "demo", site(), folder)
    [line] = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert (line["verb"], line["says"]["run"]) == ("approve", "demo")
    assert isinstance(runner.invoke(app, ["approve", "nothing", *where]).exception, NotApproved)
