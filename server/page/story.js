"use strict";
// A run's story: events.jsonl, told event by event. The live page and the report read the same story.

function newStory() {
  return {
    run: "", method: "", paper: "", status: "starting", reason: "", round: 0, rounds: 0, began: null, now: null,
    sites: {}, labels: [], central: [], alone: {}, centralized: null, phase: "starting", progress: null, asked: null,
    agreement: [], pseudo: [], right: [], warnings: [], log: [], lengths: [], roundBegan: null, joined: null, wanted: 0, weights: null, losses: [],
  };
}

function mainScore(scores) {
  const names = Object.keys(scores || {});
  if (names.includes("mean_over_tasks")) return "mean_over_tasks";
  return names.find((name) => !name.startsWith("accuracy") && !name.startsWith("semantic_distance")) || (names.includes("accuracy") ? "accuracy" : names[0]);
}

function site(story, name) {
  if (!Object.hasOwn(story.sites, name)) {
    story.sites[name] = { name, model: "", texts: null, state: "expected", seen: null, up: 0, down: 0, seconds: 0, why: "", whyAt: null, scores: [], privacy: null, missed: 0 };
  }
  return story.sites[name];
}

function planned(story, config) {
  story.rounds = config.rounds || story.rounds;
  for (const each of config.sites || []) {
    const known = site(story, each.name);
    known.model = String(each.model || "").split("/").pop();
  }
  story.centralModel = String((config.central || {}).model || "").split("/").pop();
  story.wanted = (config.exchange || {}).sites || (config.sites || []).length;
}

function say(story, event, words, kind = "") {
  story.log.push({ time: event.time, words, kind, of: event.event });
  if (story.log.length > 400) story.log.shift();
}

function tell(story, event) {
  story.now = event.time;
  const act = ACTS[event.event];
  if (act) act(story, event);
  return story;
}

const scoresOf = (facts, metric) => Object.entries(facts).filter(([, each]) => each && each[metric] !== undefined).map(([name, each]) => `${name} ${each[metric].toFixed(3)}`).join(", ");

