"""Terminal output: progress while a run goes, and its results as tables."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from fedstill.common.readable import duration, main_score, size
from fedstill.pace import Pace

Facts = dict[str, Any]


class Screen:
    """Shows a run's events: a live bar on a terminal, plain lines elsewhere, nothing if quiet."""

    def __init__(self, console: Console, forecast: Facts | None = None, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet
        self.began = time.monotonic()
        self.pace = Pace(forecast)
        self.bar: Progress | None = None
        self._steps: tuple[int | None, int | None] = (None, None)
        if console.is_terminal and not quiet:
            self.bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=14),
                _Left(self),
                console=console,
                transient=True,
            )
            self.task = self.bar.add_task("starting", total=None)

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
        if not self.quiet:
            clock = f"[dim]{time.monotonic() - self.began:6.1f} s[/dim]"
            self.console.print(f"{clock}  {text}", highlight=False, soft_wrap=True)

    def show(self, event: Facts) -> None:
        """Show one event of events.jsonl, or of the launch before it."""
        kind = event["event"]
        if kind == "starting":
            self._move("joining", event["what"])
        elif kind == "site_joined":
            self._move("joining", "waiting for sites", event["joined"], event["wanted"])
        elif kind == "asked":
            self._move(
                event["phase"], f"round {event['round']} · {event['phase']}" if event["round"] else event["phase"]
            )
        elif kind == "progress":
            self._move(
                event["phase"], f"round {event.get('round', '')} · {event['phase']}", event["done"], event["total"]
            )
        elif kind == "phase":
            what = {
                "alone": "yardstick: every site trains alone",
                "centralized": "yardstick: one model on all private texts",
            }[event["phase"]]
            self.line(f"{what} ({event['epochs']} epochs)")
            self._move(event["phase"], what)
        elif (text := self._sentence(kind, event)) is not None:
            self.line(text)

    def _sentence(self, kind: str, event: Facts) -> str | None:
        if kind == "run_started":
            self._move("joining", "loading the central model")
            return f"run [bold]{event['run']}[/bold]: {event['method']}" + (" (resumed)" if event["resume"] else "")
        if kind == "joining":
            self._move("joining", "waiting for sites", 0, event["sites"])
            return f"waiting for {event['sites']} sites; stream at {event['address']}"
        if kind == "joined":
            named = ", ".join(f"{n} ({f['family']}, {f['texts']} texts)" for n, f in event["sites"].items())
            return f"joined: {named}"
        if kind == "alone":
            return "alone: " + _scores_of(event["sites"])
        if kind == "centralized":
            return f"all texts in one place: {event['metrics']['accuracy']:.3f}"
        if kind == "round_started":
            self.pace.begin_round(event["round"], event["rounds"])
            self._move("local training", f"round {event['round']} · local training")
            return f"round {event['round']} of {event['rounds']}"
        if kind == "round_finished":
            central = event["central"].get("accuracy")
            shown = "not tested" if central is None else f"central {central:.3f}; sites " + _scores_of(event["sites"])
            if central is None and any(event["sites"].values()):
                shown = "sites " + _scores_of(event["sites"])
            self.pace.end_round(event["round"], event["rounds"])
            left = self.pace.in_all()
            more = f"; about {duration(left)} left" if left and event["round"] < event["rounds"] else ""
            return f"round {event['round']} done: {shown}{more}"
        if kind == "warning":
            cure = f"Likely: {event['likely']}. To change: {event['change']}"
            return f"[yellow]warning[/yellow]: {event['who']}: {event['what']}. {cure}"
        if kind in ("left_out", "refused", "join_failed", "damaged", "site_reset", "disconnected"):
            details = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("time", "event") and v is not None)
            return f"[yellow]{kind.replace('_', ' ')}[/yellow]: {details}"
        if kind == "run_finished":
            self._move("finishing", "ending the processes")
        if kind == "resumed":
            return (
                "starting anew: " + event["reason"]
                if event["round"] is None
                else f"taken up after round {event['round']}"
            )
        return None

    def _move(self, phase: str, text: str, done: int | None = None, total: int | None = None) -> None:
        self.pace.enter(phase)
        self._steps = (done, total)
        if self.bar is not None:
            self.bar.update(self.task, description=text, completed=done or 0, total=total)

    def left(self) -> str:
        """Say how long the phase and the run will still take; a phase without steps moves with the clock."""
        done, total = self._steps
        phase, run = self.pace.left(done, total), self.pace.in_all()
        expected = self.pace.expected()
        if self.bar is not None and total is None and expected:
            self.bar.update(self.task, completed=min(self.pace.spent(), 0.99 * expected), total=expected)
        parts = [f"{done}/{total}"] if total else []
        parts += [f"{duration(phase)} left" if phase else f"{duration(self.pace.spent())} so far"]
        parts += [f"run {duration(run)}"] if run else []
        return " · ".join(parts)


class _Left(ProgressColumn):
    """The time left, as the screen judges it."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self.screen = screen

    def render(self, task: Task) -> Text:
        """Draw it."""
        return Text(self.screen.left())


def _scores_of(sites: dict[str, Facts]) -> str:
    shown = {name: facts.get("accuracy", facts.get("score")) for name, facts in sites.items()}
    return ", ".join(f"{name} {score:.3f}" for name, score in shown.items() if score is not None)


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
    table = Table(
        title=f"{run}: {metric} on {where}", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    widths = {"who": 0, "model": 0, "texts": 6, "alone": 5, "after": 5, "sent": 7, "got": 7}
    for column, least in widths.items():  # on a narrow screen names go on in the next line, and nothing is cut
        table.add_column(column, justify="right" if least else "left", min_width=least or None, overflow="fold")
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
    clock = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("phase", "seconds", "sites compute", "central computes", "exchange"):
        clock.add_column(column, justify="left" if column == "phase" else "right")
    for phase, spent in summary["phases"].items():
        clock.add_row(phase, *(f"{spent[kind]:.1f}" for kind in ("total", "sites", "central", "exchange")))
    console.print(clock)
    console.print(f"Results: {folder}    Report: {folder}/report.html", highlight=False, soft_wrap=True)


def _score(metrics: Facts | None, metric: str) -> str:
    return f"{metrics[metric]:.3f}" if metrics and metric in metrics else "-"


def _mean(summary: Facts, when: str, metric: str) -> str:
    values = [site[when][metric] for site in summary["sites"].values() if site[when]]
    return f"{sum(values) / len(values):.3f}" if values else "-"
