"use strict";
const found = JSON.parse(document.getElementById("found").textContent);
const recipe = found.recommendation.recipe;
const advised = recipe.match(/max_prompt: (\d+)/) || recipe.match(/max_length: (\d+)/);
const lengths = found.candidates.map((one) => one.max_length);
let part = found.distributions[0];
let pinned = advised && lengths.includes(+advised[1]) ? +advised[1] : lengths[lengths.length - 1];
let shown = pinned;

const number = (value) => Math.round(value).toLocaleString("en");
function share(some, all) {
  if (!some || !all) return "0%";
  const percent = (100 * some) / all;
  return percent < 0.01 ? "<0.01%" : percent.toFixed(percent < 1 ? 2 : percent < 10 ? 1 : 0) + "%";
}
function html(parent, name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

/** One drawing: the bars beyond max_length in another colour, and the line before them. */
function drawLimit(svg, isCut) {
  let place = null;
  for (const bar of svg.querySelectorAll("rect.fill")) {
    const first = +bar.dataset.first, last = +bar.dataset.last;
    const isLost = isCut && first > shown;
    bar.classList.toggle("lost", isLost);
    bar.classList.toggle("c1", !isLost);
    if (isCut && first <= shown && shown <= last) {
      place = +bar.getAttribute("x") + (+bar.getAttribute("width") * (shown - first + 1)) / (last - first + 1);
    }
  }
  const line = svg.querySelector(".cursor");
  for (const end of ["x1", "x2"]) line.setAttribute(end, place === null ? -9 : place);
}

/** The chart of the part that is looked at: bars longer than max_length are lost, and a line stands before them. */
function drawBars() {
  for (const chart of document.querySelectorAll("#chart .part")) {
    chart.hidden = chart.dataset.name !== part.name;
    for (const svg of chart.querySelectorAll("svg")) drawLimit(svg, chart.dataset.unit === "tokens");
  }
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
  const all = found.loss_tokens || found.tokens;
  const lost = (loss) => (found.loss_tokens ? loss.loss_tokens_lost : loss.tokens_lost);
  const first = html(panel, "div");
  html(first, "h3", "", found.loss_tokens ? "Loss tokens lost" : "Tokens lost");
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
    html(fourth, "h3", "", one.cost.fits ? "Predicted to fit" : one.cost.fits === null ? "Not known to fit" : "Does not fit");
    html(fourth, "div", "", one.cost.words + (one.cost.step_s ? "; " + one.cost.step_s.toPrecision(3) + " s a step" : ""));
  }
}

function draw() {
  for (const button of document.querySelectorAll("#lengths button")) {
    button.setAttribute("aria-pressed", String(+button.dataset.length === shown));
  }
  for (const button of document.querySelectorAll("#parts button")) {
    button.setAttribute("aria-pressed", String(button.dataset.name === part.name));
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
  node.addEventListener("blur", () => { shown = pinned; draw(); });
  node.addEventListener("click", () => { pinned = shown = length; draw(); });
}

for (const length of lengths) {
  const button = html(document.getElementById("lengths"), "button", "", number(length));
  button.dataset.length = length;
  picks(button, length);
}
for (const one of found.distributions) {
  const button = html(document.getElementById("parts"), "button", "", one.name.replaceAll("_", " "));
  button.dataset.name = one.name;
  button.addEventListener("click", () => { part = one; draw(); });
}
for (const row of document.querySelectorAll("tr.pick")) picks(row, +row.dataset.length);
draw();
