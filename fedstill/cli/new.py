"""The commands `fedstill new`, which writes a federation's files, and `fedstill demo`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstill.cli.tables import Change, Json, On, Quiet, Runs, console

MODELS = ("minilm", "minilm-3", "small-bert")
FROZEN = 'freeze = "encoder", learning_rate = 3e-3'  # a head on cached vectors: seconds a round instead of minutes
LOOKED_AT = 200_000  # rows of the file from which columns and sizes are guessed
SHARES = {"private": 0.6, "public": 0.2, "labelled": 0.05, "test": 0.15}
ENOUGH = {"private": 3000, "public": 400, "labelled": 200, "test": 600}  # texts for a first federation
FEW = 60  # texts without which shares make no federation


def add_to(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.command()(new)
    app.command()(demo)


def demo(
    on: On = "local",
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the run's live page, as `fedstill watch` does.")
    ] = False,
    change: Change = None,
    quiet: Quiet = False,
    as_json: Json = False,
    runs: Runs = Path("runs"),
) -> None:
    """Run the demo: four sites with four kinds of models on film reviews, a few minutes on two cores."""
    from fedstill import experiments
    from fedstill.cli.runs import run

    file = Path(next(iter(experiments.__path__))) / "demo.toml"
    run(str(file), on=on, change=change, runs=runs, watch=watch, quiet=quiet, as_json=as_json)


def new(
    folder: Annotated[Path, typer.Argument(help="Where to write run.toml and the sites' files.")] = Path(),
    data: Annotated[Path | None, typer.Option(help="A csv, tsv or jsonl file with texts and labels.")] = None,
    text: Annotated[str | None, typer.Option(help="The column of the text; by default guessed.")] = None,
    label: Annotated[str | None, typer.Option(help="The column of the label; by default guessed.")] = None,
    sites: Annotated[str | None, typer.Option(help="The sites' names, with commas between them.")] = None,
    models: Annotated[
        str | None, typer.Option(help="The sites' models, with commas; they take turns if there are fewer.")
    ] = None,
    method: Annotated[str, typer.Option(help="The method; see: fedstill methods")] = "ds-fl",
    rounds: Annotated[int, typer.Option(help="Communication rounds.", min=1)] = 3,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; take what is guessed.")] = False,
    as_json: Json = False,
) -> None:
    """Write a federation on a file of yours: run.toml, and a file a site for when they run on machines of their own."""
    ask = _Asking(yes or as_json)
    file = data or Path(ask("The file with texts and labels (csv, tsv or jsonl)", None, "--data"))
    rows = _rows(file)
    text = text or ask("The column of the text", guess_text(rows), "--text")
    label = label or ask("The column of the label", guess_label(rows, text), "--label")
    counts = _labels(rows, file, text, label)
    named = [name.strip() for name in (sites or ask("The sites' names", "north, south, west", "--sites")).split(",")]
    chosen = [name.strip() for name in (models or ask("Their models", ", ".join(MODELS), "--models")).split(",")]
    kinds = {name: chosen[place % len(chosen)] for place, name in enumerate(named)}
    written = write(folder, file.resolve(), text, label, list(counts), kinds, method, rounds, *sizes(rows, text))
    if as_json:
        print(json.dumps({"files": [str(path) for path in written], "labels": counts}, indent=1))
        return
    shown = ", ".join(f"{name} {count}" for name, count in counts.most_common(8))
    console.print(f"{sum(counts.values()):,} texts; labels: {shown}.", highlight=False)
    for path in written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    console.print(
        f"Next: fedstill check {written[0]}; fedstill run {written[0]} --watch", highlight=False, soft_wrap=True
    )


class _Asking:
    """Asks a person, or takes the default."""

    def __init__(self, silent: bool) -> None:
        self.silent = silent

    def __call__(self, question: str, default: str | None, option: str) -> str:
        if not self.silent:
            return str(typer.prompt(question, default=default))
        if default is None:
            raise ValueError(f"{question}: give it with {option}, since nothing is asked")
        return default


# --- the file ---


def _rows(file: Path) -> list[Mapping[str, Any]]:
    from itertools import islice

    from fedstill.common.data.tasks.rows import read_rows

    rows = list(islice(read_rows(file.expanduser()), LOOKED_AT))
    if len(rows) < FEW:
        raise ValueError(f"{file}: has {len(rows)} rows, and a federation needs at least {FEW} texts")
    return rows


def guess_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the column with the longest entries."""
    return max(rows[0], key=lambda column: sum(len(str(row.get(column) or "")) for row in rows))


