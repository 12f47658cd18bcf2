"""Flower's stock `flwr-clientapp`, after a look at the bundle: SuperExec finds this command first on a site's PATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from fedstill.deploy.flower_internals import flwr_clientapp, run_clientapp
from fedstill.deploy.site.bundle import check_bundle

COMMANDS = ("flwr-clientapp",)
OTHERS = ("flwr-agentapp", "flwr-serverapp", "flwr-simulation", "flwr-connector", "flwr-model")  # none is a site's


def main() -> None:
    """Run the ClientApp of a bundle that is the installed fedstill; of another one, only the coordinator hears."""
    flower: Any = run_clientapp  # where the stock command unpacks a bundle, before it imports it
    install = flower.install_from_fab

    def install_checked(content: bytes, **options: Any) -> Any:
        check_bundle(content)
        return install(content, **options)

    flower.install_from_fab = install_checked
    flwr_clientapp()


def write_commands(folder: Path) -> Path:
    """Write the commands that stand before Flower's own on a site's PATH; return their folder."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in (*COMMANDS, *OTHERS):
        does = "from fedstill.deploy.site.clientapp import main\nmain()\n"
        if name in OTHERS:
            does = f"import sys\nsys.exit('a site does not run {name}')\n"
        draft = folder / f".{name}.{os.getpid()}"
        draft.write_text(f"#!{sys.executable}\n{does}")
        draft.chmod(0o700)
        draft.replace(folder / name)
    return folder


if __name__ == "__main__":
    main()
