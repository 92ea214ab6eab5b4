// One run: curves, why it waits, config, events, checkpoints.
import { get, newest, of, trouble } from "./api.js";
import { audit } from "./audit.js";
import { COLOURS, chart } from "./charts.js";
import { bytes, fill, h, heads, link, moment, number, seconds, state, table } from "./dom.js";
import { words } from "./event_words.js";
import { actions, bar } from "./page_runs.js";
import { drawWhy } from "./why.js";

const TABS = ["curves", "config", "events", "checkpoints", "audit"];

export function tabs(run, here) {
  const base = `/runs/${encodeURIComponent(run)}`;
  const all = [["Overview", base], ["Samples", `${base}/samples`], ["Timeline", `${base}/timeline`], ["Lineage", `${base}/lineage`]];
  return h("nav", { class: "tabs", "aria-label": "Pages of the run" }, all.map(([name, href]) => h("a", { href, "aria-current": name === here ? "page" : null }, name)));
}

export async function runPage(page, name) {
  const head = h("div", {});
  const why = h("div", {});
  const body = h("div", {});
  const places = Object.fromEntries(TABS.map((each) => [each, h("div", {})]));
  let shown = new URLSearchParams(location.search).get("show") || "curves";
  const bar = h("div", { class: "subtabs", role: "tablist" }, TABS.map((each) => h("button", { type: "button", role: "tab", "data-tab": each, onclick: () => choose(each) }, each)));
  const choose = (each) => {
    shown = each;
    history.replaceState(null, "", `${location.pathname}${each === "curves" ? "" : `?show=${each}`}`);
    for (const button of bar.children) button.setAttribute("aria-selected", String(button.dataset.tab === each));
    fill(body, places[each]);
    load().catch((error) => trouble("tab", error.message));
  };
  const memory = { step: -1, rows: -1, kinds: "", ask: newest() };
  const load = async () => {
    if (shown === "curves") await curves(page, name, places.curves, memory);
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
    heading(page, head, run);
    drawWhy(why, run);
    if (isFirst) {
      isFirst = false;
      fill(page.main, head, tabs(name, "Overview"), why, bar, body);
      for (const button of bar.children) button.setAttribute("aria-selected", String(button.dataset.tab === shown));
      fill(body, places[shown]);
    }
    await load();
    return !run.has_ended || memory.isGrowing;
  });
}

function heading(page, head, run) {
  const facts = [
    ["reward", number(run.reward)], ["policy", `v${run.version}`], ["rollouts", number(run.rollouts)], ["tokens", number(run.tokens)],
    ["groups dropped", `${number(run.groups_dropped)} of ${number(run.groups)}`],
    ["created", moment(run.created)], ["time", seconds((run.ended || Date.now() / 1000) - (run.started || run.created))],
    ["held by", run.held_by.join(", ") || "nobody"],
  ];
  fill(head,
    h("div", { class: "title" }, h("h1", {}, run.name), state(run.state), bar(run), h("span", { class: "grow" }), actions(page, run)),
    run.error ? h("p", { class: "panel failed" }, h("b", {}, run.error.reason), ` ${run.error.message}`, run.error.remedy ? h("small", {}, ` Remedy: ${run.error.remedy}`) : null) : null,
    run.environments.map((each) => h("p", { class: "panel warned" }, h("b", {}, `${number(each.failed)} of ${number(each.rollouts)} rollouts of ${each.env} failed. `), `The first: ${each.first_error}`)),
    h("dl", { class: "facts" }, facts.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)))));
}

const CHARTS = [
  ["Loss", ["loss/mean"]], ["Mismatch KL", ["mismatch_kl/mean"], "trainer against engine, k3 over sampled tokens"],
  ["Effective sample size", ["ess/mean"], "of the importance ratios, 0 to 1"],
  ["Advantages", ["advantage/mean", "advantage/std"], "over the tokens that are trained on"], ["KL to the start model", ["reference_kl/mean"]],
  ["Staleness of tokens", ["staleness/mean", "staleness/max"], "steps, over sampled tokens"], ["Entropy", ["entropy/mean"]], ["Masked or clipped", ["is_masked/mean", "is_masked_low/mean", "is_masked_high/mean"], "share of tokens"],
  ["Gradient norm", ["optim/grad_norm"]], ["Importance ratio", ["ratio/mean", "ratio/min", "ratio/max"]],
  ["Tokens/s", ["perf/throughput"]], ["Seconds of a step", ["time/step", "time/wait_for_batch", "time/forward_backward"]],
  ["Update of engines", ["time/update_weights", "policy/pause_seconds"], "seconds"], ["Learning rate", ["optim/lr"]],
  ["Tokens behind seq_len", ["seq_len/cut_tokens"], "of a batch; they are not trained on"],
];

