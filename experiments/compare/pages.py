"""The evidence on the pages of docs/results, made from published scores: `make results-pages`.

A page names a claim where its table belongs, and this program writes the table below it, up to the end mark:

    <!-- claim experiments/screen/methods.toml interaction picture -->
    <!-- end -->

With `picture` a forest plot goes to docs/pictures. `cost` in place of a claim writes how many runs the file's tables
took. Scores are those that `fedstill compare --publish` keeps beside the tables, so that a page can be made again
without a run, and a test sees when it was not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from fedstill.common.checkpoint import write_atomically
from fedstill.experiments.compare.claims import Finding, cost, evidence_lines, findings, forest
from fedstill.experiments.compare.published import read_published
from fedstill.experiments.compare.results import Results
from fedstill.experiments.compare.table_file import read_tables

ROOT = Path(__file__).resolve().parents[2]
PAGES, PICTURES = ROOT / "docs" / "results", ROOT / "docs" / "pictures"
MARKED = re.compile(r"(<!-- claim (\S+) (\S+)( picture)? -->\n).*?(<!-- end -->)", re.DOTALL)
Draw = Callable[[Finding, Path], None]


@cache
def published_results(file: str) -> tuple[Results, ...]:
    """Return every table of a file with its published scores, whatever runs are on this machine."""
    nowhere = ROOT / "build" / "no-runs"
    return tuple(Results(table, nowhere, read_published(table)) for table in read_tables(ROOT / file))


@cache
def found_in(file: str) -> dict[str, Finding]:
    """Return what the published scores of a file's tables say of its claims."""
    return {one.name: one for one in findings(published_results(file))}


def filled(page: str, draw: Draw | None = None) -> str:
    """Return a page with the evidence that it names; `draw` gets what is to be drawn, and where."""

    def block(mark: re.Match[str]) -> str:
        begin, file, name, picture, end = mark.groups()
        if name == "cost":
            return f"{begin}\n{cost(published_results(file))}\n\n{end}"
        if (one := found_in(file).get(name)) is None:
            raise SystemExit(f"{file} has no claim {name!r}; it has {', '.join(found_in(file))}")
        lines = evidence_lines(one)
        if picture and one.evidence:
            path = PICTURES / f"forest-{Path(file).stem}-{name}.png"
            lines += ["", f"![{one.claim.says}](../pictures/{path.name})"]
            if draw is not None:
                draw(one, path)
        return begin + "\n" + "\n".join(lines) + "\n\n" + end

    return MARKED.sub(block, page)


def main() -> None:
    """Write every page of docs/results anew, with its pictures."""
    for path in sorted(PAGES.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        if (now := filled(page, forest)) != page:
            write_atomically(path, now)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
