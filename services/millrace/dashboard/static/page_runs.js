// All runs: state, progress, the curve of the reward, and what can be asked of one.
import { get, mayOnlyRead, of, post, trouble } from "./api.js";
import { sparkline } from "./charts.js";
import { compact, fill, h, heads, link, moment, number, seconds, state, table } from "./dom.js";

const SPARKS_AT_ONCE = 4;
const SEARCH_MS = 250;

export async function runsPage(page) {
  const wanted = new URLSearchParams(location.search);
  const search = h("input", { type: "search", placeholder: "Find a run, a label, an environment", "aria-label": "Find", value: wanted.get("q") || "" });
  const only = h("select", { "aria-label": "State" }, h("option", { value: "" }, "every state"),
    ["open", "succeeded", "failed", "cancelled", "damaged"].map((name) => h("option", { value: name }, name)));
  only.value = wanted.get("state") || "";
  const config = h("input", { type: "search", placeholder: "Find in configs: lr=1e-5 grpo", "aria-label": "Find in configs", value: wanted.get("config") || "" });
  const compare = h("button", { type: "button", disabled: true }, "Compare");
  const body = h("div", {});
  const chosen = new Set();
  const sparks = new Map();
  let runs = [];
  const draw = () => {
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size < 2 ? "Compare: choose two or more" : `Compare ${chosen.size} runs`;
    drawRuns(page, body, runs.filter((run) => passes(run, search.value, only.value)), { chosen, sparks, draw });
  };
  const load = async () => {
    const asked = config.value;
    const answer = await get("/api/runs", asked ? { config: asked } : {}, page.signal);
    if (asked !== config.value) return; // more was typed meanwhile
    trouble("source", answer.trouble);
    runs = answer.runs;
    draw();
  };
  let soon = 0;
  for (const field of [search, only, config]) {
    field.addEventListener("input", () => {
      const query = new URLSearchParams([["q", search.value], ["state", only.value], ["config", config.value]].filter(([, value]) => value));
      history.replaceState(null, "", query.size ? `/?${query}` : "/");
      draw();
      clearTimeout(soon);
      if (field === config) soon = setTimeout(() => load().catch((error) => error.name !== "AbortError" && trouble("look", error.message)), SEARCH_MS);
    });
  }
  compare.addEventListener("click", () => page.go(`/compare?runs=${[...chosen].map(encodeURIComponent).join(",")}`));
  let isFirst = true;
  await page.every(async () => {
    if (isFirst) fill(page.main, h("h1", { class: "hidden" }, "Runs"), h("div", { class: "tools" }, search, only, config, compare), body);
    isFirst = false;
    await load();
    loadSparks(page, runs, sparks, draw);
    return true;
  });
}

function passes(run, words, wanted) {
  if (wanted === "open" && run.has_ended) return false;
  if (wanted && wanted !== "open" && run.state.toLowerCase() !== wanted) return false;
  const text = [run.name, run.uid, ...Object.entries(run.labels).flat(), ...run.environments.map((each) => each.env)];
  return words.toLowerCase().split(/\s+/).every((word) => text.some((each) => String(each).toLowerCase().includes(word)));
}

// The curve of an ended run is read once; that of an open one with every step.
async function loadSparks(page, runs, sparks, draw) {
  const due = runs.slice(0, 60).filter((run) => run.step > 0 && sparks.get(run.uid)?.step !== run.step);
  for (let at = 0; at < due.length && !page.isOver; at += SPARKS_AT_ONCE) {
    await Promise.all(due.slice(at, at + SPARKS_AT_ONCE).map(async (run) => {
      try {
        const names = "reward/mean,batch/off_policy_level/mean,perf/throughput,time/step,progress/tokens";
        const found = await get(`${of(run.name)}/metrics`, { names, points: 60 }, page.signal);
        sparks.set(run.uid, { step: run.step, curves: found.curves });
      } catch { /* the row stays without its curve */ }
    }));
    if (!page.isOver) draw();
  }
}

