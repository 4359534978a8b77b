"use strict";
const found = JSON.parse(document.getElementById("found").textContent);
const tip = document.getElementById("tip");
const recipe = found.recommendation.recipe;
const advised = recipe.match(/max_prompt: (\d+)/) || recipe.match(/max_length: (\d+)/);
const lengths = found.candidates.map((one) => one.max_length);
let part = found.distributions[0];
let pinned = advised && lengths.includes(+advised[1]) ? +advised[1] : lengths[lengths.length - 1];
let shown = pinned;

const BOX = { left: 8, right: 992, top: 40, bottom: 262 };
const number = (value) => Math.round(value).toLocaleString("en");
function share(some, all) {
  if (!some || !all) return "0%";
  const percent = (100 * some) / all;
  return percent < 0.01 ? "<0.01%" : percent.toFixed(percent < 1 ? 2 : percent < 10 ? 1 : 0) + "%";
}
function svg(parent, name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
function html(parent, name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

/** Where a length stands: every bar is as wide as any other, and lengths within a bar are spread over it. */
function placeOf(tokens) {
  const bins = part.bins;
  const width = (BOX.right - BOX.left) / bins.length;
  if (tokens < bins[0].first) return BOX.left;
  const at = bins.findIndex((bin) => tokens <= bin.last);
  if (at < 0) return null;
  const bin = bins[at];
  return BOX.left + width * (at + (tokens - bin.first + 1) / (bin.last - bin.first + 1));
}

function drawBars() {
  const canvas = document.getElementById("bars");
  canvas.replaceChildren();
  const bins = part.bins;
  const width = (BOX.right - BOX.left) / bins.length;
  const most = Math.max(...bins.map((bin) => bin.rows));
  const limit = part.unit === "tokens" ? placeOf(shown) : null;
  let below = 0;
  bins.forEach((bin, at) => {
    below += bin.rows;
    const upToHere = below;
    const height = bin.rows ? Math.max(1.5, ((BOX.bottom - BOX.top) * bin.rows) / most) : 0;
    const x = BOX.left + at * width;
    const isCut = limit !== null && bin.first > shown;
    const bar = svg(canvas, "rect", { x: x + 0.5, y: BOX.bottom - height, width: Math.max(width - 1, 0.5),
      height, class: isCut ? "bar cut" : "bar" });
    const target = svg(canvas, "rect", { x, y: BOX.top, width, height: BOX.bottom - BOX.top, fill: "transparent" });
    target.addEventListener("pointermove", (event) => {
      bar.classList.add("over");
      const range = bin.first === bin.last ? number(bin.last) : number(bin.first) + " to " + number(bin.last);
      showTip(event, range + " " + part.unit + "\n" + number(bin.rows) + " rows (" + share(bin.rows, part.count) +
        ")\n" + share(upToHere, part.count) + " of the rows are up to here");
    });
    target.addEventListener("pointerleave", () => { bar.classList.remove("over"); tip.style.display = "none"; });
  });
  svg(canvas, "line", { x1: BOX.left, x2: BOX.right, y1: BOX.bottom, y2: BOX.bottom, class: "axis" });
  drawTicks(canvas, bins, width);
  drawMarks(canvas);
  if (part.unit === "tokens" && limit === null) {
    svg(canvas, "text", { x: BOX.right, y: BOX.top - 26, "text-anchor": "end" },
      "max_length " + number(shown) + ": nothing here is longer");
  }
  if (limit !== null) {
    svg(canvas, "line", { x1: limit, x2: limit, y1: BOX.top - 22, y2: BOX.bottom, class: "limit" });
    const end = limit > 860;
    svg(canvas, "text", { x: limit + (end ? -6 : 6), y: BOX.top - 26, class: "at",
      "text-anchor": end ? "end" : "start" }, "max_length " + number(shown));
  }
}

function drawTicks(canvas, bins, width) {
  const every = Math.max(1, Math.ceil(bins.length / 14));
  let last = -1000;
  bins.forEach((bin, at) => {
    const isRound = Number.isInteger(Math.log2(bin.last));
    const x = BOX.left + (at + 1) * width;
    if ((isRound || (bins.length <= 14 && at % every === 0)) && x - last > 44) {
      const anchor = x > 960 ? "end" : x < 40 ? "start" : "middle";
      svg(canvas, "text", { x, y: BOX.bottom + 17, "text-anchor": anchor }, number(bin.last));
      svg(canvas, "line", { x1: x, x2: x, y1: BOX.bottom, y2: BOX.bottom + 4, class: "axis" });
      last = x;
    }
  });
}

function drawMarks(canvas) {
  const names = { 50: "median", 90: "90%", 95: "95%", 99: "99%", 99.9: "99.9%" };
  let last = -1000;
  for (const point of part.percentiles) {
    const x = names[point.percent] === undefined ? null : placeOf(point.tokens);
    if (x === null) continue;
    svg(canvas, "line", { x1: x, x2: x, y1: BOX.top, y2: BOX.bottom, class: "mark" });
    if (x - last > 38) {
      svg(canvas, "text", { x, y: BOX.bottom + 34, "text-anchor": x > 960 ? "end" : "middle" }, names[point.percent]);
      last = x;
    }
  }
}

function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const room = window.innerWidth - tip.offsetWidth - 16;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, room)) + "px";
  tip.style.top = Math.max(4, event.clientY - tip.offsetHeight - 12) + "px";
}

