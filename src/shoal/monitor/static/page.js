"use strict";
// One stream of server-sent events brings the state of the run, and each second what has changed. The page only shows
// it: it sends nothing, and keeps no more points than a chart has. Texts from peers go into the page as text alone.

const $ = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const CHARTS = [
  {title: "Throughput", unit: "samples/s", series: [["throughput", "all peers", "--one"]], zero: true},
  {title: "Loss", unit: "", series: [["loss", "mean by samples", "--one"], ["loss_median", "median of peers", "--two"]]},
  {title: "From step to step", unit: "seconds", zero: true, series: [["step", "in all", "--one"],
    ["computing", "computing", "--three"], ["waiting", "waiting for others", "--two"], ["averaging", "averaging", "--four"]]},
  {title: "Peers", unit: "", zero: true, series: [["peers", "there", "--one"], ["gone", "gone, of late", "--two"]]},
];
const ROWS_AT_FIRST = 50, MAX_EVENTS = 300;
const TEXTS = new Set(["peer", "state", "link", "version", "failure"]);
const TITLES = {joint: "not computing", step: "step s", averaging: "averaging s", failure: "last failure"};

let columns = [], spans = [], level = 0, data = null, charts = [], shownRows = ROWS_AT_FIRST;
let order = {column: "samples/s", down: true}, wanted = "", lastFetch = 0;
const peers = new Map();      // id -> row
const elements = [];          // the rows of the table in the page, reused

function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Math.abs(value) >= 1e12) return value.toExponential(2);
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

