"""A coordinator's state in one file, and back: database, runs, certificates, the names of registered keys."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fedstill.common.checkpoint import OWNER, OWNER_FOLDER

MANIFEST = "sha256.json"
DATABASE = "superlink.db"


class BackupError(ValueError):
    """A backup cannot be made or used; the text says why."""


def back_up(target: Path, places: dict[str, Path]) -> int:
    """Write folders and files with their checksums into one file that only its owner can read; return their number.

    The database is copied by SQLite itself, so that the SuperLink may go on meanwhile.
    """
    if target.exists():
        raise BackupError(f"{target}: is there already; a backup is never overwritten")
    sums: dict[str, str] = {}
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, OWNER), "wb") as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                for title, place in places.items():
                    for path in [place] if place.is_file() else _files(place):
                        name = f"{title}/{path.name if path == place else path.relative_to(place)}"
                        with _still(path) as source:
                            sums[name] = _add(archive, name, source)
                _add_bytes(archive, MANIFEST, json.dumps(sums, indent=1).encode())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return len(sums)


def restore(source: Path, places: dict[str, Path]) -> int:
    """Put back a backup whose checksums pass, where nothing is yet; return the number of files."""
    full = [place for place in places.values() if place.is_file() or (place.is_dir() and any(place.iterdir()))]
    if full:
        raise BackupError(f"{full[0]}: is there already; move it away first, so that two states are not mixed")
    with tempfile.TemporaryDirectory(dir=source.resolve().parent) as draft:
        try:
            with tarfile.open(source) as archive:
                archive.extractall(draft, filter="data")
            sums: dict[str, str] = json.loads((Path(draft) / MANIFEST).read_bytes())
        except (OSError, tarfile.TarError, ValueError) as error:
            raise BackupError(f"{source}: cannot be read as a backup ({type(error).__name__}: {error})") from None
        found = {str(path.relative_to(draft)) for path in _files(Path(draft))} - {MANIFEST}
        wrong = [name for name, wanted in sums.items() if name not in found or _sum(Path(draft) / name) != wanted]
        wrong += sorted(found - set(sums))
        if wrong:
            raise BackupError(f"{source}: {wrong[0]} is damaged or missing; nothing was restored")
        for title, place in places.items():
            kept = Path(draft) / title
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.suffix and (kept / place.name).is_file():
                shutil.copy2(kept / place.name, place)
            elif kept.is_dir():
                shutil.copytree(kept, place, dirs_exist_ok=True)
                place.chmod(OWNER_FOLDER)
    return len(sums)


def _files(folder: Path) -> list[Path]:
    passing = (".lock", "-wal", "-shm")
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(passing))


@contextlib.contextmanager
def _still(path: Path) -> Iterator[Path]:
    """Yield a file that does not change while it is read: a database as SQLite copies it, any other file itself."""
    if path.name != DATABASE:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / DATABASE
        with contextlib.closing(sqlite3.connect(path)) as live, contextlib.closing(sqlite3.connect(copy)) as still:
            live.backup(still)
        yield copy


def _add(archive: tarfile.TarFile, name: str, path: Path) -> str:
    """Add a file as it is now, even if it grows meanwhile; return its checksum."""
    data = path.read_bytes()
    _add_bytes(archive, name, data, path.stat().st_mode & 0o777)
    return hashlib.sha256(data).hexdigest()


def _add_bytes(archive: tarfile.TarFile, name: str, data: bytes, mode: int = OWNER) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
