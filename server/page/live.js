"use strict";
// The live page: reads the run's events as they are written, and draws the story so far.

const at = (id) => document.getElementById(id);
const key = document.querySelector('meta[name="fedstill-key"]').content;
let story = newStory(), facts = { config: {}, forecast: null, alive: false }, connected = false, drawn = 0, waiting = null, announced = "";

const KINDS = { running: "live", finished: "good", failed: "bad", interrupted: "bad", stopped: "warn", starting: "" };
const STATES = { working: "live", waiting: "", done: "good", "left out": "bad", lost: "bad", expected: "" };

function status() {
  if (story.status === "running" && facts.over) return "interrupted";
  return facts.starting && story.status !== "running" ? "starting" : story.status;
}

function ago(time) {
  if (!time) return "not yet";
  const seconds = (Date.now() - new Date(time)) / 1000;
  return seconds < 3 ? "just now" : `${duration(seconds)} ago`;
}

function figure(name, value, note, main) {
  return el("div", { class: main ? "main" : null }, el("dt", {}, name), el("dd", {}, value, note ? el("small", {}, note) : null));
}

function drawHead() {
  const now = status(), left = timeLeft(story, facts.forecast, Date.now()), pill = at("status");
  at("title").textContent = story.run || facts.run;
  document.title = `${story.round && story.rounds ? `${story.round}/${story.rounds} · ` : ""}${story.run || facts.run} · fedstill`;
  at("about").textContent = [story.method, story.paper].filter(Boolean).join(", ");
  pill.textContent = now; pill.className = `pill ${KINDS[now] || ""}`;
  const { metric } = seriesOf(story), score = story.central.length ? story.central[story.central.length - 1][1][metric] : null;
  const first = story.central.length > 1 ? story.central[0][1][metric] : null;
  const parts = [
    figure("central model", number(score), score === null ? "not tested yet" : first === null ? metric : `${metric}; ${number(first)} after round ${story.central[0][0]}`, true),
    figure("round", story.rounds ? `${story.finishedRound === story.rounds ? story.rounds : story.round} of ${story.rounds}` : "–", now === "running" ? story.phase : ""),
    now === "running" ? figure("time left", left === null ? "–" : duration(left), left === null ? "known after the first round" : "at the pace so far")
      : figure("took", story.seconds ? duration(story.seconds.total) : story.began && story.now ? duration((new Date(story.now) - new Date(story.began)) / 1000) : "–", story.seconds ? `${duration(story.seconds.compute)} of it computing` : ""),
    figure("sent by sites", size(Object.values(story.sites).reduce((sum, each) => sum + each.up, 0)), `${size(Object.values(story.sites).reduce((sum, each) => sum + each.down, 0))} back to them`),
  ];
  at("figures").replaceChildren(...parts);
  at("reason").replaceChildren(...(now === "failed" || now === "interrupted" ? [el("div", { class: "warning bad", role: "alert" }, el("p", {}, now === "failed" ? story.reason : "The run's process is gone, and it did not say why; its logs may."), el("p", { class: "soft small" }, "Resume continues after the last finished round."))] : []));
}

function drawWire() {
  const rows = [];
  if (status() === "running") {
    const done = story.progress, share = done && done.total ? done.done / done.total : null;
    rows.push(el("p", {}, el("b", {}, story.phase), done ? ` ${done.done} of ${done.total} ${done.unit}${typeof done.loss === "number" ? `, loss ${done.loss.toFixed(3)}` : ""}` : ""));
    rows.push(el("div", { class: share === null ? "bar unknown" : "bar", role: "progressbar", "aria-label": story.phase, "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": share === null ? null : String(Math.round(100 * share)) }, el("i", { style: share === null ? "" : `width: ${100 * share}%` })));
    if (story.asked) {
      const working = story.asked.sites.filter((name) => story.sites[name].state === "working");
      rows.push(el("p", { class: "soft small" }, el("code", {}, story.asked.verb), working.length ? ` to ${story.asked.sites.join(", ")}; waiting for ${working.join(", ")}, asked ${ago(story.asked.time)}` : ` answered by ${story.asked.sites.join(", ")}`));
    } else if (!story.joined) {
      const missing = Object.values(story.sites).filter((each) => each.state === "expected").map((each) => each.name);
      rows.push(el("p", { class: "soft small" }, missing.length ? `Not here yet: ${missing.join(", ")}.` : ""));
    }
  } else rows.push(el("p", { class: "soft" }, { finished: "Nothing: the run is over.", starting: "Nothing yet: processes are starting." }[status()] || "Nothing: the run is not running."));
  at("wire").replaceChildren(...rows);
}