const ACTS = {
  run_started(story, event) {
    story.run = event.run; story.method = event.method; story.status = "running"; story.reason = ""; story.phase = "loading the central model";
    story.began = event.time; story.asked = null; story.progress = null; story.joined = null;
    for (const each of Object.values(story.sites)) Object.assign(each, { state: "expected", why: "", seen: null });
    say(story, event, event.resume ? "Resumed." : "Started.");
  },
  method(story, event) { story.paper = event.paper; story.parameters = event.parameters; },
  joining(story, event) { story.phase = "waiting for sites to join"; story.wanted = event.sites; say(story, event, `Waiting for ${event.sites} sites; stream at ${event.address}.`); },
  site_joined(story, event) {
    const each = site(story, event.site);
    each.state = "waiting"; each.seen = event.time;
    story.progress = { done: event.joined, total: event.wanted, unit: "sites" };
    say(story, event, `${event.site} joined, ${event.joined} of ${event.wanted}.`);
  },
  joined(story, event) {
    for (const [name, facts] of Object.entries(event.sites)) {
      const each = site(story, name);
      Object.assign(each, { model: facts.model || facts.family, family: facts.family, texts: facts.texts, rates: facts.rates, state: "waiting", seen: event.time, why: "" });
      if (facts.labels) story.labels = facts.labels;
    }
    story.joined = event.time; story.progress = null; story.phase = "ready";
    say(story, event, "All sites have joined.");
  },
  join_failed(story, event) { say(story, event, `A site could not join: ${event.reason}`, "bad"); },
  refused(story, event) { say(story, event, `Refused${event.site ? ` ${event.site}` : ""}: ${event.reason}`, "warn"); },
  disconnected(story, event) { Object.assign(site(story, event.site), { state: "lost", why: "its stream broke; it may come back", whyAt: event.time }); say(story, event, `${event.site}: connection lost.`, "warn"); },
  left_out(story, event) {
    const each = site(story, event.site);
    Object.assign(each, { state: "left out", why: event.reason, whyAt: event.time, missed: each.missed + 1 });
    say(story, event, `${event.site} left out of ${event.verb}: ${event.reason}`, "bad");
  },
  readmitted(story, event) { Object.assign(site(story, event.site), { state: "waiting", why: "", back: event.round, seen: event.time }); say(story, event, `${event.site} is back.`); },
  site_reset(story, event) { say(story, event, `${event.site} continues with a new model: ${event.reason}`, "warn"); },
  phase(story, event) {
    story.phase = event.phase === "alone" ? "yardstick: every site trains alone" : "yardstick: one model on all texts";
    story.progress = null;
    say(story, event, `${story.phase[0].toUpperCase()}${story.phase.slice(1)} (${event.epochs} epochs).`);
  },
  alone(story, event) { story.alone = event.sites; const first = Object.values(event.sites)[0]; say(story, event, `Alone: ${scoresOf(event.sites, mainScore(first))}.`); },
  centralized(story, event) { story.centralized = event.metrics; say(story, event, `All texts in one place: ${number(event.metrics[mainScore(event.metrics)])}.`); },
  resumed(story, event) {
    const kept = event.round === null ? -1 : event.round;
    story.central = story.central.filter(([round]) => round <= kept);
    story.agreement = story.agreement.filter((each) => each.round <= kept);
    for (const each of Object.values(story.sites)) each.scores = each.scores.filter(([round]) => round <= kept);
    story.round = Math.max(0, kept);
    say(story, event, event.round === null ? `Starts anew: ${event.reason}` : `Taken up after round ${event.round}.`);
  },
  round_started(story, event) {
    story.round = event.round; story.rounds = event.rounds; story.roundBegan = event.time; story.phase = "local training"; story.progress = null;
    say(story, event, `Round ${event.round} of ${event.rounds}.`);
  },
  round_finished(story, event) {
    story.rounds = event.rounds;
    if (story.roundBegan) story.lengths.push((new Date(event.time) - new Date(story.roundBegan)) / 1000);
    if (Object.keys(event.central).length) story.central.push([event.round, event.central]);
    for (const [name, scores] of Object.entries(event.sites)) site(story, name).scores.push([event.round, scores]);
    if (event.metrics && typeof event.metrics.loss === "number") story.losses.push([event.round, event.metrics.loss]);
    story.finishedRound = event.round; story.roundBegan = event.time; story.progress = null;
    const metric = mainScore(event.central), central = event.central[metric];
    say(story, event, `Round ${event.round} done${central === undefined ? "" : `: central ${number(central)}`}.`);
  },
  tested(story, event) {
    if (Object.keys(event.central).length) story.central.push([event.round, event.central]);
    for (const [name, scores] of Object.entries(event.sites)) site(story, name).scores.push([event.round, scores]);
  },
  progress(story, event) { story.phase = event.phase; story.progress = { done: event.done, total: event.total, loss: event.loss, unit: "batches" }; },
  asked(story, event) {
    story.asked = event; story.phase = event.phase || story.phase;
    for (const name of event.sites) { const each = site(story, name); if (each.state !== "lost") each.state = "working"; }
  },
  traffic(story, event) {
    for (const [name, facts] of Object.entries(event.sites)) {
      const each = site(story, name), answered = !story.asked || facts.seen >= story.asked.time;
      Object.assign(each, { up: facts.up, down: facts.down, seconds: facts.seconds, seen: facts.seen });
      if (answered && !(each.whyAt && each.whyAt > facts.seen)) { each.state = "waiting"; each.why = ""; }
    }
  },
  agreement(story, event) { story.agreement.push(event); },
  pseudo_labels(story, event) { story.pseudo.push(event); },
  pseudo_label_accuracy(story, event) { story.right.push(event); },
  weights(story, event) { story.weights = event; },
  warning(story, event) { story.warnings.push(event); say(story, event, `${event.who}: ${event.what}.`, "warn"); },
  privacy(story, event) { for (const [name, facts] of Object.entries(event.sites)) site(story, name).privacy = facts; },
  checkpoint(story, event) { story.saved = event.round; },
  damaged(story, event) { say(story, event, event.problem, "warn"); },
  run_stopped(story, event) { over(story, "stopped", `stopped after round ${event.round}, as asked`); say(story, event, `Stopped after round ${event.round}.`); },
  run_failed(story, event) { over(story, "failed", event.reason); say(story, event, event.reason, "bad"); },
  run_finished(story, event) { over(story, "finished", ""); story.seconds = event.seconds; say(story, event, "Finished."); },
};

function over(story, status, reason) {
  Object.assign(story, { status, reason, asked: null, progress: null, phase: status });
  for (const each of Object.values(story.sites)) if (["working", "waiting"].includes(each.state)) each.state = status === "finished" ? "done" : "expected";
}

