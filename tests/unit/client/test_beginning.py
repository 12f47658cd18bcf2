"""A site that hides its texts tells no coordinator why it cannot begin: the reason may quote a label."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedstill.client.app import answer_message, join
from fedstill.common.config import RunConfig
from fedstill.common.wire import to_records


@pytest.fixture
def asked(small: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Message]:
    """Messages of a run whose labels are none of the site's own."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)  # as in a ClientApp's process
    (tmp_path / "notes.csv").write_text("text,label\na note,a rare disease\n" * 4)
    config = small("method.name=ds-fl").to_json()

    def message(verb: str) -> Message:
        facts = {"config": config, "run": "demo", "link": "messages", "settings": {}, "number": 1}
        return Message(to_records({}, facts), 1, verb)

    return message


def context(folder: Path, privacy: str) -> Context:
    text = f'name = "north"\nmodel = "tiny-bert"\nstate = "{folder}/state"\n[data]\nprivate = "notes.csv"\n{privacy}'
    (folder / "site.toml").write_text(text)
    return Context(1, 1, {"site": str(folder / "site.toml")}, RecordDict(), {})


# a coordinator may send the second without ever having sent the first
@pytest.mark.parametrize(("verb", "handler"), [("query.join", join), ("query.predictions", answer_message)])
def test_a_reason_that_quotes_a_label_stays_at_the_site(
    verb: str, handler: Callable[[Message, Context], Message], asked: Callable[..., Message], tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="a rare disease"):
        handler(asked(verb), context(tmp_path, ""))
    with pytest.raises(RuntimeError, match="its own log says why") as error:
        handler(asked(verb), context(tmp_path, "[privacy]\nepsilon = 8.0\nnoise_multiplier = 4.0\n"))
    assert "disease" not in str(error.value)
    assert error.value.__cause__ is None
    lines = [json.loads(line) for line in (tmp_path / "state/north/ledger.jsonl").read_text().splitlines()]
    assert ["a rare disease" in line["refused"] for line in lines] == [True, True]
