// Curves of several runs in one plot, and where their configs differ.
import { get, of, trouble } from "./api.js";
import { chart } from "./charts.js";
import { fill, h, link, panel, table } from "./dom.js";

const METRICS = ["reward/mean", "loss/mean", "mismatch_kl/mean", "entropy/mean", "batch/off_policy_level/mean", "perf/throughput", "time/step", "seq_len/mean", "optim/grad_norm"];
const MOST = 8;

export async function comparePage(page) {
  const names = (new URLSearchParams(location.search).get("runs") || "").split(",").filter(Boolean).slice(0, MOST);
  if (names.length < 2) {
    fill(page.main, h("p", { class: "none" }, "Choose two or more runs in the ", link("/", "list"), "."));
    return;
  }
  const charts = h("div", { class: "charts" });
  const configs = h("div", {});
  fill(page.main, h("h1", {}, `Compare ${names.length} runs`), charts, configs);
  let shown = "";
  await page.every(async () => {
    const runs = await Promise.all(names.map((name) => get(of(name), {}, page.signal)));
    const steps = JSON.stringify(runs.map((run) => run.step));
    if (steps !== shown) {
      const curves = await Promise.all(names.map((name) => get(`${of(name)}/metrics`, { names: METRICS.join(","), points: 400 }, page.signal)));
      trouble("store", curves.map((each) => each.stale).find(Boolean) || "");
      fill(charts, METRICS.map((metric) => chart(metric, names.map((name, at) => ({ name, points: curves[at].curves[metric] || [] })), { height: 210 })).filter((each) => each.querySelector("svg")));
      if (!shown) drawConfigs(configs, names, runs);
      shown = steps;
    }
    return runs.some((run) => !run.has_ended);
  });
}

function drawConfigs(place, names, runs) {
  const values = runs.map((run) => new Map(run.config.map((each) => [each.key, JSON.stringify(each.value)])));
  const keys = [...new Set(values.flatMap((each) => [...each.keys()]))].filter((key) => new Set(values.map((each) => each.get(key))).size > 1);
  fill(place, panel("Where the configs differ", keys.length ? table([{ head: "Key" }, ...names.map((name) => ({ head: name }))], keys.map((key) => h("tr", {}, h("td", {}, h("code", {}, key)), values.map((each) => h("td", { class: "value" }, each.get(key) ?? "–")))), { class: "rows" }) : h("p", { class: "none" }, "They do not.")));
}
