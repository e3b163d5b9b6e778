"use strict";
// Line plots, dots and a grid of shares, as SVG made element by element: outside names only become text.

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

/** Round numbers from low to high, about `count` of them. */
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(raw || 1));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || power;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(+value.toFixed(10));
  return found;
}

function clock(seconds, span) {
  const date = new Date(seconds * 1000);
  if (span > 2 * 86400) return date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  const seconds_too = span <= 600 ? { second: "2-digit" } : {};
  return date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...seconds_too });
}

/** A frame with axes; `draw` adds the data. Returns the frame, or null if there is nothing to plot. */
function frame(host, spec) {
  host.replaceChildren();
  if (!spec.has_data) {
    host.append(make("p", "none", spec.none || "Nothing in this span."));
    return null;
  }
  const width = Math.max(host.clientWidth, 240), height = spec.height || 220;
  const box = { left: spec.left || 40, right: spec.right || 10, top: 12, bottom: 22 };
  const chart = make("div", "chart");
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": spec.label });
  const x = (v) => box.left + ((v - spec.x0) / (spec.x1 - spec.x0 || 1)) * (width - box.left - box.right);
  const y = (v) => height - box.bottom - ((v - spec.y0) / (spec.y1 - spec.y0 || 1)) * (height - box.top - box.bottom);
  for (const tick of spec.y_ticks || ticks(spec.y0, spec.y1, height < 150 ? 2 : 4)) {
    root.append(svg("line", { class: "grid", x1: box.left, x2: width - box.right, y1: y(tick), y2: y(tick) }));
    root.append(svg("text", { x: box.left - 6, y: y(tick) + 4, "text-anchor": "end" }, spec.y_text(tick)));
  }
  const most = Math.max(2, Math.floor((width - box.left) / (spec.x_room || 90)));
  for (const tick of spec.x_ticks(most)) {
    if (tick < spec.x0 || tick > spec.x1) continue;
    const anchor = x(tick) > width - 24 ? "end" : x(tick) < box.left + 16 ? "start" : "middle";
    root.append(svg("text", { x: x(tick), y: height - 6, "text-anchor": anchor }, spec.x_text(tick)));
  }
  root.append(svg("line", { class: "axis", x1: box.left, x2: width - box.right, y1: y(spec.y0), y2: y(spec.y0) }));
  let taken = -Infinity; // overlapping names are left out; the list of events has them all
  for (const mark of spec.marks || []) {
    if (mark.t < spec.x0 || mark.t > spec.x1) continue;
    const at = x(mark.t), is_late = at > width - 60;
    root.append(svg("line", { class: "mark", x1: at, x2: at, y1: box.top, y2: height - box.bottom }));
    if (at - taken < 64) continue;
    taken = at;
    root.append(svg("text", { x: at, y: box.top - 2, "text-anchor": is_late ? "end" : "middle" }, mark.kind));
  }
  chart.append(root);
  host.append(chart);
  return { chart, root, x, y, width, height, box };
}

/** Lines over time. series: [{name, points: [[t, value or null]], color, dashed}]; a gap wider than `gap` breaks a line. */
function line_chart(host, spec) {
  const values = spec.series.flatMap((s) => s.points.map((p) => p[1])).filter((v) => v !== null);
  const low = spec.low !== undefined ? spec.low : Math.min(...values);
  const high = Math.max(...values, low + (spec.least || 1));
  const span = spec.x1 - spec.x0;
  const made = frame(host, {
    ...spec,
    has_data: values.length > 0,
    y0: low,
    y1: ticks(low, high, 4).at(-1) >= high ? ticks(low, high, 4).at(-1) : high + (high - low) * 0.06,
    x_ticks: (most) => time_ticks(spec.x0, spec.x1, most),
    x_text: (t) => clock(t, span),
    y_text: spec.y_text,
  });
  if (!made) return;
  for (const one of spec.series) {
    for (const run of runs(one.points, spec.gap)) {
      const at = run.map(([t, v]) => `${made.x(t).toFixed(1)},${made.y(v).toFixed(1)}`);
      const dash = one.dashed ? " dashed" : "";
      if (run.length === 1) {
        made.root.append(svg("circle", { class: `f${one.color}`, cx: made.x(run[0][0]), cy: made.y(run[0][1]), r: 2.5 }));
      } else {
        made.root.append(svg("polyline", { class: `line c${one.color}${dash}`, points: at.join(" ") }));
      }
    }
  }
  hover(made, spec, (t) => {
    const rows = [];
    for (const one of spec.series) {
      let best = null;
      for (const point of one.points) {
        if (point[1] !== null && Math.abs(point[0] - t) <= spec.gap && (!best || Math.abs(point[0] - t) < Math.abs(best[0] - t))) best = point;
      }
      if (best) rows.push([one.name, spec.y_text(best[1])]);
    }
    return rows;
  });
}

function runs(points, gap) {
  const found = [];
  let run = [];
  for (const point of points) {
    const is_broken = point[1] === null || (run.length && point[0] - run.at(-1)[0] > gap);
    if (is_broken && run.length) { found.push(run); run = []; }
    if (point[1] !== null) run.push(point);
  }
  if (run.length) found.push(run);
  return found;
}

