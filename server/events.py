"""Every event of events.jsonl: its meaning and its fields. The docs and a test read this; a run does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """One kind of line in events.jsonl."""

    meaning: str
    fields: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)  # fields that only some lines have


ALWAYS = {"time": "UTC, ISO 8601 with milliseconds", "event": "the kind of event, as below"}
ROUND = {"round": "number of the round; 0 before the first"}

EVENTS: Mapping[str, Event] = {
    # --- the run ---
    "run_started": Event(
        "The ServerApp started work on the run.",
        {
            "run": "name of the run's folder",
            "method": "name of the method",
            "resume": "true if the run was resumed",
            "pid": "process id of the server",
        },
    ),
    "method": Event(
        "The method, with every parameter as resolved.",
        {"name": "name of the method", "paper": "its paper", "parameters": "every parameter and its value"},
    ),
    "run_finished": Event(
        "The last round is done and summary.json is written.",
        {"central": "the central model's final scores", "seconds": "wall time by part of the run"},
    ),
    "run_stopped": Event("The run stopped after a round because somebody asked for it; it can be resumed.", {**ROUND}),
    "run_failed": Event("The run stopped with an error.", {"reason": "the error, as text"}),
    # --- sites coming and going ---
    "joining": Event(
        "The server waits for sites.",
        {"sites": "how many sites must join", "address": "where the stream listens, or `Flower messages`"},
    ),
    "site_joined": Event(
        "One more site has joined.",
        {"site": "name of the site", "joined": "how many have", "wanted": "how many must"},
    ),
    "joined": Event(
        "All sites have joined.", {"sites": "what each site said of itself: model, number of texts, checkpoints held"}
    ),
    "join_failed": Event(
        "A Flower node did not answer its join message.", {"node": "Flower's node id", "reason": "why, as Flower says"}
    ),
    "refused": Event(
        "A connection or a site was not let in.",
        {"reason": "why"},
        {
            "site": "the name that the site gave",
            "peer": "address of the connection",
            "note": "on the last line that is written: further refusals are not recorded",
        },
    ),
    "disconnected": Event("A site's stream broke; the site may reconnect.", {"site": "name of the site"}),
    "left_out": Event(
        "A site's answer to one Ask is missing or unusable; the step goes on without it.",
        {**ROUND, "site": "name of the site", "verb": "what it was asked", "reason": "why it was left out"},
    ),
    "readmitted": Event(
        "A site that was late or lost answered again.",
        {**ROUND, "site": "name of the site", "missed": "why it had been away"},
    ),
    "site_reset": Event(
        "A site holds no checkpoint and continues with a new model.",
        {**ROUND, "site": "name of the site", "reason": "why"},
    ),
    "closed": Event(
        "The sites were told how the run ended.",
        {"status": "`finished`, `stopped` or `failed`"},
        {"reason": "why the run stopped or failed"},
    ),
    # --- rounds ---
    "tested": Event(
        "Everybody was tested before the first round.",
        {**ROUND, "central": "the central model's scores", "sites": "each site's scores"},
    ),
    "round_started": Event(
        "A round began.", {**ROUND, "rounds": "number of rounds of the run", "sites": "the sites that take part"}
    ),
    "round_finished": Event(
        "A round ended.",
        {
            **ROUND,
            "rounds": "number of rounds of the run",
            "metrics": "what the method reports of the round, such as its loss",
            "central": "the central model's latest scores",
            "sites": "each site's latest scores",
        },
    ),
    "progress": Event(
        "How far a phase of the round is; at most two a second, and always the last one.",
        {**ROUND, "phase": "name of the phase", "done": "steps done", "total": "steps in all"},
        {"loss": "loss of the latest step"},
    ),
    "asked": Event(
        "An Ask goes out; of quick ones at most one a second is told.",
        {**ROUND, "phase": "name of the phase", "verb": "what is asked", "sites": "the sites that are asked"},
    ),
    "traffic": Event(
        "What each site has done so far: after every answer to a long Ask if there are at most 32 sites, else at most "
        "once a second.",
        {**ROUND, "sites": "by site: bytes `up` and `down`, `seconds` of computing, and when it was `seen` last"},
    ),
    "agreement": Event(
        "How much the sites agree on the public texts.",
        {
            **ROUND,
            "mean": "share of texts for which two sites put the same class first, mean over all pairs",
            "chance": "the same by chance, with each site's own shares of the classes",
            "pairs": "the share by pair of sites, `north south`; empty where there are more than 20 sites",
            "classes": "by site: how often it puts each class first",
        },
    ),
    "local_losses": Event(
        "Mean loss of each local epoch of the round, where sites tell it.", {**ROUND, "sites": "losses by site"}
    ),
    "pseudo_labels": Event(
        "What sites say of the public texts in one pass over them; of every method that exchanges predictions.",
        {
            **ROUND,
            "pass": "number of the pass in its round, from 1",
            "texts": "how many public texts were predicted",
            "sites": "by site: share of its `largest` class; since its last pass, share of texts with another class "
            "first (`changed`) and mean distance of its probabilities (`moved`, 0 to 1)",
            "together": "`largest` of the sites' mean probabilities",
        },
    ),
    "pseudo_label_accuracy": Event(
        "How often these predictions are right; only where the public texts were cut from labelled ones.",
        {
            **ROUND,
            "pass": "number of the pass in its round, from 1",
            "texts": "how many public texts were predicted",
            "sites": "accuracy by site",
            "together": "accuracy of the sites' mean probabilities",
        },
    ),
    "checkpoint": Event("Server and sites saved a round.", {**ROUND, "path": "the server's file, in the run's folder"}),
    "ledgers": Event(
        "What each site's ledger had come to when the round was saved: `flower-client ledger verify` checks it.",
        {**ROUND, "heads": "hash of the ledger's last line, by site"},
        {"signature": "the coordinator's, with the key of its stream, under run, round and heads"},
    ),
    "resumed": Event(
        "The run continues after this round, or starts anew if there is none.",
        {"round": "number of the last finished round, or null"},
        {"reason": "why the run starts anew"},
    ),
    "damaged": Event("A checkpoint could not be read and was skipped.", {"problem": "which file, and what is wrong"}),
    "warning": Event(
        "Something suggests that the federation does not learn as it should.",
        {
            **ROUND,
            "what": "what was seen",
            "who": "a site, `central`, or `all sites`",
            "likely": "a likely cause",
            "change": "the keys to change",
        },
    ),
    "privacy": Event(
        "Each site's privacy budget after the round.", {**ROUND, "sites": "epsilon spent and left, by site"}
    ),
    # --- yardsticks beside the federation ---
    "phase": Event(
        "A yardstick is being trained before the first round.",
        {"phase": "`alone` or `centralized`", "epochs": "how many epochs"},
    ),
    "alone": Event("What each site reaches alone.", {"sites": "scores by site"}),
    "centralized": Event("What all private texts in one place reach.", {"metrics": "scores"}),
    # --- what single methods decide ---
    "weights": Event(
        "How much each site counts in the ensemble of this round (fedid, adafd, fedkd, sinkhorn, entropy).",
        {**ROUND, "weighting": "the rule", "weights": "weight by site, or a list by class"},
    ),
    "beta": Event("The beta that adafd chose for this round.", {**ROUND, "beta": "its value"}),
    "llm": Event(
        "One exchange of adafd's llmwc with its language model, or the fallback.",
        dict(ROUND),
        {
            "attempt": "number of the attempt, from 1",
            "question": "what was asked",
            "answer": "what came back",
            "weights": "the weights read from the answer",
            "problem": "why the answer cannot be used",
            "fallback": "the rule that decides instead",
        },
    ),
    "clusters": Event(
        "Which sites are averaged together (percfl, atc).",
        {**ROUND, "clusters": "number of the cluster, by site"},
        {"objective": "atc: `mlm` or `denoising`", "cosines": "atc: similarity of the sites' updates"},
    ),
    "split": Event(
        "percfl split a cluster in two.", {**ROUND, "cluster": "number of the cluster", "parts": "sites of each part"}
    ),
    "neighbours": Event(
        "The other sites by similarity of their updates, nearest first (atc).",
        {**ROUND, "nearest": "sites, by site", "cosines": "similarity of the sites' updates"},
    ),
}
