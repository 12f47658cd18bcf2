"""The built wheel in a fresh environment outside the tree: everything that a user without a checkout needs is in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fedstill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command as the wheel installs it; its dependencies are borrowed from this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    quiet = ["--quiet", "--disable-pip-version-check"]
    build = ["wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *quiet, *build], check=True, cwd=folder)
    [wheel] = folder.glob("*.whl")
    assert wheel.stat().st_size < 40_000_000
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv/bin/python"
    install = ["--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *quiet, *install], check=True, cwd=folder)
    [packages] = (folder / "venv/lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "venv/bin/fedstill"


def call(command: Path, folder: Path, *arguments: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run([command, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_from_a_csv_file_to_predictions_without_a_checkout(fedstill: Path, tmp_path: Path) -> None:
    where = "import fedstill, fedstill.server.page as page; print(fedstill.__file__, page.__file__)"
    for path in call(fedstill.parent / "python", tmp_path, "-c", where).split():
        assert Path(path).is_relative_to(fedstill.parents[1])
    rows = [f"{'a really fine film' if n % 2 else 'two dull hours'} {n},{'yes' if n % 2 else 'no'}" for n in range(120)]
    (tmp_path / "reviews.csv").write_text("review,liked\n" + "\n".join(rows) + "\n")
    call(fedstill, tmp_path, "new", "mine", "--data", "reviews.csv", "--sites", "a,b", "--rounds", "2", "--yes")
    quick = ["--on", "process", "--set", "report.alone=false", "--set", "report.centralized=false"]
    summary = json.loads(call(fedstill, tmp_path, "run", "mine/run.toml", "--json", *quick))
    assert summary["status"] == "finished"
    assert summary["central"]["accuracy"] > 0.7  # the task is easy, and small-bert comes trained in the wheel
    assert (tmp_path / "runs/latest/report.html").stat().st_size > 30_000
    [answer] = json.loads(call(fedstill, tmp_path, "predict", "latest", "a really fine film", "--json"))
    assert answer["label"] in ("yes", "no")


def test_the_demo_and_the_page_are_in_the_wheel(fedstill: Path, tmp_path: Path) -> None:
    look = (
        "from pathlib import Path\nfrom fedstill import experiments\nfrom fedstill.server.page import asset\n"
        "from fedstill.common.models.builtin import builtin_models, builtin_folder\n"
        "assert (Path(next(iter(experiments.__path__))) / 'demo.toml').is_file()\n"
        "assert all(asset(n) for n in ('live.html', 'live.js', 'story.js', 'charts.js', 'report.js', 'style.css'))\n"
        "shipped = [m.name for m in builtin_models() if m.shipped]\n"
        "assert len(shipped) == 4 and all((builtin_folder(n)[0] / 'model.safetensors').is_file() for n in shipped)\n"
        "print('all there')"
    )
    assert "all there" in call(fedstill.parent / "python", tmp_path, "-c", look)