// Metrics of environments, a line each: `PREFIX/ENVIRONMENT SUFFIX`.
const FAMILIES = [
  ["Spread within groups", "reward/", "/group_std", "mean over groups of the standard deviation of their rewards", { zero: true }],
  ["Solved by every rollout of a group", "solve_all/", "", "share of groups", { share: true }],
  ["Solved by none", "solve_none/", "", "share of groups", { share: true }],
  ["Cut at a token limit", "is_truncated/", "/mean", "share of rollouts", { share: true }],
  ["Turns", "num_turns/", "/mean", "model calls of a rollout", { zero: true }],
  ["Seconds of a rollout", "time/rollout/", "/mean", "", { zero: true }],
  ["Dropped as stale", "stale_share/", "/mean", "share of the last groups", { share: true }],
  ["Slow ones dropped as stale", "stale_share/", "/slowest_quarter", "share of the slowest quarter of the last groups", { share: true }],
];

// Metrics of an environment with names of its own, a chart for each environment: `PREFIX/ENVIRONMENT/NAME`.
const NAMED = [
  ["Reward functions", "metrics/", "mean over the rollouts of its groups", { named: true }],
  ["Why rollouts end", "stop_condition/", "share of rollouts", { share: true, named: true }],
];
const MOST_LINES = COLOURS;
const MOST_ENVIRONMENTS = 8;

function ofEnvironments(names) {
  const envs = names.filter((each) => each.startsWith("solve_all/")).map((each) => each.slice("solve_all/".length)).filter((each) => each !== "all");
  const shown = envs.slice(0, MOST_ENVIRONMENTS);
  const families = FAMILIES.map(([title, prefix, suffix, hint, options]) => {
    const there = envs.filter((env) => names.includes(`${prefix}${env}${suffix}`));
    return { title, hint, options, count: there.length, lines: there.slice(0, MOST_LINES).map((env) => [`${prefix}${env}${suffix}`, env]) };
  });
  const named = shown.flatMap((env) => NAMED.map(([title, prefix, hint, options]) => {
    const start = `${prefix}${env}/`;
    // Turns have a chart of their own, and would make one of shares flat.
    const there = names.filter((each) => each.startsWith(start) && each !== `${start}num_turns`);
    return { title: `${title} of ${env}`, hint, options, count: there.length, lines: there.slice(0, MOST_LINES).map((key) => [key, key.slice(start.length)]) };
  }));
  return [...families, ...named];
}

function familyChart(family, curves) {
  const left = family.count - family.lines.length;
  const note = left > 0 ? `${left} more are not drawn: millrace run export has them` : "";
  return chart(family.title, family.lines.map(([key, name]) => ({ name, points: curves[key] || [] })), { hint: family.hint, note, ...family.options });
}

const MOST_ASKED = 3000; // characters of names in one address

async function inParts(name, wanted, signal) {
  const parts = [];
  let room = 0;
  for (const each of wanted) {
    room -= encodeURIComponent(each).length + 3;
    if (room < 0) {
      parts.push([]);
      room = MOST_ASKED;
    }
    parts[parts.length - 1].push(each);
  }
  const found = await Promise.all(parts.map((each) => get(`${of(name)}/metrics`, { names: each.join(","), points: 400 }, signal)));
  return Object.assign({}, ...found.map((each) => each.curves));
}

