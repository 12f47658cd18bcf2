"""ATC's course in small: every method on sites with different tasks; a table, and pictures of who learns with whom.

    python experiments/bench/atc.py                       all rows of experiments/atc/small/course.toml, seeds 1 to 3
    python experiments/bench/atc.py --methods atc fedavg --seeds 1
    python experiments/bench/atc.py --quick               a few steps of everything, to see that it works
    python experiments/bench/atc.py --data-only           only the files that the table's rows need

Each (row, seed) is a file of its own in runs/atc/results, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
COURSE = ROOT / "experiments/atc/small/course.toml"
SITES = ("imdb-1", "agnews-1", "agnews-2", "squad-1", "xquad-1", "cnndm-1", "questions-1", "questions-2")
DATASETS = ("imdb", "agnews", "squad", "xquad", "cnndm", "questions")
TRAIN, TEST = 800, 50  # texts of a site and of a data set


# --- texts ---------------------------------------------------------------------------------------------------------


def make_data(shared: Path, folder: Path) -> None:
    """Contiguous equal slices of each data set, as in the paper (only IMDB is shuffled), and a test file each."""
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, train, test in _datasets(shared):
        sites = [site for site in SITES if site.startswith(f"{name}-")]
        size = min(TRAIN, len(train) // len(sites))
        for number, site in enumerate(sites):
            _write(folder / f"{site}.jsonl", train[number * size : (number + 1) * size])
        _write(folder / f"{name}-test.jsonl", test[:TEST])
    (folder / "done").touch()


def _datasets(shared: Path) -> Iterator[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]]:
    from fedstill.common.data.tasks import film_reviews

    pool = film_reviews().train
    assert pool.domains is not None
    assert pool.labels is not None
    order = np.random.default_rng(1).permutation([n for n, domain in enumerate(pool.domains) if domain == "imdb"])
    reviews = [{"text": pool.texts[n], "label": "for" if pool.labels[n] else "against"} for n in order[: TRAIN + TEST]]
    yield "imdb", reviews[:TRAIN], reviews[TRAIN:]

    names = ("World", "Sports", "Business", "Sci/Tech")
    with (shared / "ag_news/alps_dev.tsv").open(encoding="utf-8") as file:
        rows = [line.rstrip("\n").rsplit("\t", 1) for line in file]
    train = [{"text": text, "label": label.strip()} for text, label in rows if label.strip() in names]
    with (shared / "ag_news/test.csv").open(encoding="utf-8") as file:
        test = [{"text": f"{title} {body}", "label": names[int(label) - 1]} for label, title, body in csv.reader(file)]
    yield "agnews", train, np.random.default_rng(2).permutation(np.array(test, object)).tolist()

    answers, held = _squad(shared / "squad/train-v1.1.json.gz"), _squad(shared / "squad/dev-v1.1.json.gz")
    other = _squad(shared / "squad/xquad.en.json")
    known = {row["context"] for row in other}
    held = [row for row in held if row["context"] not in known]
    half = len(answers) // 2
    yield "squad", answers[:half], held[::97]
    yield "xquad", other[: -2 * TEST], other[-TEST:]

    with gzip.open(shared / "cnn_dailymail/cnn_dailymail-test.first3000.csv.gz", "rt", encoding="utf-8") as file:
        news = [{"text": row["article"], "summary": row["highlights"]} for row in csv.DictReader(file)]
    yield "cnndm", news[:-TEST], news[-TEST:]

    asked = [{**row, "answer": row["answer"][0]} for row in answers[half:]]
    yield "questions", asked[: -20 * TEST], asked[-20 * TEST :: 20]


def _squad(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        articles = json.load(file)["data"]
    return [
        {
            "question": asked["question"].strip(),
            "context": part["context"],
            "answer": list(dict.fromkeys(answer["text"] for answer in asked["answers"])),
            "answer_start": asked["answers"][0]["answer_start"],
        }
        for article in articles
        for part in article["paragraphs"]
        for asked in part["qas"]
    ]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rows() -> list[str]:
    """The rows of the table, in its order."""
    from fedstill.experiments.compare.table_file import read_file

    return list(read_file(COURSE).contents.rows)


# --- one run -------------------------------------------------------------------------------------------------------


def settings(row: str, seed: int, args: argparse.Namespace) -> Any:
    """The run of a row, with the model and the folder that were asked for."""
    from fedstill.common.config import RunConfig
    from fedstill.experiments.compare.table_file import load_row

    values = load_row(COURSE, row).model_dump(mode="json", exclude_unset=True)
    if args.quick:
        values["train"]["epoch_steps"] = 2
        assign = values["method"].get("assign_rounds", 0)
        if assign:
            values["method"]["assign_rounds"] = 2
        if values["method"]["name"] == "atc":
            values["method"].update(assign_steps=2, items=8)
        values["rounds"] = 4 if assign else 2
    values["seed"], values["central"]["model"] = seed, str(args.model)
    for site in values["sites"]:
        site["model"] = str(args.model)
        for part in ("train", "test"):
            site["task"][part] = str((args.out / "data" / Path(site["task"][part]).name).resolve())
    return RunConfig.model_validate(values)


def run_one(label: str, seed: int, args: argparse.Namespace) -> None:
    """One federation in this process, with the sites' own files of scores read at the end."""
    import torch

    torch.set_num_threads(1)
    from fedstill.common.wire import Reply
    from fedstill.deploy.launch.process import assemble
    from fedstill.server.link import LocalLink
    from fedstill.server.record import Record

    class Course(LocalLink):
        """A stopped (method, seed) begins anew, so the sites keep no checkpoints; nor are they tested untrained."""

        def deliver(self, parts: Any, deadline: float) -> Any:
            idle = {name for name, ask in parts.items() if ask.verb == "query.save" or _untrained(ask)}
            yield from super().deliver({name: ask for name, ask in parts.items() if name not in idle}, deadline)
            yield from (Reply(name) for name in parts if name in idle)

    def _untrained(ask: Any) -> bool:
        return bool(ask.verb == "evaluate.test" and ask.settings["round"] == 0)

    class Sheet(Record):
        """Nor does the server."""

        def save_round(self, number: int, arrays: Any, facts: Any) -> None:
            print(f"{label} {seed}: round {number}, {time.perf_counter() - began:.0f} s", flush=True)

    began = time.perf_counter()
    config = settings(label, seed, args)
    place = f"{label}-{seed}"
    folder = args.out / "work" / place
    for old in folder.rglob("*.jsonl"):
        old.unlink()
    here = assemble(config, Sheet(folder, config), run="run")
    nodes = here.nodes
    summary = here.federation.run(Course(nodes, here.federation.admission()))
    scores = {}
    for node in nodes:
        lines = (node.folder / "scores.jsonl").read_text().splitlines()
        scores[node.name] = {n: v for n, v in json.loads(lines[-1]).items() if n not in ("verb", "round", "kind")}
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    found = {
        "method": label,
        "seed": seed,
        "quick": args.quick,
        "scores": scores,
        "clusters": [event["clusters"] for event in events if event["event"] == "clusters"],
        "nearest": [event["nearest"] for event in events if event["event"] == "neighbours"],
        "losses": [event["metrics"].get("loss") for event in events if event["event"] == "round_finished"],
        "bytes_up": sum(site["bytes_up"] for site in summary["sites"].values()),
        "bytes_down": sum(site["bytes_down"] for site in summary["sites"].values()),
        "seconds": time.perf_counter() - began,
    }
    draft = args.out / "results" / f".{place}"
    draft.write_text(json.dumps(found, indent=1))
    draft.replace(args.out / "results" / f"{place}.json")


