// All runs: state, progress, the curve of the reward, the last evaluation, and what can be asked of one.
import { get, mayOnlyRead, of, post, trouble } from "./api.js";
import { sparkline } from "./charts.js";
import { compact, fill, h, link, moment, number, seconds, state, table } from "./dom.js";
import { know, worker } from "./workers.js";

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
  let order = wanted.get("sort") || "-created";
  const sort = (key, isNumber) => () => {
    order = order === (isNumber ? `-${key}` : key) ? (isNumber ? key : `-${key}`) : isNumber ? `-${key}` : key; // the largest, or the first of the alphabet
    remember();
    draw();
  };
  const draw = () => {
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size < 2 ? "Compare: choose two or more" : `Compare ${chosen.size} runs`;
    const found = runs.filter((run) => passes(run, search.value, only.value)).map((run) => ({ run, ...valuesOf(run, sparks.get(run.uid)?.curves) }));
    drawRuns(page, body, found.sort(by(order)), { chosen, draw, order, sort });
  };
  const remember = () => {
    const query = new URLSearchParams([["q", search.value], ["state", only.value], ["config", config.value], ["sort", order === "-created" ? "" : order]].filter(([, value]) => value));
    history.replaceState(null, "", query.size ? `/?${query}` : "/");
  };
  const load = async () => {
    const asked = config.value;
    const answer = await get("/api/runs", asked ? { config: asked } : {}, page.signal);
    if (asked !== config.value) return; // more was typed meanwhile
    trouble("source", answer.trouble);
    runs = answer.runs;
    for (const run of runs) know(run.workers);
    draw();
  };
  let soon = 0;
  for (const field of [search, only, config]) {
    field.addEventListener("input", () => {
      remember();
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
        const names = "reward/mean,batch/off_policy_level/mean,perf/throughput,time/step,progress/tokens,eval/*/reward/mean";
        const found = await get(`${of(run.name)}/metrics`, { names, points: 60 }, page.signal);
        sparks.set(run.uid, { step: run.step, curves: found.curves });
      } catch { /* the row stays without its curve */ }
    }));
    if (!page.isOver) draw();
  }
}

// Columns: their heading, what they are sorted by, and whether that is a number.
const COLUMNS = [
  ["Run", "name"], ["Reward", "reward", true], ["Last evaluation", "evaluation", true], ["State", "state"], ["Progress", "progress", true], ["Staleness", "staleness", true],
  ["Tokens/s", "rate", true], ["Failed", "failed", true], ["Duration", "duration", true], ["Created", "created", true],
];
const TO_THE_RIGHT = ["evaluation", "staleness", "rate", "failed", "duration"];

function valuesOf(run, curves) {
  const last = (name) => curves?.[name]?.at(-1)?.[1] ?? null;
  const evals = Object.entries(curves || {}).filter(([name, curve]) => name.startsWith("eval/") && curve.length).map(([name, curve]) => ({ env: name.slice("eval/".length, -"/reward/mean".length), version: curve.at(-1)[0], value: curve.at(-1)[1] }));
  const [tokens, time] = [last("progress/tokens"), last("time/step")];
  return {
    curves, evals, name: run.name, state: run.state, progress: run.max_steps ? run.step / run.max_steps : 0, reward: run.step ? run.reward : null,
    evaluation: evals.length ? evals.reduce((sum, each) => sum + each.value, 0) / evals.length : null, staleness: last("batch/off_policy_level/mean"),
    rate: last("perf/throughput") ?? (tokens && time ? tokens / time : null), failed: run.environments.reduce((sum, each) => sum + each.failed, 0),
    duration: run.started ? (run.ended || Date.now() / 1000) - run.started : null, created: run.created,
  };
}

// What has no value comes last, either way; equals stay as they came, the newest first.
function by(order) {
  const [key, sign] = order.startsWith("-") ? [order.slice(1), -1] : [order, 1];
  return (one, other) => {
    const [a, b] = [one[key] ?? null, other[key] ?? null];
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
  };
}

function drawRuns(page, body, found, { chosen, draw, order, sort }) {
  if (!found.length) {
    fill(body, h("p", { class: "none" }, "No run is here. ", h("code", {}, "millrace rl @ rl.toml"), " starts one."));
    return;
  }
  const columns = COLUMNS.map(([head, key, isNumber]) => ({
    head, class: TO_THE_RIGHT.includes(key) ? "num" : "", onsort: sort(key, isNumber),
    sorted: order === key ? "ascending" : order === `-${key}` ? "descending" : "none",
  }));
  const focus = body.contains(document.activeElement) && document.activeElement.matches(".sort") ? document.activeElement.textContent : null;
  fill(body, table([{ head: "" }, ...columns, { head: "" }], found.map((each) => row(page, each, { chosen, draw })), { class: "rows runs" }));
  if (focus) [...body.querySelectorAll(".sort")].find((each) => each.textContent === focus)?.focus();
}

function row(page, { run, curves, ...values }, { chosen, draw }) {
  const box = h("input", { type: "checkbox", "aria-label": `Choose ${run.name}` });
  box.checked = chosen.has(run.name);
  box.addEventListener("change", () => {
    if (box.checked) chosen.add(run.name);
    else chosen.delete(run.name);
    draw();
  });
  const labels = Object.entries(run.labels).map(([key, value]) => [" ", h("span", { class: "tag" }, value ? `${key}: ${value}` : key)]);
  return h("tr", {},
    h("td", {}, box),
    h("td", { class: "name" }, link(`/runs/${encodeURIComponent(run.name)}`, run.name), labels, h("small", {}, run.kind.toLowerCase(),
      run.parent ? ` · fork of ${run.parent.name.replace("runs/", "")} at ${run.parent.step}` : "")),
    h("td", { class: "when" }, sparkline(curves?.["reward/mean"] || [], `reward of ${run.name}`), " ", h("b", {}, number(values.reward))),
    h("td", { class: "num", title: values.evals.map((each) => `${each.env}: ${number(each.value)} of v${each.version}`).join("\n") }, number(values.evaluation), values.evals.length ? h("small", {}, values.evals.length > 1 ? `mean of ${values.evals.length}` : `v${values.evals[0].version}`) : null),
    h("td", { class: "why-failed" }, state(run.state), run.error ? h("small", { class: "problem", title: run.error.message }, `${run.error.reason}: ${run.error.message}`) : null,
      run.queue_place ? h("small", { class: "queue", title: run.queue_place }, run.queue_place) : null,
      run.held_by.length ? h("small", { class: "held", title: "works for it" }, run.held_by.map((each, at) => [at ? ", " : null, worker(each)])) : null),
    h("td", {}, bar(run)),
    h("td", { class: "num" }, number(values.staleness, 1)),
    h("td", { class: "num" }, compact(values.rate)),
    h("td", { class: "num" }, values.failed ? h("span", { class: "problem" }, number(values.failed), h("small", { class: "first-error", title: run.environments.map((each) => `${each.env}: ${each.first_error}`).join("\n") }, run.environments.find((each) => each.failed)?.first_error)) : "0"),
    h("td", { class: "num" }, seconds(values.duration)),
    h("td", { class: "when" }, moment(run.created)),
    h("td", { class: "when" }, actions(page, run)));
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