function line(parent, name, part, text, className) {
  const row = html(parent, "div", "line");
  html(row, "span", "", name);
  const bar = html(html(row, "span", "track"), "i", className);
  bar.style.width = Math.min(100, Math.max(part ? 1 : 0, 100 * part)) + "%";
  html(row, "span", "", text);
}

function drawCost() {
  const panel = document.getElementById("cost");
  panel.replaceChildren();
  const one = found.candidates.find((candidate) => candidate.max_length === shown);
  const all = found.learnt || found.tokens;
  const lost = (loss) => (found.learnt ? loss.learnt_lost : loss.tokens_lost);
  const first = html(panel, "div");
  html(first, "h3", "", found.learnt ? "Loss tokens lost" : "Tokens lost");
  for (const loss of one.losses) {
    line(first, loss.truncation, lost(loss) / all, number(lost(loss)) + " · " + share(lost(loss), all), "lost");
  }
  line(first, "rows longer", one.rows_longer / found.rows,
    number(one.rows_longer) + " · " + share(one.rows_longer, found.rows), "lost");
  const second = html(panel, "div");
  html(second, "h3", "", "Padding, not packed: " + number(one.steps) + " steps");
  for (const [name, key] of [["batches of " + found.batch.micro_batch_size, "fixed"], ["grouped", "grouped"],
    ["padding-free", "padding_free"]]) {
    line(second, name, one.padding[key], (100 * one.padding[key]).toFixed(1) + "%", "lost");
  }
  if (one.packings.length) {
    const third = html(panel, "div");
    html(third, "h3", "", "Packed: fill");
    for (const packed of one.packings) {
      line(third, packed.packing, packed.fill,
        (100 * packed.fill).toFixed(1) + "% · " + number(packed.steps) + " steps", "");
    }
  }
  if (one.cost) {
    const fourth = html(panel, "div");
    html(fourth, "h3", "", one.cost.fits ? "Predicted to fit" : "Does not fit");
    html(fourth, "div", "", one.cost.words + (one.cost.step_s ? "; " + one.cost.step_s.toPrecision(3) + " s a step" : ""));
  }
}

function draw() {
  for (const button of document.querySelectorAll("#lengths button")) {
    button.setAttribute("aria-pressed", String(+button.dataset.length === shown));
  }
  for (const button of document.querySelectorAll("#parts button")) {
    button.setAttribute("aria-pressed", String(button.textContent === part.name));
  }
  for (const row of document.querySelectorAll("tr.pick")) {
    row.classList.toggle("chosen", +row.dataset.length === shown);
  }
  drawBars();
  drawCost();
}

function picks(node, length) {
  node.addEventListener("pointerenter", () => { shown = length; draw(); });
  node.addEventListener("pointerleave", () => { shown = pinned; draw(); });
  node.addEventListener("focus", () => { shown = length; draw(); });
  node.addEventListener("click", () => { pinned = shown = length; draw(); });
}

for (const length of lengths) {
  const button = html(document.getElementById("lengths"), "button", "", number(length));
  button.dataset.length = length;
  picks(button, length);
}
for (const one of found.distributions) {
  const button = html(document.getElementById("parts"), "button", "", one.name);
  button.addEventListener("click", () => { part = one; draw(); });
}
for (const row of document.querySelectorAll("tr.pick")) picks(row, +row.dataset.length);
draw();
