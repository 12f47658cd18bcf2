"""Models from the hub into a folder, for sites that have no internet: safetensors and tokenizer, no code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstill.common.models.text_model import ModelError

WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "README.md", "LICENSE*"]
UNWANTED = [
    "*/*",
    "training_args*",
    "optimizer*",
    "trainer_state*",
]  # other frameworks' folders, and what training left


@dataclass(frozen=True)
class Pulled:
    """A model on this disk, and which state of the hub's repository it is."""

    name: str
    folder: Path
    commit: str
    bytes: int

    def facts(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"name": self.name, "folder": str(self.folder), "commit": self.commit, "bytes": self.bytes}


def pull_model(name: str, folder: Path, revision: str = "main") -> Pulled:
    """Fetch a model's configuration, tokenizer and safetensors; refuse one that could not be loaded from there."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        about = HfApi().model_info(name, revision=revision)
        files = [sibling.rfilename for sibling in about.siblings or []]
        if "config.json" not in files:
            raise ModelError(f"model {name}: there is no config.json in it; it is no model of transformers")
        if not any(file.endswith(".safetensors") and "/" not in file for file in files):
            raise ModelError(
                f"model {name}: has no safetensors, and other formats can run code; ask its owner to convert it"
            )
        snapshot_download(name, revision=about.sha, local_dir=folder, allow_patterns=WANTED, ignore_patterns=UNWANTED)
    except OfflineModeIsEnabled:
        raise ModelError(f"model {name}: HF_HUB_OFFLINE is set, so nothing is fetched; unset it") from None
    except ModelError:
        raise
    except Exception as error:  # the library and what it sends requests with raise a dozen types
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model {name}: cannot be fetched; check the name and the connection, and for a private model HF_TOKEN "
            f"({reason})"
        ) from None
    commit = str(about.sha)
    (folder / "fedstill.json").write_text(json.dumps({"name": name, "revision": revision, "commit": commit}) + "\n")
    return Pulled(name, folder, commit, sum(file.stat().st_size for file in folder.glob("*") if file.is_file()))
