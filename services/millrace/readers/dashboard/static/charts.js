// Curves as SVG: lines with a band, a pointer that reads values and zooms, and sparklines. Colours are the style sheet's.
import { h, number, svg } from "./dom.js";
import { change, smoothed, view, xAxis, xOf } from "./plot_view.js";
import { saver } from "./save_plot.js";
import { linear, logarithmic } from "./scales.js";

const PAD = { left: 52, right: 14, top: 8, bottom: 34 };
const HEIGHT = 190;
const LEAST_DRAG = 6;
const LATER_MS = 150;
const waiting = new WeakMap();
export const COLOURS = 8;

// series: [{name, points: [[step, y, low?, high?], …], axes?, colour?}]; `axes` is a map of steps to rows of `xOf`.
export function chart(title, series, options = {}) {
  const drawn = series.map((each, at) => ({ axes: options.axes, colour: at % COLOURS, ...each })).filter((each) => each.points.length);
  const figure = h("figure", { class: "chart" });
  const last = drawn.map((each) => each.points[each.points.length - 1]);
  const legend = h("figcaption", {}, h("strong", {}, title));
  drawn.forEach((each, at) => {
    const label = drawn.length > 1 || options.named ? `${each.name} ` : "";
    legend.append(h("span", { class: `key c${each.colour}` }, label, h("b", {}, number(last[at][1]))));
  });
  figure.append(legend);
  if (options.hint) figure.append(h("p", { class: "hint" }, options.hint));
  if (options.note) figure.append(h("p", { class: "hint warned" }, options.note));
  if (!drawn.length) {
    figure.append(h("p", { class: "none" }, options.none || "no values yet"));
    return figure;
  }
  const box = svg("svg", { role: "img", tabindex: "0", height: HEIGHT,
    "aria-label": `${title}: ${drawn.map((each, at) => `${each.name} ${number(last[at][1])} at ${placed(options, last[at][0])}`).join(", ")}` });
  const tip = h("div", { class: "tip", hidden: true });
  figure.append(h("div", { class: "plot" }, box, tip));
  legend.append(saver(title, drawn, box));
  let shown = null;
  let width = 0;
  const draw = () => {
    if (width) shown = frame(box, drawn, width, options);
  };
  figure.addEventListener("view", () => whenSeen(figure, draw));
  reading(box, tip, () => shown, options);
  new ResizeObserver((entries) => {
    const now = Math.floor(entries[0].contentRect.width);
    if (now <= 0 || now === width) return;
    width = now;
    box.setAttribute("width", width);
    draw();
  }).observe(figure);
  return figure;
}

// What is on the screen is drawn at once, the rest when somebody has moved the slider for the last time.
function whenSeen(figure, draw) {
  const { top, bottom } = figure.getBoundingClientRect();
  clearTimeout(waiting.get(figure));
  if (bottom > 0 && top < innerHeight) draw();
  else waiting.set(figure, setTimeout(draw, LATER_MS));
}

// What the pointer and the keys do: read the values at an x, and zoom in on a part that is dragged over.
function reading(box, tip, frameNow, options) {
  let [at, from] = [-1, null];
  const hide = () => {
    tip.hidden = true;
    box.querySelector(".cursor")?.remove();
  };
  const read = (index) => {
    const { xs } = frameNow();
    at = Math.max(0, Math.min(xs.length - 1, index));
    showTip(box, tip, frameNow(), xs[at], options);
  };
  const nearest = (x) => frameNow().xs.reduce((best, each, index, xs) => (Math.abs(each - x) < Math.abs(xs[best] - x) ? index : best), 0);
  box.addEventListener("pointermove", (event) => {
    if (!frameNow()?.xs.length) return;
    if (from !== null) brush(box, frameNow(), from, event.offsetX);
    read(nearest(frameNow().x.back(event.offsetX)));
  });
  box.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return; // a finger scrolls the page
    from = event.offsetX;
    box.setPointerCapture(event.pointerId);
  });
  box.addEventListener("pointerup", (event) => {
    const [begin, end] = [from, event.offsetX].sort((a, b) => a - b);
    const isDrag = from !== null && end - begin > LEAST_DRAG;
    from = null;
    box.querySelector(".brush")?.remove();
    if (isDrag) change({ range: [frameNow().x.back(begin), frameNow().x.back(end)] });
  });
  box.addEventListener("dblclick", () => change({ range: null }));
  box.addEventListener("pointerleave", hide);
  box.addEventListener("blur", hide);
  box.addEventListener("keydown", (event) => {
    const { xs, x } = frameNow() || { xs: [] };
    if (event.key === "Escape") change({ range: null });
    else if ((event.key === "+" || event.key === "-") && xs.length) zoom(event.key === "+" ? 0.5 : 2, xs[Math.max(0, at)], x);
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") read(at < 0 ? xs.length - 1 : at + (event.key === "ArrowRight" ? 1 : -1));
    else return;
    event.preventDefault();
  });
}

