// How all plots of a page are looked at: smoothing, log scale, what is on the x axis, and the part that is zoomed in on.
import { compact, h, seconds } from "./dom.js";

// What each choice of the x axis is of a step, from a row of `axes`: [step, seconds since the run began, tokens].
const X = {
  step: { name: "step", of: (row) => row[0], text: null },
  time: { name: "time", of: (row) => row[1], text: (value) => seconds(Math.max(0, value)) },
  tokens: { name: "tokens", of: (row) => row[2], text: compact },
};
const KEY = "millrace-plots";
const DEFAULT = { smooth: 0, log: false, x: "step" };
export const view = { ...DEFAULT, range: null, ...kept() };

function kept() {
  try {
    const { smooth, log, x } = JSON.parse(localStorage.getItem(KEY)) || {};
    return { smooth: smooth >= 0 && smooth < 1 ? smooth : 0, log: log === true, x: x in X ? x : "step" };
  } catch {
    return {};
  }
}

export const xAxis = () => X[view.x];

// The x of a point, or null where the log does not say it. A version is what the step before it made.
export function xOf(step, axes, isVersion) {
  if (view.x === "step") return step;
  if (isVersion && step === 0) return 0;
  const row = axes?.get(isVersion ? step - 1 : step);
  return row ? X[view.x].of(row) : null;
}

// Exponential moving average, without the pull of its first value: that of TensorBoard and W&B.
export function smoothed(points) {
  let [sum, weight] = [0, 0];
  return points.map((point) => {
    sum = view.smooth * sum + (1 - view.smooth) * point[1];
    weight = view.smooth * weight + (1 - view.smooth);
    return sum / weight;
  });
}

export function change(what) {
  Object.assign(view, what);
  localStorage.setItem(KEY, JSON.stringify({ smooth: view.smooth, log: view.log, x: view.x }));
  for (const each of document.querySelectorAll("figure.chart, .plot-tools")) each.dispatchEvent(new Event("view"));
}

// The tools above the plots of a page.
export function tools() {
  view.range = null;
  const smooth = h("input", { type: "range", min: "0", max: "0.98", step: "0.02", "aria-label": "Smoothing" });
  const log = h("input", { type: "checkbox" });
  const x = h("select", { "aria-label": "The x axis" }, Object.keys(X).map((each) => h("option", { value: each }, `by ${each}`)));
  const whole = h("button", { type: "button", onclick: () => change({ range: null }) }, "Whole run");
  const how = h("span", { class: "note wide-only" }, "Drag across a plot to zoom in.");
  const share = h("output", {});
  const draw = () => {
    [smooth.value, log.checked, x.value, whole.hidden] = [String(view.smooth), view.log, view.x, !view.range];
    share.textContent = view.smooth ? view.smooth.toFixed(2) : "off";
    how.hidden = Boolean(view.range);
  };
  smooth.addEventListener("input", () => change({ smooth: Number(smooth.value) }));
  log.addEventListener("change", () => change({ log: log.checked }));
  x.addEventListener("change", () => change({ x: x.value, range: null }));
  const box = h("div", { class: "plot-tools" }, h("label", {}, "smoothing ", smooth, " ", share), h("label", {}, log, " log"), x, whole, how);
  box.addEventListener("view", draw);
  draw();
  return box;
}
