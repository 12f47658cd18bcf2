"""The coordinator's commands for programs: with --json one line of JSON, and nothing else, on the standard output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedstill.cli import app
from fedstill.deploy.coordinator import keys


def call(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def test_certificates_and_keys_tell_a_program_what_they_made(tmp_path: Path) -> None:
    folder = ["--folder", str(tmp_path / "made")]
    made = call("certs", "new", "--host", "localhost", "--host", "127.0.0.1", *folder)
    assert Path(made["authority"]).is_file()
    assert made["hosts"] == ["localhost", "127.0.0.1"]
    good = call("certs", "check", *folder)
    assert good["hosts"] == made["hosts"]
    assert call("certs", "renew", "--days", "9", *folder)["until"] < good["until"]
    assert Path(call("certs", "server", "--host", "elsewhere", *folder)["certificate"]).is_file()
    assert call("certs", "check", *folder)["hosts"] == ["elsewhere"]
    key = call("keys", "new", str(tmp_path / "site.key"))
    assert key["fingerprint"] == keys.fingerprint(Path(key["public"]).read_text())
    site = call("certs", "site", "north", key["public"], *folder)
    assert Path(site["certificate"]).read_text().startswith("-----BEGIN CERTIFICATE")


def test_a_key_from_a_pipe_is_registered_and_shown(tmp_path: Path) -> None:
    """`... | fedstill keys register /dev/stdin north`: a pipe can be read only once."""
    public = keys.new_key(tmp_path / "site.key").read_text()
    code = "from fedstill.deploy.coordinator import keys; keys.flower.call = lambda words, env: {'node-id': 7}\n"
    code += "from fedstill.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "keys", "register", "/dev/stdin", "north", "--json"],
        input=public, env={**os.environ, "FLWR_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"site": "north", "node": "7", "fingerprint": keys.fingerprint(public)}


def test_a_site_is_shut_out_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr(keys.flower, "call", lambda words, env: {"node-id": 9})
    public = keys.new_key(tmp_path / "site.key")
    call("keys", "register", str(public), "north")
    assert call("keys", "revoke", "north") == {"site": "north", "node": "9"}
