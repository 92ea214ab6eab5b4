// One run: its curves first, and beside them who works for it, config, events, checkpoints and audit.
import { get, newest, of, trouble } from "./api.js";
import { audit } from "./audit.js";
import { fill, h, link, moment, number, percent, seconds, state } from "./dom.js";
import { actions, bar } from "./page_runs.js";
import { tools } from "./plot_view.js";
import { curves } from "./run_curves.js";
import { checkpoints, config, events } from "./run_tabs.js";
import { drawWhy } from "./why.js";
import { drawWorkers, gpuFact, know, worker } from "./workers.js";

const TABS = ["curves", "workers", "config", "events", "checkpoints", "audit"];
const PAGES = [["Samples", "/samples"], ["Timeline", "/timeline"], ["Lineage", "/lineage"]];

// The pages of a run and the tabs of its first one in one row.
export function tabs(run, here) {
  const base = `/runs/${encodeURIComponent(run)}`;
  const all = [["Overview", base], ...PAGES.map(([name, path]) => [name, base + path]), ...TABS.slice(1).map((each) => [each, `${base}?show=${each}`])];
  return h("nav", { class: "tabs", "aria-label": "Pages of the run" }, all.map(([name, href]) => h("a", { href, "aria-current": name === here ? "page" : null }, name[0].toUpperCase() + name.slice(1))));
}

export async function runPage(page, name) {
  const [head, why, body] = [h("div", {}), h("div", {}), h("div", {})];
  const places = Object.fromEntries(TABS.map((each) => [each, h("div", {})]));
  const asked = new URLSearchParams(location.search).get("show");
  const shown = TABS.includes(asked) ? asked : "curves";
  const memory = { step: -1, kinds: "", ask: newest() };
  const load = async () => {
    if (shown === "curves") await curves(page, name, places.curves, memory);
    else if (shown === "workers") drawWorkers(places.workers, memory.run);
    else if (shown === "events") await events(page, name, places.events, memory);
    else if (shown === "checkpoints") await checkpoints(page, name, places.checkpoints);
    else if (shown === "audit") await audit(name, places.audit, memory);
    else config(places.config, memory);
  };
  let isFirst = true;
  await page.every(async () => {
    const run = await get(of(name), {}, page.signal);
    trouble("source", run.trouble);
    memory.run = run;
    know(run.workers, run.names);
    heading(page, head, run, memory.last);
    drawWhy(why, run);
    if (isFirst) {
      isFirst = false;
      const plots = shown === "curves" ? tools() : null;
      plots?.addEventListener("view", () => curves(page, name, places.curves, memory).catch((error) => trouble("tab", error.message)));
      fill(page.main, head, tabs(name, shown === "curves" ? "Overview" : shown), why, plots, body);
      fill(body, places[shown]);
    }
    await load();
    if (memory.last) heading(page, head, run, memory.last);
    return !run.has_ended || memory.isGrowing;
  });
}

function heading(page, head, run, last) {
  const gpus = gpuFact(run);
  const facts = [
    ["reward", run.step ? number(run.reward) : "–"], ...(last ? [["last evaluation", last.evaluation], ["tokens/s", last.rate], ["staleness", last.staleness]] : []),
    ["policy", `v${run.version}`], ["rollouts", number(run.rollouts)], ["tokens", number(run.tokens)],
    ["groups dropped", run.groups ? `${number(run.groups_dropped)} of ${number(run.groups)} (${percent(run.groups_dropped / run.groups)})` : "–"],
    ["time", seconds((run.ended || Date.now() / 1000) - (run.started || run.created))], ["created", moment(run.created)],
    ...(gpus ? [["GPUs", gpus]] : []),
    ["held by", run.held_by.length ? run.held_by.map((each, at) => [at ? ", " : null, worker(each)]) : run.has_ended ? "–" : "nobody"],
    ...(run.parent ? [["fork of", link(`/${run.parent.name}`, `${run.parent.name.replace("runs/", "")} at ${run.parent.step}`)]] : []),
    ...Object.entries(run.labels),
  ];
  fill(head,
    h("div", { class: "title" }, h("h1", {}, run.name), state(run.state), bar(run), h("span", { class: "grow" }), actions(page, run)),
    run.error ? h("p", { class: "panel failed" }, h("b", {}, run.error.reason), ` ${run.error.message}`, run.error.remedy ? h("small", {}, ` Remedy: ${run.error.remedy}`) : null) : null,
    run.environments.filter((each) => each.failed).map((each) => h("p", { class: "panel warned" }, h("b", {}, `${number(each.failed)} of ${number(each.rollouts)} rollouts of ${each.env} failed. `), `The first: ${each.first_error}`)),
    h("dl", { class: "facts" }, facts.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)))));
}
