// Draws the page from the JSON that it holds. Text is only ever set as text, so nothing in the data can become markup.
"use strict";
window.onerror = (message) => {
  const root = document.documentElement;
  root.dataset.errors = String(Number(root.dataset.errors || 0) + 1);
  root.dataset.error = String(message);
  const said = document.createElement("p");
  said.id = "trouble";
  said.textContent = "This page could not be drawn: " + message;
  document.body.prepend(said);
};

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 8;

function html(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
const colour = (n) => `var(--s${n % COLOURS})`;

/// Three digits that count (four between 10 and 100: shares near 100% differ there), without an exponent where people would not write one.
function short(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9) return trim(value / 1e9) + "G";
  if (size >= 1e6) return trim(value / 1e6) + "M";
  if (size >= 1e4) return trim(value / 1e3) + "k";
  if (size >= 100) return String(Math.round(value));
  if (size < 0.001) return value.toExponential(1);
  return size >= 10 ? String(Number(value.toPrecision(4))) : trim(value);
}
const trim = (value) => String(Number(value.toPrecision(3)));

// --- scales ---

/// A scale from values to pixels, and its ticks. A linear one begins at 0 unless it is told where.
function scale(values, log, from, to) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log) {
    low = Math.pow(10, Math.floor(Math.log10(low) + 1e-9));
    high = Math.pow(10, Math.ceil(Math.log10(high) - 1e-9));
    if (high <= low) high = low * 10;
    const place = (value) => from + ((Math.log10(value) - Math.log10(low)) / (Math.log10(high) - Math.log10(low))) * (to - from);
    const ticks = [];
    const decades = Math.round(Math.log10(high / low));
    const step = Math.max(1, Math.ceil(decades / 5));
    for (let power = 0; power <= decades; power += step) ticks.push(low * Math.pow(10, power));
    return { place, ticks };
  }
  low = Math.min(0, low);
  if (high <= low) high = low + 1;
  const rough = (high - low) / 4;
  const unit = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * unit).find((n) => n >= rough) || 10 * unit;
  high = Math.ceil(high / step - 1e-9) * step;
  const ticks = [];
  for (let value = low; value <= high + step / 2; value += step) ticks.push(Number(value.toPrecision(12)));
  return { place: (value) => from + ((value - low) / (high - low)) * (to - from), ticks };
}

/// A scale that puts the given values on ticks of their own: what x is, in a sweep.
function stops(values, log, from, to) {
  const sorted = [...new Set(values)].sort((a, b) => a - b);
  const low = sorted[0], high = sorted[sorted.length - 1];
  const of = log && low > 0 ? Math.log : (value) => value;
  const span = of(high) - of(low) || 1;
  const place = (value) => from + ((of(value) - of(low)) / span) * (to - from);
  // Labels that would touch each other are left out, the first and the last never.
  const ticks = [];
  for (const value of sorted) {
    const room = ticks.every((other) => Math.abs(place(other) - place(value)) > 30);
    if (room && (value === high || place(high) - place(value) > 30)) ticks.push(value);
  }
  return { place, ticks };
}

// --- marks ---

function titled(mark, text) {
  mark.append(svg("title", {}, text));
  return mark;
}
/// Ours is a filled disc, the paper's a hollow diamond.
function oursMark(x, y, n, text) {
  return titled(svg("circle", { class: "mark ours", cx: x, cy: y, r: 5, fill: colour(n) }), text);
}
function paperMark(x, y, n, text) {
  const path = `M${x} ${y - 7}L${x + 7} ${y}L${x} ${y + 7}L${x - 7} ${y}Z`;
  return titled(svg("path", { class: "mark paper", d: path, stroke: colour(n) }), text);
}
function tip(plot, series, point, which) {
  const value = which === "paper" ? point.paper : point.ours;
  const where = plot.x ? `, ${plot.x.label} ${short(point.x)}` : "";
  const place = which === "paper" && point.source ? ` (${point.source})` : "";
  return `${series.name}${where}: ${which === "paper" ? "paper " : ""}${short(value)} ${plot.unit}${place}`;
}
const drawable = (plot, value) => typeof value === "number" && isFinite(value) && (!plot.log || value > 0);
const valuesOf = (plot) => plot.series.flatMap((series) => series.points.flatMap((point) => [point.ours, point.paper]))
  .filter((value) => drawable(plot, value));

