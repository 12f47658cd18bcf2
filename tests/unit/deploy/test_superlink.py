"""`fedstill superlink`: what Flower's SuperLink is started with, and that a run hears of it."""

from __future__ import annotations

import os
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from fedstill.common.config import ConfigError
from fedstill.common.config.files import load_run
from fedstill.deploy import flower_commands as flower
from fedstill.deploy.coordinator.certificates import CertificateError, make_certificates
from fedstill.deploy.coordinator.superlink import Listening, prepare
from fedstill.server.app import with_environment


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    return tmp_path / "flower"


def test_tls_authentication_and_a_database_are_on(tmp_path: Path, home: Path) -> None:
    files = make_certificates(tmp_path / "certificates", ("coordinator.example.org", "127.0.0.1"))
    command, env, connection = prepare(Listening(), files.key.parent, tmp_path / "state", "coordinator")
    assert command[:2] == ["flower-superlink", "--disable-runtime-dependency-installation"]
    assert "--enable-supernode-auth" in command
    assert "--insecure" not in command
    given = dict(pairwise(command))
    assert given["--ssl-keyfile"] == str(files.key)
    assert given["--database"] == str(tmp_path / "state/superlink.db")
    assert (given["--host"], given["--fleet-api-address"]) == ("127.0.0.1", "0.0.0.0:9092")
    assert env["FEDSTILL_ADVERTISE"] == "coordinator.example.org:9093"
    assert connection == {"address": "127.0.0.1:8000", "root-certificates": str(files.authority)}
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def test_a_connection_is_added_and_the_others_stay(home: Path) -> None:
    flower.write_connection(home, "old", {"address": "a:1", "insecure": True})
    flower.add_connection(home, "new", {"address": "b:2"})
    known = tomllib.loads((home / "config.toml").read_text())["superlink"]
    assert known == {"default": "old", "old": {"address": "a:1", "insecure": True}, "new": {"address": "b:2"}}


def test_what_nobody_could_trust_is_not_started(tmp_path: Path, home: Path) -> None:
    with pytest.raises(ConfigError, match="Give one of the two"):
        prepare(Listening(), None, tmp_path, "coordinator")
    files = make_certificates(tmp_path / "certificates", ("coordinator.example.org",))
    with pytest.raises(
        ConfigError, match=r"fedstill certs server --host coordinator\.example\.org --host 127\.0\.0\.1"
    ):
        prepare(Listening(), files.key.parent, tmp_path, "coordinator")
    os.chmod(files.key, 0o644)
    with pytest.raises(CertificateError, match="chmod 600"):
        prepare(Listening(), files.key.parent, tmp_path, "coordinator")
    assert not (home / "config.toml").exists()


def test_a_run_listens_where_the_coordinator_says_unless_it_says_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSTILL_LISTEN", "0.0.0.0:9093")
    sent = load_run(load_run("rounds = 1\n").to_json())  # as it travels: every value written out
    assert with_environment(sent).exchange.listen == "0.0.0.0:9093"
    own = load_run('[exchange]\nlisten = "10.0.0.1:7000"\n')
    assert with_environment(own).exchange.listen == "10.0.0.1:7000"
