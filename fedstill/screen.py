"""Terminal output: progress while a run goes, and its results as tables."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedstill.common.readable import size

Facts = dict[str, Any]


class Screen:
    """Shows a run's events: a live bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.began = time.monotonic()
        self.bar: Progress | None = None
        if console.is_terminal:
            self.bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self.task = self.bar.add_task("starting", total=None, note="")

    def __enter__(self) -> Screen:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def line(self, text: str) -> None:
        """Print a line that stays, with the time since the start."""
        self.console.print(
            f"[dim]{time.monotonic() - self.began:6.1f} s[/dim]  {text}", highlight=False, soft_wrap=True
        )

    def show(self, event: Facts) -> None:
        """Show one event of events.jsonl."""
        kind = event["event"]
        if kind == "progress":
            self._move(f"round {event.get('round', '')} · {event['phase']}", event["done"], event["total"])
        elif kind == "phase":
            what = {
                "alone": "yardstick: every site trains alone",
                "centralized": "yardstick: one model on all private texts",
            }[event["phase"]]
            self.line(f"{what} ({event['epochs']} epochs)")
            self._move(what, None, None)
        elif (text := self._sentence(kind, event)) is not None:
            self.line(text)

    def _sentence(self, kind: str, event: Facts) -> str | None:
        if kind == "run_started":
            self._move("loading the central model", None, None)
            return f"run [bold]{event['run']}[/bold]: {event['method']}" + (" (resumed)" if event["resume"] else "")
        if kind == "joining":
            self._move("waiting for the sites to load their models and join", None, None)
            return f"waiting for {event['sites']} sites; stream at {event['address']}"
        if kind == "joined":
            named = ", ".join(f"{n} ({f['family']}, {f['texts']} texts)" for n, f in event["sites"].items())
            return f"joined: {named}"
        if kind == "alone":
            return "alone: " + _scores_of(event["sites"])
        if kind == "centralized":
            return f"all texts in one place: {event['metrics']['accuracy']:.3f}"
        if kind == "round_started":
            self._move(f"round {event['round']} · local training at the sites", None, None)
            return f"round {event['round']} of {event['rounds']}"
        if kind == "round_finished":
            central = event["central"].get("accuracy")
            shown = "not tested" if central is None else f"central {central:.3f}; sites " + _scores_of(event["sites"])
            if central is None and any(event["sites"].values()):
                shown = "sites " + _scores_of(event["sites"])
            return f"round {event['round']} done: {shown}"
        if kind == "warning":
            cure = f"Likely: {event['likely']}. To change: {event['change']}"
            return f"[yellow]warning[/yellow]: {event['who']}: {event['what']}. {cure}"
        if kind in ("left_out", "refused", "join_failed", "damaged", "site_reset", "disconnected"):
            details = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("time", "event") and v is not None)
            return f"[yellow]{kind.replace('_', ' ')}[/yellow]: {details}"
        if kind == "resumed":
            return (
                "starting anew: " + event["reason"]
                if event["round"] is None
                else f"taken up after round {event['round']}"
            )
        return None

    def _move(self, text: str, done: int | None, total: int | None) -> None:
        if self.bar is not None:
            note = "" if total is None else f"{done}/{total} batches"
            if text != self.bar.tasks[0].description:
                self.bar.reset(self.task)  # each phase has its own clock
            self.bar.update(self.task, description=text, completed=done or 0, total=total, note=note)


def _scores_of(sites: dict[str, Facts]) -> str:
    shown = {name: facts.get("accuracy", facts.get("score")) for name, facts in sites.items()}
    return ", ".join(f"{name} {score:.3f}" for name, score in shown.items() if score is not None)


def main_score(scores: Facts) -> str:
    """Return a task's main score: its own metric beside accuracy, or the mean over all tasks if there are several."""
    if "mean_over_tasks" in scores:
        return "mean_over_tasks"
    others = (name for name in scores if not name.startswith(("accuracy", "semantic_distance")))
    return next(others, "accuracy")


def results(console: Console, summary: Facts, folder: str) -> None:
    """Print the table at the end of a run."""
    if summary["status"] != "finished":
        console.print(f"[red]{summary['status']}[/red]: {summary.get('reason', '')}", highlight=False)
        return
    metric = main_score(summary["central"])
    if not summary["central"]:
        metric = "score"  # of sites with different tasks: the mean of each one's own metrics
    run = f"{summary['method']} ({summary['preset']}), {summary['rounds']} rounds, seed {summary['seed']}"
    where = f"{summary['test_texts']} test texts" if summary["central"] else "each site's own test texts"
    table = Table(title=f"{run}: {metric} on {where}", title_justify="left")
    widths = {"who": 1, "model": 1, "texts": 6, "alone": 5, "after": 5, "sent": 7, "got": 7}
    for column, least in widths.items():  # on a narrow screen words are cut, numbers are not
        table.add_column(column, justify="left" if least == 1 else "right", no_wrap=True, min_width=least)
    for name, site in summary["sites"].items():
        table.add_row(name, site["model"], f"{site['texts']:,}",
                      _score(site["alone"], metric), _score(site["after"], metric),
                      size(site["bytes_up"]), size(site["bytes_down"]))  # fmt: skip
    alone, after = _mean(summary, "alone", metric), _mean(summary, "after", metric)
    table.add_section()
    table.add_row("mean of sites", "", "", alone, after, "", "")
    if summary["central"]:
        table.add_row("[bold]central[/bold]", summary["central_model"]["model"], "0", "",
                      f"[bold]{_score(summary['central'], metric)}[/bold]", "", "")  # fmt: skip
    if summary["centralized"]:
        texts = sum(site["texts"] for site in summary["sites"].values())
        table.add_row("centralized", summary["central_model"]["model"], f"{texts:,}", "",
                      _score(summary["centralized"], metric), "", "")  # fmt: skip
    console.print(table)
    seconds = summary["seconds"]
    title = f"{seconds['total']:.0f} s in all, {seconds['set-up']:.0f} s of them until every site had joined"
    clock = Table(title=title, title_justify="left")
    for column in ("phase", "seconds", "sites compute", "central computes", "exchange"):
        clock.add_column(column, justify="left" if column == "phase" else "right")
    for phase, spent in summary["phases"].items():
        clock.add_row(phase, *(f"{spent[kind]:.1f}" for kind in ("total", "sites", "central", "exchange")))
    console.print(clock)
    console.print(f"Results: {folder}", highlight=False, soft_wrap=True)


def _score(metrics: Facts | None, metric: str) -> str:
    return f"{metrics[metric]:.3f}" if metrics and metric in metrics else "-"


def _mean(summary: Facts, when: str, metric: str) -> str:
    values = [site[when][metric] for site in summary["sites"].values() if site[when]]
    return f"{sum(values) / len(values):.3f}" if values else "-"
