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
from fedstill.experiments.compare.pictures import Picture
from fedstill.experiments.compare.results import Results

STYLE = """
:root { --ink: #1d1f23; --soft: #646a73; --line: #e3e5e8; --accent: #0b5cad; --bad: #a3261b; color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 3rem 1.5rem 5rem; max-width: 74rem; background: #fff; color: var(--ink);
  font: 16px/1.55 "Charter", "Bitstream Charter", "Source Serif Pro", "Georgia", serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 3rem 0 .8rem; padding-top: .8rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 2.2rem 0 .5rem; }
p { margin: .5rem 0; max-width: 44rem; }
.lead { color: var(--soft); }
nav { margin: 1rem 0 0; font-size: .9rem; } nav a { color: var(--accent); margin-right: 1.2rem; text-decoration: none; }
table, .facts, details, figcaption, nav, .gap {
  font-family: "Inter", "Helvetica Neue", "Segoe UI", "DejaVu Sans", sans-serif; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .42rem .7rem; text-align: right; white-space: nowrap; vertical-align: bottom; }
th { font-weight: 600; color: var(--soft); white-space: normal; min-width: 5.5rem; line-height: 1.3;
  border-bottom: 1.5px solid var(--ink); }
td { border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td:first-child { white-space: normal; min-width: 8rem; }
td b { color: var(--accent); }
td.paper, th.paper, .tag { color: var(--soft); }
.tag { font-size: .72rem; margin-left: .4rem; white-space: nowrap; }
table.narrow { width: auto; }
tr.partial td { background: #fdf3f2; }
ul.notes { font-size: .95rem; padding-left: 1.1rem; max-width: 46rem; } ul.notes li { margin: .25rem 0; }
.gap { border-left: 3px solid var(--bad); padding: .4rem .9rem; margin: .6rem 0; font-size: .85rem; background: #fdf3f2;
  overflow-wrap: anywhere; max-width: 52rem; }
figure { margin: 1.5rem 0 2.5rem; } figure img { max-width: 100%; height: auto; display: block; }
figcaption { font-size: .82rem; color: var(--soft); margin-top: .5rem; max-width: 44rem; }
details { border-bottom: 1px solid var(--line); padding: .5rem 0; font-size: .85rem; max-width: 60rem; }
summary { cursor: pointer; } summary code { color: var(--soft); }
pre { font: 12px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; background: #f7f8f9; padding: .8rem 1rem;
  overflow-x: auto; border-radius: 4px; }
.facts { font-size: .85rem; display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; }
.facts dt { color: var(--soft); } .facts dd { margin: 0; overflow-wrap: anywhere; }
@media print { body { padding: 0; } nav { display: none; } figure { break-inside: avoid; } }
"""


def write(results: Results, pictures: Sequence[Picture]) -> str:
    """The page."""
    settings = results.table.settings
    gaps = "".join(f'<p class="gap">{escape(gap)}</p>' for gap in cells.gaps(results))
    notes = "".join(f"<li>{escape(note)}</li>" for note in cells.notes(results))
    further = cells.other_differences(results)
    lead = f'<p class="lead">{escape(settings.caption)}</p>' if settings.caption else ""
    seeds = ", ".join(map(str, settings.seeds))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(settings.title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(settings.title)}</h1>
{lead}
<nav><a href="#table">Table</a><a href="#pictures">Pictures</a><a href="#settings">Settings</a>
<a href="#about">About</a></nav>
</header>
<main>
<h2 id="table">Table</h2>
{gaps}
{_table(results)}
<ul class="notes">{notes}</ul>
{_plain("Further scores against their best baseline", further) if further else ""}
<h2 id="pictures">Pictures</h2>
{"".join(map(_figure, pictures))}
<h2 id="settings">Settings</h2>
<p>Seeds: {escape(seeds)}. Every row as it was resolved, without its seed:</p>
{"".join(_settings(results, row) for row in results.rows)}
<h2 id="about">About</h2>
{_about(results)}
</main>
</body>
</html>
"""


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
        return f'<h3>{escape(picture.title)}</h3><p class="lead">{escape(picture.caption)}</p>'
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
        "torch": ", ".join(sorted({str(one.get("torch")) for one in done})) or "–",
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "Python": platform.python_version(),
    }
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f'<dl class="facts">{lines}</dl>'
