"""Outputs of frozen layers, kept on disk: each text is computed once on a machine, whoever asks for it.

A folder a frozen model (`key`), in it a folder a segment: the texts that one call had to compute. Processes map the
segments into memory and so share them. A segment appears whole or not at all (it is renamed into place), carries a
checksum, and is thrown away and computed again when that fails. The oldest go when the cache outgrows its limit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedstill.common.lock import taking_turns
from fedstill.common.models.builtin import cache_folder

Floats = NDArray[np.float32]
Compute = Callable[[Sequence[int]], Floats]  # texts by number -> their rows, one after another

log = logging.getLogger(__name__)
DRAFT = ".draft-"
TEXTS, COUNTS, ROWS = "texts.bin", "counts.i64", "rows.f32"  # of a segment: hashes, rows a text, numbers; little-endian
_opened: dict[Path, Segment] = {}  # checked once a process; a segment never changes


@dataclass(frozen=True)
class Segment:
    """Some texts' rows: text i has `counts[i]` of them, from `starts[i]` on."""

    folder: Path
    texts: dict[bytes, int]
    counts: NDArray[np.int64]
    rows: Floats

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first row of each text."""
        return np.concatenate([[0], np.cumsum(self.counts)[:-1]]).astype(np.int64)


class FeatureCache:
    """The cached rows of one frozen model."""

    def __init__(self, key: str, width: int, limit: int, root: Path | None = None) -> None:
        self.root = root or cache_folder() / "features"
        self.folder, self.key, self.width, self.limit = self.root / key[:32], key, width, limit

    def rows(self, texts: Sequence[bytes], counts: NDArray[np.int64], compute: Compute) -> Floats | None:
        """The rows of these texts, one text after another, computed where they are missing.

        None if they are more than the cache may hold. On a full disk they stay in this process's memory.
        """
        size = int(counts.sum()) * self.width * 4
        if size > self.limit:
            log.warning(
                "frozen layers: %d MB of features are more than cache_mb = %d allows, so they are computed anew on "
                "every pass; raise cache_mb, shorten max_length or freeze the whole encoder",
                size >> 20,
                self.limit >> 20,
            )
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with taking_turns(self.folder / "lock"):
                return self._rows(texts, counts, compute)
        except OSError as error:
            log.warning(
                "frozen layers: the cache %s cannot be written (%s), so features stay in this process's memory; "
                "free some room, or point FEDSTILL_CACHE to another folder",
                self.root,
                error.strerror or error,
            )
            return compute(range(len(texts)))

    def _rows(self, texts: Sequence[bytes], counts: NDArray[np.int64], compute: Compute) -> Floats:
        segments = list(self._segments())
        known = set().union(*(segment.texts for segment in segments))
        first = {text: number for number, text in reversed(list(enumerate(texts)))}  # each text once
        missing = [number for text, number in first.items() if text not in known]
        missing.sort()
        if missing:
            self._write([texts[number] for number in missing], counts[missing], compute(missing))
            segments = list(self._segments())
        used = [segment for segment in segments if not segment.texts.keys().isdisjoint(first)]
        for segment in used:
            os.utime(segment.folder)
        self._shrink({segment.folder for segment in used})
        return _gather(texts, used, self.width)

    def _write(self, texts: list[bytes], counts: NDArray[np.int64], rows: Floats) -> None:
        """Add a segment, whole or not at all."""
        draft = Path(tempfile.mkdtemp(prefix=DRAFT, dir=self.folder))
        try:
            (draft / TEXTS).write_bytes(b"".join(texts))
            counts.astype("<i8").tofile(draft / COUNTS)
            rows.astype("<f4").tofile(draft / ROWS)
            about = {"key": self.key, "texts": len(texts), "sum": _checksum(draft)}
            (draft / "about.json").write_text(json.dumps(about))
            for file in draft.iterdir():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            draft.rename(self.folder / f"segment-{draft.name.removeprefix(DRAFT)}")
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _segments(self) -> Iterator[Segment]:
        """Every whole segment of this model; damaged ones and drafts of killed processes are removed."""
        for draft in self.folder.glob(f"{DRAFT}*"):  # we hold the lock: nobody else is writing
            shutil.rmtree(draft, ignore_errors=True)
        for folder in sorted(self.folder.glob("segment-*")):
            try:
                _opened[folder] = _opened.get(folder) or self._open(folder)
                yield _opened[folder]
            except FileNotFoundError:  # another process made room
                continue
            except (OSError, ValueError, KeyError, EOFError) as error:
                log.warning("frozen layers: %s is damaged (%s); its texts are computed again", folder, error)
                shutil.rmtree(folder, ignore_errors=True)

    def _open(self, folder: Path) -> Segment:
        about = json.loads((folder / "about.json").read_text())
        if about["key"] != self.key:
            raise ValueError("it belongs to other weights")
        if about["sum"] != _checksum(folder):
            raise ValueError("its checksum is wrong")
        counts = np.fromfile(folder / COUNTS, "<i8")
        shape = (int(counts.sum()), self.width)
        rows: Floats = np.memmap(folder / ROWS, "<f4", "r", shape=shape) if shape[0] else np.empty(shape, np.float32)
        names = np.fromfile(folder / TEXTS, np.uint8).reshape(len(counts), -1)
        return Segment(folder, {row.tobytes(): number for number, row in enumerate(names)}, counts, rows)

    def _shrink(self, used: set[Path]) -> None:
        """Remove what was not used for longest, of any model, until the cache is within its limit."""
        ages: list[tuple[float, int, Path]] = []
        for folder in self.root.glob("*/segment-*"):
            with contextlib.suppress(OSError):
                ages.append((folder.stat().st_mtime, sum(file.stat().st_size for file in folder.iterdir()), folder))
        total = sum(size for _, size, _ in ages)
        for _, size, folder in sorted(ages):
            if total <= self.limit:
                return
            if folder not in used:
                _opened.pop(folder, None)
                shutil.rmtree(folder, ignore_errors=True)
                total -= size


def _gather(texts: Sequence[bytes], segments: list[Segment], width: int) -> Floats:
    """The texts' rows in their order: the mapped file itself where it holds just these, else a copy."""
    for segment in segments:
        if len(segment.texts) == len(texts) and all(segment.texts.get(text) == i for i, text in enumerate(texts)):
            return segment.rows
    held: dict[bytes, Floats] = {}
    for segment in segments:
        starts = segment.starts
        for text in segment.texts.keys() & set(texts):
            start = starts[segment.texts[text]]
            held[text] = segment.rows[start : start + segment.counts[segment.texts[text]]]
    return np.concatenate([np.empty((0, width), np.float32), *(held[text] for text in texts)])


def _checksum(folder: Path) -> int:
    total = 0
    for name in (TEXTS, COUNTS, ROWS):
        with (folder / name).open("rb") as file:
            while part := file.read(1 << 22):
                total = zlib.crc32(part, total)
    return total