function card(each, place) {
  const elapsed = story.joined && story.now ? Math.max(each.seconds, ((status() === "running" ? Date.now() : new Date(story.now)) - new Date(story.joined)) / 1000) : each.seconds;
  const rows = [["model", each.model || "–"], ["texts", each.texts === null ? "–" : each.texts.toLocaleString("en")],
    ["seen", status() === "running" ? ago(each.seen) : each.seen ? new Date(each.seen).toLocaleTimeString([], { hour12: false }) : "never"],
    ["sent", size(each.up)], ["received", size(each.down)],
    ["computing", duration(each.seconds)], ["waiting", duration(Math.max(0, elapsed - each.seconds))]];
  const { metric } = seriesOf(story), last = each.scores.length ? each.scores[each.scores.length - 1][1][metric] : null;
  const alone = story.alone[each.name] ? story.alone[each.name][metric] : null;
  if (last !== null || alone !== null) rows.unshift([metric, `${number(last)}${alone === null || alone === undefined ? "" : ` (alone ${number(alone)})`}`]);
  if (each.privacy) rows.push(["privacy left", each.privacy.left !== undefined ? `ε ${Number(each.privacy.left).toFixed(2)} of ${(Number(each.privacy.left) + Number(each.privacy.epsilon || each.privacy.spent || 0)).toFixed(2)}` : Object.entries(each.privacy).map(([name, value]) => `${name} ${value}`).join(", ")]);
  if (each.missed) rows.push(["left out", `${each.missed} ${each.missed === 1 ? "time" : "times"}`]);
  return el("li", { class: "site", style: `--mark: ${Object.keys(story.sites).length > 8 ? "var(--line)" : colour(place)}`, "data-site": each.name },
    el("header", {}, el("h3", {}, each.name), el("span", { class: `pill ${STATES[each.state] || ""}` }, each.state === "expected" && status() !== "running" ? "–" : each.state)),
    el("dl", {}, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    el("div", { class: "split", role: "img", "aria-label": `${Math.round(100 * each.seconds / Math.max(1e-9, elapsed))} % of the time computing` }, el("i", { style: `width: ${100 * each.seconds / Math.max(1e-9, elapsed)}%` })),
    each.why ? el("p", { class: "why" }, each.why) : null);
}

function drawCurves() {
  const { series, guides, metric } = seriesOf(story), box = at("curves");
  const rounds = [...new Set(series.flatMap((each) => each.points.map(([round]) => round)))].sort((a, b) => a - b);
  const last = story.central.length ? number(story.central[story.central.length - 1][1][metric]) : "not tested yet";
  box.replaceChildren(curves({ series, guides, rounds: story.rounds, metric, width: Math.max(280, box.clientWidth), label: `${metric} by round; central model: ${last}` }));
  at("curves-table").replaceChildren(table(["round", ...series.map((each) => each.name)], rounds.map((round) => [String(round), ...series.map((each) => { const point = each.points.find(([at]) => at === round); return point ? number(point[1]) : ""; })]), { label: "scores by round" }));
  at("metric").textContent = metric;
}

function drawAgreement() {
  const all = story.agreement, last = all[all.length - 1];
  at("agreement-part").hidden = !last;
  if (!last) return;
  const names = Object.keys(story.sites).filter((name) => Object.hasOwn(last.classes, name)), pair = (a, b) => (a === b ? null : last.pairs[`${a} ${b}`] ?? last.pairs[`${b} ${a}`]);
  const before = all.length > 1 ? `, ${Math.round(100 * all[0].mean)} % in round ${all[0].round}` : "";
  const classes = Object.fromEntries(names.map((name) => [name, last.classes[name]]));
  at("agreement").replaceChildren(
    el("p", {}, `Two sites put the same class first for ${Math.round(100 * last.mean)} % of the public texts${before}; chance would be ${Math.round(100 * last.chance)} %.`),
    el("div", { class: "columns even" },
      Object.keys(last.pairs).length ? el("div", {}, el("h3", {}, "By pair"), matrix(names, names, pair, { least: last.chance, label: "agreement by pair of sites" })) : null,
      el("div", {}, el("h3", {}, "Pseudo-labels: what each site puts first"), shares(classes, story.labels))));
}

function drawPseudo() {
  const box = at("pseudo");
  at("pseudo-part").hidden = !story.pseudo.length;
  box.replaceChildren(...pseudoLabels(story, Math.max(280, box.clientWidth)));
}

function drawRest() {
  const cards = Object.values(story.sites).map(card);
  at("sites").replaceChildren(...cards);
  at("warnings-part").hidden = !story.warnings.length;
  at("warnings").replaceChildren(...story.warnings.slice(-6).reverse().map((each) => el("div", { class: "warning" }, el("p", {}, el("b", {}, each.who), `, round ${each.round}: ${each.what}.`), el("p", { class: "soft small" }, `Likely: ${each.likely}. To change: ${each.change}.`))));
  const log = at("log"), stuck = log.scrollTop + log.clientHeight > log.scrollHeight - 30;
  log.replaceChildren(...story.log.map((each) => el("li", {}, el("time", { datetime: each.time }, new Date(each.time).toLocaleTimeString([], { hour12: false })), el("span", { class: each.kind || null }, each.words))));
  if (stuck) log.scrollTop = log.scrollHeight;
  const running = status() === "running", stop = at("stop"), resume = at("resume");
  stop.disabled = !running || !facts.steer; stop.textContent = facts.stopping ? "Do not stop" : "Stop after this round";
  resume.disabled = running || status() === "finished" || status() === "starting" || !facts.steer || !facts.resumable;
  at("steering").textContent = facts.stopping ? "It stops when this round is saved." : running ? "" : facts.resumable && status() !== "finished" && status() !== "starting" ? "It continues after the last finished round." : "";
  at("connection").textContent = connected ? "" : "Connection to the page's server lost; trying again.";
}

function draw() {
  drawn = Date.now(); waiting = null;
  drawHead(); drawWire(); drawCurves(); drawAgreement(); drawPseudo(); drawRest();
  const words = `${status()}${story.finishedRound ? `, round ${story.finishedRound} done` : ""}`;
  if (words !== announced) { announced = words; at("announce").textContent = words; }
}

function soon() {
  if (waiting === null) waiting = setTimeout(draw, Math.max(0, 250 - (Date.now() - drawn)));
}

function follow() {
  const source = new EventSource("events");
  source.addEventListener("facts", (message) => {
    facts = JSON.parse(message.data);
    if (facts.fresh) { story = newStory(); planned(story, facts.config); }
    soon();
  });
  source.addEventListener("run", (message) => { tell(story, JSON.parse(message.data)); soon(); });
  source.addEventListener("open", () => { connected = true; soon(); });
  source.addEventListener("error", () => { connected = false; soon(); });
}

async function steer(action) {
  const answer = await fetch(action, { method: "POST", headers: { "X-Fedstill-Key": key } });
  const words = await answer.text();
  at("steering").textContent = answer.ok ? words : `That did not work: ${words}`;
}

at("stop").addEventListener("click", () => steer(facts.stopping ? "go-on" : "stop"));
at("resume").addEventListener("click", () => steer("resume"));
window.addEventListener("resize", soon);
setInterval(soon, 1000);
follow();