function drawRuns(page, body, runs, { chosen, sparks, draw }) {
  if (!runs.length) {
    fill(body, h("p", { class: "none" }, "No run is here. ", h("code", {}, "millrace rl @ rl.toml"), " starts one."));
    return;
  }
  const columns = heads("", "Run", "State", "Progress", "Reward", "Staleness#", "Tokens/s#", "Failed#", "Held by", "Created", "");
  fill(body, table(columns, runs.map((run) => row(page, run, sparks.get(run.uid)?.curves, { chosen, draw })), { class: "rows runs" }));
}

function last(curves, name) {
  const curve = curves?.[name];
  return curve?.length ? curve[curve.length - 1][1] : null;
}

function row(page, run, curves, { chosen, draw }) {
  const box = h("input", { type: "checkbox", "aria-label": `Choose ${run.name}` });
  box.checked = chosen.has(run.name);
  box.addEventListener("change", () => {
    if (box.checked) chosen.add(run.name);
    else chosen.delete(run.name);
    draw();
  });
  const rewards = curves?.["reward/mean"] || [];
  const failed = run.environments.reduce((sum, each) => sum + each.failed, 0);
  const tokens = last(curves, "progress/tokens");
  const time = last(curves, "time/step");
  const rate = last(curves, "perf/throughput") ?? (tokens && time ? tokens / time : null);
  return h("tr", {},
    h("td", {}, box),
    h("td", { class: "name" }, link(`/runs/${encodeURIComponent(run.name)}`, run.name), h("small", {}, run.kind.toLowerCase(),
      run.parent ? ` · fork of ${run.parent.name.replace("runs/", "")} at ${run.parent.step}` : "")),
    h("td", {}, state(run.state), run.error ? h("small", { class: "problem", title: run.error.message }, run.error.reason) : null),
    h("td", {}, bar(run)),
    h("td", {}, sparkline(rewards, `reward of ${run.name}`), " ", h("b", {}, run.step ? number(run.reward) : "–")),
    h("td", { class: "num" }, number(last(curves, "batch/off_policy_level/mean"), 1)),
    h("td", { class: "num" }, compact(rate)),
    h("td", { class: "num" }, failed ? h("span", { class: "problem", title: run.environments.map((each) => `${each.env}: ${each.first_error}`).join("\n") }, number(failed)) : "0"),
    h("td", { class: "held" }, run.held_by.join(", ") || "–"),
    h("td", { class: "when", title: run.ended ? `took ${seconds(run.ended - (run.started || run.created))}` : "" }, moment(run.created)),
    h("td", {}, actions(page, run)));
}

export function bar(run) {
  const text = run.max_steps ? `${run.step} / ${run.max_steps}` : `step ${run.step}`;
  return h("div", { class: "progress" }, h("progress", { max: run.max_steps || 1, value: run.max_steps ? run.step : 0, "aria-label": "steps done" }), h("small", {}, text));
}

export function actions(page, run, done = () => {}) {
  if (mayOnlyRead()) return [];
  if (run.state === "FAILED") return [button(page, run, "resume", "Reopen", done)];
  if (run.has_ended) return [];
  const first = run.state === "PAUSED" ? button(page, run, "resume", "Resume", done) : button(page, run, "pause", "Pause", done);
  return [first, " ", button(page, run, "cancel", "Cancel", done)];
}

function button(page, run, action, name, done) {
  return h("button", { type: "button", class: action === "cancel" ? "danger" : "", onclick: async (event) => {
    if (action === "cancel" && !confirm(`Cancel ${run.name}? A cancelled run cannot go on; a fork of it can.`)) return;
    event.target.disabled = true;
    try {
      await post(`${of(run.name)}/${action}`, {});
      done();
    } catch (error) {
      alert(`${error.message}${error.remedy ? `\n\n${error.remedy}` : ""}`);
      event.target.disabled = false;
    }
  } }, name);
}
