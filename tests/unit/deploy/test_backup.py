"""A coordinator's state in one file: whole, for its owner's eyes, and back only where nothing is."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from fedstill.deploy.coordinator.backup import BackupError, back_up, restore
from fedstill.deploy.coordinator.certificates import Certificates, check_server, make_authority, make_server


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    state, certificates = tmp_path / "here/coordinator", tmp_path / "here/certificates"
    (state / "runs/demo").mkdir(parents=True)
    (state / "runs/demo/events.jsonl").write_text('{"event": "joined"}\n')
    make_authority(certificates)
    make_server(certificates, ["localhost"])
    (tmp_path / "here/flower").mkdir()
    (tmp_path / "here/flower/fedstill-sites.json").write_text('{"coordinator": {}}')
    return {"state": state, "certificates": certificates, "sites": tmp_path / "here/flower/fedstill-sites.json"}


def elsewhere(tmp_path: Path, places: dict[str, Path]) -> dict[str, Path]:
    return {title: tmp_path / "there" / place.name for title, place in places.items()}


def test_a_backup_comes_back_as_it_was_while_the_database_is_written(tmp_path: Path, places: dict[str, Path]) -> None:
    live = sqlite3.connect(places["state"] / "superlink.db")
    live.execute("PRAGMA journal_mode=WAL")
    live.execute("create table runs (name text)")
    live.execute("insert into runs values ('demo')")
    live.commit()
    live.execute("insert into runs values ('half')")  # not committed: a transaction is going on
    count = back_up(tmp_path / "backup.tar", places)
    assert (tmp_path / "backup.tar").stat().st_mode & 0o077 == 0
    new = elsewhere(tmp_path, places)
    assert restore(tmp_path / "backup.tar", new) == count
    assert sqlite3.connect(new["state"] / "superlink.db").execute("select name from runs").fetchall() == [("demo",)]
    assert (new["state"] / "runs/demo/events.jsonl").read_text() == '{"event": "joined"}\n'
    assert new["sites"].read_text() == '{"coordinator": {}}'
    assert check_server(Certificates.of(new["certificates"]))  # keys and their modes, too
    live.close()


def test_a_damaged_backup_restores_nothing(tmp_path: Path, places: dict[str, Path]) -> None:
    back_up(tmp_path / "backup.tar", places)
    data = (tmp_path / "backup.tar").read_bytes()
    at = data.index(b'"joined"')
    (tmp_path / "backup.tar").write_bytes(data[:at] + b'"change' + data[at + 7 :])
    with pytest.raises(BackupError, match=r"events\.jsonl is damaged or missing; nothing was restored"):
        restore(tmp_path / "backup.tar", elsewhere(tmp_path, places))
    assert not (tmp_path / "there").exists()
    (tmp_path / "backup.tar").write_bytes(data[: len(data) // 2])
    with pytest.raises(BackupError):
        restore(tmp_path / "backup.tar", elsewhere(tmp_path, places))


def test_nothing_is_overwritten_by_either(tmp_path: Path, places: dict[str, Path]) -> None:
    back_up(tmp_path / "backup.tar", places)
    with pytest.raises(BackupError, match="a backup is never overwritten"):
        back_up(tmp_path / "backup.tar", places)
    with pytest.raises(BackupError, match="is there already; move it away first"):
        restore(tmp_path / "backup.tar", places)
