// Curves of several runs in one plot, their evaluations among them, and where their configs differ.
import { get, of, trouble } from "./api.js";
import { chart } from "./charts.js";
import { compact, fill, h, heads, link, number, panel, seconds, state, table } from "./dom.js";
import { bar } from "./page_runs.js";
import { tools, view } from "./plot_view.js";
import { evaluations, withInterval } from "./run_curves.js";

const METRICS = [
  ["Reward", "reward/mean"], ["Entropy", "entropy/mean"], ["Mismatch KL", "mismatch_kl/mean"], ["Tokens/s", "perf/throughput"], ["Length of samples", "seq_len/mean"], ["Staleness", "batch/off_policy_level/mean"],
  ["No advantage within a group", "zero_advantage/all"], ["Cut at a token limit", "is_truncated/all/mean"], ["Loss", "loss/mean"], ["Gradient norm", "optim/grad_norm"], ["Seconds of a step", "time/step"], ["Learning rate", "optim/lr"],
];
const EVALUATED = "eval/*/reward/mean,eval/*/pass@*";
const POINTS = 400;
const MOST = 8;

export async function comparePage(page) {
  const names = (new URLSearchParams(location.search).get("runs") || "").split(",").filter(Boolean).slice(0, MOST);
  if (names.length < 2) {
    fill(page.main, h("p", { class: "none" }, "Choose two or more runs in the ", link("/", "list"), "."));
    return;
  }
  const [about, charts, configs] = [h("div", {}), h("div", { class: "charts" }), h("div", {})];
  const plots = tools();
  let shown = "";
  const look = async () => {
    const runs = await Promise.all(names.map((name) => get(of(name), {}, page.signal)));
    const range = view.x === "step" && view.range ? { first: Math.max(0, Math.floor(view.range[0]) - 1), last: Math.ceil(view.range[1]) + 1 } : {};
    const wanted = JSON.stringify([runs.map((run) => [run.step, run.state]), range]);
    if (wanted !== shown && !charts.querySelector(".brush")) {
      const asked = { names: `${METRICS.map(([, metric]) => metric).join(",")},${EVALUATED}`, points: POINTS, axes: 1, ...range };
      const curves = await Promise.all(names.map((name) => get(`${of(name)}/metrics`, asked, page.signal)));
      trouble("store", curves.map((each) => each.stale).find(Boolean) || "");
      const found = names.map((name, at) => ({ name, run: runs[at], curves: curves[at].curves, axes: new Map(curves[at].axes.map((row) => [row[0], row])) }));
      drawCharts(charts, found);
      drawRuns(about, found);
      if (!shown) drawConfigs(configs, names, runs);
      shown = wanted;
    }
    return runs.some((run) => !run.has_ended);
  };
  plots.addEventListener("view", () => look().catch((error) => error.name !== "AbortError" && trouble("look", error.message)));
  fill(page.main, h("h1", {}, `Compare ${names.length} runs`), about, plots, charts, configs);
  await page.every(look);
}

// A run keeps its colour in every plot, those that another run is missing from, too.
function drawCharts(place, found) {
  const all = [...new Set(found.flatMap((each) => Object.keys(each.curves)))].sort();
  const { envs, passes } = evaluations(all);
  const one = (title, metric, options = {}) => chart(title, found.map((each, at) => ({ name: each.name, colour: at, axes: each.axes, points: withInterval(each.curves, metric) })), { named: true, ...options });
  const evals = [
    ...[...new Set(envs)].map((env) => one(`Evaluation: ${env}`, `eval/${env}/reward/mean`, { dots: true, x: "version", hint: "mean reward of held-out tasks" })),
    ...passes.flatMap(([env, figures]) => figures.map((each) => one(`Evaluation: ${env} ${each}`, `eval/${env}/${each}`, { dots: true, x: "version", hint: "with its 95 % interval" }))),
  ];
  const [reward, ...rest] = METRICS.map(([title, metric]) => one(title, metric, { hint: metric }));
  fill(place, [reward, ...evals, ...rest].filter((each) => each.querySelector("svg")));
}

function drawRuns(place, found) {
  const rows = found.map(({ name, run, curves }, at) => {
    const evals = Object.entries(curves).filter(([metric, curve]) => /^eval\/.+\/reward\/mean$/.test(metric) && curve.length).map(([metric, curve]) => `${metric.slice("eval/".length, -"/reward/mean".length)} ${number(curve.at(-1)[1])} (v${curve.at(-1)[0]})`);
    return h("tr", {}, h("td", { class: `key c${at}` }, link(`/runs/${encodeURIComponent(name)}`, name)), h("td", {}, state(run.state)), h("td", {}, bar(run)), h("td", { class: "num" }, run.step ? number(run.reward) : "–"),
      h("td", {}, evals.join(", ") || "–"), h("td", { class: "num" }, compact(run.tokens)), h("td", { class: "num" }, run.started ? seconds((run.ended || Date.now() / 1000) - run.started) : "–"));
  });
  fill(place, table(heads("Run", "State", "Progress", "Reward#", "Last evaluation", "Tokens#", "Duration#"), rows, { class: "rows compared" }));
}

function drawConfigs(place, names, runs) {
  const values = runs.map((run) => new Map(run.config.map((each) => [each.key, JSON.stringify(each.value)])));
  const keys = [...new Set(values.flatMap((each) => [...each.keys()]))].filter((key) => new Set(values.map((each) => each.get(key))).size > 1);
  fill(place, panel("Where the configs differ", keys.length ? table([{ head: "Key" }, ...names.map((name) => ({ head: name }))], keys.map((key) => h("tr", {}, h("td", {}, h("code", {}, key)), values.map((each) => value(each.get(key) ?? "–")))), { class: "rows" }) : h("p", { class: "none" }, "They do not.")));
}

// A name, or another short value, stands in one line: the table can be scrolled.
const value = (text) => h("td", { class: text.length > 40 ? "value" : "value whole" }, text);