def guess_label(rows: Sequence[Mapping[str, Any]], text: str) -> str:
    """Return the column with the fewest different entries, but at least two."""
    kinds = {column: len({str(row.get(column)) for row in rows}) for column in rows[0] if column != text}
    known = {column: count for column, count in kinds.items() if 2 <= count <= max(2, len(rows) // 10)}
    if not known:
        raise ValueError(f"no column looks like a label ({', '.join(rows[0])}); name it with --label")
    named = [column for column in known if column.lower() in ("label", "labels", "class", "category", "target")]
    return named[0] if named else min(known, key=lambda column: known[column])


def _labels(rows: Sequence[Mapping[str, Any]], file: Path, text: str, label: str) -> Counter[str]:
    for column, option in ((text, "--text"), (label, "--label")):
        if column not in rows[0]:
            raise ValueError(f"{file}: there is no column {column!r}; columns: {', '.join(rows[0])}; see {option}")
    counts = Counter(str(row[label]).strip() for row in rows if str(row.get(label) or "").strip())
    if not 2 <= len(counts) <= max(2, len(rows) // 5):
        raise ValueError(f"{file}: column {label!r} has {len(counts)} different values, so it holds no labels; --label")
    return Counter(dict(sorted(counts.items())))


# --- what is written ---


def write(
    folder: Path,
    file: Path,
    text: str,
    label: str,
    labels: Sequence[str],
    kinds: Mapping[str, str],
    method: str,
    rounds: int,
    held: Mapping[str, int | float],
    length: int,
) -> list[Path]:
    """Write run.toml and sites/NAME.toml; refuse to write over a file."""
    from fedstill.common.config.files import load_run

    paths = {folder / "run.toml": _run(folder, file, text, label, kinds, method, rounds, held, length)}
    paths |= {
        folder / "sites" / f"{name}.toml": _site(name, model, text, label, labels) for name, model in kinds.items()
    }
    load_run(paths[folder / "run.toml"])  # says what is wrong with a name, before it becomes a file's
    there = [path for path in paths if path.exists()]
    if there:
        raise ValueError(f"{there[0]} is there already; take it away, or name another folder: fedstill new FOLDER")
    for path, content in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return list(paths)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def sizes(rows: Sequence[Mapping[str, Any]], text: str) -> tuple[dict[str, int | float], int]:
    """Return shares of the file, or numbers of texts that are enough, and a length in tokens that most texts have."""
    words = sorted(len(str(row.get(text) or "").split()) for row in rows)
    length = next((length for length in (32, 64) if 1.3 * words[int(0.8 * len(words))] <= length), 128)
    return {
        name: share if share * len(rows) <= ENOUGH[name] else ENOUGH[name] for name, share in SHARES.items()
    }, length


def _model(name: str) -> str:
    """Return a learner's model as TOML; of a trained encoder that comes with fedstill only a head is trained."""
    from fedstill.common.models.builtin import builtin_models

    ready = {model.name for model in builtin_models() if model.pretrained and model.family != "t5"}
    return f"model = {_quoted(name)}" + (f", {FROZEN}" if name in ready else "")


def _run(
    folder: Path,
    file: Path,
    text: str,
    label: str,
    kinds: Mapping[str, str],
    method: str,
    rounds: int,
    held: Mapping[str, int | float],
    length: int,
) -> str:
    name = "".join(char if char.isalnum() or char in "-_." else "-" for char in folder.resolve().name).lstrip("-_.")
    sites = "".join(f"  {{ name = {_quoted(site)}, {_model(model)} }},\n" for site, model in kinds.items())
    parts = ", ".join(f"{part} = {size}" for part, size in held.items())
    return f"""# A federation on one machine, written by `fedstill new`. What it will cost: fedstill check run.toml
name = {_quoted(name or "mine")}
rounds = {rounds}
task = {{ name = "files", train = {_quoted(str(file))}, text = {_quoted(text)}, label = {_quoted(label)} }}
# private: dealt to the sites; public: for everybody, without labels; labelled: the server's; test: for the scores
data = {{ {parts} }}  # shares, or numbers of texts
train = {{ max_length = {length} }}  # tokens of a text; longer ones are cut
method.name = {_quoted(method)}  # see: fedstill methods
# freeze = "encoder" trains a head on vectors that are computed once; without it, and its rate, whole models are trained
central = {{ {_model(MODELS[0])} }}
report = {{ centralized = false }}  # true: also train one model on all texts in one place, as a bound; it takes longer
# a site's model: a built-in (fedstill models), any AutoModel name, or a folder (fedstill models pull)
sites = [
{sites}]
"""


def _site(name: str, model: str, text: str, label: str, labels: Sequence[str]) -> str:
    return f"""# The site {name} on a machine of its own, written by `fedstill new`: fill in what is marked <...>.
# Then, there: flower-client --site {name}.toml --check
name = {_quoted(name)}
model = {_quoted(model)}
superlink = "coordinator.example.org:9092"  # <the coordinator's>
root_certificates = "ca.crt"                # <the coordinator's, over a channel nobody can tamper with>
private_key = "{name}.key"                  # fedstill keys new {name}.key
labels = {json.dumps(list(labels), ensure_ascii=False)}
[data]
private = "private.csv"                     # <this site's texts and labels; they stay here>
public = "public.csv"                       # <the same file everywhere>
text = {_quoted(text)}
label = {_quoted(label)}
[limits]
leave = ["predictions"]                     # what may leave, whatever a run asks for
"""