function zoom(factor, around, x) {
  const half = ((x.high - x.low) * factor) / 2;
  change({ range: [around - half, around + half] });
}

function brush(box, { x, height }, from, to) {
  const inside = (pixel) => Math.max(x.from, Math.min(x.to, pixel));
  const [left, right] = [inside(from), inside(to)].sort((a, b) => a - b);
  box.querySelector(".brush")?.remove();
  box.append(svg("rect", { class: "brush", x: left, width: right - left, y: PAD.top, height: height - PAD.top - PAD.bottom }));
}

// The curves as they are looked at: their x, what is inside of the zoomed part, what a log scale can show.
function looked(drawn, options) {
  const isVersion = options.x === "version";
  return drawn.map((each) => {
    const points = each.points.map((point) => [xOf(point[0], each.axes, isVersion), ...point.slice(1), point[0]])
      .filter((point) => point[0] !== null && Number.isFinite(point[1]) && (!view.log || point[1] > 0))
      .map((point) => ({ x: point[0], y: point[1], step: point[point.length - 1], low: point.length > 4 ? point[2] : null, high: point.length > 4 ? point[3] : null }));
    const smooth = view.smooth && points.length > 2 ? smoothed(points.map((point) => [point.x, point.y])) : null;
    points.forEach((point, at) => {
      point.smooth = smooth ? smooth[at] : point.y;
    });
    const isInside = (point) => !view.range || (point.x >= view.range[0] && point.x <= view.range[1]);
    return { ...each, isSmooth: Boolean(smooth), points: points.filter(isInside) };
  });
}

