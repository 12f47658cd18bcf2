"use strict";
// Pictures and small parts. Whatever a run says is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined).map(text));
  return node;
}

function text(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

function shape(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") node.style.cssText = value; // an attribute would need a looser content policy
    else node.setAttribute(name, value);
  }
  node.append(...children.map(text));
  return node;
}

const colour = (place) => `var(--s${(place % 8) + 1})`;

function size(bytes) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (bytes < 1000 || unit === "GB") return `${bytes.toFixed(unit === "B" || bytes >= 100 ? 0 : 1)}\u00a0${unit}`;
    bytes /= 1000;
  }
}

function duration(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))}\u00a0s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)}\u00a0min` : `${(seconds / 3600).toFixed(1)}\u00a0h`;
}

function number(value, digits = 3) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

function table(head, rows, options = {}) {
  const cells = (row, tag) => row.map((cell, at) => el(tag, { class: (options.words || []).includes(at) ? "words" : null, scope: tag === "th" ? "col" : null }, cell));
  const body = rows.map((row) => el("tr", { class: row.kind }, ...cells(row.cells || row, "td")));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": options.label || "table" },
    el("table", {}, el("thead", {}, el("tr", {}, ...cells(head, "th"))), el("tbody", {}, ...body)));
}

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((part) => part * power).find((part) => part >= raw * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + 1e-9; at += step) found.push(Number(at.toFixed(10)));
  return found;
}

// Curves by round. series: {name, points: [[round, score]], central, place}; guides: {name, y}.
function curves({ series, guides = [], rounds, metric, width, label }) {
  const shown = series.filter((each) => each.points.length);
  const values = [...shown.flatMap((each) => each.points.map((point) => point[1])), ...guides.map((guide) => guide.y)];
  if (!values.length) return el("p", { class: "soft" }, "No scores yet: everybody is tested after each round.");
  const narrow = width < 520, right = narrow ? 88 : 150, left = 40, top = 14, bottom = 34, height = narrow ? 250 : 320;
  let low = Math.min(...values), high = Math.max(...values);
  const room = Math.max(0.02 * Math.max(1e-9, Math.abs(high)), (high - low) * 0.08);
  low -= room; high += room;
  if (Math.min(...values) >= 0 && Math.max(...values) <= 1) { low = Math.max(0, low); high = Math.min(1, high); }
  const last = Math.max(1, rounds);
  const x = (round) => left + (round / last) * (width - left - right);
  const y = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom);
  const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const tick of ticks(low, high, 5)) {
    svg.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      shape("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, String(Number(tick.toFixed(4)))));
  }
  const every = Math.ceil((last + 1) / (narrow ? 6 : 12));
  for (let round = 0; round <= last; round += every) {
    svg.append(shape("text", { x: x(round), y: height - bottom + 20, "text-anchor": "middle" }, String(round)));
  }
  svg.append(shape("text", { x: (left + width - right) / 2, y: height - 1, "text-anchor": "middle" }, "round"));
  const ends = [];
  for (const guide of guides) {
    svg.append(shape("line", { class: "guide", x1: left, x2: width - right, y1: y(guide.y), y2: y(guide.y) }));
    ends.push({ name: guide.name, y: y(guide.y), style: "fill: var(--soft)" });
  }
  for (const each of [...shown].sort((a, b) => (a.central ? 1 : 0) - (b.central ? 1 : 0))) {
    const stroke = each.central ? "var(--accent)" : each.quiet ? "var(--line)" : colour(each.place);
    const points = each.points.map(([round, score]) => `${x(round).toFixed(1)},${y(score).toFixed(1)}`).join(" ");
    svg.append(shape("polyline", { class: `curve ${each.central ? "central" : ""}`, points, style: `stroke: ${stroke}` }));
    for (const [round, score] of each.quiet ? [] : each.points) {
      svg.append(shape("circle", { cx: x(round), cy: y(score), r: each.central ? 4 : 2.5, style: `fill: ${stroke}` },
        shape("title", {}, `${each.name}, round ${Number(round.toFixed(2))}: ${number(score)} ${metric}`)));
    }
    const end = each.points[each.points.length - 1];
    if (!each.quiet) ends.push({ name: each.name, y: y(end[1]), strong: each.central, x: x(end[0]), style: `fill: ${each.central ? "var(--accent)" : stroke}` });
  }
  ends.sort((a, b) => a.y - b.y);
  ends.forEach((end, at) => { end.at = at ? Math.max(end.y, ends[at - 1].at + 15) : Math.max(top, end.y); });
  const over = ends.length ? ends[ends.length - 1].at - (height - bottom) : 0;
  if (over > 0) for (let at = ends.length - 1, most = height - bottom; at >= 0; at -= 1, most -= 15) ends[at].at = Math.min(ends[at].at, most);
  for (const end of ends) {
    if (end.x !== undefined && end.x < width - right - 12) svg.append(shape("line", { class: "leader", x1: end.x + 6, x2: width - right + 4, y1: end.y, y2: end.at }));
    const most = narrow ? 11 : 20, name = end.name.length > most ? `${end.name.slice(0, most - 1)}…` : end.name;
    svg.append(shape("text", { x: width - right + 10, y: end.at + 4, class: end.strong ? "strong" : "", style: end.style }, name, shape("title", {}, end.name)));
  }
  return svg;
}

// Shares between 0 and 1 (or counts), darker where larger. rows and columns are names; value(row, column) may be null.
function matrix(rows, columns, value, options = {}) {
  const shown = options.show || ((each) => `${Math.round(100 * each)} %`);
  const most = options.most || 1, least = options.least || 0;
  const cell = (row, column) => {
    const each = value(row, column);
    if (each === null || each === undefined) return el("td", {}, "");
    const depth = Math.max(0, Math.min(1, (each - least) / Math.max(1e-9, most - least)));
    return el("td", { style: `background: color-mix(in srgb, var(--accent) ${Math.round(6 + 80 * depth)}%, var(--card)); color: ${depth > 0.8 ? "var(--card)" : "var(--ink)"}` }, shown(each));
  };
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": options.label || "matrix" },
    el("table", { class: "matrix" },
      el("thead", {}, el("tr", {}, el("th", {}, options.corner || ""), ...columns.map((column) => el("th", { scope: "col" }, column)))),
      el("tbody", {}, ...rows.map((row) => el("tr", {}, el("th", { scope: "row" }, row), ...columns.map((column) => cell(row, column)))))));
}

// How often each site puts each class first, as one stacked bar a site.
function shares(classes, labels) {
  const rows = Object.entries(classes).flatMap(([site, parts]) => [
    el("span", {}, site),
    el("span", { class: "stack", role: "img", "aria-label": `${site}: ${parts.map((part, at) => `${labels[at] || at} ${Math.round(100 * part)} %`).join(", ")}` },
      ...parts.map((part, at) => el("span", { style: `width: ${100 * part}%; background: ${colour(at + 5)}`, title: `${labels[at] || at}: ${Math.round(100 * part)} %` }, part > 0.12 ? `${Math.round(100 * part)} %` : ""))),
  ]);
  const names = (Object.values(classes)[0] || []).map((_, at) => el("span", { style: `--mark: ${colour(at + 5)}` }, el("i", { class: "dot" }), labels[at] || `class ${at}`));
  return el("div", {}, el("div", { class: "legend" }, ...names), el("div", { class: "shares" }, ...rows));
}

// A row for everybody: where it stood alone (ring), where it stands now (dot), and how sure the test is (bar).
function ladder({ rows, guide, metric, width, label }) {
  const values = rows.flatMap((row) => [row.before, row.after, row.after - row.error, row.after + row.error]).filter((each) => Number.isFinite(each));
  if (guide) values.push(guide.y);
  if (!values.length) return el("p", { class: "soft" }, "No scores.");
  const narrow = width < 520, left = narrow ? 108 : 150, right = 58, step = 34, top = 26, height = top + rows.length * step + 30;
  let low = Math.min(...values), high = Math.max(...values);
  const room = Math.max(0.01, (high - low) * 0.06);
  low = low - room; high = high + room;
  const x = (value) => left + ((value - low) / (high - low)) * (width - left - right);
  const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const tick of ticks(low, high, narrow ? 4 : 7)) {
    svg.append(shape("line", { class: "grid", x1: x(tick), x2: x(tick), y1: top - 6, y2: height - 26 }),
      shape("text", { x: x(tick), y: height - 9, "text-anchor": "middle" }, String(Number(tick.toFixed(4)))));
  }
  if (guide) {
    svg.append(shape("line", { class: "guide", x1: x(guide.y), x2: x(guide.y), y1: top - 6, y2: height - 26 }),
      shape("text", { x: Math.min(x(guide.y), width - right - 40), y: top - 12, "text-anchor": "middle" }, guide.name));
  }
  rows.forEach((row, at) => {
    const y = top + at * step + 12, fill = row.central ? "var(--accent)" : row.sum ? "var(--ink)" : colour(row.place);
    const most = narrow ? 14 : 20, name = row.name.length > most ? `${row.name.slice(0, most - 1)}…` : row.name;
    svg.append(shape("text", { x: left - 12, y: y + 4, "text-anchor": "end", class: row.central || row.sum ? "strong" : "", style: row.central ? "fill: var(--accent)" : "" }, name, shape("title", {}, row.name)));
    if (Number.isFinite(row.after) && row.error) svg.append(shape("line", { x1: x(row.after - row.error), x2: x(row.after + row.error), y1: y, y2: y, style: `stroke: ${fill}; stroke-width: 6; opacity: .18; stroke-linecap: round` }));
    if (Number.isFinite(row.before) && Number.isFinite(row.after)) svg.append(shape("line", { x1: x(row.before), x2: x(row.after), y1: y, y2: y, style: `stroke: ${fill}; stroke-width: 2` }));
    if (Number.isFinite(row.before)) svg.append(shape("circle", { cx: x(row.before), cy: y, r: 4.5, style: `fill: var(--card); stroke: ${fill}; stroke-width: 2` }, shape("title", {}, `${row.name} alone: ${number(row.before)}`)));
    if (Number.isFinite(row.after)) svg.append(shape("circle", { cx: x(row.after), cy: y, r: row.central ? 7 : 5.5, style: `fill: ${fill}` }, shape("title", {}, `${row.name}: ${number(row.after)} ${metric}`)),
      shape("text", { x: width - right + 14, y: y + 4, class: row.central || row.sum ? "strong" : "", style: row.central ? "fill: var(--accent)" : "" }, number(row.after)));
  });
  return svg;
}

// Accuracy by confidence: dots on the diagonal mean that the model is as sure as it is right; larger dots, more texts.
function reliability(bins, width) {
  const edge = Math.min(width, 330), left = 42, bottom = 36, top = 8, side = edge - left - 12;
  const at = (value) => left + value * side, up = (value) => top + (1 - value) * side;
  const most = Math.max(...bins.map((bin) => bin.texts));
  const svg = shape("svg", { width: edge, height: side + top + bottom, viewBox: `0 0 ${edge} ${side + top + bottom}`, role: "img", "aria-label": `reliability: ${bins.map((bin) => `sure ${number(bin.confidence, 2)}, right ${number(bin.accuracy, 2)}`).join("; ")}` });
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(shape("line", { class: "grid", x1: left, x2: left + side, y1: up(tick), y2: up(tick) }),
      shape("text", { x: left - 8, y: up(tick) + 4, "text-anchor": "end" }, String(tick)), shape("text", { x: at(tick), y: top + side + 16, "text-anchor": "middle" }, String(tick)));
  }
  svg.append(shape("line", { class: "diagonal", x1: at(0), y1: up(0), x2: at(1), y2: up(1) }));
  svg.append(shape("polyline", { class: "curve", points: bins.map((bin) => `${at(bin.confidence)},${up(bin.accuracy)}`).join(" "), style: "stroke: var(--accent); opacity: .5" }));
  for (const bin of bins) svg.append(shape("circle", { cx: at(bin.confidence), cy: up(bin.accuracy), r: 3 + 7 * Math.sqrt(bin.texts / most), style: "fill: var(--accent); opacity: .8" }, shape("title", {}, `${bin.texts} texts: sure ${number(bin.confidence, 2)}, right ${number(bin.accuracy, 2)}`)));
  svg.append(shape("text", { x: at(0.5), y: top + side + 33, "text-anchor": "middle" }, "how sure it is"));
  return svg;
}
