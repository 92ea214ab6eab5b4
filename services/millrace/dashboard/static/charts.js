// Curves as SVG: lines with a band, a pointer that reads values, and sparklines. Colours are those of the style sheet.
import { compact, h, number, svg } from "./dom.js";

const PAD = { left: 52, right: 10, top: 8, bottom: 22 };
export const COLOURS = 8;

function ticks(low, high, most) {
  if (!(high > low)) return [low];
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) {
    found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  }
  return found;
}

// series: [{name, points: [[x, y, low?, high?], …]}]
export function chart(title, series, options = {}) {
  const drawn = series.filter((each) => each.points.length);
  const figure = h("figure", { class: "chart" });
  const last = drawn.map((each) => each.points[each.points.length - 1]);
  const legend = h("figcaption", {}, h("strong", {}, title));
  drawn.forEach((each, at) => {
    const label = drawn.length > 1 || options.named ? `${each.name} ` : "";
    legend.append(h("span", { class: `key c${at % COLOURS}` }, label, h("b", {}, number(last[at][1]))));
  });
  figure.append(legend);
  if (options.hint) figure.append(h("p", { class: "hint" }, options.hint));
  if (options.note) figure.append(h("p", { class: "hint warned" }, options.note));
  if (!drawn.length) {
    figure.append(h("p", { class: "none" }, options.none || "no values yet"));
    return figure;
  }
  const height = options.height || 170;
  const box = svg("svg", { role: "img", tabindex: "0", height,
    "aria-label": `${title}: ${drawn.map((each, at) => `${each.name} ${number(last[at][1])} at step ${last[at][0]}`).join(", ")}` });
  const tip = h("div", { class: "tip", hidden: true });
  figure.append(h("div", { class: "plot" }, box, tip));
  let width = 0;
  let scale = null;
  let at = -1;
  const draw = () => {
    scale = frame(box, drawn, width, height, options);
  };
  const xs = [...new Set(drawn.flatMap((each) => each.points.map((point) => point[0])))].sort((a, b) => a - b);
  const read = (index) => {
    at = Math.max(0, Math.min(xs.length - 1, index));
    showTip(box, tip, drawn, scale, xs[at], options);
  };
  box.addEventListener("pointermove", (event) => {
    const x = scale.back(event.offsetX);
    let best = 0;
    for (let index = 1; index < xs.length; index += 1) if (Math.abs(xs[index] - x) < Math.abs(xs[best] - x)) best = index;
    read(best);
  });
  const hide = () => {
    tip.hidden = true;
    box.querySelector(".cursor")?.remove();
  };
  box.addEventListener("pointerleave", hide);
  box.addEventListener("blur", hide);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    read(at < 0 ? xs.length - 1 : at + (event.key === "ArrowRight" ? 1 : -1));
  });
  new ResizeObserver((entries) => {
    const now = Math.floor(entries[0].contentRect.width);
    if (now > 0 && now !== width) {
      width = now;
      box.setAttribute("width", width);
      draw();
    }
  }).observe(figure);
  return figure;
}

function extent(drawn, options) {
  let [low, high] = [Infinity, -Infinity];
  let [first, final] = [Infinity, -Infinity];
  for (const each of drawn) {
    for (const point of each.points) {
      first = Math.min(first, point[0]);
      final = Math.max(final, point[0]);
      for (const value of point.slice(1)) {
        if (value !== null && Number.isFinite(value)) {
          low = Math.min(low, value);
          high = Math.max(high, value);
        }
      }
    }
  }
  if (!Number.isFinite(low)) [low, high] = [0, 1];
  if (options.zero || options.share) low = Math.min(0, low);
  if (options.share || (options.zero && low === high)) high = Math.max(low + 1, high);
  const rounding = 1e-9 * Math.max(Math.abs(low), Math.abs(high)); // 0.3 and 0.1 + 0.2 are no curve, and have no ticks between them
  if (high - low <= rounding) [low, high] = [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
  if (first === final) [first, final] = [first - 0.5, final + 0.5];
  return { low, high, first, final };
}

// As many digits as tell two neighbours apart.
function tickText(value, apart) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e4) return compact(value);
  if (apart < 1e-4) return value.toExponential(1);
  return value.toFixed(Math.max(0, Math.min(5, Math.ceil(-Math.log10(apart) - 1e-9))));
}

function frame(box, drawn, width, height, options) {
  const { low, high, first, final } = extent(drawn, options);
  const inner = Math.max(10, width - PAD.left - PAD.right);
  const tall = height - PAD.top - PAD.bottom;
  const x = (value) => PAD.left + ((value - first) / (final - first)) * inner;
  const y = (value) => PAD.top + (1 - (value - low) / (high - low)) * tall;
  box.replaceChildren();
  const marks = ticks(low, high, 4);
  const apart = marks.length > 1 ? marks[1] - marks[0] : high - low;
  for (const value of marks) {
    box.append(svg("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(value), y2: y(value) }));
    box.append(svg("text", { class: "tick", x: PAD.left - 6, y: y(value) + 4, "text-anchor": "end" }, tickText(value, apart)));
  }
  for (const value of ticks(first, final, Math.max(2, Math.floor(inner / 90)))) {
    if (!Number.isInteger(value)) continue;
    box.append(svg("text", { class: "tick", x: x(value), y: height - 6, "text-anchor": "middle" }, String(value)));
  }
  box.append(svg("text", { class: "tick", x: PAD.left - 8, y: height - 6, "text-anchor": "end" }, options.x || "step"));
  drawn.forEach((each, at) => {
    const points = each.points.filter((point) => point[1] !== null);
    if (points.some((point) => point.length > 3)) {
      const up = points.map((point) => `${x(point[0]).toFixed(1)},${y(point[3]).toFixed(1)}`);
      const down = points.map((point) => `${x(point[0]).toFixed(1)},${y(point[2]).toFixed(1)}`).reverse();
      box.append(svg("polygon", { class: `band f${at % COLOURS}`, points: [...up, ...down].join(" ") }));
    }
    if (points.length === 1 || options.dots) {
      for (const point of points) box.append(svg("circle", { class: `f${at % COLOURS}`, r: 3, cx: x(point[0]), cy: y(point[1]) }));
    }
    const path = points.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join(" ");
    box.append(svg("polyline", { class: `line s${at % COLOURS}`, points: path }));
  });
  return { x, y, height, width, back: (pixel) => first + ((pixel - PAD.left) / inner) * (final - first) };
}

function showTip(box, tip, drawn, scale, x, options) {
  box.querySelector(".cursor")?.remove();
  box.append(svg("line", { class: "cursor", x1: scale.x(x), x2: scale.x(x), y1: PAD.top, y2: scale.height - PAD.bottom }));
  tip.replaceChildren(h("b", {}, `${options.x || "step"} ${x}`));
  drawn.forEach((each, at) => {
    const point = each.points.find((found) => found[0] === x);
    if (!point) return;
    const spread = point.length > 3 ? ` (${number(point[2])} … ${number(point[3])})` : "";
    tip.append(h("div", { class: `key c${at % COLOURS}` }, `${drawn.length > 1 ? `${each.name} ` : ""}${number(point[1])}${spread}`));
  });
  tip.hidden = false;
  const left = scale.x(x);
  const flip = left > scale.width / 2;
  tip.style.left = flip ? "" : `${left + 8}px`;
  tip.style.right = flip ? `${scale.width - left + 8}px` : "";
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
