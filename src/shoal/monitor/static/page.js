"use strict";
// One stream of server-sent events brings the state of the run, and each second what has changed. The page only shows
// it: it sends nothing, and keeps no more points than a chart has. Texts from peers go into the page as text alone.

const $ = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const SHADES = ["--one", "--two", "--three", "--four", "--five", "--six"];
const CHARTS = [
  {title: "Throughput", unit: "samples/s", zero: true, show: number,
    tip: "Samples that all peers together process in a second, waiting included.",
    series: [["throughput", "all peers"]]},
  {title: "Loss", show: (value) => number(value, 4),
    tip: "What peers report with optimizer.report(loss=…), and other figures whose names contain “loss”.",
    series: [["loss", "mean", "Mean over peers, weighted by their samples."],
      ["loss_median", "median", "Median over peers: a few wrong reports do not move it."]]},
  {title: "Samples in a step", zero: true, show: number,
    tip: "How many samples each joint step really had, from all peers together.",
    series: [["batch", "had", "Samples of the last joint step."], ["target", "wanted", "target_batch_size of the peers."]]},
  {title: "From step to step", unit: "seconds", zero: true, show: number,
    tip: "Time from one joint step to the next, and its parts. Medians over peers.",
    series: [["step", "all", "The whole time."], ["computing", "computing", "Working on batches."],
      ["waiting", "waiting", "For other peers, and for a group."], ["averaging", "averaging", "Exchanging values with the group."]]},
  {title: "Peers", zero: true, show: number,
    tip: "Peers that take part, and those that have left or are lost, for five minutes.",
    series: [["peers", "there"], ["gone", "gone"]]},
  {title: "Network", unit: "per second", zero: true, show: bytes,
    tip: "Bytes that all peers together send and receive in a second.",
    series: [["sent", "sent"], ["received", "received"]]},
];
const FIGURE = "figure/";
const ROWS_AT_FIRST = 50, MAX_EVENTS = 600, EVENTS_SHOWN = 200, CHART_HEIGHT = 170;
const TEXTS = new Set(["peer", "state", "link", "failure"]);
// The columns that a row shows; the rest of what is known of a peer is in its details.
const SHOWN = ["peer", "state", "epoch", "samples/s", "loss", "step", "joint", "failed", "link", "failure"];
const TITLES = {joint: "idle", failure: "last failure"};
const TIPS = {
  peer: "The name that its user has given it, or else the end of its id.",
  state: "training; behind: more than an epoch behind the others; silent: it does not answer, or has not renewed its record; lost: it ended without a goodbye; left: it said goodbye.",
  epoch: "How many joint steps are in its parameters.",
  "samples/s": "Samples that it processes in a second, waiting included.",
  loss: "The loss that it reports.",
  step: "Seconds from its last joint step but one to the last one.",
  joint: "How much of that time it did not compute, but looked for others, waited for them and averaged.",
  failed: "Rounds of averaging that brought it no result.",
  link: "How others reach it: public, relayed, client (they cannot call it) or unknown.",
  failure: "Why its last failed round has failed.",
};
const KINDS = [
  ["Joins and leaves", ["joined", "left", "returned", "goal"], "--good", "Peers that join, leave with a goodbye, or come back."],
  ["Losses", ["lost"], "--bad", "Peers that are gone without a goodbye."],
  ["Failures", ["failed"], "--bad", "Rounds of averaging that have failed, with the reason."],
  ["Warnings", ["trouble"], "--warn", "Warnings of peers, and what is odd about the run."],
  ["Epochs", ["epoch"], "--one", "A line for each epoch."],
];

let columns = [], spans = [], level = 0, data = null, charts = [], shownRows = ROWS_AT_FIRST;
let order = {column: "samples/s", down: true}, wanted = "", lastFetch = 0, lastSummary = null;
let open = "", details = null, detailsRow = null;
let events = [], stages = [], openStage = null;
const hidden = new Set(["epoch"]);      // kinds of events that are not shown
const logarithmic = new Set();          // titles of charts
const peers = new Map();                // id -> row
const elements = [];                    // the rows of the table in the page, reused

// --- words ---

function isUnknown(value) { return value === null || value === undefined || Number.isNaN(value); }

function number(value, digits = 3) {
  if (isUnknown(value)) return "–";
  if (Math.abs(value) >= 1e15) return value.toExponential(2);
  if (Math.abs(value) >= 1e7) return new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 4}).format(value);
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(digits - 1);
  return String(Number(value.toPrecision(digits)));
}

