"""The coordinator's app bundle: only what is installed here is run, and nothing of another one is imported."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
from flwr.cli.build import build_fab_from_disk

from fedstill.common.config.files import load_run
from fedstill.deploy.flower_commands import write_bundle
from fedstill.deploy.site import clientapp
from fedstill.deploy.site.bundle import ForeignBundle, check_bundle
from tests.conftest import SMALL

ROOT = Path(__file__).parents[3]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "app", load_run(SMALL), "run", False)


def test_the_bundle_of_a_run_and_the_whole_tree_are_the_installed_ones(bundle: Path) -> None:
    check_bundle(build_fab_from_disk(bundle))
    check_bundle(build_fab_from_disk(ROOT))


def steals(bundle: Path) -> None:
    client = bundle / "fedstill_run/client.py"
    client.write_text("print(open('/etc/passwd').read())\n" + client.read_text())


def hides(bundle: Path) -> None:
    (bundle / "fedstill_run/json.py").write_text("print(open('/etc/passwd').read())\n")


def shadows(bundle: Path) -> None:
    (bundle / "fedstill/client").mkdir(parents=True)
    (bundle / "fedstill/__init__.py").write_text("")
    (bundle / "fedstill/client/app.py").write_text("print(open('/etc/passwd').read())\n")
    text = (bundle / "pyproject.toml").read_text()
    (bundle / "pyproject.toml").write_text(text.replace("fedstill_run/*.py", "**/*.py"))


def points_elsewhere(bundle: Path) -> None:
    text = (bundle / "pyproject.toml").read_text()
    (bundle / "pyproject.toml").write_text(text.replace("fedstill_run.client:app", "fedstill_run.server:app"))


@pytest.mark.parametrize("change", [steals, hides, shadows, points_elsewhere])
def test_another_bundle_is_refused_unread(bundle: Path, change: Any) -> None:
    change(bundle)
    with pytest.raises(ForeignBundle, match=r"is not the fedstill that is installed here.*Nothing of it was run"):
        check_bundle(build_fab_from_disk(bundle))


@pytest.mark.parametrize("content", [b"", b"PK", b"\0" * 1000])
def test_what_is_no_bundle_is_refused(content: bytes) -> None:
    with pytest.raises(ForeignBundle):
        check_bundle(content)


def packed(files: list[tuple[str, bytes]]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile's own, of a name that is there already
        for name, data in files:
            archive.writestr(name, data)
    return stream.getvalue()


def contents(bundle: Path) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(bundle))) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ([("pyproject.toml", b"")], "a file twice"),  # one that is read here, the other that is unpacked
        ([("../../.bashrc.toml", b"")], "is not the installed one"),
        ([("/etc/cron.d/daily.toml", b"")], "is not the installed one"),
        ([("bomb.toml", b" " * (65 << 20))], "is larger than"),
        ([("fedstill_run/native.so", b"\x7fELF")], "is not the installed one"),
    ],
)
def test_tricks_of_archives_are_refused(bundle: Path, more: list[tuple[str, bytes]], reason: str) -> None:
    check_bundle(packed(contents(bundle)))
    with pytest.raises(ForeignBundle, match=reason):
        check_bundle(packed([*more, *contents(bundle)]))


def test_nothing_is_unpacked_before_the_look(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[bytes] = []
    steals(bundle)
    content = build_fab_from_disk(bundle)
    monkeypatch.setattr(
        clientapp.run_clientapp, "install_from_fab", lambda content, **options: unpacked.append(content)
    )

    def stock() -> None:  # what Flower's command does with a bundle
        clientapp.run_clientapp.install_from_fab(content, skip_prompt=True)

    monkeypatch.setattr(clientapp, "flwr_clientapp", stock)
    with pytest.raises(ForeignBundle):
        clientapp.main()
    assert not unpacked


def test_superexec_finds_our_commands_first(tmp_path: Path) -> None:
    folder = clientapp.write_commands(tmp_path / "commands")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    assert shutil.which("flwr-clientapp", path=path) == str(folder / "flwr-clientapp")
    done = subprocess.run([folder / "flwr-agentapp"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "a site does not run flwr-agentapp")
    helped = subprocess.run([folder / "flwr-clientapp", "--help"], capture_output=True, text=True, check=False)
    assert (helped.returncode, "--runtime-api-address" in helped.stdout) == (0, True)