function time_ticks(x0, x1, most) {
  const steps = [10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400, 172800];
  const step = steps.find((s) => (x1 - x0) / s <= most) || 172800;
  const zone = new Date(x0 * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let t = Math.ceil((x0 - zone) / step) * step + zone; t <= x1; t += step) found.push(t);
  return found;
}

/** A guide line and a small box with the result of `look_up(t)`, at the pointer. */
function hover(made, spec, look_up) {
  const guide = svg("line", { class: "guide", y1: made.box.top, y2: made.height - made.box.bottom, visibility: "hidden" });
  const tip = make("div", "tip");
  tip.hidden = true;
  made.root.append(guide);
  made.chart.append(tip);
  made.root.addEventListener("pointermove", (event) => {
    const at = event.clientX - made.root.getBoundingClientRect().left;
    const share = (at - made.box.left) / (made.width - made.box.left - made.box.right);
    const t = spec.x0 + share * (spec.x1 - spec.x0);
    const rows = share < 0 || share > 1 ? [] : look_up(t, event.clientY - made.root.getBoundingClientRect().top);
    tip.hidden = rows.length === 0;
    guide.setAttribute("visibility", rows.length ? "visible" : "hidden");
    if (!rows.length) return;
    guide.setAttribute("x1", at);
    guide.setAttribute("x2", at);
    tip.replaceChildren(make("span", "note", clock(t, spec.x1 - spec.x0)), ...rows.map(([name, text]) => make("span", "", `${name}: ${text}`)));
    tip.style.left = `${Math.max(0, Math.min(at + 12, made.width - tip.offsetWidth))}px`;
  });
  made.root.addEventListener("pointerleave", () => { tip.hidden = true; guide.setAttribute("visibility", "hidden"); });
}

/** Shares by row over time. rows: [[share or null by time]]; darker is more. Each row ends with its mean. */
function heat_chart(host, spec) {
  const height = 36 + Math.max(spec.rows.length * 24, 60), right = 48;
  const made = frame(host, {
    ...spec, height, right, left: 26, y0: spec.rows.length - 0.5, y1: -0.5, y_ticks: spec.rows.map((_, i) => i),
    has_data: spec.rows.length > 0, y_text: (v) => String(v),
    x_ticks: (most) => time_ticks(spec.x0, spec.x1, most), x_text: (t) => clock(t, spec.x1 - spec.x0),
  });
  if (!made) return;
  const tall = Math.abs(made.y(1) - made.y(0)) - 2, wide = Math.max(1, made.x(spec.x0 + spec.step) - made.x(spec.x0) - 0.5);
  spec.rows.forEach((row, position) => {
    row.forEach((share, i) => {
      if (share === null) return;
      const at = { x: made.x(spec.times[i]), y: made.y(position) - tall / 2, width: wide, height: tall };
      made.root.append(svg("rect", { class: "heat", "fill-opacity": (0.06 + 0.94 * share).toFixed(3), ...at }));
    });
    const mean = spec.means[position];
    made.root.append(svg("text", { x: made.width - right + 6, y: made.y(position) + 4 }, mean === null ? "" : spec.text(mean)));
  });
  hover(made, spec, (t, top) => {
    const i = Math.floor((t - spec.x0) / spec.step);
    const position = spec.rows.findIndex((_, p) => Math.abs(top - made.y(p)) <= tall / 2 + 1);
    const share = position >= 0 ? spec.rows[position][i] : undefined;
    return share === null || share === undefined ? [] : [[`position ${position}`, spec.text(share)]];
  });
}

/** Dots and one line in a plot of two figures. */
function dot_chart(host, spec) {
  const all = [...spec.dots, ...spec.line];
  const x1 = Math.max(...all.map((p) => p[0]), 1), y1 = Math.max(...all.map((p) => p[1]), 1);
  const made = frame(host, {
    ...spec, has_data: all.length > 0, x0: 0, x1: x1 * 1.04, y0: 0, y1: y1 * 1.08, x_room: 60,
    x_ticks: (most) => ticks(0, x1, Math.min(most, 8)), x_text: String, y_text: spec.y_text,
  });
  if (!made) return;
  for (const [a, b] of spec.dots) {
    made.root.append(svg("circle", { class: "f1 halo", "fill-opacity": 0.55, cx: made.x(a), cy: made.y(b), r: 4 }));
  }
  const points = spec.line.map(([a, b]) => `${made.x(a).toFixed(1)},${made.y(b).toFixed(1)}`).join(" ");
  if (spec.line.length > 1) made.root.append(svg("polyline", { class: "line c2", points }));
}

/** Names of series with their colours and latest values. */
function legend(rows) {
  const list = make("ul", "legend");
  for (const { name, color, dashed, value, is_dot } of rows) {
    const item = make("li", "");
    const sample = svg("svg", { width: 18, height: 10, "aria-hidden": "true" });
    if (is_dot) sample.append(svg("circle", { class: `f${color}`, cx: 9, cy: 5, r: 4 }));
    else sample.append(svg("line", { class: `line c${color}${dashed ? " dashed" : ""}`, x1: 0, x2: 18, y1: 5, y2: 5 }));
    item.append(sample, name);
    if (value !== undefined) item.append(make("b", "", value));
    list.append(item);
  }
  return list;
}
