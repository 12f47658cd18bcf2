"""How long the way of one FedID batch is: our own functions and files that it passes, at the server and at a site.

    python experiments/bench/path.py

A small federation runs in this process; between two batches in the middle of a round every call into this project is
noted by sys.setprofile. Libraries are not counted, nor are comprehensions and lambdas by themselves. Writes
experiments/bench/path.json with the counts and the names in the order of their first call.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
ROOMS = tuple(str(ROOT / room) + "/" for room in ("client", "common", "fedstill", "server", "strategies"))
BATCH = 2  # of the round: the one that is looked at

RUN = """
name = "path"
rounds = 1
data = { private = 64, public = 64, labelled = 16, test = 16 }
train = { learning_rate = 1e-3, max_length = 16, batch_size = 16 }
method = { name = "fedid", local_epochs = 1, distill_epochs = 1 }
report = { alone = false, centralized = false }
central = { model = "tiny-bert" }
sites = [{ name = "north", model = "tiny-bert" }]
"""


class Path_:
    """The functions that were called, in order, once each."""

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """sys.setprofile's hook."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOMS) and not code.co_name.startswith("<"):
            self.seen[f"{code.co_filename.removeprefix(str(ROOT) + '/')}:{code.co_qualname}"] = None

    def facts(self) -> dict[str, Any]:
        """Counts, and the names."""
        names = list(self.seen)
        return {"functions": len(names), "files": len({name.partition(":")[0] for name in names}), "names": names}


def measure() -> dict[str, Any]:
    """One batch at the server without what the site does, and at the site from its answer() on."""
    import fedstill
    from fedstill.client.node import Node

    server, site = Path_(), Path_()
    honest, deliver = Node.answer, None

    def watched(self: Node, ask: fedstill.Ask) -> fedstill.Reply:
        wanted = ask.verb == "train.feedback" and ask.settings["step"] == BATCH + 1
        before = sys.getprofile()
        sys.setprofile(site.note if wanted else None)
        try:
            return honest(self, ask)
        finally:
            # The server is looked at from here to the same point of the next batch.
            sys.setprofile(server.note if wanted else before if ask.settings["step"] < BATCH + 1 else None)

    Node.answer = watched  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        fedstill.run(RUN, runs=folder)
    del deliver
    return {"server": server.facts(), "site": site.facts()}


def main() -> None:
    """Measure, show, and write the file."""
    found = measure()
    together = {*found["server"]["names"], *found["site"]["names"]}
    files = {name.partition(":")[0] for name in together}
    for side, facts in found.items():
        print(f"{side:8} {facts['functions']:3} functions in {facts['files']:2} files")
    print(f"{'both':8} {len(together):3} functions in {len(files):2} files")
    (ROOT / "experiments/bench/path.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