function bytes(value) {
  if (isUnknown(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${number(value)} ${units[unit]}`;
}

function seconds(value) { return isUnknown(value) ? "–" : `${number(value)} s`; }

function span(value) {
  if (isUnknown(value)) return "–";
  const minutes = Math.round(value / 60), hours = Math.round(value / 3600);
  if (value < 100) return `${Math.round(value)} s`;
  if (minutes < 100) return `${minutes} min`;
  return hours < 48 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function clock(seconds, isPrecise) {
  const parts = {hour: "2-digit", minute: "2-digit", ...(isPrecise ? {second: "2-digit"} : {})};
  return new Date(seconds * 1000).toLocaleTimeString("en-GB", parts);
}

function shortId(id) { return `…${id.slice(-8)}`; }

function setText(element, text) { if (element.textContent !== text) element.textContent = text; }

function make(tag, text = "", className = "") {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  if (className) element.className = className;
  return element;
}

// --- explanations of headings ---

function explain(element, text) {
  if (!text || element.dataset.tip === text) return;
  element.dataset.tip = text;
  element.setAttribute("aria-description", text);
  if (!element.matches("button, a, input")) element.tabIndex = 0;
}

function showTip(element) {
  const tip = $("tip");
  setText(tip, element.dataset.tip);
  tip.hidden = false;
  placeBeside(tip, element.getBoundingClientRect());
}

function placeBeside(box, around) {
  const left = Math.min(Math.max(8, around.left), innerWidth - box.offsetWidth - 8);
  const below = around.bottom + 6;
  box.style.left = `${left}px`;
  box.style.top = `${below + box.offsetHeight > innerHeight ? around.top - box.offsetHeight - 6 : below}px`;
}

function followTips() {
  const over = (event) => {
    const element = event.target.closest?.("[data-tip]");
    // A button that was clicked has the focus, too, but needs no explanation any more.
    if (element && (event.type !== "focusin" || element.matches(":focus-visible"))) showTip(element); else $("tip").hidden = true;
  };
  for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, over);
  document.addEventListener("click", (event) => { if (event.target.closest?.("button")) $("tip").hidden = true; });
  for (const kind of ["focusout", "scroll", "keydown"]) document.addEventListener(kind, () => { $("tip").hidden = true; }, true);
  document.querySelectorAll("[data-tip]").forEach((each) => { const text = each.dataset.tip; delete each.dataset.tip; explain(each, text); });
}

// --- the swarm in figures ---

function tile(name, value, more, tip, extra = {}) { return {name, value, more: more || "", tip, ...extra}; }

function figuresOf(summary) {
  const states = Object.entries(summary.states).filter(([, count]) => count).map(([state, count]) => `${count} ${state}`);
  const {step, computing, waiting, averaging, batch, target, goal} = summary;
  const parts = [["computing", computing, "--three"], ["waiting", waiting, "--two"], ["averaging", averaging, "--four"]];
  const failure = events.findLast((event) => event.kind === "failed");
  const left = goal ? (summary.epoch >= goal ? "goal reached" : isUnknown(summary.left) ? "" : `${span(summary.left)} left`) : "";
  const figures = [
    tile("epoch", number(summary.epoch), left, "Joint steps of the swarm: the median over peers. With --goal-epochs also how long the rest takes at the present pace.",
      {unit: goal ? `of ${number(goal)}` : "", share: goal ? [[summary.epoch / goal, "--one"]] : null}),
    tile(stages.length ? "drivers" : "peers", number(summary.peers), states.join(", "), `Peers that are there${stages.length ? " and send microbatches" : ""}, and the states of all that are shown.`),
    tile("samples/s", number(summary.throughput), isUnknown(summary.sent) ? "" : `${bytes(summary.sent)}/s sent`, "Samples that all peers together process in a second, and bytes that they send."),
    tile("loss", number(summary.means.loss, 4), isUnknown(summary.medians.loss) ? "no peer reports it" : `median ${number(summary.medians.loss, 4)}`, "Mean of what peers report with optimizer.report(loss=…), weighted by samples, and median over peers."),
    tile("samples per step", number(batch), isUnknown(batch) || isUnknown(target) ? "" : `${Math.round(100 * batch / target)} % of ${number(target)}`, "What the last joint step really had, from all peers together, and target_batch_size."),
    tile("step to step", seconds(step), isUnknown(step) || !step ? "" : `${Math.round(100 * computing / step)} % computing`, `Time from one joint step to the next; medians over peers. ${parts.map(([name, part]) => `${name[0].toUpperCase()}${name.slice(1)}: ${seconds(part)}`).join(". ")}.`,
      {share: isUnknown(step) || !step ? null : parts.map(([, part, shade]) => [part / step, shade])}),
    tile("samples so far", number(summary.samples), "", "All that peers have processed, those that are gone included, as far as this monitor has seen their reports."),
    tile("rounds failed", number(summary.failed), failure ? `${clock(failure.time)} ${failure.text}` : "", "Rounds of averaging that brought no result, as the peers have counted them, and the last failure.",
      {isBad: failure && summary.time - failure.time < 60}),
  ];
  return figures;
}

function showOthers(summary) {
  const others = Object.entries(summary.means).filter(([name]) => name !== "loss"), list = $("others");
  while (list.children.length < others.length) {
    const box = make("div");
    box.append(make("dt"), make("dd"));
    list.append(box);
  }
  while (list.children.length > others.length) list.lastChild.remove();
  others.forEach(([name, value], at) => {
    const [term, told] = list.children[at].children;
    setText(term, name);
    setText(told, number(value, 4));
    explain(term, `A figure that peers report: the mean, weighted by samples. The median over peers is ${number(summary.medians[name], 4)}.`);
  });
  list.hidden = !others.length;
}

function showSummary(summary) {
  if (!summary) return;
  lastSummary = summary;
  const versions = Object.entries(summary.versions).map(([version, count], at, all) => all.length > 1 ? `${version || "?"} (${count})` : version);
  setText($("since"), [isUnknown(summary.age) ? "" : `running for ${span(summary.age)}`, versions.join("") ? `shoal ${versions.join(", ")}` : ""].filter(Boolean).join(" · "));
  explain($("since"), "Since the oldest peer that reports began. If peers have several versions of shoal, how many have each.");
  showOthers(summary);
  const figures = figuresOf(summary), list = $("figures");
  while (list.children.length < figures.length) {
    const box = make("div"), value = make("dd", "", "value");
    value.append(make("span"), " ", make("small"));
    box.append(make("dt"), value, make("dd", "", "more"), make("div", "", "share"));
    list.append(box);
  }
  while (list.children.length > figures.length) list.lastChild.remove();
  figures.forEach((figure, index) => {
    const box = list.children[index], [name, value, more, share] = box.children;
    setText(name, figure.name);
    explain(name, figure.tip);
    setText(value.firstChild, figure.value);
    setText(value.lastChild, figure.unit || "");
    setText(more, figure.more);
    more.title = figure.more;
    box.classList.toggle("bad", Boolean(figure.isBad));
    share.hidden = !figure.share;
    const parts = figure.share || [];
    while (share.children.length < parts.length) share.append(make("i"));
    while (share.children.length > parts.length) share.lastChild.remove();
    parts.forEach(([part, shade], at) => {
      share.children[at].style.width = `${Math.min(100, 100 * part)}%`;
      share.children[at].style.setProperty("--shade", `var(${shade})`);
    });
  });
}

// --- stages ---

const STAGE_COLUMNS = [["peer", "The name that its user has given it, or else the end of its id."],
  ["state", "serving; joining: it has chosen this stage and gets its parameters; leaving: it finishes what it has."],
  ["microbatches/s", "What it can do, forward and back."], ["queue", "Microbatches that wait for its device."],
  ["room", "How many more it would accept."], ["epoch", "The step whose parameters it has."]];

function makeStage(stage) {
  const item = make("li"), button = make("button"), band = make("span", "", "band"), dots = make("span", "", "dots");
  band.append(make("i"));
  button.append(make("b", `stage ${stage}`), make("span", "", "rate"), band, dots, make("small"));
  button.addEventListener("click", () => { openStage = openStage === stage ? null : stage; showStages(); });
  item.append(button);
  return item;
}

function showStages() {
  const chain = $("chain"), most = Math.max(...stages.map((row) => row.rate || 0), 0);
  $("stages").hidden = !stages.length;
  while (chain.children.length < stages.length) chain.append(makeStage(chain.children.length));
  while (chain.children.length > stages.length) chain.lastChild.remove();
  const known = stages.map((row) => row.rate).filter((rate) => !isUnknown(rate));
  const least = Math.min(...known);
  setText($("stagesTold"), !known.length ? "" : least ? `up to ${number(least)} microbatches/s` : "no microbatch can pass");
  stages.forEach((row, at) => {
    const item = chain.children[at], button = item.firstChild, [, rate, band, dots, more] = button.children;
    item.className = `${row.is_bottleneck ? "bottleneck" : ""} ${row.serving ? "" : "empty"}`;
    button.setAttribute("aria-expanded", String(openStage === at));
    setText(rate, row.is_bottleneck ? (row.serving ? `${number(row.rate)}/s · bottleneck` : "no peer") : isUnknown(row.rate) ? "–" : `${number(row.rate)}/s`);
    band.firstChild.style.setProperty("--share", String(most ? Math.max(0.04, (row.rate ?? most) / most) : 1));
    const states = row.peers.slice(0, 24).map((peer) => peer.state);
    while (dots.children.length < states.length) dots.append(make("i"));
    while (dots.children.length > states.length) dots.lastChild.remove();
    states.forEach((state, peer) => { dots.children[peer].className = state; });
    const also = [[row.joining, "joining"], [row.leaving, "leaving"]].filter(([count]) => count).map(([count, state]) => `, ${count} ${state}`);
    setText(more, `${row.serving} ${row.serving === 1 ? "peer" : "peers"}${also.join("")} · queue ${number(row.queue)} · epoch ${isUnknown(row.epoch) ? "–" : number(row.epoch)}`);
  });
  showStagePeers(stages[openStage ?? -1]);
}

function showStagePeers(row) {
  const box = $("stagePeers"), [head, body] = box.firstChild.children;
  box.hidden = !row;
  if (!row) return;
  if (!head.children.length) {
    const line = make("tr");
    line.append(...STAGE_COLUMNS.map(([name, tip], at) => {
      const cell = make("th", "", at < 2 ? "text" : ""), label = make("span", name);
      explain(label, tip);
      cell.append(label);
      return cell;
    }));
    head.append(line);
  }
  body.replaceChildren(...row.peers.map((peer) => {
    const line = make("tr"), name = make("td", peer.name || shortId(peer.peer), "text");
    name.title = peer.peer;
    line.append(name, make("td", peer.state, `text state ${peer.state}`),
      ...[peer.rate || null, peer.queue, peer.room, peer.epoch].map((value) => make("td", number(value))));
    return line;
  }));
}

// --- charts ---

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function wantedCharts() {
  const figures = Object.keys(data || {}).filter((name) => name.startsWith(FIGURE));
  const losses = figures.filter((name) => name.toLowerCase().includes("loss"));
  const rest = figures.filter((name) => !losses.includes(name));
  const named = (name) => [name, name.slice(FIGURE.length), "A figure that peers report: the mean, weighted by samples."];
  return [
    ...CHARTS.map((chart) => chart.title === "Loss" ? {...chart, series: [...chart.series, ...losses.slice(0, 4).map(named)]} : chart),
    ...rest.map((name) => ({title: name.slice(FIGURE.length), show: (value) => number(value, 4), series: [[name, "mean"]],
      tip: "A figure that peers report: the mean, weighted by samples."})),
  ];
}

function valuesOf(chart, name) {
  const values = data[name] || [];
  return logarithmic.has(chart.title) ? values.map((value) => value > 0 ? value : null) : values;
}

function chartData(chart) { return data ? [data.time, ...chart.series.map(([name]) => valuesOf(chart, name))] : [[], ...chart.series.map(() => [])]; }

function makeCharts() {
  charts.forEach((each) => each.plot.destroy());
  charts = wantedCharts().map(makeChart);
  $("charts").replaceChildren(...charts.map(({figure}) => figure));
  resizeCharts();
}

function makeChart(chart) {
  const figure = make("figure"), caption = make("figcaption"), head = make("span", "", "title"), area = make("div");
  const title = make("b", chart.unit ? `${chart.title} ` : chart.title), when = make("time"), log = make("button", "log", "log");
  if (chart.unit) title.append(make("small", chart.unit));
  explain(title, chart.tip);
  explain(log, "A logarithmic axis.");
  log.setAttribute("aria-pressed", String(logarithmic.has(chart.title)));
  log.setAttribute("aria-label", `${chart.title}: logarithmic axis`);
  log.addEventListener("click", () => {
    if (!logarithmic.delete(chart.title)) logarithmic.add(chart.title);
    makeCharts();
    document.querySelector(`figure[data-title="${CSS.escape(chart.title)}"] .log`)?.focus();
  });
  head.append(title, log, when);
  const legend = chart.series.map(([, label, tip], at) => {
    const series = make("span", label, "series"), value = make("span", "–");
    series.style.setProperty("--swatch", `var(${SHADES[at % SHADES.length]})`);
    explain(series, tip);
    series.append(value);
    return {series, value};
  });
  caption.append(head, ...legend.map(({series}) => series));
  figure.append(caption, area);
  figure.dataset.title = chart.title;
  const axis = {stroke: colour("--faint"), font: "11px system-ui, sans-serif", grid: {stroke: colour("--grid"), width: 1}, ticks: {show: false}};
  const isLog = logarithmic.has(chart.title);
  let made = null;
  const plot = new uPlot({
    width: 300, height: CHART_HEIGHT, legend: {show: false},
    cursor: {sync: {key: "run", scales: ["x", null]}, points: {size: 6}, y: false, drag: {x: false, y: false}},
    scales: {y: isLog ? {distr: 3, range: (u, low, high) => logRange(low, high)} : {range: (u, low, high) => range(low, high, chart.zero)}},
    axes: [
      {...axis, space: 70, size: 28, values: (u, ticks, axis, space, step) => ticks.map((tick) => clock(tick, step < 60))},
      {...axis, size: 52, space: 32, gap: 4, ...(isLog ? {splits: (u, at, low, high) => logTicks(low, high), filter: (u, ticks) => ticks} : {}), values: (u, ticks) => ticks.map((tick) => isUnknown(tick) ? "" : chart.show(tick))},
    ],
    series: [{}, ...chart.series.map(([name, label], at) => ({
      label, stroke: colour(SHADES[at % SHADES.length]), width: 1.6, spanGaps: name.startsWith(FIGURE),
      dash: name === "target" ? [5, 4] : undefined, points: {show: false},
    }))],
    hooks: {setCursor: [() => { if (made) showValues(made); }]},
  }, chartData(chart), area);
  plot.over.addEventListener("pointerleave", () => { $("point").hidden = true; });
  made = {chart, plot, figure, area, when, legend};
  return made;
}

// The values under the pointer, in the legends of all charts and beside the pointer; without a pointer, the latest ones.
function showValues({chart, plot, when, legend}) {
  const isPointed = plot.cursor.left >= 0 && !isUnknown(plot.cursor.idx) && plot.data[0].length > 0;
  const at = isPointed ? Math.min(plot.cursor.idx, plot.data[0].length - 1) : plot.data[0].length - 1;
  const time = plot.data[0][at];
  const told = chart.series.map(([name], index) => {
    const values = plot.data[index + 1];
    let from = at;
    // Figures come now and then: the last one is still the latest.
    if (!isPointed || name.startsWith(FIGURE)) while (from > 0 && at - from < 120 && isUnknown(values[from])) from -= 1;
    return chart.show(values[from]);
  });
  setText(when, isPointed ? clock(time, true) : "");
  legend.forEach(({value}, index) => setText(value, told[index]));
  const point = $("point");
  if (!isPointed || !plot.over.matches(":hover")) return;
  const head = make("time", clock(time, level < 2));
  point.replaceChildren(head, ...chart.series.map(([, label], index) => {
    const line = make("div"), name = make("span"), swatch = make("i");
    swatch.style.setProperty("--swatch", `var(${SHADES[index % SHADES.length]})`);
    name.append(swatch, label);
    line.append(name, make("b", told[index]));
    return line;
  }));
  point.hidden = false;
  const around = plot.over.getBoundingClientRect(), x = around.left + plot.cursor.left;
  const right = x + 14 + point.offsetWidth > innerWidth - 6;
  point.style.left = `${Math.max(6, right ? x - point.offsetWidth - 14 : x + 14)}px`;
  point.style.top = `${Math.max(6, around.top + 4)}px`;
}

function range(low, high, fromZero) {
  if (low === null || high === null) return [0, 1];
  if (fromZero) return [0, high > 0 ? high * 1.1 : 1];
  const margin = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low - margin, high + margin];
}

function logRange(low, high) {
  if (!(low > 0) || !(high > 0)) return [1, 10];
  return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
}

function logTicks(low, high) {
  const ticks = [], decades = Math.log10(high / low);
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += Math.max(1, Math.ceil(decades / 5))) {
    for (const digit of decades > 3 ? [1] : [1, 2, 5]) ticks.push(Number(`${digit}e${power}`));
  }
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  if (inside.length > 2) return inside;
  // Within a decade: steps of equal size.
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find((digit) => digit * power >= rough) * power;
  const first = Math.ceil(low / step);
  return Array.from({length: Math.max(1, Math.floor(high / step) - first + 1)}, (_, at) => (first + at) * step);
}

function drawCharts() {
  if (!data || document.hidden) return;
  if (wantedCharts().some((chart, at) => charts[at]?.chart.series.length !== chart.series.length)) makeCharts();
  for (const made of charts) {
    made.plot.setData(chartData(made.chart));
    showValues(made);
  }
}

function resizeCharts() {
  for (const {plot, area, figure} of charts) {
    plot.setSize({width: Math.max(200, area.clientWidth), height: CHART_HEIGHT});
    figure.dataset.width = area.clientWidth < 500 ? "small" : "large";
  }
}

async function fetchHistory() {
  lastFetch = Date.now();
  const asked = level, answer = await fetch(`history?level=${asked}`);
  if (!answer.ok || asked !== level) return;
  data = await answer.json();
  drawCharts();
}

function addPoint(point, summary) {
  if (!data || !point) return;
  const step = [1, 10, 60][level], time = Math.floor(summary.time);
  const figures = Object.fromEntries(Object.entries(summary.means).map(([name, value]) => [FIGURE + name, value]));
  const isNew = Object.keys(data).length < 60 && Object.keys(figures).some((name) => name !== `${FIGURE}loss` && !(name in data));
  if (level > 0 || (isNew && Date.now() - lastFetch > 5000)) {
    if (Date.now() - lastFetch > step * 1000) fetchHistory().catch(() => {});
    return;
  }
  const last = data.time.length - 1;
  if (last >= 0 && time <= data.time[last]) return;
  data.time.push(time);
  for (const name of Object.keys(data)) if (name !== "time") data[name].push((name.startsWith(FIGURE) ? figures[name] : point[name]) ?? null);
  const most = spans[0] || 600;
  if (data.time.length > most) for (const name of Object.keys(data)) data[name].splice(0, data[name].length - most);
  drawCharts();
}

// --- the table ---

function makeHead() {
  $("head").replaceChildren(...SHOWN.map((name) => {
    const cell = make("th"), button = make("button", TITLES[name] || name);
    cell.scope = "col";
    if (TEXTS.has(name)) cell.className = "text";
    explain(button, TIPS[name]);
    button.addEventListener("click", () => {
      order = {column: name, down: order.column === name ? !order.down : !TEXTS.has(name)};
      showRows();
    });
    cell.append(button);
    return cell;
  }));
}

function of(row, name) { return row[columns.indexOf(name)]; }

function nameOf(row) { return of(row, "name") || shortId(row[0]); }

function cellText(name, value) {
  if (isUnknown(value)) return name === "failure" ? "" : "–";
  if (name === "step" || name === "joint") return value ? seconds(value) : "–";
  if (TEXTS.has(name)) return value;
  return number(value, name === "loss" ? 4 : 3);
}

function compare(name, down) {
  const sign = down ? -1 : 1, index = columns.indexOf(name);
  const key = name === "peer" ? (row) => of(row, "name") || row[0] : (row) => row[index];
  return (one, other) => {
    const a = key(one), b = key(other);
    if (a === b) return one[0] < other[0] ? -1 : 1;
    if (a === null || a === undefined) return 1;
    if (b === null || b === undefined) return -1;
    return a < b ? -sign : sign;
  };
}

function makeRow() {
  const row = make("tr", "", "row");
  row.append(...SHOWN.map((name) => {
    const cell = make("td", "", TEXTS.has(name) ? `text ${name}` : "");
    if (name === "peer") {
      const button = make("button");
      button.append(make("span"), make("small"));
      button.setAttribute("aria-expanded", "false");
      cell.append(button);
    }
    if (name === "failure") cell.append(make("span"));
    return cell;
  }));
  row.addEventListener("click", () => toggle(row.dataset.peer));
  return row;
}

function showRows() {
  [...$("head").children].forEach((cell, at) =>
    cell.setAttribute("aria-sort", SHOWN[at] !== order.column ? "none" : order.down ? "descending" : "ascending"));
  const texts = ["peer", "name", "state", "link", "version", "failure"].map((name) => columns.indexOf(name));
  const rows = [...peers.values()].filter((row) =>
    !wanted || texts.some((at) => String(row[at] ?? "").toLowerCase().includes(wanted)));
  rows.sort(compare(order.column, order.down));
  const shown = rows.slice(0, shownRows);
  const count = rows.length > shown.length ? `${shown.length} of ${rows.length}` : String(rows.length);
  setText($("shown"), stages.length ? `${count} that drive` : count);
  $("more").hidden = rows.length <= shown.length;
  $("nobody").hidden = rows.length > 0;
  setText($("nobody"), peers.size ? "No peer has this text." : "No peer has been seen yet.");
  if (document.hidden) return;
  while (elements.length < shown.length) {
    elements.push(makeRow());
    $("rows").append(elements.at(-1));
  }
  while (elements.length > shown.length) elements.pop().remove();
  shown.forEach((row, at) => showRow(elements[at], row));
  placeDetails(elements.find((element) => element.dataset.peer === open));
}

function showRow(element, row) {
  const state = of(row, "state"), isOpen = row[0] === open;
  element.dataset.peer = row[0];
  element.className = `row${isOpen ? " open" : ""}${state === "lost" || state === "left" ? " gone" : ""}`;
  SHOWN.forEach((name, column) => {
    const cell = element.children[column], value = of(row, name);
    if (name === "peer") {
      const button = cell.firstChild, given = of(row, "name");
      button.setAttribute("aria-expanded", String(isOpen));
      setText(button.firstChild, nameOf(row));
      button.firstChild.className = given ? "" : "id";
      setText(button.lastChild, given ? shortId(row[0]) : "");
      if (cell.title !== row[0]) cell.title = row[0];
      return;
    }
    setText(name === "failure" ? cell.firstChild : cell, cellText(name, value));
    if (name === "state") cell.className = `text state ${value}`;
    if (name === "failed") cell.className = value ? "some" : "";
    if (name === "failure" && cell.title !== (value || "")) cell.title = value || "";
  });
}

// --- one peer ---

function toggle(id) {
  open = open === id ? "" : id;
  details = null;
  showRows();
  fetchDetails();
}

async function fetchDetails() {
  const asked = open;
  if (!asked) return;
  const answer = await fetch(`peer?id=${encodeURIComponent(asked)}`);
  if (asked !== open) return;
  details = answer.ok ? await answer.json() : null;
  showDetails();
}

function placeDetails(after) {
  if (!after) { detailsRow?.remove(); detailsRow = null; return; }
  if (!detailsRow) {
    detailsRow = make("tr", "", "details");
    const cell = make("td");
    cell.colSpan = SHOWN.length;
    cell.append(make("dl"));
    detailsRow.append(cell);
  }
  if (after.nextSibling !== detailsRow) after.after(detailsRow);
  showDetails();
}

function showDetails() {
  const row = peers.get(open);
  if (!row || !detailsRow) return;
  const rate = (name) => isUnknown(details?.[`${name}_per_second`]) ? "" : ` (${bytes(details[`${name}_per_second`])}/s)`;
  const answers = {true: "yes", false: "no longer"};
  const waiting = isUnknown(of(row, "joint")) ? null : Math.max(0, of(row, "joint") - of(row, "averaging"));
  const computing = isUnknown(of(row, "step")) ? null : Math.max(0, of(row, "step") - of(row, "joint"));
  const facts = [
    ["id", row[0], "wide whole"],
    ["last heard of", details ? `${span(Math.max(0, details.told))} ago` : "–"],
    ["answers this monitor", answers[details?.answers] || "was not called"],
    ["running for", span(details?.age)],
    ["samples", number(of(row, "samples"))],
    ["samples in its last step", number(details?.batch)],
    ["computing, waiting, averaging", `${seconds(computing)}, ${seconds(waiting)}, ${seconds(of(row, "averaging"))}`],
    ["sent", bytes(of(row, "sent")) + rate("sent")],
    ["received", bytes(of(row, "received")) + rate("received")],
    ["rounds, of which failed", `${number(of(row, "rounds"))}, ${number(of(row, "failed"))}`],
    ["members of its last round", of(row, "group") ? number(of(row, "group")) : "–"],
    ["version of shoal", of(row, "version") || "–"],
    ...(details?.donor ? [["role", "gives others its state, does not train"]] : []),
    ...Object.entries(details?.figures || {}).map(([name, value]) => [name, number(value, 5)]),
    ...(details?.cannot_reach ? [["peers that it cannot reach", number(details.cannot_reach)]] : []),
    ...Object.entries(details?.troubles || {}).map(([kind, count]) => [`warning: ${kind}`, `${number(count)} times`]),
    ...(of(row, "failure") ? [["last failure", of(row, "failure"), "wide"]] : []),
  ];
  const list = detailsRow.firstChild.firstChild;
  while (list.children.length < facts.length) {
    const fact = make("div");
    fact.append(make("dt"), make("dd"));
    list.append(fact);
  }
  while (list.children.length > facts.length) list.lastChild.remove();
  facts.forEach(([name, value, kind], at) => {
    const fact = list.children[at];
    setText(fact.firstChild, name);
    setText(fact.lastChild, value);
    fact.className = kind?.includes("wide") ? "wide" : "";
    fact.lastChild.className = kind?.includes("whole") ? "whole" : "";
  });
}

// --- events ---

function makeKinds() {
  $("kinds").replaceChildren(...KINDS.map(([title, kinds, shade, tip]) => {
    const button = make("button", title);
    button.style.setProperty("--shade", `var(${shade})`);
    button.setAttribute("aria-pressed", String(!kinds.some((kind) => hidden.has(kind))));
    explain(button, tip);
    button.addEventListener("click", () => {
      const isShown = kinds.some((kind) => hidden.has(kind));
      kinds.forEach((kind) => isShown ? hidden.delete(kind) : hidden.add(kind));
      button.setAttribute("aria-pressed", String(isShown));
      showEvents();
    });
    return button;
  }));
}

function lineOf(event) {
  const line = make("li", "", event.kind), when = make("time", clock(event.time, true));
  line.append(when, event.text);
  if (event.peer) {
    line.title = event.peer;
    line.classList.add("of-peer");
    line.addEventListener("click", () => {
      if (!peers.has(event.peer)) return;
      wanted = $("filter").value = "";
      if (open !== event.peer) toggle(event.peer);
      elements.find((element) => element.dataset.peer === open)?.scrollIntoView({block: "center"});
    });
  }
  return line;
}

function addEvents(news) {
  const known = events.length ? events.at(-1).number : -1;
  const fresh = news.filter((event) => event.number > known);
  events.push(...fresh);
  // Epochs go first: they are many, and say little.
  while (events.length > MAX_EVENTS) {
    const epoch = events.findIndex((event) => event.kind === "epoch");
    events.splice(Math.max(0, epoch), 1);
  }
  const list = $("events"), shown = fresh.filter((event) => !hidden.has(event.kind));
  if (!shown.length && list.children.length) return;
  list.querySelector(".none")?.remove();
  for (const event of shown) list.prepend(lineOf(event));
  while (list.children.length > EVENTS_SHOWN) list.lastChild.remove();
  if (!list.children.length) list.append(make("li", "Nothing so far.", "none"));
}

function showEvents() {
  const all = events;
  events = [];
  $("events").replaceChildren();
  addEvents(all);
}

// --- life ---

function begin(news) {
  columns = news.columns;
  spans = news.spans;
  document.title = `${news.run} – shoal monitor`;
  setText($("run"), news.run);
  peers.clear();
  openStage = null;
  elements.splice(0).forEach((row) => row.remove());
  placeDetails(null);
  events = [];
  $("events").replaceChildren();
  makeHead();
  fetchHistory().catch(() => {});
}

function hear(message) {
  const news = JSON.parse(message.data);
  if (news.columns) begin(news);
  for (const row of news.rows) peers.set(row[0], row);
  for (const id of news.gone || []) peers.delete(id);
  addEvents(news.events);
  if (news.stages) { stages = news.stages; showStages(); }
  showSummary(news.summary);
  if (news.summary) addPoint(news.point, news.summary);
  if (news.rows.length || news.gone?.length || news.columns) showRows();
  if (open && !document.hidden) fetchDetails().catch(() => {});
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
    $("historyCsv").href = `history.csv?level=${level}`;
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
  resizing = setTimeout(resizeCharts, 150);
});
followTips();
makeKinds();
makeCharts();
follow();