// Seconds until the end: rounds as long as those so far; before the first one, as forecast before the start.
function timeLeft(story, forecast, now) {
  if (!["running"].includes(story.status) || !story.rounds) return null;
  const parts = forecast ? forecast.parts : null, since = (time) => (now - new Date(time)) / 1000;
  const done = story.finishedRound || story.saved || 0;
  if (story.lengths.length) {
    const mean = story.lengths.reduce((a, b) => a + b, 0) / story.lengths.length;
    return Math.max(0, (story.rounds - done) * mean - since(story.roundBegan));
  }
  return parts && !done ? Math.max(1, forecast.seconds - since(story.began)) : null;
}

function seriesOf(story) {
  const last = story.central.length ? story.central[story.central.length - 1][1] : null;
  const some = last || Object.values(story.sites).map((each) => each.scores.length && each.scores[each.scores.length - 1][1]).find(Boolean) || story.centralized || Object.values(story.alone)[0];
  const metric = mainScore(some);
  const points = (scores) => scores.filter(([, each]) => each[metric] !== undefined).map(([round, each]) => [round, each[metric]]);
  const names = Object.keys(story.sites), quiet = names.length > 8;
  const series = names.map((name, place) => ({ name, place, points: points(story.sites[name].scores), quiet }));
  if (quiet) {
    const rounds = [...new Set(series.flatMap((each) => each.points.map(([round]) => round)))].sort((a, b) => a - b);
    const mean = rounds.map((round) => { const found = series.map((each) => each.points.find(([at]) => at === round)).filter(Boolean); return [round, found.reduce((sum, [, value]) => sum + value, 0) / found.length]; });
    series.push({ name: "mean of sites", place: 1, points: mean });
  }
  series.push({ name: "central", central: true, points: points(story.central) });
  const guides = [], alone = Object.values(story.alone).map((each) => each[metric]).filter((each) => each !== undefined);
  if (story.centralized && story.centralized[metric] !== undefined) guides.push({ name: "all texts in one", y: story.centralized[metric] });
  if (alone.length) guides.push({ name: "mean alone", y: alone.reduce((a, b) => a + b, 0) / alone.length });
  return { series, guides, metric: metric || "score" };
}

// Pseudo-labels by pass: accuracy where it is known, the share of the largest class, and how far sites moved.
function pseudoLabels(story, width) {
  if (!story.pseudo.length) return [];
  const passes = {}, names = Object.keys(story.sites), quiet = names.length > 8;
  for (const each of story.pseudo) passes[each.round] = Math.max(passes[each.round] || 0, each.pass);
  const at = (each) => each.round - 1 + each.pass / passes[each.round];
  const lines = (events, of) => [...names.map((name, place) => ({ name, place, quiet, points: events.filter((each) => of(each.sites[name]) !== undefined).map((each) => [at(each), of(each.sites[name])]) })),
    { name: "together", central: true, points: events.filter((each) => of(each.together) !== undefined).map((each) => [at(each), of(each.together)]) }];
  const drawing = (title, metric, events, of) => el("figure", {}, el("h3", {}, title), curves({ series: lines(events, of), rounds: story.rounds, metric, width, label: `${metric} by pass over the public texts` }));
  const last = story.pseudo[story.pseudo.length - 1], right = story.right[story.right.length - 1], percent = (value) => (value === undefined || value === null ? "–" : `${Math.round(100 * value)} %`);
  const rows = names.filter((name) => Object.hasOwn(last.sites, name)).map((name) => [name, percent(right && right.sites[name]), percent(last.sites[name].largest), percent(last.sites[name].changed), number(last.sites[name].moved)]);
  rows.push({ kind: "main", cells: ["together", percent(right && right.together), percent(last.together.largest), "", ""] });
  return [
    el("p", {}, `What sites say of the public texts is what others learn. ${right ? `In the last pass their mean was right for ${percent(right.together)} of ${right.texts} texts.` : "Whether it is right is not known here: the public texts have no labels."}`),
    story.right.length ? drawing("How often right", "accuracy", story.right, (each) => each) : drawing("Share of the largest class", "share", story.pseudo, (each) => each && each.largest),
    table(["last pass", "right", "largest class", "changed", "moved"], rows, { label: "pseudo-labels of the last pass" }),
    el("p", { class: "soft small" }, "Changed: texts with another class first than in the site's pass before. Moved: mean distance of its probabilities, 0 to 1."),
  ];
}
