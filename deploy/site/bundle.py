"""The app bundle that a SuperLink hands to sites: only the installed fedstill is run, whatever the coordinator sends.

A Flower run brings its app as a zip file, and a stock SuperNode would import it. Here every file of it must be one that
fedstill itself would have put there: the two thin files of `fedstill run`, or the installed package's own files.
"""

from __future__ import annotations

import hashlib
import io
import tomllib
import zipfile
from pathlib import Path

from fedstill.deploy.flower_commands import THIN

APPS = ("fedstill_run.client:app", "fedstill.client.app:app")
DATA = (".toml", ".md")  # what cannot be imported
MOST = 64 << 20  # bytes of an unpacked bundle


class ForeignBundle(RuntimeError):
    """The coordinator's app is not the fedstill that is installed here; nothing of it was run."""


def check_bundle(content: bytes) -> None:
    """Refuse a bundle that holds anything but the installed fedstill; it is read, never unpacked or imported."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            if len({entry.filename for entry in entries}) != len(entries):
                raise ForeignBundle("it has a file twice")
            if sum(entry.file_size for entry in entries) > MOST:
                raise ForeignBundle(f"it is larger than {MOST:,} bytes")
            files = {entry.filename: archive.read(entry) for entry in entries if not entry.is_dir()}
            project = tomllib.loads(files.get("pyproject.toml", b"").decode())
    except (zipfile.BadZipFile, ValueError, OSError, RuntimeError) as error:
        raise ForeignBundle(_said(hashlib.sha256(content).hexdigest(), str(error))) from None
    app = project.get("tool", {}).get("flwr", {}).get("app", {}).get("components", {}).get("clientapp")
    strange = [name for name, data in files.items() if not _known(name, data)]
    if app not in APPS or strange:
        what = f"{strange[0]!r} is not the installed one" if strange else f"its ClientApp is {app!r}"
        raise ForeignBundle(_said(hashlib.sha256(content).hexdigest(), what))


def _known(name: str, data: bytes) -> bool:
    if name in THIN:
        return data.decode(errors="replace") == THIN[name]
    if name.startswith(".info/") or name == "LICENSE":
        return True
    if ".." in Path(name).parts or Path(name).is_absolute():
        return False
    if name.endswith(DATA):
        return True
    installed = [place / name for place in _homes()]
    return name.endswith(".py") and any(path.is_file() and path.read_bytes() == data for path in installed)


def _homes() -> tuple[Path, ...]:
    """Where the installed rooms lie: beside the package in a checkout, inside it in a wheel."""
    import fedstill

    package = Path(fedstill.__file__).resolve().parent
    return package.parent, package


def _said(digest: str, what: str) -> str:
    return (
        f"the coordinator's app (sha256 {digest[:16]}) is not the fedstill that is installed here: {what}. Nothing of "
        "it was run; both sides must have the same release"
    )
