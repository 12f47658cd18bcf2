"""Checkpoints of server and sites: written atomically, verified when read, the last few kept."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from fedstill.common.states import State
from fedstill.common.wire import Arrays, Facts

OWNER, OWNER_FOLDER = 0o600, 0o700  # a model has seen its site's texts
KEEP = 3  # the sites are one round ahead while the server writes, and one may turn out damaged
_DTYPES = {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("float", "int") for bits in (64, 32, 16)}
_DTYPES |= {"int8": "I8", "uint8": "U8", "bool": "BOOL"}
_NAME = re.compile(r"^round-(\d+)$")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the text names the file."""


Nested = Mapping[str, Any]  # arrays by name, or nested tables of them


def save(folder: Path, number: int, arrays: Nested, facts: Facts, keep: int = KEEP) -> Path:
    """Write the checkpoint of round `number`, for its owner's eyes: files, then their checksums, then rename."""
    target, draft = folder / f"round-{number:05d}", folder / f".draft-{os.getpid()}-{number:05d}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=OWNER_FOLDER)
        sweep(folder)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=OWNER_FOLDER)
        with _held(draft):
            content = {
                "arrays.safetensors": packed(flat(arrays)),
                "facts.json": [json.dumps(facts, indent=1).encode()],
            }
            sums = {name: _write(draft / name, pieces, OWNER) for name, pieces in content.items()}
            _write(draft / "sha256.json", [json.dumps(sums).encode()], OWNER)
            sync_folder(draft)
            if target.exists():  # a round that is done again: one of the two is always there
                target.rename(folder / f".draft-{os.getpid()}-{number:05d}-before")
            draft.rename(target)
            sync_folder(folder)
        sweep(folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        cure = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the folder's permissions"
        raise CheckpointError(f"{target}: cannot be written ({error.strerror}); {cure} and resume the run") from None
    kept = [other for other in rounds(folder) if other <= number]  # later checkpoints belong to an abandoned past
    for old in set(rounds(folder)) - set(kept[-keep:]):
        shutil.rmtree(folder / f"round-{old:05d}", ignore_errors=True)
    return target


def sweep(folder: Path) -> None:
    """Remove drafts whose writer is gone: the system has released their locks."""
    for draft in folder.glob(".draft-*") if folder.is_dir() else ():
        with contextlib.suppress(OSError), _held(draft):
            shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that is being written; OSError if another process holds it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def load(folder: Path, number: int) -> tuple[dict[str, Any], Facts]:
    """Return the arrays, nested as saved, and the facts of round `number`; a CheckpointError names the damaged file."""
    source = folder / f"round-{number:05d}"
    try:
        sums = json.loads((source / "sha256.json").read_bytes())
        content = {name: (source / name).read_bytes() for name in ("arrays.safetensors", "facts.json")}
        for name, data in content.items():
            if hashlib.sha256(data).hexdigest() != sums.get(name):
                raise CheckpointError(f"{source / name}: damaged (its checksum differs)")
        return nested(safetensors.numpy.load(content["arrays.safetensors"])), json.loads(content["facts.json"])
    except OSError as error:
        raise CheckpointError(f"{error.filename or source}: cannot be read ({error.strerror})") from None
    except (ValueError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{source}: damaged ({error})") from None


def rounds(folder: Path) -> list[int]:
    """Return the rounds that have a checkpoint here, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for entry in folder.iterdir() if (match := _NAME.match(entry.name)))


def whole_rounds(folder: Path) -> list[int]:
    """Return the rounds whose checkpoints are here and whose checksums pass, oldest first; drafts are swept."""
    sweep(folder)
    return [number for number in rounds(folder) if _whole(folder / f"round-{number:05d}")]


def _whole(source: Path) -> bool:
    try:
        sums = json.loads((source / "sha256.json").read_bytes())
        names = ("arrays.safetensors", "facts.json")
        return all(
            hashlib.file_digest((source / name).open("rb"), "sha256").hexdigest() == sums[name] for name in names
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def newest(folder: Path, among: set[int] | None = None) -> tuple[int, dict[str, Any], Facts, list[str]] | None:
    """Return the newest readable checkpoint, with what was wrong with newer ones."""
    problems: list[str] = []
    for number in reversed(rounds(folder)):
        if among is not None and number not in among:
            continue
        try:
            arrays, facts = load(folder, number)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return number, arrays, facts, problems
    return None


def flat(arrays: Nested) -> Arrays:
    """Flatten nested tables of arrays, their names joined by a slash."""
    flattened: Arrays = {}
    for name, value in arrays.items():
        if isinstance(value, Mapping):
            flattened.update({f"{name}/{inner}": array for inner, array in flat(value).items()})
        else:
            flattened[name] = value
    return flattened


def nested(arrays: State) -> dict[str, Any]:
    """Undo `flat`; tables without an array are lost."""
    tree: dict[str, Any] = {}
    for path, value in arrays.items():
        *tables, name = path.split("/")
        place = tree
        for table in tables:
            place = place.setdefault(table, {})
        place[name] = value
    return tree


def append_line(path: Path, line: str, mode: int = 0o644, sync: bool = False) -> None:
    """Append a line to a file, whole or not at all: a full disk leaves no half line. With `sync` it is on disk."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)
    try:
        before, data = os.fstat(handle).st_size, line.encode() + b"\n"
        try:
            if os.write(handle, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            if sync:
                os.fsync(handle)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, before)
            raise
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str | bytes, mode: int = 0o666) -> None:
    """Replace a small file atomically and durably; an error names the file."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        _write(draft, [text.encode() if isinstance(text, str) else text], mode)
        draft.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def packed(arrays: State) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file piece by piece: the library would first copy everything in memory."""
    head: Facts = {}
    at = 0
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))  # align every array
    for name in names:
        value = arrays[name]
        head[name] = {"dtype": _DTYPES[value.dtype.name], "shape": value.shape, "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield np.asarray(arrays[name], order="C").reshape(-1).view(np.uint8).data


def _write(path: Path, pieces: Iterable[bytes | memoryview], mode: int) -> str:
    """Write a new file and sync it to disk; return its checksum."""
    digest = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk: a rename in it is not lost after this."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