function bytes(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${number(value)} ${units[unit]}`;
}

function seconds(value) { return value === null || value === undefined ? "–" : `${number(value)} s`; }

function clock(seconds, isPrecise) {
  const parts = {hour: "2-digit", minute: "2-digit", ...(isPrecise ? {second: "2-digit"} : {})};
  return new Date(seconds * 1000).toLocaleTimeString("en-GB", parts);
}

// --- the swarm in figures ---

function showSummary(summary) {
  if (!summary) return;
  const states = Object.entries(summary.states).filter(([, count]) => count).map(([state, count]) => `${count} ${state}`);
  const figures = [
    ["epoch", number(summary.epoch)],
    ["peers", number(summary.peers), states.join(", ")],
    ["samples/s", number(summary.throughput)],
    ["loss", number(summary.means.loss, 4)],
    ["step to step", seconds(summary.step)],
    ["sent", summary.sent === null ? "–" : `${bytes(summary.sent)}/s`],
    ["rounds failed", number(summary.failed)],
  ];
  for (const [name, value] of Object.entries(summary.means)) if (name !== "loss") figures.push([name, number(value, 4)]);
  const versions = Object.entries(summary.versions).map(([version, count]) => `${version || "?"} (${count})`);
  if (versions.length) figures.push([versions.length === 1 ? "version" : "versions", versions.length === 1 ? Object.keys(summary.versions)[0] : versions.length, versions.length === 1 ? "" : versions.join(", ")]);
  const list = $("figures");
  while (list.children.length < figures.length) {
    const box = document.createElement("div");
    box.append(document.createElement("dt"), document.createElement("dd"));
    list.append(box);
  }
  while (list.children.length > figures.length) list.lastChild.remove();
  figures.forEach(([name, value, more], index) => {
    const box = list.children[index];
    setText(box.firstChild, name);
    setText(box.lastChild, String(value));
    box.title = more || "";
  });
}

function setText(element, text) { if (element.textContent !== text) element.textContent = text; }

// --- charts ---

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function chartData(chart) { return [data.time, ...chart.series.map(([name]) => data[name])]; }

function makeCharts() {
  charts.forEach((each) => each.plot.destroy());
  $("charts").replaceChildren();
  charts = CHARTS.map((chart) => {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    const title = document.createElement("b"), area = document.createElement("div");
    title.textContent = chart.unit ? `${chart.title} (${chart.unit})` : chart.title;
    caption.append(title);
    for (const [, label, shade] of chart.series) {
      const span = document.createElement("span");
      span.textContent = label;
      span.style.setProperty("--swatch", `var(${shade})`);
      caption.append(span);
    }
    figure.append(caption, area);
    $("charts").append(figure);
    const axis = {stroke: colour("--faint"), grid: {stroke: colour("--grid"), width: 1}, ticks: {stroke: colour("--line"), width: 1}};
    const plot = new uPlot({
      width: Math.max(200, area.clientWidth), height: 180, legend: {show: false},
      cursor: {sync: {key: "run"}, points: {size: 6}},
      scales: {y: {range: (u, low, high) => range(low, high, chart.zero)}},
      axes: [{...axis, space: 70, values: (u, ticks, axis, space, step) => ticks.map((tick) => clock(tick, step < 60))}, {...axis, size: 56, values: (u, ticks) => ticks.map((tick) => number(tick))}],
      series: [{}, ...chart.series.map(([, label, shade]) => ({label, stroke: colour(shade), width: 1.6, points: {show: false}}))],
    }, data ? chartData(chart) : [[], ...chart.series.map(() => [])], area);
    return {chart, plot, area};
  });
}

function range(low, high, fromZero) {
  if (low === null || high === null) return [0, 1];
  if (fromZero) return [0, high > 0 ? high * 1.08 : 1];
  const margin = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low - margin, high + margin];
}

function drawCharts() { if (data && !document.hidden) charts.forEach(({chart, plot}) => plot.setData(chartData(chart))); }

async function fetchHistory() {
  lastFetch = Date.now();
  const asked = level, answer = await fetch(`history?level=${asked}`);
  if (!answer.ok || asked !== level) return;
  data = await answer.json();
  drawCharts();
}

function addPoint(point, time) {
  if (!data || !point) return;
  const step = [1, 10, 60][level];
  if (level > 0) {
    if (Date.now() - lastFetch > step * 1000) fetchHistory().catch(() => {});
    return;
  }
  const last = data.time.length - 1;
  if (last >= 0 && Math.floor(time) <= data.time[last]) return;
  data.time.push(Math.floor(time));
  for (const name of Object.keys(data)) if (name !== "time") data[name].push(point[name] ?? null);
  const most = spans[0] || 600;
  if (data.time.length > most) for (const name of Object.keys(data)) data[name].splice(0, data[name].length - most);
  drawCharts();
}

// --- the table ---

function makeHead() {
  $("head").replaceChildren(...columns.map((name) => {
    const cell = document.createElement("th"), button = document.createElement("button");
    button.textContent = TITLES[name] || name;
    cell.scope = "col";
    if (TEXTS.has(name)) cell.className = "text";
    button.addEventListener("click", () => {
      order = {column: name, down: order.column === name ? !order.down : !TEXTS.has(name)};
      showRows();
    });
    cell.append(button);
    return cell;
  }));
}

function cellText(name, value) {
  if (value === null || value === undefined) return name === "failure" ? "" : "–";
  if (name === "peer") return `…${value.slice(-8)}`;
  if (name === "sent" || name === "received") return bytes(value);
  if (TEXTS.has(name)) return value;
  return number(value, name === "loss" ? 4 : 3);
}

function compare(index, down) {
  const sign = down ? -1 : 1;
  return (one, other) => {
    const a = one[index], b = other[index];
    if (a === b) return one[0] < other[0] ? -1 : 1;
    if (a === null || a === undefined) return 1;
    if (b === null || b === undefined) return -1;
    return a < b ? -sign : sign;
  };
}

function showRows() {
  const index = Math.max(0, columns.indexOf(order.column));
  [...$("head").children].forEach((cell, at) =>
    cell.setAttribute("aria-sort", at !== index ? "none" : order.down ? "descending" : "ascending"));
  const texts = columns.map((name, at) => TEXTS.has(name) ? at : -1).filter((at) => at >= 0);
  const rows = [...peers.values()].filter((row) =>
    !wanted || texts.some((at) => String(row[at] ?? "").toLowerCase().includes(wanted)));
  rows.sort(compare(index, order.down));
  const shown = rows.slice(0, shownRows);
  setText($("shown"), rows.length > shown.length ? `${shown.length} of ${rows.length}` : String(rows.length));
  $("more").hidden = rows.length <= shown.length;
  if (document.hidden) return;
  while (elements.length < shown.length) {
    const row = document.createElement("tr");
    row.append(...columns.map((name) => {
      const cell = document.createElement("td");
      if (TEXTS.has(name)) cell.className = "text";
      return cell;
    }));
    elements.push(row);
    $("rows").append(row);
  }
  while (elements.length > shown.length) elements.pop().remove();
  shown.forEach((row, at) => columns.forEach((name, column) => {
    const cell = elements[at].children[column];
    setText(cell, cellText(name, row[column]));
    if (name === "peer" && cell.title !== row[column]) cell.title = row[column];
    if (name === "state" && cell.className !== `text ${row[column]}`) cell.className = `text ${row[column]}`;
  }));
}

// --- events ---

function showEvents(events) {
  const list = $("events");
  for (const event of events) {
    const line = document.createElement("li"), when = document.createElement("time");
    when.textContent = clock(event.time, true);
    line.className = event.kind;
    line.append(when, event.text);
    if (event.peer) line.title = event.peer;
    list.prepend(line);
  }
  while (list.children.length > MAX_EVENTS) list.lastChild.remove();
}

// --- life ---

function begin(news) {
  columns = news.columns;
  spans = news.spans;
  document.title = `${news.run} – shoal monitor`;
  setText($("run"), news.run);
  peers.clear();
  elements.splice(0).forEach((row) => row.remove());
  $("events").replaceChildren();
  makeHead();
  fetchHistory().catch(() => {});
}

function hear(message) {
  const news = JSON.parse(message.data);
  if (news.columns) begin(news);
  for (const row of news.rows) peers.set(row[0], row);
  for (const id of news.gone || []) peers.delete(id);
  showSummary(news.summary);
  if (news.summary) addPoint(news.point, news.summary.time);
  if (news.rows.length || news.gone?.length || news.columns) showRows();
  showEvents(news.events);
  document.documentElement.dataset.news = String(Number(document.documentElement.dataset.news || 0) + 1);
}

function follow() {
  const stream = new EventSource("events");
  const tell = (text, state) => { setText($("link"), text); $("link").className = state; };
  stream.onmessage = hear;
  stream.onopen = () => tell("live", "live");
  stream.onerror = () => {
    tell("the monitor does not answer; trying again", "lost");
    // A browser tries again by itself, unless there was an answer that is no stream, such as that of a full server.
    if (stream.readyState === EventSource.CLOSED) setTimeout(follow, 3000);
  };
}

for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => {
    level = Number(button.dataset.level);
    document.querySelectorAll("nav button").forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
    fetchHistory().catch(() => {});
  });
}
$("filter").addEventListener("input", (event) => { wanted = event.target.value.trim().toLowerCase(); showRows(); });
$("more").addEventListener("click", () => { shownRows *= 2; showRows(); });
dark.addEventListener("change", makeCharts);
document.addEventListener("visibilitychange", () => { if (!document.hidden) { showRows(); drawCharts(); } });
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => charts.forEach(({plot, area}) => {
    plot.setSize({width: Math.max(200, area.clientWidth), height: 180});
    area.parentElement.dataset.width = area.clientWidth < 500 ? "small" : "large";
  }), 150);
});
makeCharts();
follow();
