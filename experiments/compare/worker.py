"""Runs of a table, in a process of their own: `python -m fedstill.experiments.compare.worker ON FOLDER ...`.

ON is process, local or simulation; a FOLDER holds config.toml. What comes of each: summary.json as `fedstill run`
writes it, outputs.safetensors, and at the very end done.json; or failed.json with the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType

os.environ.setdefault("OMP_NUM_THREADS", "1")

from fedstill.common import checkpoint
from fedstill.common.checkpoint import write_atomically
from fedstill.common.config import RunConfig
from fedstill.common.config.files import load_run
from fedstill.common.wire import Facts

CONFIG, SUMMARY, DONE, FAILED, OWN_SCORES = "config.toml", "summary.json", "done.json", "failed.json", "own_scores.json"
LEFTOVERS = ("checkpoints", "sites", "flower", "app")  # needed by an unfinished run only


def main(folder: Path, on: str, keep_models: bool, reuse: Path | None = None) -> int:
    """Run, or resume, the run of this folder; return 0 if it finished."""
    began, cpu = time.perf_counter(), time.process_time()
    config = load_run(folder / CONFIG)
    resume = can_resume(config, folder)
    try:
        if on == "process":
            run_in_process(config, folder, resume, reuse)
        else:
            from fedstill.deploy.launch.local import run_here

            run_here(config, folder.resolve(), on, resume, lambda event: None)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}{_site_reasons(folder)}"
        write_atomically(folder / FAILED, json.dumps({"error": reason}, indent=1) + "\n")
        return 1
    for name in [*LEFTOVERS, *([] if keep_models else ["central"])]:
        shutil.rmtree(folder / name, ignore_errors=True)
    write_atomically(
        folder / DONE, json.dumps(_about(on, time.perf_counter() - began, cpu, reuse is not None), indent=1) + "\n"
    )
    return 0


def can_resume(config: RunConfig, folder: Path) -> bool:
    """Return whether the server and every site hold a checkpoint of the same round."""
    held = [set(checkpoint.rounds(folder / "checkpoints"))]
    states = [folder / "sites" / site.name / folder.name for site in config.sites]  # as in a launched federation
    return bool(set.intersection(*held, *(set(checkpoint.rounds(state / "checkpoints")) for state in states)))


def run_in_process(config: RunConfig, folder: Path, resume: bool = False, reuse: Path | None = None) -> Facts:
    """Run server and sites in this process with one thread; return the run's summary."""
    import torch

    torch.set_num_threads(1)
    from fedstill.deploy.launch.process import assemble
    from fedstill.experiments.compare.model_outputs import save_outputs
    from fedstill.experiments.compare.shared_training import reuse_first_training
    from fedstill.server.record import recorded

    with recorded(config, folder, resume) as record:
        assembled = assemble(config, record)
        if reuse is not None and not resume:
            for node in assembled.nodes:
                reuse_first_training(node, reuse)
        summary = assembled.run(resume)
        site_scores = {node.name: scores for node in assembled.nodes if (scores := node.own_scores())}
        if site_scores:
            write_atomically(folder / OWN_SCORES, json.dumps(site_scores, indent=1) + "\n")
        else:
            save_outputs(folder, assembled.federation.central, assembled.nodes)
        return summary


def _site_reasons(folder: Path) -> str:
    """Return why sites were left out, which a run that lost its quorum does not report itself."""
    try:
        lines = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return ""
    reasons = {f"{line['site']}: {line['reason']}" for line in lines[-20:] if line["event"] == "left_out"}
    return "".join(f"; {reason}" for reason in sorted(reasons))


def _about(on: str, seconds: float, began: float, reused: bool) -> Facts:
    import torch

    cpu = round(time.process_time() - began, 2)  # of this process alone
    return {
        "on": on,
        "seconds": round(seconds, 2),
        "cpu_seconds": cpu,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "reused": reused,
    }


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    try:
        where, *places = sys.argv[1:]
        keep = "--keep-models" in places
        shared = Path(places[places.index("--reuse") + 1]) if "--reuse" in places else None
        folders = [Path(place) for place in places if not place.startswith("--") and Path(place) != shared]
        sys.exit(max(main(folder, where, keep, shared) for folder in folders))
    except KeyboardInterrupt:
        sys.exit(130)