// --- plots ---

/// One value for each series: a row each, so that long names have room on a narrow screen.
function rows(plot) {
  const width = 340, left = 8, right = 332, rowHeight = 40, top = 4;
  const bottom = top + plot.series.length * rowHeight;
  const values = valuesOf(plot);
  const at = scale(values.length ? values : [1], plot.log, left + 8, right - 22);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${bottom + 38}`, role: "img", "aria-label": plot.title });
  for (const tick of at.ticks) {
    const x = at.place(tick);
    drawing.append(svg("line", { class: "grid", x1: x, x2: x, y1: top, y2: bottom }));
    drawing.append(svg("text", { class: "tick", x, y: bottom + 15, "text-anchor": "middle" }, short(tick)));
  }
  drawing.append(svg("text", { class: "tick", x: (left + right) / 2, y: bottom + 32, "text-anchor": "middle" }, plot.unit + (plot.log ? " (log scale)" : "")));
  plot.series.forEach((series, n) => {
    const y = top + n * rowHeight + 28, point = series.points[0];
    if (!point) return;
    drawing.append(svg("text", { x: left, y: y - 13 }, series.name));
    const said = `${short(point.ours)}` + (point.paper !== null ? `  (paper ${short(point.paper)})` : "");
    drawing.append(svg("text", { class: "tick", x: right, y: y - 13, "text-anchor": "end" }, said));
    drawing.append(svg("line", { class: "axis", x1: left + 8, x2: right - 22, y1: y, y2: y, "stroke-opacity": 0.35 }));
    if (drawable(plot, point.paper)) drawing.append(paperMark(at.place(point.paper), y, n, tip(plot, series, point, "paper")));
    if (drawable(plot, point.ours)) drawing.append(oursMark(at.place(point.ours), y, n, tip(plot, series, point, "ours")));
  });
  return drawing;
}

/// Values over x: a line for each series.
function lines(plot) {
  const width = 340, height = 240, left = 46, right = 326, top = 12, bottom = 190;
  const values = valuesOf(plot);
  const y = scale(values.length ? values : [1], plot.log, bottom, top);
  const x = stops(plot.series.flatMap((series) => series.points.map((point) => point.x)), plot.x.log, left + 8, right - 8);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": plot.title });
  for (const tick of y.ticks) {
    const at = y.place(tick);
    drawing.append(svg("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }));
    drawing.append(svg("text", { class: "tick", x: left - 6, y: at + 4, "text-anchor": "end" }, short(tick)));
  }
  drawing.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  for (const tick of x.ticks) {
    const at = x.place(tick);
    drawing.append(svg("line", { class: "axis", x1: at, x2: at, y1: bottom, y2: bottom + 4 }));
    drawing.append(svg("text", { class: "tick", x: at, y: bottom + 17, "text-anchor": "middle" }, short(tick)));
  }
  const label = plot.x.label + (plot.x.log ? " (log scale)" : "");
  drawing.append(svg("text", { class: "tick", x: (left + right) / 2, y: bottom + 36, "text-anchor": "middle" }, label));
  plot.series.forEach((series, n) => {
    const there = series.points.filter((point) => drawable(plot, point.ours));
    const way = there.map((point) => `${x.place(point.x)},${y.place(point.ours)}`).join(" ");
    drawing.append(svg("polyline", { points: way, fill: "none", stroke: colour(n), "stroke-width": 2, "stroke-opacity": 0.7 }));
    for (const point of series.points) {
      if (drawable(plot, point.paper)) drawing.append(paperMark(x.place(point.x), y.place(point.paper), n, tip(plot, series, point, "paper")));
    }
    for (const point of there) drawing.append(oursMark(x.place(point.x), y.place(point.ours), n, tip(plot, series, point, "ours")));
  });
  return drawing;
}

function legend(plot) {
  const list = html("ul", { class: "legend" });
  const icon = (mark) => svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, mark);
  if (plot.x) {
    plot.series.forEach((series, n) => {
      list.append(html("li", {}, icon(svg("circle", { cx: 8, cy: 8, r: 5, fill: colour(n) })), series.name));
    });
  } else {
    list.append(html("li", {}, icon(svg("circle", { cx: 8, cy: 8, r: 5, fill: "var(--faint)" })), "measured here"));
  }
  if (plot.series.some((series) => series.points.some((point) => point.paper !== null))) {
    const diamond = svg("path", { d: "M8 1L15 8L8 15L1 8Z", class: "paper", fill: "none", stroke: "var(--faint)", "stroke-width": 2 });
    list.append(html("li", {}, icon(diamond), "the paper's text"));
  }
  return list;
}

const GRADES = { "within 1.2x": "close", "within 1.5x": "near", "within 2x": "rough", off: "off" };
function graded(verdict, factor) {
  if (!verdict) return html("td", { class: "n" }, "–");
  const times = factor ? ` ${trim(factor)}x` : "";
  return html("td", { class: `n ${GRADES[verdict] || ""}` }, verdict === "off" ? `off${times}` : verdict);
}

/// The numbers of a plot.
function table(plot) {
  const compares = plot.series.some((series) => series.points.some((point) => point.paper !== null));
  const head = html("tr", {}, html("th", {}, plot.x ? "series" : ""), plot.x ? html("th", { class: "n" }, plot.x.label) : null,
    html("th", { class: "n" }, compares ? "ours" : plot.unit), ...(compares ? [html("th", { class: "n" }, "paper"), html("th", { class: "n" }, "verdict")] : []));
  const body = html("tbody");
  for (const series of plot.series) {
    for (const point of series.points) {
      const name = html("td", {}, series.name);
      if (point.source) name.append(html("span", { class: "source" }, point.source + (point.calibrated ? "; the model is fitted to it" : "")));
      body.append(html("tr", {}, name, plot.x ? html("td", { class: "n" }, short(point.x)) : null,
        html("td", { class: "n" }, short(point.ours)),
        ...(compares ? [html("td", { class: "n" }, short(point.paper)), graded(point.verdict, point.factor)] : [])));
    }
  }
  return html("div", { class: "wide" }, html("table", {}, html("thead", {}, head), body));
}

function plotFigure(plot) {
  const caption = html("figcaption", {}, html("h3", {}, `${plot.title}, ${plot.unit}`), legend(plot));
  return html("figure", { class: "plot" }, caption, plot.x ? lines(plot) : rows(plot), table(plot));
}

// --- the page ---

function folded(title, text) {
  return html("details", {}, html("summary", {}, title), html("pre", {}, text));
}
function passage(part) {
  const list = part.points.length ? html("ul", {}, ...part.points.map((point) => html("li", {}, point))) : null;
  return html("section", {}, html("h2", {}, part.heading), ...part.paragraphs.map((text) => html("p", {}, text)), list,
    part.folded ? folded(part.folded.title, part.folded.text) : null);
}
function headlines(all) {
  const head = html("tr", {}, html("th", {}, "figure"), html("th", {}, "ratio"), html("th", { class: "n" }, "paper"),
    html("th", { class: "n" }, "ours"), html("th", { class: "n" }, "verdict"));
  const body = html("tbody", {}, ...all.rows.map((row) => html("tr", {}, html("td", {}, row.figure),
    html("td", {}, row.what, html("span", { class: "source" }, row.source)), html("td", { class: "n" }, short(row.paper)),
    html("td", { class: "n" }, short(row.ours)), graded(row.verdict, row.factor))));
  return html("section", { id: "headlines" }, html("h2", {}, all.title), html("p", {}, all.summary),
    html("div", { class: "wide" }, html("table", {}, html("thead", {}, head), body)));
}
function section(part) {
  return html("section", { id: part.id }, html("h2", {}, part.title), html("p", { class: "about" }, part.about),
    part.finding ? html("p", { class: "finding" }, part.finding) : null,
    html("div", { class: "plots" }, ...part.plots.map(plotFigure)),
    part.commands.length ? folded("The commands behind it", part.commands.join("\n")) : null);
}

const page = JSON.parse(document.getElementById("data").textContent);
const links = page.sections.map((part) => html("a", { href: "#" + part.id }, part.title.split(":")[0]));
document.getElementById("page").replaceChildren(
  html("h1", {}, page.title), ...page.opening.map(passage), page.headlines ? headlines(page.headlines) : "",
  html("nav", {}, ...links), ...page.sections.map(section));
document.documentElement.dataset.drawn = String(document.querySelectorAll("figure.plot").length);