function extent(curves, options) {
  const all = curves.flatMap((each) => each.points);
  const values = all.flatMap((point) => [point.y, point.low ?? point.y, point.high ?? point.y]).filter((value) => Number.isFinite(value) && (!view.log || value > 0));
  const least = (found, other) => found.reduce((a, b) => Math.min(a, b), other);
  const most = (found, other) => found.reduce((a, b) => Math.max(a, b), other);
  let [low, high] = values.length ? [least(values, Infinity), most(values, -Infinity)] : [view.log ? 0.1 : 0, 1];
  if (view.log) {
    if (high / low < 1 + 1e-9) [low, high] = [low / 2, high * 2];
  } else {
    if (options.zero || options.share) low = Math.min(0, low);
    if (options.share || (options.zero && low === high)) high = Math.max(low + 1, high);
    const rounding = 1e-9 * Math.max(Math.abs(low), Math.abs(high)); // 0.3 and 0.1 + 0.2 are no curve, and have no ticks between them
    if (low === 0 && high === 0) high = 1;
    else if (high - low <= rounding) [low, high] = [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
  }
  const xs = [...new Set(all.map((point) => point.x))].sort((a, b) => a - b);
  let [first, final] = view.range || (xs.length ? [xs[0], xs[xs.length - 1]] : [0, 1]);
  if (view.x === "step") [first, final] = [Math.floor(first), Math.ceil(final)];
  if (!(final > first)) final = first + 1;
  return { low, high, first, final, xs };
}

function frame(box, drawn, width, options) {
  const curves = looked(drawn, options);
  const { low, high, first, final, xs } = extent(curves, options);
  const [from, to, bottom] = [PAD.left, Math.max(PAD.left + 10, width - PAD.right), HEIGHT - PAD.bottom];
  const y = (view.log ? logarithmic : linear)(low, high, bottom, PAD.top, 4);
  const x = { ...linear(first, final, from, to, Math.max(2, Math.floor((to - from) / 90))), low: first, high: final, from, to };
  box.replaceChildren();
  for (const [value, text] of y.marks) {
    box.append(svg("line", { class: "grid", x1: from, x2: to, y1: y.at(value), y2: y.at(value) }));
    box.append(svg("text", { class: "tick", x: from - 6, y: y.at(value) + 4, "text-anchor": "end" }, text));
  }
  for (const [value, text] of labelsOf(x, first, final)) box.append(svg("text", { class: "tick", x: x.at(value), y: bottom + 15, "text-anchor": value === first ? "start" : value === final ? "end" : "middle" }, text));
  box.append(svg("text", { class: "tick", x: to, y: HEIGHT - 4, "text-anchor": "end" }, view.x === "step" ? options.x || "batch" : xAxis().name));
  const place = (value) => (view.log && !(value > 0) ? bottom : Math.max(PAD.top - 40, Math.min(HEIGHT + 40, y.at(value))));
  for (const each of curves) line(box, each, (point, name) => `${x.at(point.x).toFixed(1)},${place(point[name]).toFixed(1)}`, options);
  return { x, y, xs, curves, height: HEIGHT, width };
}

// Where a point stands, in words: step n + 1 is that of batch n.
function placed(options, value) {
  return options.x ? `${options.x} ${value}` : `batch ${value} (step ${value + 1})`;
}

// Of whole steps there is nothing in between; where few are shown, the ends are labels.
function labelsOf(x, first, final) {
  const { text } = xAxis();
  if (text) return x.marks.map(([value]) => [value, text(value)]);
  const whole = x.marks.filter(([value]) => Number.isInteger(value));
  if (whole.length > 1) return whole.map(([value]) => [value, String(value)]);
  return [Math.ceil(first), Math.max(Math.floor(final), Math.ceil(first) + 1)].map((value) => [value, String(value)]);
}

function line(box, each, at, options) {
  const [colour, points] = [each.colour, each.points];
  const isBand = points.some((point) => point.low !== null && point.high !== null);
  if (isBand) {
    const wide = points.filter((point) => point.low !== null && point.high !== null);
    box.append(svg("polygon", { class: `band f${colour}`, points: [...wide.map((point) => at(point, "high")), ...wide.map((point) => at(point, "low")).reverse()].join(" ") }));
  }
  if (each.isSmooth) box.append(svg("polyline", { class: `raw s${colour}`, points: points.map((point) => at(point, "y")).join(" ") }));
  box.append(svg("polyline", { class: `line s${colour}`, points: points.map((point) => at(point, "smooth")).join(" ") }));
  if (points.length > 1 && !options.dots) return;
  for (const point of points) {
    const [cx, cy] = at(point, "y").split(",");
    box.append(svg("circle", { class: `f${colour}`, r: 3, cx, cy }));
  }
}

function showTip(box, tip, { x, curves, height, width }, value, options) {
  box.querySelector(".cursor")?.remove();
  box.append(svg("line", { class: "cursor", x1: x.at(value), x2: x.at(value), y1: PAD.top, y2: height - PAD.bottom }));
  const found = curves.map((each) => [each, each.points.find((point) => point.x === value)]).filter(([, point]) => point);
  const step = placed(options, found[0]?.[1].step);
  tip.replaceChildren(h("b", {}, view.x === "step" ? step : `${xAxis().text(value)}${view.x === "tokens" ? " tokens" : ""}, ${step}`));
  for (const [each, point] of found) {
    const spread = point.low === null ? "" : ` (${number(point.low)} … ${number(point.high)})`;
    const smooth = each.isSmooth ? `, smoothed ${number(point.smooth)}` : "";
    tip.append(h("div", { class: `key c${each.colour}` }, `${curves.length > 1 ? `${each.name} ` : ""}${number(point.y)}${spread}${smooth}`));
  }
  tip.hidden = false;
  const left = x.at(value);
  const flip = left > width / 2;
  tip.style.left = flip ? "" : `${left + 8}px`;
  tip.style.right = flip ? `${width - left + 8}px` : "";
}

export function sparkline(points, label) {
  const [width, height] = [110, 24];
  const box = svg("svg", { class: "spark", role: "img", "aria-label": label, width, height, viewBox: `0 0 ${width} ${height}` });
  points = points.filter((point) => point[1] !== null); // not finite: no 0
  if (points.length < 2) return box;
  const values = points.map((point) => point[1]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [first, final] = [points[0][0], points[points.length - 1][0]];
  const path = points.map((point) => {
    const x = 1 + ((point[0] - first) / (final - first || 1)) * (width - 2);
    const y = height - 2 - ((point[1] - low) / (high - low || 1)) * (height - 4);
    return `${x.toFixed(1)},${y.toFixed(1)}`;
  });
  box.append(svg("polyline", { class: "line s0", points: path.join(" ") }));
  return box;
}
