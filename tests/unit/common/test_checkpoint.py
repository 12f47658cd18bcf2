"""Checkpoints: whole or not at all, checked when read, the one before when damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from fedstill.common import checkpoint
from fedstill.common.checkpoint import CheckpointError

ARRAYS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "step": np.array(3.0, np.float32)}


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 4, ARRAYS, {"loss": 0.5})
    arrays, facts = checkpoint.load(tmp_path, 4)
    assert facts == {"loss": 0.5}
    assert np.array_equal(arrays["w"], ARRAYS["w"])
    assert arrays["step"].shape == ()


def test_arrays_of_every_kind_are_read_by_the_format_s_own_library(tmp_path: Path) -> None:
    kinds = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64")
    arrays = {f"{kind}/x": np.arange(3).astype(kind) for kind in kinds}
    arrays |= {"none": np.zeros((0, 2), np.float32), "turned": np.arange(6.0).reshape(2, 3).T}
    path = checkpoint.save(tmp_path, 1, arrays, {}) / "arrays.safetensors"
    found = safetensors.numpy.load_file(path)
    assert found.keys() == arrays.keys()
    for name, value in arrays.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert np.array_equal(found[name], value)


def test_the_last_three_are_kept(tmp_path: Path) -> None:
    for number in range(6):
        checkpoint.save(tmp_path, number, ARRAYS, {})
    assert checkpoint.rounds(tmp_path) == [3, 4, 5]


@pytest.mark.parametrize("name", ["arrays.safetensors", "facts.json", "sha256.json"])
@pytest.mark.parametrize("damage", ["first", "last", "cut", "gone"])
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path: Path, name: str, damage: str) -> None:
    checkpoint.save(tmp_path, 1, ARRAYS, {"round": 1})
    file = checkpoint.save(tmp_path, 2, ARRAYS, {"round": 2}) / name
    data = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        flipped = bytearray(data)
        flipped[0 if damage == "first" else -1] ^= 1  # the last is a number's: only the checksum can tell
        file.write_bytes(data[: len(data) // 2] if damage == "cut" else flipped)
    with pytest.raises(CheckpointError, match="round-00002"):
        checkpoint.load(tmp_path, 2)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    number, _, facts, problems = found
    assert (number, facts) == (1, {"round": 1})
    assert "round-00002" in problems[0]


def test_only_rounds_that_others_hold_too_count(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        checkpoint.save(tmp_path, number, ARRAYS, {})
    found = checkpoint.newest(tmp_path, {0, 1, 2})
    assert found is not None
    assert found[0] == 2
    assert checkpoint.newest(tmp_path / "none") is None


def test_a_full_disk_names_the_file_and_keeps_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, ARRAYS, {"round": 1})
    write = checkpoint._write

    def to_a_full_disk(path: Path, pieces: Iterable[bytes], mode: int) -> str:
        if path.name == "arrays.safetensors":
            path.symlink_to("/dev/full")  # every write there fails as on a full disk
        return write(path, pieces, mode)

    monkeypatch.setattr(checkpoint, "_write", to_a_full_disk)
    with pytest.raises(CheckpointError, match=r"round-00002: cannot be written \(No space left.*free some space"):
        checkpoint.save(tmp_path, 2, ARRAYS, {"round": 2})
    assert checkpoint.rounds(tmp_path) == [1]
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".draft")]


def test_kill_while_writing_never_leaves_half_a_checkpoint(tmp_path: Path) -> None:
    program = (
        "import numpy as np, sys, pathlib\n"
        "from fedstill.common import checkpoint\n"
        "big = {'w': np.ones(2_000_000, np.float32)}\n"
        "for number in range(10_000):\n"
        "    checkpoint.save(pathlib.Path(sys.argv[1]), number, big, {'round': number})\n"
        "    print(number, flush=True)\n"
    )
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        for _ in range(3):
            child.stdout.readline()
        child.kill()
        child.wait()
        child.stdout.close()
        for number in checkpoint.rounds(tmp_path):
            assert checkpoint.load(tmp_path, number)[1] == {"round": number}


def test_a_small_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    checkpoint.write_atomically(path, "one")
    checkpoint.write_atomically(path, "two")
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_later_checkpoint_is_of_a_past_that_was_given_up(tmp_path: Path) -> None:
    """A run that had to go back to round 2 must not be taken up at round 9 the next time."""
    for number in (7, 8, 9, 2, 3):
        checkpoint.save(tmp_path, number, {"a": np.zeros(1)}, {})
    assert checkpoint.rounds(tmp_path) == [2, 3]
    for number in (4, 5):
        checkpoint.save(tmp_path, number, {"a": np.zeros(1)}, {})
    assert checkpoint.rounds(tmp_path) == [3, 4, 5]


def test_a_line_is_appended_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    checkpoint.append_line(path, "first", 0o600)
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:3]))  # the disk is full after 3 bytes
    with pytest.raises(OSError, match="No space left"):
        checkpoint.append_line(path, "second")
    monkeypatch.undo()
    checkpoint.append_line(path, "third")
    assert path.read_text() == "first\nthird\n"
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="No space left"):
        checkpoint.append_line(Path("/dev/full"), "line")


def test_only_its_owner_reads_a_checkpoint(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        saved = checkpoint.save(tmp_path / "checkpoints", 1, ARRAYS, {})
    finally:
        os.umask(before)
    for path in [tmp_path / "checkpoints", saved, *saved.iterdir()]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_checkpoint_is_on_disk_before_and_after_its_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    sync, rename = os.fsync, Path.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: (done.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}")).name)), sync(fd))[1]
    )
    monkeypatch.setattr(Path, "rename", lambda self, to: (done.append(("rename", Path(to).name)), rename(self, to))[1])
    checkpoint.save(tmp_path / "kept", 3, ARRAYS, {})
    draft = f".draft-{os.getpid()}-00003"
    files = [("sync", name) for name in ("arrays.safetensors", "facts.json", "sha256.json")]
    assert done == [*files, ("sync", draft), ("rename", "round-00003"), ("sync", "kept")]


@pytest.mark.parametrize("name", ["arrays.safetensors", "facts.json", "sha256.json"])
def test_only_rounds_whose_checksums_pass_are_announced(tmp_path: Path, name: str) -> None:
    for number in (1, 2, 3):
        checkpoint.save(tmp_path, number, ARRAYS, {})
    file = tmp_path / "round-00002" / name
    file.write_bytes(b"x" + file.read_bytes()[1:])
    assert checkpoint.rounds(tmp_path) == [1, 2, 3]
    assert checkpoint.whole_rounds(tmp_path) == [1, 3]


KILLED = """
import os, signal, sys
import numpy as np
from pathlib import Path
from fedstill.common import checkpoint

class Cut(dict):
    def items(self):
        yield "w", np.zeros(1_000_000, np.float32)

def end(*_):
    os.kill(os.getpid(), signal.SIGKILL)

checkpoint.packed = lambda arrays: iter([b"x" * 4_000_000, end()])
checkpoint.save(Path(sys.argv[1]), 5, Cut(), {})
"""


def test_drafts_that_kills_leave_are_swept_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == -9
        assert len(list(tmp_path.glob(".draft-*"))) == 1  # each sweeps the one before
    alive = tmp_path / ".draft-1-00009"
    alive.mkdir()
    with checkpoint._held(alive):
        checkpoint.save(tmp_path, 6, ARRAYS, {})
        assert [draft.name for draft in tmp_path.glob(".draft-*")] == [alive.name]
    assert checkpoint.whole_rounds(tmp_path) == [6]
    assert not list(tmp_path.glob(".draft-*"))


def test_a_round_that_is_done_again_replaces_the_one_before(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, ARRAYS, {"try": 1})
    checkpoint.save(tmp_path, 1, ARRAYS, {"try": 2})
    assert checkpoint.load(tmp_path, 1)[1] == {"try": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["round-00001"]
