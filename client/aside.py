"""What a site leaves on disk while another one has its place in memory.

It is for this process alone, and so without checksums and without syncing. An optimizer's state is twice a model's
size and most Asks need none: each stays in a file of its own until something reads it, and what nobody read is not
written again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import ItemsView, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.numpy

from fedstill.common.checkpoint import OWNER, OWNER_FOLDER, CheckpointError, Nested, flat, nested, packed


class OnDisk(Mapping[str, Any]):
    """A table of arrays in a file, which is read whenever something is looked up."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _read(self) -> dict[str, Any]:
        return nested(safetensors.numpy.load_file(self.path))

    def __getitem__(self, name: str) -> Any:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def items(self) -> ItemsView[str, Any]:
        """Read the file once, not once for each name."""
        return self._read().items()


def set_aside(folder: Path, number: int, state: Nested) -> tuple[OnDisk, dict[str, OnDisk]]:
    """Write a site's state, apart from optimizers that still are on disk; return both where they are now.

    The number is one that the folder has not had: nobody who still holds an older table reads a newer one's arrays.
    """
    optimizers: Mapping[str, Nested] = state.get("optimizer", {})
    rest = {name: part for name, part in state.items() if name != "optimizer"}
    tables = {}
    try:
        for place, (name, part) in enumerate(optimizers.items()):
            if isinstance(part, OnDisk):
                tables[name] = part
            elif part:  # one that has no state yet is made anew
                tables[name] = _written(folder / f"{number}-{place}", part)
        main = _written(folder / f"{number}-rest", rest)
    except CheckpointError:
        for path in folder.glob(f"{number}-*"):  # the next try has another number and needs their room
            path.unlink()
        raise
    present = {main.path, *(table.path for table in tables.values())}
    for path in folder.iterdir():
        if path not in present:
            path.unlink()
    return main, tables


def fetched(main: OnDisk, optimizers: Mapping[str, OnDisk]) -> dict[str, Any]:
    """Return a state that was set aside; its optimizers stay on disk."""
    return {**dict(main.items()), "optimizer": dict(optimizers)}


def _written(path: Path, arrays: Nested) -> OnDisk:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=OWNER_FOLDER)
        path.unlink(missing_ok=True)  # of an earlier process
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER), "wb") as file:
            file.writelines(packed(flat(arrays)))
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: cannot be written ({error.strerror})") from None
    return OnDisk(path)