// Versions that were due and not evaluated, in words.
async function skipped(name, evals, curves, signal) {
  const some = evals.some((each) => (curves[each.replace(/reward\/mean$/, "num_skipped")] || []).some((point) => point[1] > 0));
  if (!some) return "";
  const { events } = await get(`${of(name)}/events`, { kinds: "eval_completed", size: 500 }, signal);
  const byEnv = {};
  for (const { body } of events.reverse()) if ((body.skipped || []).length) (byEnv[body.env] ||= []).push(...body.skipped);
  const said = Object.entries(byEnv).map(([env, versions]) => `${env}: ${versions.slice(0, 10).map((each) => `v${each}`).join(", ")}${versions.length > 10 ? `, … (${versions.length} in all)` : ""}`);
  return said.length ? `not evaluated: ${said.join("; ")}` : "";
}

async function curves(page, name, place, memory) {
  const { run } = memory;
  if (memory.step === run.step && !memory.isGrowing && place.childElementCount) return;
  const names = CHARTS.flatMap(([, each]) => each).join(",");
  const [found, all] = await Promise.all([
    get(`${of(name)}/metrics`, { names: `${names},reward/mean`, spread: 1, points: 400 }, page.signal),
    memory.names ? null : get(`${of(name)}/metrics`, { names: "" }, page.signal),
  ]);
  memory.names = all ? all.names : memory.names;
  const evals = found.names.filter((each) => /^eval\/.+\/reward\/mean$/.test(each));
  const families = ofEnvironments(found.names);
  const wanted = [...evals.flatMap((each) => [each, each.replace(/reward\/mean$/, "num_skipped")]), ...families.flatMap((family) => family.lines.map(([key]) => key))];
  const more = await inParts(name, wanted, page.signal);
  const missed = await skipped(name, evals, more, page.signal);
  trouble("store", found.stale || "");
  memory.step = run.step;
  memory.isGrowing = found.index.is_growing;
  const spread = found.spread || {};
  const rewards = Object.keys(spread).filter((each) => each.startsWith("reward/")).sort(); // as the evaluations: one colour an environment
  const drawn = [
    chart("Reward by environment", rewards.length ? rewards.map((each) => ({ name: each.slice(7), points: spread[each] })) : [{ name: "all", points: found.curves["reward/mean"] || [] }], { hint: "mean, with the tenth and the ninetieth percentile", height: 210 }),
    chart("Evaluations", evals.map((each) => ({ name: each.slice("eval/".length, -"/reward/mean".length), points: more[each] || [] })), { dots: true, x: "version", note: missed, none: "no evaluation yet", height: 210 }),
    chart("Staleness", [{ name: "steps", points: spread.staleness || [] }], { hint: "step minus the oldest version of a rollout's tokens", zero: true }),
    chart("Sampled tokens", [{ name: "tokens", points: spread["length/sampled"] || [] }], { zero: true }),
    chart("Share of rollouts", [["trained on", "rollouts/trained_share"], ["failed", "rollouts/failed_share"], ["cut off", "rollouts/truncated_share"]].map(([label, key]) => ({ name: label, points: spread[key] || [] })), { zero: true }),
    ...families.map((family) => familyChart(family, more)),
    idle(found.curves),
    ...CHARTS.map(([title, each, hint]) => chart(title, each.filter((key) => found.curves[key]).map((key) => ({ name: label(key, each), points: found.curves[key] })), { hint })),
  ];
  const note = found.index.batches < found.index.known_batches ? h("p", { class: "note" }, `The index has ${found.index.batches} of ${found.index.known_batches} batches; curves of single rollouts grow with it.`) : null;
  fill(place, note, h("div", { class: "charts" }, drawn.filter((each) => each.querySelector("svg"))), drawn.some((each) => each.querySelector("svg")) ? null : h("p", { class: "none" }, "No step is done yet."));
}

const label = (key, all) => (all.length > 1 ? key.replace(/^(time|policy|is_masked|ratio|advantage|staleness)[/_]/, "").replace(/\/mean$/, "").replaceAll("_", " ") : key);

function idle(found) {
  const waits = new Map((found["time/wait_for_batch"] || []).map(([step, value]) => [step, value]));
  const points = (found["time/step"] || []).filter(([step, value]) => waits.has(step) && value > 0).map(([step, value]) => [step, Math.min(1, waits.get(step) / value)]);
  return chart("Trainer waits", [{ name: "share of a step", points }], { zero: true, hint: "share of a step in which the trainer waits for its batch" });
}

