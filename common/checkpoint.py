"""Checkpoints of server and sites: written atomically, verified when read, the last few kept."""

from __future__ import annotations

import contextlib
import errno
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

KEEP = 3  # the sites are one round ahead while the server writes, and one may turn out damaged
_DTYPES = {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("float", "int") for bits in (64, 32, 16)}
_DTYPES |= {"int8": "I8", "uint8": "U8", "bool": "BOOL"}
_NAME = re.compile(r"^round-(\d+)$")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the text names the file."""


Nested = Mapping[str, Any]  # arrays by name, or nested tables of them


def save(folder: Path, number: int, arrays: Nested, facts: Facts, keep: int = KEEP) -> Path:
    """Write the checkpoint of round `number`: files first, then their checksums, then rename."""
    target, draft = folder / f"round-{number:05d}", folder / f".draft-{os.getpid()}-{number:05d}"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        content = {"arrays.safetensors": _packed(flat(arrays)), "facts.json": [json.dumps(facts, indent=1).encode()]}
        sums = {name: _write(draft / name, pieces) for name, pieces in content.items()}
        _write(draft / "sha256.json", [json.dumps(sums).encode()])
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
        _sync_folder(folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        cure = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the folder's permissions"
        raise CheckpointError(f"{target}: cannot be written ({error.strerror}); {cure} and resume the run") from None
    kept = [other for other in rounds(folder) if other <= number]  # later checkpoints belong to an abandoned past
    for old in set(rounds(folder)) - set(kept[-keep:]):
        shutil.rmtree(folder / f"round-{old:05d}", ignore_errors=True)
    return target


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


def append_line(path: Path, line: str, mode: int = 0o644) -> None:
    """Append a line to a file, whole or not at all: a full disk leaves no half line."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)
    try:
        before, data = os.fstat(handle).st_size, line.encode() + b"\n"
        try:
            if os.write(handle, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, before)
            raise
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file atomically; an error names the file."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write(draft, [text.encode()])
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def _packed(arrays: State) -> Iterator[bytes | memoryview]:
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


def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a file and sync it to disk; return its checksum."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
