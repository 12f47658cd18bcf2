"""`flower-client --check`: each check made to fail, and what it says then; a real TLS server where one is needed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstill.common.config import ConfigError, SiteFile
from fedstill.common.config.files import load_site
from fedstill.deploy.coordinator.certificates import Certificates, make_certificates
from fedstill.deploy.coordinator.keys import fingerprint, new_key
from fedstill.deploy.processes import free_port
from fedstill.deploy.site import checks, probe
from fedstill.deploy.site.checks import Check, Failed, check_site
from fedstill.deploy.site.client import supernode_command

DATA = "text,label\nfine work,good\npoor work,bad\nvery fine,good\n ,bad\n"


def site_of(folder: Path, more: str = "") -> SiteFile:
    (folder / "site.toml").write_text(f'name = "clinic"\nmodel = "tiny-bert"\n{more}')
    return load_site(folder / "site.toml")


@contextlib.contextmanager
def listening(files: Certificates | None) -> Iterator[str]:
    """A server that shakes hands and hangs up; without TLS if there are no certificates."""
    server = socket.create_server(("127.0.0.1", 0))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if files is not None:
        context.load_cert_chain(files.certificate, files.key)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = server.accept()
                with contextlib.suppress(OSError), plain:
                    if files is None:
                        plain.sendall(b"hello\r\n")
                    else:
                        context.wrap_socket(plain, server_side=True).close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def failed(look: Any, *arguments: Any) -> Failed:
    with pytest.raises(Failed) as error:
        look(*arguments)
    return error.value


# --- the file ---


def test_relative_paths_begin_at_the_file(tmp_path: Path) -> None:
    site = site_of(
        tmp_path,
        'superlink = "[::1]:9092"\nroot_certificates = "ca.crt"\nprivate_key = "/keys/site.key"\nstate = "state"\n'
        '[data]\nprivate = "notes/mine.csv"\n[limits]\nleave = ["predictions"]\n',
    )
    assert site.data is not None
    assert (site.root_certificates, site.private_key) == (tmp_path / "ca.crt", Path("/keys/site.key"))
    assert (site.state, site.data.private) == (tmp_path / "state", tmp_path / "notes/mine.csv")
    assert site.model == "tiny-bert"
    assert site.limits.leave == ["predictions"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('superlink = "https://x:1"', "superlink"),
        ('superlink = "coordinator"', "superlink"),
        ('insecure = true\nprivate_key = "k"', "insecure = true and private_key exclude each other"),
        ('[limits]\nleave = ["texts"]', "limits.leave.0"),
        ('peers = "peers"', "this site has no private_key to sign"),
        ("[limits]\nmb_per_day = 0", "limits.mb_per_day"),
        ('public_hash = "abc"', "public_hash"),
        (f'public_hash = "{"a" * 64}"', "there is none: name the file"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        site_of(tmp_path, text)
    assert said in str(error.value)


def test_the_supernode_gets_what_the_file_says(tmp_path: Path) -> None:
    trust = 'superlink = "c.example.org:9092"\nroot_certificates = "ca.crt"\nprivate_key = "site.key"\nport = 9101\n'
    command = supernode_command(tmp_path / "site.toml", site_of(tmp_path, f'{trust}health = "127.0.0.1:9110"\n'))
    assert command == [
        sys.executable, "-m", "fedstill.deploy.site.supernode", "--root-certificates", f"{tmp_path}/ca.crt",
        "--auth-supernode-private-key", f"{tmp_path}/site.key", "--superlink", "c.example.org:9092",
        "--host", "127.0.0.1", "--port", "9101", "--health-server-address", "127.0.0.1:9110",
        "--node-config", f'site="{tmp_path}/site.toml"',
    ]  # fmt: skip
    for more in ("", 'superlink = "c:1"\n', 'superlink = "c:1"\nroot_certificates = "ca.crt"\n'):
        with pytest.raises(ConfigError, match=r"superlink is missing|private_key are needed"):
            supernode_command(tmp_path / "site.toml", site_of(tmp_path, more))


# --- the network ---


def test_an_address_that_does_not_answer(tmp_path: Path) -> None:
    assert "names no SuperLink" in str(failed(checks.address, site_of(tmp_path)))
    port = free_port()
    with pytest.raises(probe.ProbeError, match=rf"127\.0\.0\.1:{port}: Connection refused"):
        checks.address(site_of(tmp_path, f'superlink = "127.0.0.1:{port}"\n'))
    with pytest.raises(probe.ProbeError, match=r"the name no-such-host\.invalid is not known here"):
        checks.address(site_of(tmp_path, 'superlink = "no-such-host.invalid:1"\n'))


def test_tls_with_the_right_authority_and_with_wrong_ones(tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "right")
    other = make_certificates(tmp_path / "other")
    elsewhere = make_certificates(tmp_path / "elsewhere", ("elsewhere.example.org",))
    with listening(files) as address:
        text = f'superlink = "{address}"\nroot_certificates = '
        assert "trusted until" in checks.tls(site_of(tmp_path, f'{text}"{files.authority}"\n'))
        with pytest.raises(probe.ProbeError, match="its certificate is not trusted"):
            checks.tls(site_of(tmp_path, f'{text}"{other.authority}"\n'))
        assert "names no authority" in str(failed(checks.tls, site_of(tmp_path, f'superlink = "{address}"\n')))
    with listening(elsewhere) as address, pytest.raises(probe.ProbeError, match=r"not trusted \(IP address mismatch"):
        checks.tls(site_of(tmp_path, f'superlink = "{address}"\nroot_certificates = "{elsewhere.authority}"\n'))
    with listening(None) as address, pytest.raises(probe.ProbeError, match="does not speak TLS"):
        checks.tls(site_of(tmp_path, f'superlink = "{address}"\nroot_certificates = "{files.authority}"\n'))


def test_a_key_shows_its_public_half_and_a_missing_one_its_cure(tmp_path: Path) -> None:
    error = failed(checks.key, site_of(tmp_path))
    assert "fedstill keys new" in error.cure
    public = new_key(tmp_path / "site.key").read_text().strip()
    site = site_of(tmp_path, 'private_key = "site.key"\n')
    assert public in checks.key(site)
    assert fingerprint(public) in checks.key(site)
    os.chmod(tmp_path / "site.key", 0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        checks.key(site)


@given(st.floats(-3600, 3600))
def test_the_clocks_difference_is_found_to_the_second(ahead: float) -> None:
    """The SuperLink takes a time t if -5 < its clock - t < 305; here its clock is `ahead` of ours."""
    found = probe.clock_ahead(lambda told: -5 < ahead - told < 305)
    assert found is not None
    assert abs(found - ahead) <= 1


def test_a_clock_that_is_hours_off_is_not_found() -> None:
    assert probe.clock_ahead(lambda told: -5 < 20_000 - told < 305) is None


# --- the machine ---


def test_versions_beside_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"flwr {metadata.version('flwr')}" in checks.versions()
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.20.0" if name == "flwr" else real(name))
    error = failed(checks.versions)
    assert "flwr 1.20.0 is installed, and fedstill needs" in str(error)
    assert error.cure.startswith("pip install 'flwr")


def test_data_are_counted_by_label_and_wrong_columns_are_named(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(DATA)
    table = 'labels = ["bad", "good", "fair"]\n[data]\nprivate = "mine.csv"\n'
    assert checks.data(site_of(tmp_path, table)) == "3 texts: bad 1, good 2, fair 0; 1 blank ones left out"
    for text, said in (
        ('[data]\nprivate = "mine.csv"\ntext = "txt"\n', "there is no column 'txt'"),
        ('labels = ["bad", "fair"]\n[data]\nprivate = "mine.csv"\n', "label 'good' is none of bad, fair"),
        ('[data]\nprivate = "none.csv"\n', r"none\.csv: cannot be read"),
    ):
        with pytest.raises(ValueError, match=said):
            checks.data(site_of(tmp_path, text))


def test_the_public_file_is_the_agreed_one(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(DATA)
    (tmp_path / "public.csv").write_text("text\nsome\n")
    right = hashlib.sha256(b"text\nsome\n").hexdigest()
    table = '[data]\nprivate = "mine.csv"\npublic = "public.csv"\n'
    assert right in checks.public_data(site_of(tmp_path, table))
    assert "as agreed" in checks.public_data(site_of(tmp_path, f'public_hash = "{right}"\n{table}'))
    assert "agreed was aaaaaaaa" in str(
        failed(checks.public_data, site_of(tmp_path, f'public_hash = "{"a" * 64}"\n{table}'))
    )


def test_limits_name_verbs_that_do_not_exist(tmp_path: Path) -> None:
    said = checks.limits(site_of(tmp_path, '[limits]\nleave = ["predictions"]\nmb_per_day = 20\n'))
    assert said == "may leave: predictions; at most 20 MB a day"
    error = failed(checks.limits, site_of(tmp_path, '[limits]\nverbs = ["query.prediction"]\n'))
    assert "query.prediction" in str(error)
    assert "query.predictions" in error.cure


def test_peers_are_public_keys_that_are_there(tmp_path: Path) -> None:
    new_key(tmp_path / "site.key")
    site = site_of(tmp_path, 'private_key = "site.key"\npeers = "peers"\n')
    error = failed(checks.limits, site)
    assert "has no NAME.pub, so this site sums nothing with anybody" in str(error)
    assert "from its owner" in error.cure
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers/south.pub").write_bytes(new_key(tmp_path / "south").read_bytes())
    assert checks.limits(site).endswith("secure sums with south alone")
    (tmp_path / "peers/east.pub").write_text("ssh-what\n")
    assert "east.pub: is no ECDSA public key" in str(failed(checks.limits, site))


def test_the_whole_list_goes_on_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = site_of(tmp_path, f'superlink = "127.0.0.1:{free_port()}"\nbatch_size = 4\nmax_length = 8\n')
    found = {line.name: line for line in check_site(site, tmp_path / "state")}
    assert [name for name, line in found.items() if line.ok] == [
        "versions", "data", "public data", "model", "memory", "disk", "limits",
    ]  # fmt: skip
    assert all(line.cure for line in found.values() if not line.ok)
    assert "a batch of 4 x 8 passed" in found["memory"].said
    low = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: low)
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    found = {line.name: line for line in check_site(site, tmp_path / "state")}
    assert "0.0 GB are free" in found["memory"].said
    assert "3 checkpoints need" in found["disk"].said
    (tmp_path / "file").write_text("")
    broken = site.model_copy(update={"model": "/nowhere/model"})
    lines: list[Check] = list(check_site(broken, tmp_path / "file/state"))
    found = {line.name: line for line in lines}
    assert "model folder /nowhere/model: is not there" in found["model"].said
    assert found["memory"].said == "cannot be seen while the model does not load"
    assert "Not a directory" in found["disk"].said
