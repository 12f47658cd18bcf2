"""Sites' keys: made once, readable by their owner alone, as Flower and OpenSSH read them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fedstill.deploy.coordinator import keys
from fedstill.deploy.coordinator.certificates import CertificateError


def test_a_new_key_is_one_that_flower_takes(tmp_path: Path) -> None:
    path = tmp_path / "site/site.key"
    public = keys.new_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    key = keys.read_key(path)
    assert isinstance(key.curve, ec.SECP384R1)
    assert public.read_text().split()[:2] == keys.public_half(key).split()
    from flwr.cli.supernode.register import try_load_public_key

    assert try_load_public_key(public)
    with pytest.raises(CertificateError, match="a private key is never overwritten"):
        keys.new_key(path)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_the_fingerprint_is_the_one_that_openssh_shows(tmp_path: Path) -> None:
    public = keys.new_key(tmp_path / "site.key")
    shown = subprocess.run(["ssh-keygen", "-l", "-f", public], capture_output=True, text=True, check=True).stdout
    assert shown.split()[1] == keys.fingerprint(public.read_text())


def test_a_key_that_others_can_read_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "site.key"
    keys.new_key(path)
    os.chmod(path, 0o644)
    with pytest.raises(CertificateError, match="chmod 600"):
        keys.read_key(path)
    path.unlink()
    secret = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    path.touch(mode=0o600)
    path.write_bytes(secret)
    with pytest.raises(CertificateError, match="Flower takes ECDSA keys only"):
        keys.read_key(path)
    path.write_text("nothing")
    with pytest.raises(CertificateError, match="is no OpenSSH private key"):
        keys.read_key(path)
    with pytest.raises(CertificateError, match=r"cannot be read \(No such file"):
        keys.read_key(tmp_path / "none.key")


def test_a_private_key_is_not_sent_to_the_coordinator_by_mistake(tmp_path: Path) -> None:
    keys.new_key(tmp_path / "site.key")
    with pytest.raises(CertificateError, match=r"must never leave its site; register the \.pub file"):
        keys.register(tmp_path / "site.key", "north", "nowhere", {"FLWR_HOME": str(tmp_path)})
    (tmp_path / "odd.pub").write_text("ssh-what\n")
    with pytest.raises(CertificateError, match="no OpenSSH public key"):
        keys.register(tmp_path / "odd.pub", "north", "nowhere", {"FLWR_HOME": str(tmp_path)})


def test_a_site_that_nobody_registered_cannot_be_revoked(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="there is no site 'north' at nowhere; registered from here: none"):
        keys.revoke("north", "nowhere", {"FLWR_HOME": str(tmp_path)})


def test_a_new_key_is_in_before_the_old_one_is_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env, calls, last = {"FLWR_HOME": str(tmp_path)}, list[str](), iter(range(7, 99))

    def flwr(words: list[str], env: object) -> dict[str, object]:
        calls.append(words[1])
        if words[1] == "unregister" and len(calls) == 3:
            raise keys.flower.FlowerError("the line is cut")
        return {"node-id": next(last)}

    monkeypatch.setattr(keys.flower, "call", flwr)
    one, two = keys.new_key(tmp_path / "one"), keys.new_key(tmp_path / "two")
    with pytest.raises(CertificateError, match="there is no site 'north'"):
        keys.rotate(two, "north", "c", env)
    keys.register(one, "north", "c", env)
    with pytest.raises(keys.flower.FlowerError):
        keys.rotate(two, "north", "c", env)
    assert keys.rotate(two, "north", "c", env) == 8  # run again: it goes on where it was cut
    assert calls == ["register", "register", "unregister", "unregister"]
    [entry] = keys._book("c", env).values()
    assert entry["fingerprint"] == keys.fingerprint(two.read_text())


def test_registering_the_same_key_twice_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env, last = {"FLWR_HOME": str(tmp_path)}, iter(range(7, 99))
    monkeypatch.setattr(keys.flower, "call", lambda words, env: {"node-id": next(last)})
    one, two = keys.new_key(tmp_path / "one"), keys.new_key(tmp_path / "two")
    assert keys.register(one, "north", "c", env) == 7
    assert keys.register(one, "north", "c", env) == 7
    assert keys.fingerprint_of(7, "c", env) == keys.fingerprint(one.read_text())
    with pytest.raises(CertificateError, match="registered already; revoke it first"):
        keys.register(two, "north", "c", env)
