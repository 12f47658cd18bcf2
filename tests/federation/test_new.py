"""Starting without a checkout: `fedstill new`, `fedstill demo`, and a model from a stand-in of the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedstill.cli import app
from fedstill.common.config.files import load_run, load_site
from fedstill.common.models.builtin import builtin_folder

COMMAND = str(Path(sys.executable).parent / "fedstill")


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    rows = [f"{n},{'a really fine film' if n % 2 else 'two dull hours'} number {n},{'yes' if n % 2 else 'no'}"
            for n in range(200)]  # fmt: skip
    (tmp_path / "reviews.csv").write_text("id,review,liked\n" + "\n".join(rows) + "\n")
    return tmp_path / "reviews.csv"


def test_new_writes_a_federation_that_passes_its_check(reviews: Path, tmp_path: Path) -> None:
    folder, runner = tmp_path / "mine", CliRunner()
    options = ["--data", str(reviews), "--sites", "clinic, lab", "--models", "tiny-bert,tiny-roberta", "--yes"]
    done = runner.invoke(app, ["new", str(folder), *options])
    assert done.exit_code == 0, done.output
    run = load_run(folder / "run.toml")
    assert (run.task.text, run.task.label, run.name) == (["review"], "liked", "mine")
    assert [(site.name, site.model) for site in run.sites] == [("clinic", "tiny-bert"), ("lab", "tiny-roberta")]
    site = load_site(folder / "sites/lab.toml")
    assert (site.labels, site.limits.leave) == (["no", "yes"], ["predictions"])
    lines = [line for line in (folder / "run.toml").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) <= 12  # with two sites
    checked = runner.invoke(app, ["check", str(folder / "run.toml"), "--on", "process", "--json"])
    assert json.loads(checked.stdout)["ok"], checked.output
    again = runner.invoke(app, ["new", str(folder), *options])
    assert "run.toml is there already" in str(again.exception)


def test_new_asks_and_takes_what_is_said(reviews: Path, tmp_path: Path) -> None:
    answers = f"{reviews}\n\nliked\neast,west\ntiny-bert\n"
    done = CliRunner().invoke(app, ["new", str(tmp_path / "asked")], input=answers)
    assert done.exit_code == 0, done.output
    run = load_run(tmp_path / "asked/run.toml")
    assert [site.name for site in run.sites] == ["east", "west"]
    assert run.task.text == ["review"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--label", "id"], "column 'id' has 200 different values"),
        (["--text", "nothing"], "there is no column 'nothing'; columns: id, review, liked"),
        (["--sites", "north,<b>"], "sites.1.name"),
    ],
)
def test_new_says_what_does_not_fit(reviews: Path, tmp_path: Path, options: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["new", str(tmp_path / "bad"), "--data", str(reviews), "--yes", *options])
    assert said in str(done.exception)


def test_new_needs_a_file_with_labels(tmp_path: Path) -> None:
    assert "give it with --data" in str(CliRunner().invoke(app, ["new", str(tmp_path / "x"), "--yes"]).exception)
    (tmp_path / "few.csv").write_text("text,label\na,b\n")
    done = CliRunner().invoke(app, ["new", str(tmp_path / "x"), "--yes", "--data", str(tmp_path / "few.csv")])
    assert "has 1 rows, and a federation needs at least" in str(done.exception)


def test_the_demo_is_part_of_the_package(tmp_path: Path) -> None:
    small = [f"sites.{site}.model=tiny-bert" for site in ("north", "east", "south", "west")]
    small += ["central.model=tiny-bert", "rounds=1", "data.private=80", "data.public=16", "data.labelled=16",
              "data.test=16", "train.max_length=12", "report.alone=false", "report.centralized=false"]  # fmt: skip
    changes = [part for change in small for part in ("--set", change)]
    done = CliRunner().invoke(app, ["demo", "--on", "process", "--json", "--runs", str(tmp_path), *changes])
    assert done.exit_code == 0, done.output
    assert set(json.loads(done.stdout)["sites"]) == {"north", "east", "south", "west"}


# --- the hub ---

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """What the hub answers for one repository: its description, its list of files, and the files."""

    folder: Path
    extra: dict[str, bytes]
    asked: list[str]

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir() if path.is_file()} | self.extra

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path, files = self.path.partition("?")[0], self.files()
        self.asked.append(path)
        if path == "/":
            return self.send(b"hub", body)
        if path in ("/api/models/someone/small", "/api/models/someone/small/revision/main",
                    f"/api/models/someone/small/revision/{COMMIT}"):  # fmt: skip
            siblings = [{"rfilename": name} for name in files]
            return self.send(json.dumps({"id": "someone/small", "sha": COMMIT, "siblings": siblings}).encode(), body)
        if path in ("/api/models/someone/small/tree/main", f"/api/models/someone/small/tree/{COMMIT}"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in files.items()]
            return self.send(json.dumps(tree).encode(), body)
        name = path.rpartition("/")[2]
        if path.startswith("/someone/small/resolve/") and name in files:
            return self.send(files[name], body)
        error = "EntryNotFound" if "/someone/small/" in path else "RepoNotFound"
        return self.send(json.dumps({"error": "not found"}).encode(), body, 404, error)

    def send(self, data: bytes, body: bool, status: int = 200, error: str | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Length": str(len(data)), "ETag": f'"{hash(data) & 0xFFFFFFFF:x}"', "X-Repo-Commit": COMMIT}
        for name, value in {**headers, **({"X-Error-Code": error} if error else {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[type[Hub], dict[str, str]]]:
    """A hub with one model, a built-in one, and files that nobody should fetch."""

    class Here(Hub):
        folder = builtin_folder("tiny-bert")[0]
        extra = {"pytorch_model.bin": b"code may hide here", "training_args.bin": b"x"}  # noqa: RUF012
        asked: list[str] = []  # noqa: RUF012

    server = ThreadingHTTPServer(("127.0.0.1", 0), Here)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf")}
    env.update(HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1", HF_HUB_DISABLE_PROGRESS_BARS="1", OMP_NUM_THREADS="1")
    yield Here, env
    server.shutdown()


def call(env: dict[str, str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], env=env, cwd=folder, capture_output=True, text=True, timeout=120)


def test_a_model_is_pulled_from_the_hub_into_a_folder_that_a_site_can_use(
    hub: tuple[type[Hub], dict[str, str]], tmp_path: Path, small_file: Path
) -> None:
    handler, env = hub
    done = call(env, tmp_path, "models", "pull", "someone/small", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    folder = tmp_path / facts["folder"]
    assert facts["commit"] == COMMIT
    assert (folder / "model.safetensors").read_bytes() == handler.files(handler)["model.safetensors"]  # type: ignore
    assert not (folder / "pytorch_model.bin").exists()
    assert not any("pytorch_model.bin" in path for path in handler.asked)
    offline = {**env, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    options = ["--on", "process", "--json", "--set", f"sites.south.model={folder}"]
    done = call(offline, tmp_path, "check", str(small_file), *options)
    assert json.loads(done.stdout)["ok"], done.stdout + done.stderr


def test_a_model_is_loaded_by_its_name_on_the_hub(
    hub: tuple[type[Hub], dict[str, str]], tmp_path: Path, small_file: Path
) -> None:
    handler, env = hub
    done = call(env, tmp_path, "check", str(small_file), "--on", "process", "--json", "--set",
                "sites.south.model=someone/small")  # fmt: skip
    facts = json.loads(done.stdout)
    assert facts["ok"], done.stdout + done.stderr
    [south] = [model for model in facts["models"] if model["of"] == "south"]
    assert south["model"] == "someone/small"
    assert south["parameters"] == next(model["parameters"] for model in facts["models"] if model["of"] == "north")
    assert any(path.endswith("model.safetensors") for path in handler.asked)


def test_what_the_hub_does_not_have_is_said_in_a_sentence(
    hub: tuple[type[Hub], dict[str, str]], tmp_path: Path
) -> None:
    handler, env = hub
    done = call(env, tmp_path, "models", "pull", "someone/else")
    assert done.returncode == 1
    assert done.stderr.startswith("fedstill: model someone/else: cannot be fetched; check the name")
    handler.folder = tmp_path  # nothing but what the fixture adds
    done = call(env, tmp_path, "models", "pull", "someone/small")
    assert "there is no config.json in it" in done.stderr
    handler.extra = {**handler.extra, "config.json": b"{}"}
    done = call(env, tmp_path, "models", "pull", "someone/small")
    assert "has no safetensors, and other formats can run code" in done.stderr
    done = call({**env, "HF_HUB_OFFLINE": "1"}, tmp_path, "models", "pull", "someone/small")
    assert "HF_HUB_OFFLINE is set" in done.stderr
    assert "Traceback" not in done.stderr
