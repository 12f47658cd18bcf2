"use strict";
// A run's report: the same story as the live page tells, with what is known when it is over.

const data = JSON.parse(document.getElementById("data").textContent);
const summary = data.summary, config = data.config, story = newStory();
planned(story, config);
for (const event of data.events) tell(story, event);
const { series, guides, metric } = seriesOf(story);
const finished = summary.status === "finished", sites = summary.sites || {}, names = Object.keys(sites).length ? Object.keys(sites) : Object.keys(story.sites);
const score = (scores) => (scores && scores[metric] !== undefined ? scores[metric] : undefined);
const mean = (values) => { const known = values.filter((each) => Number.isFinite(each)); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : undefined; };
const alone = mean(names.map((name) => score((sites[name] || {}).alone))), after = mean(names.map((name) => score((sites[name] || {}).after)));
const central = score(summary.central), bound = score(summary.centralized), tests = summary.test_texts;
const error = (value) => (tests && value >= 0 && value <= 1 ? 1.96 * Math.sqrt((value * (1 - value)) / tests) : 0);

function part(id, title, ...children) {
  return el("section", { "aria-labelledby": `h-${id}`, id }, el("h2", { id: `h-${id}` }, title), ...children);
}

function figure(name, value, note, main) {
  return el("div", { class: main ? "main" : null }, el("dt", {}, name), el("dd", {}, value, note ? el("small", {}, note) : null));
}

function head() {
  const kinds = new Set(names.map((name) => (sites[name] || story.sites[name] || {}).model)), status = summary.status;
  const figures = [figure("central model", number(central), Number.isFinite(central) && tests ? `${metric}, ± ${number(error(central))} by ${tests} test texts` : "", true)];
  if (Number.isFinite(after)) figures.push(figure("mean of sites", number(after), Number.isFinite(alone) ? `${number(alone)} alone` : metric));
  if (Number.isFinite(bound)) figures.push(figure("all texts in one place", number(bound), "what nobody may do"));
  if (summary.seconds) figures.push(figure("took", duration(summary.seconds.total), `${summary.rounds} rounds; ${duration(summary.seconds["set-up"])} until all had joined`));
  return el("header", {},
    el("div", { class: "head" }, el("h1", {}, data.run), el("span", { class: `pill ${{ finished: "good", failed: "bad", stopped: "warn" }[status] || ""}` }, status), el("span", { class: "about" }, [summary.method || story.method, story.paper].filter(Boolean).join(", "))),
    el("p", {}, words(kinds)), finished ? el("dl", { class: "figures" }, ...figures) : el("div", { class: "warning bad" }, el("p", {}, summary.reason || "The run has not finished.")));
}

function words(kinds) {
  const count = names.length, spread = kinds.size === 1 ? "one kind of model" : `${kinds.size} kinds of models`;
  let text = `${count} ${count === 1 ? "site" : "sites"} with ${spread} and ${names.reduce((sum, name) => sum + ((sites[name] || story.sites[name] || {}).texts || 0), 0).toLocaleString("en")} private texts trained together by ${summary.method || story.method}.`;
  if (finished && Number.isFinite(central) && Number.isFinite(alone)) {
    const gain = central - alone, sure = Math.abs(gain) > error(central);
    text += ` The central model, which saw no private text, is ${Math.abs(gain).toFixed(3)} ${gain >= 0 ? "above" : "below"} the mean of the sites alone${sure ? "" : ", which is within the error of this test"}.`;
  }
  return text;
}

function picture(width) {
  const rows = names.map((name, place) => ({ name, place: names.length > 8 ? 7 : place, before: score((sites[name] || {}).alone), after: score((sites[name] || {}).after), error: 0 }));
  for (const row of rows) row.error = Number.isFinite(row.after) ? error(row.after) : 0;
  rows.push({ name: "mean of sites", sum: true, before: alone, after, error: 0 });
  if (Number.isFinite(central)) rows.push({ name: "central model", central: true, before: undefined, after: central, error: error(central) });
  return ladder({ rows, guide: Number.isFinite(bound) ? { name: "all texts in one place", y: bound } : null, metric, width, label: `${metric} of each site alone and after the run, and of the central model` });
}

function siteTable() {
  const rows = names.map((name, place) => {
    const each = sites[name], change = score(each.after) - score(each.alone);
    const missed = story.sites[name] ? story.sites[name].missed : 0;
    return [el("span", { style: `--mark: ${colour(names.length > 8 ? 7 : place)}` }, el("i", { class: "dot" }), name), each.model, each.texts.toLocaleString("en"), number(score(each.alone)), number(score(each.after)), Number.isFinite(change) ? `${change >= 0 ? "+" : "−"}${Math.abs(change).toFixed(3)}` : "–", size(each.bytes_up), size(each.bytes_down), each.seconds === undefined ? "–" : duration(each.seconds), missed ? `${missed}×` : "never"];
  });
  rows.push({ kind: "sum", cells: ["mean of sites", "", "", number(alone), number(after), Number.isFinite(after - alone) ? `${after >= alone ? "+" : "−"}${Math.abs(after - alone).toFixed(3)}` : "–", "", "", "", ""] });
  if (Number.isFinite(central)) rows.push({ kind: "main", cells: ["central model", summary.central_model.model, "0", "", number(central), "", "", "", "", ""] });
  if (Number.isFinite(bound)) rows.push(["all texts in one place", summary.central_model.model, names.reduce((sum, name) => sum + sites[name].texts, 0).toLocaleString("en"), "", number(bound), "", "", "", "", ""]);
  return table(["site", "model", "texts", "alone", "after", "change", "sent", "received", "computed", "left out"], rows, { words: [1], label: "sites" });
}

