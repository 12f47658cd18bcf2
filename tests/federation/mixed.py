"""Sites with four kinds of tasks, in files made here: two speak of the sea, two of the kitchen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fedstill.common.config import RunConfig
from fedstill.common.config.files import load_run

SEA = "the ship sailed over the wide ocean . a sailor saw a whale near the coast . waves and wind broke the mast"
KITCHEN = "the cook baked fresh bread in the oven . a pinch of salt and butter made the soup rich . sugar fills the pan"
KINDS = {"ann": ("classification", SEA), "bob": ("question-answering", KITCHEN),
         "cat": ("summarisation", SEA), "dan": ("question-generation", KITCHEN)}  # fmt: skip

RUN = """
name = "mixed"
rounds = 4
[task]
name = "mixed"
[train]
learning_rate = 1e-3
max_length = 32
batch_size = 8
epoch_steps = 2
[method]
name = "atc"
assign_rounds = 2
assign_steps = 2
clusters = 2
neighbours = 2
items = 6
positions = 8
[central]
model = "tiny-bert"
[report]
alone = false
evaluate = "end"
"""


def write_files(folder: Path, count: int = 24) -> dict[str, Path]:
    """A file for each site, with words of its domain in a drawn order."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, found = np.random.default_rng(7), {}
    for site, (kind, domain) in KINDS.items():
        words = [word for word in domain.split() if word != "."]
        rows = []
        for _ in range(count):
            drawn = rng.permutation(words)[:12].tolist()
            text = " ".join([*drawn[:6], ".", *drawn[6:], "."])
            answer = drawn[3]
            rows.append({
                "classification": {"text": text, "label": "early" if drawn[0] < drawn[1] else "late"},
                "question-answering": {"question": f"what follows {drawn[2]}", "context": text, "answer": answer},
                "summarisation": {"text": text, "summary": " ".join(drawn[:3])},
                "question-generation": {"answer": answer, "context": text, "question": f"what follows {drawn[2]}"},
            }[kind])  # fmt: skip
        found[site] = folder / f"{site}.jsonl"
        found[site].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def mixed_run(
    folder: Path, *changes: str, model: str = "tiny-bert", sites: tuple[str, ...] = tuple(KINDS)
) -> RunConfig:
    """A run of these sites, with `key=value` changes."""
    files = write_files(folder)
    text = RUN.replace("tiny-bert", model)
    for site in sites:
        text += f'[[sites]]\nname = "{site}"\nmodel = "{model}"\n[sites.task]\nkind = "{KINDS[site][0]}"\n'
        text += f'train = "{files[site]}"\nbeams = 2\nmost = 6\ntarget_length = 8\n'
    return load_run(text, changes)
