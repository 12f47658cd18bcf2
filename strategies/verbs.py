"""What a site can be asked. A verb is declared once, where the function is that runs at the site.

    @site_verb("train.feedback", leaves="predictions", phase="interactive", quick=True,
               shield=Shield(("items", "texts"), noised=("logits",)))
    def learn(site: Node, lesson: Lesson) -> Learned: ...

Limits, costs, deadlines, the check of its Reply, privacy and the docs follow from that line and from the two message
types. The server's half asks with `replies = yield learn.ask(Lesson(...), to=sites)`.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fedstill.common.config import Leaving
from fedstill.common.wire import Ask, Facts, Reply, WireError
from fedstill.common.wire.typed import Message, check_parts, form_of, to_wire

if TYPE_CHECKING:
    from fedstill.client.node import Node

NOTHING: tuple[Leaving, ...] = ()
EVERY_REPLY = ("seconds", "privacy")  # what a site adds to the metrics of any answer
KINDS = ("train", "query", "evaluate")  # Flower's kinds of messages: a verb is a Flower message type as well
PLACE = ("round", "step")  # where in the run an Ask is: in the settings of each

SLACK = 1 << 16  # bytes beside the rows of a prediction, such as bounds and counts

VERBS: dict[str, Verb] = {}


@dataclass(frozen=True)
class Nothing(Message):
    """No content."""


@dataclass(frozen=True)
class Shield:
    """What of an answer may leave a site with [privacy], by fields; what no field names stays at the site."""

    plain: tuple[str, ...] = ()  # independent of the private texts, or said when joining
    noised: tuple[str, ...] = ()  # logits: each vector is clipped, gets noise and is charged to the budget
    charged: tuple[str, ...] = ()  # the verb itself adds noise and charges the budget
    learned: tuple[str, ...] = ()  # follows from the model and public texts alone: free after DP-SGD, else kept back
    after_training: bool = False  # answered only where the model was trained by DP-SGD
    needed: tuple[str, ...] = ()  # without these there is no answer: the fields without a default


@dataclass(frozen=True)
class Verb:
    """One thing a site can be asked, with all that server, limits and docs need to know of it."""

    name: str
    leaves: tuple[Leaving, ...]  # what the answer holds beside a few numbers
    phase: str | None  # of a run, to which its seconds and bytes count; None: the phase that it interrupts
    quick: bool  # answered within exchange.step_deadline instead of train_deadline
    message: type[Message]
    answer: type[Message]
    work: Callable[[Node, Any], Message]
    shield: Shield | None = None  # how it may leave a site with [privacy]; None: not at all

    @property
    def about(self) -> str:
        """What it does, for the docs."""
        return (self.work.__doc__ or "").strip()

    @property
    def counts_texts(self) -> bool:
        """Whether its answer says how many private texts the site has."""
        return any(field.name == "texts" for field in form_of(self.answer).fields)

    def ask(
        self,
        message: Message | None = None,
        *,
        to: tuple[str, ...] | None = None,
        each: Mapping[str, Mapping[str, Any]] | None = None,
        check: Callable[[Reply], None] | None = None,
        optional: bool = False,
    ) -> Ask:
        """The Ask that the server's half yields; `each` has the fields that differ from site to site."""
        arrays, settings = ({}, {}) if message is None else to_wire(type(message), vars(message))
        parts: dict[str, Facts] = {}
        for site, values in (each or {}).items():
            own, facts = to_wire(self.message, values)
            parts[site] = {**own, **facts}
        return Ask(self.name, arrays, settings, parts, to, check, optional)

    def room(self, ask: Ask, classes: int) -> int | None:
        """The most bytes that the arrays of an answer can have; None where the site's model decides."""
        form = form_of(self.answer)
        if form.any_array or "features" in self.leaves:
            return None
        rows = max((value.shape[0] for value in ask.arrays.values() if value.ndim), default=0)
        return len(form.arrays) * 8 * (rows + 1) * (classes + 8) + SLACK if form.arrays else 0

    def check(self, reply: Reply) -> None:
        """Refuse a Reply that does not have the parts of this verb's answer."""
        facts = {key: value for key, value in reply.metrics.items() if key not in EVERY_REPLY}
        check_parts(self.answer, reply.arrays, facts)

    def answered(self, site: Node, ask: Ask) -> Message:
        """Answer at the site: read the message and work on it."""
        settings = {key: value for key, value in ask.settings.items() if key not in PLACE}
        return self.work(site, self.message.from_wire(ask.arrays, settings))


def site_verb(
    name: str,
    *,
    leaves: Leaving | tuple[Leaving, ...],
    phase: str | None,
    quick: bool = False,
    shield: Shield | None = None,
) -> Callable[[Callable[[Node, Any], Message]], Verb]:
    """Declare a function as the answer to an Ask; it takes the site and a message, and returns a message."""

    def declare(work: Callable[[Node, Any], Message]) -> Verb:
        if name in VERBS:
            raise ValueError(f"two verbs are called {name!r}")
        if name.partition(".")[0] not in KINDS or not name.partition(".")[2]:
            raise ValueError(f"a verb is called KIND.ACTION with a kind of {', '.join(KINDS)}, not {name!r}")
        kinds = (leaves,) if isinstance(leaves, str) else leaves
        message, answer = _message_types(name, work)
        VERBS[name] = Verb(name, kinds, phase, quick, message, answer, work, _complete(name, shield, answer))
        return VERBS[name]

    return declare


def find_verb(name: str) -> Verb:
    """Return a verb by its name; a WireError lists the known ones."""
    if name not in VERBS:
        raise WireError(f"this site knows no verb {name[:200]!r}; known: {', '.join(sorted(VERBS))}")
    return VERBS[name]


def _complete(name: str, shield: Shield | None, answer: type[Message]) -> Shield | None:
    """The shield with the fields that an answer needs; a field that it names must be there."""
    if shield is None:
        return None
    known = {field.name: field.required for field in form_of(answer).fields}
    named = (*shield.plain, *shield.noised, *shield.charged, *shield.learned)
    strange = [field for field in named if field not in known]
    if strange:
        raise ValueError(f"verb {name}: its shield names {strange[0]!r}, and {answer.__name__} has no such field")
    return replace(shield, needed=tuple(field for field, required in known.items() if required))


def _message_types(name: str, work: Callable[..., Any]) -> tuple[type[Message], type[Message]]:
    """The types of the second parameter and of what comes back; both must be there and be messages."""
    hints = typing.get_type_hints(work, localns={"Node": object, "OwnTaskNode": object})  # known to type checkers only
    kinds = [value for key, value in hints.items() if key not in ("site", "node")]
    if len(kinds) != 2 or not all(isinstance(kind, type) and issubclass(kind, Message) for kind in kinds):
        raise TypeError(f"verb {name}: write its function as (site: Node, message: SomeMessage) -> SomeMessage")
    for kind in kinds:
        form_of(kind)  # a field whose type cannot be read fails here, not in a run
    return kinds[0], kinds[1]
