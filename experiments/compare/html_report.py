"""report.html: one page with table, pictures and settings that opens without a network."""

from __future__ import annotations

import base64
import os
import platform
from collections.abc import Sequence
from datetime import datetime
from html import escape

import tomli_w

from fedstill import __version__
from fedstill.common.wire import Facts
from fedstill.experiments.compare import formatting as cells
from fedstill.experiments.compare import intervals
from fedstill.experiments.compare.columns import WHOSE
from fedstill.experiments.compare.pictures import Picture
from fedstill.experiments.compare.results import Results
from fedstill.server.page import asset

# What a table needs beside the style that all pages share.
STYLE = """
th { white-space: normal; min-width: 5.5rem; } td:first-child { white-space: normal; min-width: 9rem; }
td b { color: var(--accent); } td.paper, th.paper, .tag { color: var(--soft); }
.tag { font-size: .72rem; margin-left: .4rem; white-space: nowrap; }
nav a { margin-right: 1.2rem; text-decoration: none; font-size: .9rem; }
table.narrow { width: auto; } tr.partial td { background: var(--wash); }
ul.notes { padding-left: 1.1rem; max-width: 46rem; font-size: .9rem; } ul.notes li { margin: .25rem 0; }
figure { margin: 1.2rem 0 2rem; } figure img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
"""


def write(results: Results, pictures: Sequence[Picture]) -> str:
    """The page."""
    settings = results.table.settings
    gaps = "".join(f'<p class="warning bad">{escape(gap)}</p>' for gap in cells.gaps(results))
    notes = "".join(f"<li>{escape(note)}</li>" for note in cells.notes(results))
    further = cells.other_differences(results)
    lead = f'<p class="soft">{escape(settings.caption)}</p>' if settings.caption else ""
    seeds = ", ".join(map(str, settings.seeds))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(settings.title)}</title>
<style>{asset("style.css")}{STYLE}</style>
</head>
<body>
<div class="page">
<header>
<h1>{escape(settings.title)}</h1>
{lead}
<nav><a href="#table">Table</a><a href="#intervals">Intervals</a><a href="#pictures">Pictures</a>
<a href="#settings">Settings</a><a href="#about">About</a></nav>
</header>
<main>
<section><h2 id="table">Table</h2>
{gaps}
{_table(results)}
<ul class="notes">{notes}</ul>
{_plain("Further scores against their best baseline", further) if further else ""}</section>
{_intervals(results)}
<section><h2 id="pictures">Pictures</h2>
{"".join(map(_figure, pictures))}</section>
<section><h2 id="settings">Settings</h2>
<p>Seeds: {escape(seeds)}. Every row as it was resolved, without its seed:</p>
{"".join(_settings(results, row) for row in results.rows)}</section>
<section><h2 id="about">About</h2>
{_about(results)}</section>
</main>
</div>
</body>
</html>
"""


def _intervals(results: Results) -> str:
    column, rows = results.table.main, intervals.means(results)
    if column is None or not rows:
        return '<section><h2 id="intervals">Intervals</h2><p class="soft">No row is complete yet.</p></section>'
    title = f"{column.score} of {WHOSE[column.whose]}"
    seeds = len(results.table.settings.seeds)
    said = f"Mean over {seeds} seeds and its 95 % interval (Student's t); the best row in colour."
    parts = [f"<h3>{escape(title)}</h3>", _drawn(intervals.draw(rows, title), said)]
    base, differences = intervals.differences(results)
    if differences:
        title = f"difference from {base}, the best baseline"
        said = "Paired by seed, with 95 % intervals; in colour where the interval leaves out 0."
        parts += [f"<h3>{escape(title)}</h3>", _drawn(intervals.draw(differences, title, zero=True), said)]
    return f'<section><h2 id="intervals">Intervals</h2>{"".join(parts)}</section>'


def _drawn(svg: str, caption: str) -> str:
    return f'<figure><div class="wide" tabindex="0">{svg}</div><figcaption>{escape(caption)}</figcaption></figure>'


def _table(results: Results) -> str:
    titles = cells.head(results)
    kinds = [' class="paper"' if title == "paper" else "" for title in titles]
    top = "".join(f"<th{kind}>{escape(title)}</th>" for kind, title in zip(kinds, titles, strict=True))
    body = []
    for row, result in results.rows.items():
        texts = [_bold(text) for text in cells.line(results, row, mark="\0")]
        tags = [word for word, names in (("baseline", results.table.settings.baselines),
                                         ("bound", results.table.settings.bounds)) if row in names]  # fmt: skip
        texts[0] += "".join(f'<span class="tag">{tag}</span>' for tag in tags)
        marked = ' class="partial"' if result.missing else ""
        columns = "".join(f"<td{kind}>{text}</td>" for kind, text in zip(kinds, texts, strict=True))
        body.append(f"<tr{marked}>{columns}</tr>")
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _bold(text: str) -> str:
    return f"<b>{escape(text.strip(chr(0)))}</b>" if text.startswith("\0") else escape(text)


def _plain(title: str, rows: list[list[str]]) -> str:
    top = "".join(f"<th>{escape(text)}</th>" for text in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows[1:])
    table = f"<table class='narrow'><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<h3>{escape(title)}</h3><div class="wide">{table}</div>'


def _figure(picture: Picture) -> str:
    if picture.file is None:
        return f'<h3>{escape(picture.title)}</h3><p class="soft">{escape(picture.caption)}</p>'
    data = base64.b64encode(picture.file.read_bytes()).decode()
    return (
        f'<figure><h3>{escape(picture.title)}</h3><img alt="{escape(picture.title)}" width="{picture.width}" '
        f'src="data:image/png;base64,{data}"><figcaption>{escape(picture.caption)}</figcaption></figure>'
    )


def _settings(results: Results, row: str) -> str:
    config = results.table.rows[row]
    values = config.model_dump(mode="json", exclude_none=True, exclude_unset=True, exclude={"seed"})
    return (
        f"<details><summary>{escape(results.table.title(row))} <code>{escape(row)}</code></summary>"
        f"<pre>{escape(tomli_w.dumps(values))}</pre></details>"
    )


def _about(results: Results) -> str:
    done: list[Facts] = [s["done"] for result in results.rows.values() for s in result.summaries.values()]
    runs = len(results.rows) * len(results.table.settings.seeds)
    facts = {
        "written": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z} by fedstill {__version__}",
        "table": results.table.source(),
        "runs": f"{len(done)} of {runs} finished, {sum(len(seeds) for seeds in results.failed.values())} failed",
        "run on": ", ".join(sorted({str(one.get("on")) for one in done})) or "–",
        "run time": f"{sum(one.get('seconds', 0.0) for one in done) / 60:.1f} minutes, all runs together",
        "torch": ", ".join(sorted({str(one["torch"]) for one in done if "torch" in one})) or "–",
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
    }
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f'<dl class="facts">{lines}</dl>'