function config(place, memory) {
  if (place.childElementCount) return;
  const keys = memory.run.config;
  const only = h("input", { type: "checkbox", id: "differs" });
  only.checked = true;
  const find = h("input", { type: "search", placeholder: "Find a key", "aria-label": "Find a key" });
  const box = h("div", {});
  const draw = () => {
    const shown = keys.filter((each) => (!only.checked || each.differs) && each.key.includes(find.value));
    fill(box, table(heads("Key", "Value", "Default"), shown.map((each) => h("tr", { class: each.differs ? "differs" : "" },
      h("td", {}, h("code", {}, each.key)), h("td", { class: "value" }, json(each.value)), h("td", { class: "value faint" }, each.differs ? json(each.default) : "the same"))), { class: "rows" }),
      h("p", { class: "note" }, `${shown.length} of ${keys.length} keys; run hash `, h("code", {}, memory.run.run_hash.slice(0, 16))));
  };
  only.addEventListener("change", draw);
  find.addEventListener("input", draw);
  draw();
  fill(place, h("div", { class: "tools" }, find, h("label", {}, only, " only what differs from the defaults")), box);
}

const json = (value) => (value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value));

const KINDS = [["", "all events"], ["warning,rollouts_failed", "warnings"], ["state_changed", "states"], ["step_completed", "steps"], ["policy_published,policy_served", "policies"], ["eval_completed,score_completed", "evaluations"], ["checkpoint_saved", "checkpoints"], ["wait_reported", "waits"]];

async function events(page, name, place, memory) {
  const found = await memory.ask(get(`${of(name)}/events`, { kinds: memory.kinds, size: memory.size || 100 }, page.signal));
  if (!found) return;
  trouble("store", found.stale || "");
  const newest = `${memory.kinds} ${found.events.length} ${found.events[0]?.cursor}`;
  if (newest === memory.newest) return;
  memory.newest = newest;
  const choose = h("select", { "aria-label": "Kind of events", onchange: (event) => {
    memory.kinds = event.target.value;
    events(page, name, place, memory).catch((error) => trouble("tab", error.message));
  } }, KINDS.map(([value, text]) => h("option", { value }, text)));
  choose.value = memory.kinds;
  const rows = found.events.map((event) => h("tr", { class: event.is_loud ? `loud ${event.kind}` : "" },
    h("td", { class: "when" }, moment(event.time)), h("td", {}, h("code", {}, event.writer)), h("td", {}, event.kind.replaceAll("_", " ")), h("td", { class: "wide", dir: "auto" }, words(event))));
  const more = found.has_more ? h("button", { type: "button", onclick: () => {
    memory.size = Math.min(500, (memory.size || 100) + 200);
    events(page, name, place, memory).catch((error) => trouble("tab", error.message));
  } }, "More") : null;
  fill(place, h("div", { class: "tools" }, choose), rows.length ? table(heads("Time", "Writer", "Kind", "What"), rows, { class: "rows events" }) : h("p", { class: "none" }, "No event is archived yet; that happens every ten seconds."), more);
}

async function checkpoints(page, name, place) {
  const found = await get(`${of(name)}/checkpoints`, {}, page.signal);
  const rows = found.checkpoints.reverse().map((each) => h("tr", {},
    h("td", { class: "num" }, `v${each.step}`), h("td", {}, moment(each.time)), h("td", {}, bytes(each.size_bytes)), h("td", { class: "wide" }, h("code", {}, each.uri)),
    h("td", {}, command("Fork", `millrace run fork ${name} --step ${each.step}`), " ", command("Replay", `millrace run replay ${name} --step ${each.step}`), " ", link(`/runs/${encodeURIComponent(name)}/lineage?version=${each.step}`, "lineage"))));
  fill(place, rows.length ? table(heads("Version#", "Saved", "Size", "Where", ""), rows, { class: "rows" }) : h("p", { class: "none" }, "No checkpoint is there."));
}

function command(label, line) {
  return h("button", { type: "button", title: line, onclick: (event) => {
    const place = event.target.closest("td");
    if (!place.querySelector("pre")) place.append(h("pre", { class: "command" }, line));
  } }, label);
}