function centralPart(width) {
  const test = summary.central_test;
  if (!test) return null;
  const most = Math.max(...test.confusion.flat()), place = (label) => test.labels.indexOf(label), many = test.labels.length > 12;
  const confusions = many ? table(["true label", "texts", "right", "mostly taken for"], test.labels.map((label, at) => { const row = test.confusion[at], sum = row.reduce((a, b) => a + b, 0), other = row.map((count, to) => [count, to]).filter(([, to]) => to !== at).sort((a, b) => b[0] - a[0])[0]; return [label, String(sum), sum ? `${Math.round((100 * row[at]) / sum)} %` : "–", other && other[0] ? `${test.labels[other[1]]} (${other[0]})` : "–"]; }))
    : matrix(test.labels, test.labels, (row, column) => test.confusion[place(row)][place(column)], { most, show: String, corner: "true ↓ said →", label: "confusion matrix" });
  return part("central", "The central model, closely", el("div", { class: "columns even" },
    el("figure", {}, el("h3", {}, "Confusions"), confusions, el("figcaption", {}, `Test texts by true label (rows) and by what the central model says (columns).`)),
    el("figure", {}, el("h3", {}, "Is it as sure as it is right?"), reliability(test.reliability, Math.min(width, 400)), el("figcaption", {}, `Each dot is the texts of which the model is about equally sure: to the right how sure, upwards how often right. On the dashed line both are the same; the mean gap is ${test.ece.toFixed(3)}.`))));
}

function leftPart() {
  const phases = [...new Set(names.flatMap((name) => Object.keys(sites[name].bytes || {})))];
  const rows = names.map((name) => [name, ...phases.map((phase) => { const each = (sites[name].bytes || {})[phase]; return each ? size(each.up) : "–"; }), size(sites[name].bytes_up)]);
  const asks = Object.entries(summary.asks || {});
  const budgets = names.filter((name) => sites[name].privacy).map((name) => [name, number(Number(sites[name].privacy.epsilon), 3), number(Number(sites[name].privacy.left), 3)]);
  return part("left", "What left each site",
    el("p", {}, "Texts never leave a site. These bytes did, by phase of the run:"),
    table(["site", ...phases, "in all"], rows, { label: "bytes that left each site" }),
    asks.length ? el("div", {}, el("h3", {}, "What kind of answers they were"), table(["asked", "times", "answer holds"], asks.map(([verb, each]) => [el("code", {}, verb), String(each.asks), each.leaves]), { words: [2] })) : null,
    budgets.length ? el("div", {}, el("h3", {}, "Privacy budgets"), table(["site", "epsilon spent", "left"], budgets)) : el("p", { class: "soft small" }, "No site of this run added noise to its answers ([sites.privacy])."));
}

function usePart() {
  if (!finished || !Number.isFinite(central)) return null;
  return part("use", "Use the model",
    el("p", {}, "The central model lies in the run's folder, as transformers loads it."),
    el("pre", {}, `fedstill predict ${data.run} "a text of yours"\nfedstill predict ${data.run} --file texts.csv`),
    el("pre", {}, `from pathlib import Path\nimport fedstill\n\nclassify = fedstill.Result(Path("runs/${data.run}")).model()\nclassify(["a text of yours"])`));
}

function settingsPart() {
  const facts = { task: config.task.name, method: `${summary.method || story.method}${summary.preset ? `, preset ${summary.preset}` : ""}`, seed: config.seed, link: (config.exchange || {}).link || "stream", written: data.written, machine: data.machine };
  return part("settings", "Settings", el("dl", { class: "facts" }, ...Object.entries(facts).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))])),
    el("details", {}, el("summary", {}, "The configuration as resolved"), el("pre", {}, data.toml)));
}

function draw() {
  const root = document.getElementById("report"), width = Math.max(280, root.clientWidth - (root.clientWidth < 560 ? 54 : 84));
  const open = [...root.querySelectorAll("details")].map((each) => each.open);
  const half = width > 860 ? width / 2 - 20 : width;
  const parts = [head()];
  if (Number.isFinite(after) || Number.isFinite(central)) parts.push(part("story", "The run in one picture", el("figure", {}, picture(width), el("figcaption", {}, `Ring: a site alone, on its own texts. Dot: after the run. Shaded: 95 % of what another test set of ${tests} texts could show.`))));
  if (story.central.length || series.some((each) => each.points.length)) parts.push(part("curves", "Scores by round", curves({ series, guides, rounds: story.rounds, metric, width, label: `${metric} by round` })));
  if (finished) parts.push(part("sites", "Sites", siteTable()));
  if (story.pseudo.length) parts.push(part("pseudo", "Pseudo-labels, pass by pass", ...pseudoLabels(story, width)));
  parts.push(finished ? centralPart(half) : null, finished ? leftPart() : null);
  if (story.warnings.length) parts.push(part("warnings", "Not learning as it should", ...story.warnings.map((each) => el("div", { class: "warning" }, el("p", {}, el("b", {}, each.who), `, round ${each.round}: ${each.what}.`), el("p", { class: "soft small" }, `Likely: ${each.likely}. To change: ${each.change}.`)))));
  const trouble = story.log.filter((each) => each.kind && each.of !== "warning");
  if (trouble.length) parts.push(part("log", "What went wrong on the way", el("ol", { class: "log" }, ...trouble.map((each) => el("li", {}, el("time", {}, new Date(each.time).toLocaleTimeString([], { hour12: false })), el("span", { class: each.kind }, each.words))))));
  parts.push(usePart(), settingsPart());
  root.replaceChildren(...parts.filter(Boolean));
  [...root.querySelectorAll("details")].forEach((each, at) => { each.open = Boolean(open[at]); });
}

document.title = `${data.run} · fedstill`;
draw();
window.addEventListener("resize", draw);