def run_all(args: argparse.Namespace) -> None:
    """What is not done yet, `--jobs` at a time, each in a process of its own."""
    wanted = [(name, seed) for seed in args.seeds for name in args.methods or rows()]
    waiting = [(name, seed) for name, seed in wanted if not (args.out / "results" / f"{name}-{seed}.json").exists()]
    running: list[tuple[str, int, subprocess.Popen[bytes]]] = []
    failed = []
    while waiting or running:
        while waiting and len(running) < args.jobs:
            name, seed = waiting.pop(0)
            command = [sys.executable, __file__, "--one", name, str(seed), "--out", str(args.out)]
            command += ["--model", str(args.model), "--shared", str(args.shared), *(["--quick"] if args.quick else [])]
            running.append((name, seed, subprocess.Popen(command)))
        time.sleep(0.5)
        for entry in [entry for entry in running if entry[2].poll() is not None]:
            running.remove(entry)
            failed += [f"{entry[0]} {entry[1]}"] if entry[2].returncode else []
    if failed:
        print("failed:", ", ".join(failed), file=sys.stderr)


# --- what came of it -----------------------------------------------------------------------------------------------


def by_dataset(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The mean of a data set's sites, metric by metric."""
    found = {}
    for name in DATASETS:
        sites = [scores for site, scores in result["scores"].items() if site.startswith(f"{name}-")]
        found[name] = {metric: float(np.mean([scores[metric] for scores in sites])) for metric in sites[0]}
    return found


def average(result: dict[str, Any]) -> float:
    """The mean over data sets of each one's mean metric."""
    return float(np.mean([np.mean(list(scores.values())) for scores in by_dataset(result).values()]))


def table(results: list[dict[str, Any]]) -> str:
    """In percent, as in the paper: a row a method, its metrics by data set, and the average; +- over seeds."""
    methods = [name for name in rows() if any(r["method"] == name for r in results)]
    columns = [(name, metric) for name, scores in by_dataset(results[0]).items() for metric in scores]
    lines = ["| method | seeds | " + " | ".join(f"{name} {metric}" for name, metric in columns)
             + " | average | sent, MB | received, MB | seconds |"]  # fmt: skip
    lines.append("|" + "---|" * (len(columns) + 6))
    for method in methods:
        own = [r for r in results if r["method"] == method]
        cells = [_spread([by_dataset(r)[name][metric] for r in own]) for name, metric in columns]
        cells += [_spread([average(r) for r in own])]
        cells += [f"{np.mean([r[key] for r in own]) / 1e6:.0f}" for key in ("bytes_up", "bytes_down")]
        lines.append(f"| {method} | {len(own)} | {' | '.join(cells)} | {np.mean([r['seconds'] for r in own]):.0f} |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    percent = 100 * np.array(values)
    return f"{percent.mean():.1f}" + (f" ± {percent.std(ddof=1):.1f}" if len(values) > 1 else "")


def pictures(results: list[dict[str, Any]], folder: Path) -> None:
    """How often two sites share a cluster of ASSIGN, and their mean rank among neighbours with and without eq. 3."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from fedstill.experiments.compare.pictures import matrix, together

    names = list(SITES)
    atc = [r for r in results if r["method"] == "atc"]
    if atc:
        halves = [_half(atc, late) for late in (False, True)]
        figure, axes = pyplot.subplots(1, 2, figsize=(13, 6))
        for axis, part, title in zip(axes, halves, ("first half of ASSIGN", "second half of ASSIGN"), strict=True):
            matrix(axis, together(part, names), names, f"share of rounds in one cluster, {title}", "viridis", 0, 1)
        _save(figure, folder / "clusters.png")
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 6))
    for axis, method in zip(axes, ("atc", "no-contrast-loss"), strict=True):
        own = [found for r in results if r["method"] == method for found in r["nearest"][1:]]
        if not own:
            continue
        ranks = np.full((len(names), len(names)), np.nan)
        for i, a in enumerate(names):
            for j, b in enumerate(names):
                if a != b:
                    ranks[i, j] = np.mean([found[a].index(b) + 1 for found in own])
        title = "with" if method == "atc" else "without"
        matrix(
            axis, ranks, names, f"mean rank as a neighbour, {title} contrastive loss", "viridis_r", 1, len(names) - 1
        )
    _save(figure, folder / "ranks.png")


def _half(results: list[dict[str, Any]], late: bool) -> list[dict[str, int]]:
    halves = [(r["clusters"], len(r["clusters"]) // 2) for r in results]
    return [found for clusters, half in halves for found in (clusters[half:] if late else clusters[:half])]


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(path)


def report(args: argparse.Namespace) -> None:
    """Table, pictures, a file with every result, and experiments/bench/atc.json with the scores."""
    results = [json.loads(path.read_text()) for path in sorted((args.out / "results").glob("*.json"))]
    results = [r for r in results if r["quick"] == args.quick]
    if not results:
        sys.exit("there is no result yet")
    text = table(results)
    (args.out / "table.md").write_text(text)
    slim = [{**r, "datasets": by_dataset(r), "average": average(r)} for r in results]
    (args.out / "results.json").write_text(json.dumps(slim, indent=1) + "\n")
    if not args.quick:
        kept = ("datasets", "average", "bytes_up", "bytes_down", "seconds")
        facts = {f"{r['method']}/{r['seed']}": {key: r[key] for key in kept} for r in slim}
        (ROOT / "experiments/bench/atc.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(text)
    pictures(results, args.out)


def main() -> None:
    """See the first lines of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=rows())
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "runs/atc")
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="holds data/ and weights/")
    parser.add_argument("--model", help="by default shared/weights/bert-tiny-question")
    parser.add_argument("--quick", action="store_true", help="a few steps only")
    parser.add_argument("--data-only", action="store_true", help="write the sites' files, run nothing")
    parser.add_argument("--report", action="store_true", help="table and pictures of what is there already")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model = args.model or (args.shared / "weights/bert-tiny-question").resolve()
    (args.out / "results").mkdir(parents=True, exist_ok=True)
    if args.one:
        run_one(args.one[0], int(args.one[1]), args)
        return
    if not args.report:
        if not (args.shared / "data/squad").is_dir():
            sys.exit(f"{args.shared}/data is not there: give --shared the folder with data/ (SQuAD, AG News, CNN/DM)")
        make_data(args.shared / "data", args.out / "data")
        if args.data_only:
            return
        run_all(args)
    report(args)


if __name__ == "__main__":
    main()
