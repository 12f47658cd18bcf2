"""The ledger: a chain that shows what was changed, taken out or cut off; on disk before anything leaves."""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedstill.client.release.ledger import START, Ledger, LedgerError, verify
from fedstill.common.checkpoint import append_line
from fedstill.common.lock import only_one
from fedstill.common.wire import Ask, Reply
from fedstill.deploy.coordinator.certificates import make_certificates
from fedstill.deploy.site.client import app
from fedstill.deploy.site.ledger import check_ledger
from fedstill.server.countersign import signature


def is_free(lock: Path) -> bool:
    """Whether nobody holds a lock file."""
    try:
        with only_one(lock, BlockingIOError()):
            return True
    except BlockingIOError:
        return False


def fill(path: str, count: int = 5) -> Ledger:
    ledger = Ledger(Path(path), "run")
    for number in range(count):
        ledger.leaves(Ask("query.predictions", settings={"round": number}), Reply("a", {"logits": np.zeros((2, 2))}))
    return ledger


def test_a_ledger_is_one_chain_from_its_first_line_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = fill(str(path))
    ledger.not_joined(ValueError("the run names files on this site's disk"))
    assert verify(path) == (6, ledger.head())
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["before"] == START
    assert (lines[-1]["verb"], lines[-1]["refused"][:10]) == ("join", "ValueError")
    assert path.stat().st_mode & 0o077 == 0
    assert len({line["salt"] for line in lines}) == 6  # else a hash would tell what a guessed line says


@pytest.mark.parametrize("number", [0, 2, 3])
def test_a_line_that_was_changed_or_taken_out_shows(tmp_path: Path, number: int) -> None:
    path = tmp_path / "ledger.jsonl"
    fill(str(path))
    lines = path.read_text().splitlines(keepends=True)
    changed = [*lines[:number], lines[number].replace("query.predictions", "query.save"), *lines[number + 1 :]]
    for wrong in (changed, lines[:number] + lines[number + 1 :], [*lines[:number], lines[number], *lines[number:]]):
        path.write_text("".join(wrong))
        with pytest.raises(LedgerError, match=r"line \d does not follow"):
            verify(path)
    path.write_text("".join(lines)[:-20])
    with pytest.raises(LedgerError, match="line 5 is cut off"):
        verify(path)


def test_an_end_that_was_taken_off_shows_by_the_runs_record(tmp_path: Path) -> None:
    path, run = tmp_path / "ledger.jsonl", tmp_path / "demo"
    head = fill(str(path)).head()
    run.mkdir()
    files = make_certificates(tmp_path / "certificates")
    heads = {"north": head}
    event = {"event": "ledgers", "round": 1, "heads": heads, "signature": signature(files.key, "demo", 1, heads)}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    fill(str(path), 2)
    assert "heads of 1 rounds" in check_ledger(path, "north", run / "events.jsonl", files.certificate)
    (run / "events.jsonl").write_text(json.dumps({**event, "round": 2}) + "\n")
    with pytest.raises(LedgerError, match="are not signed by"):
        check_ledger(path, "north", run / "events.jsonl", files.certificate)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    assert verify(path)[0] == 4  # a chain, but not up to where the run saw it
    with pytest.raises(LedgerError, match="its end was taken off"):
        check_ledger(path, "north", run / "events.jsonl")


def test_processes_of_one_site_write_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with ProcessPoolExecutor(3, get_context("spawn")) as pool:
        list(pool.map(fill, [str(path)] * 3, [20] * 3))
    assert verify(path)[0] == 60


def test_a_line_follows_from_the_one_before_under_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a quiet machine processes hardly ever meet: whether they could is seen by the lock alone."""
    free: list[bool] = []

    def look(path: Path, *rest: object, **options: object) -> None:
        free.append(is_free(path.with_suffix(".lock")))
        append_line(path, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("fedstill.client.release.ledger.append_line", look)
    fill(str(tmp_path / "ledger.jsonl"), 2)
    assert free == [False, False]
    assert is_free(tmp_path / "ledger.lock")


def test_a_line_is_synced_before_anything_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    fill(str(tmp_path / "ledger.jsonl"), 1)
    assert synced == ["ledger.jsonl"]


def test_flower_client_verifies_the_ledger(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(f'name = "north"\nmodel = "tiny-bert"\nstate = "{tmp_path}/state"\n')
    path = tmp_path / "state/north/ledger.jsonl"
    fill(str(path), 3)
    command = ["ledger", "verify", "--site", str(tmp_path / "site.toml")]
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, "3 lines, unbroken" in done.output) == (0, True)
    path.write_text(path.read_text().replace("query", "Query", 1))
    assert isinstance(CliRunner().invoke(app, command).exception, LedgerError)
