// The curves of a run: what a researcher looks at first, then by what they are about.
import { get, of, trouble } from "./api.js";
import { COLOURS, chart } from "./charts.js";
import { compact, fill, h, number } from "./dom.js";
import { view } from "./plot_view.js";

const POINTS = 400;
const MOST_LINES = COLOURS;
const MOST_ENVIRONMENTS = 8;
const MOST_ASKED = 3000; // characters of names in one address

// By section: title, metrics, hint, options.
const CHARTS = {
  first: [
    ["Entropy", ["entropy/mean"], "nats, over sampled tokens"],
    ["Mismatch KL", ["mismatch_kl/mean"], "trainer against engine, k3 over sampled tokens"],
    ["Tokens/s", ["perf/throughput"], "tokens of a step by its time", { zero: true }],
  ],
  Learning: [
    ["Loss", ["loss/mean"]], ["Gradient norm", ["optim/grad_norm"]], ["Learning rate", ["optim/lr"]],
    ["Advantages", ["advantage/mean", "advantage/std"], "over the tokens that are trained on"],
    ["Importance ratio", ["ratio/mean", "ratio/min", "ratio/max"]],
    ["Effective sample size", ["ess/mean"], "of the importance ratios, 0 to 1"],
    ["Masked or clipped", ["is_masked/mean", "is_masked_low/mean", "is_masked_high/mean"], "share of tokens"],
    ["KL to the start model", ["reference_kl/mean"]],
    ["Staleness of tokens", ["staleness/mean", "staleness/max"], "steps, over sampled tokens", { zero: true }],
  ],
  Time: [
    ["Seconds of a step", ["time/step", "time/wait_for_batch", "time/forward_backward"], "", { zero: true }],
    ["Update of engines", ["time/update_weights", "policy/pause_seconds"], "seconds", { zero: true }],
    ["Model FLOPs utilization", ["perf/mfu"], "0 to 1"], ["Peak memory", ["perf/peak_memory"], "GiB, of the GPU of rank 0"],
    ["Tokens behind seq_len", ["seq_len/cut_tokens"], "of a batch; they are not trained on"],
  ],
};

// Metrics of environments, a line each: `PREFIX/ENVIRONMENT SUFFIX`.
const FAMILIES = [
  ["No advantage within a group", "zero_advantage/", "", "share of groups whose rollouts all have one reward", { share: true }],
  ["Solved by every rollout of a group", "solve_all/", "", "share of groups", { share: true }],
  ["Solved by none", "solve_none/", "", "share of groups", { share: true }],
  ["Spread within groups", "reward/", "/group_std", "mean over groups of the standard deviation of their rewards", { zero: true }],
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

function ofEnvironments(names) {
  const envs = names.filter((each) => each.startsWith("solve_all/")).map((each) => each.slice("solve_all/".length)).filter((each) => each !== "all");
  const families = FAMILIES.map(([title, prefix, suffix, hint, options]) => {
    const there = envs.filter((env) => names.includes(`${prefix}${env}${suffix}`));
    return { title, hint, options, count: there.length, lines: there.slice(0, MOST_LINES).map((env) => [`${prefix}${env}${suffix}`, env]) };
  });
  const named = envs.slice(0, MOST_ENVIRONMENTS).flatMap((env) => NAMED.map(([title, prefix, hint, options]) => {
    const start = `${prefix}${env}/`;
    // Turns have a chart of their own, and would make one of shares flat.
    const there = names.filter((each) => each.startsWith(start) && each !== `${start}num_turns`);
    return { title: `${title} of ${env}`, hint, options, count: there.length, lines: there.slice(0, MOST_LINES).map((key) => [key, key.slice(start.length)]) };
  }));
  return [...named, ...families];
}

const REWARD = /^eval\/(.+)\/reward\/mean$/;
const PASS = /^eval\/(.+)\/(pass[@^]\d+)$/;

// The evaluations among metrics: environments, and for each the figures of pass@k with their intervals.
export function evaluations(names) {
  const envs = names.map((each) => each.match(REWARD)?.[1]).filter(Boolean);
  const passes = envs.map((env) => [env, names.map((each) => each.match(PASS)).filter((match) => match?.[1] === env).map((match) => match[2])
    .sort((a, b) => Number(a.slice(5)) - Number(b.slice(5)))]).filter(([, figures]) => figures.length);
  return { envs, passes };
}

export function withInterval(curves, name) {
  const [low, high] = ["low", "high"].map((side) => new Map(curves[`${name}/${side}`] || []));
  return (curves[name] || []).map(([step, value]) => (low.has(step) && high.has(step) ? [step, value, low.get(step), high.get(step)] : [step, value]));
}

function drawnFamily(family, curves, axes) {
  const left = family.count - family.lines.length;
  const note = left > 0 ? `${left} more are not drawn: millrace run export has them` : "";
  return chart(family.title, family.lines.map(([key, name]) => ({ name, points: curves[key] || [] })), { hint: family.hint, note, axes, ...family.options });
}

async function inParts(name, wanted, params, signal) {
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
  const found = await Promise.all(parts.map((each) => get(`${of(name)}/metrics`, { names: each.join(","), points: POINTS, ...params }, signal)));
  return Object.assign({}, ...found.map((each) => each.curves));
}

// Versions that were due and not evaluated, in words.
async function skipped(name, envs, curves, signal) {
  if (!envs.some((env) => (curves[`eval/${env}/num_skipped`] || []).some((point) => point[1] > 0))) return "";
  const { events } = await get(`${of(name)}/events`, { kinds: "eval_completed", size: 500 }, signal);
  const byEnv = {};
  for (const { body } of events.reverse()) if ((body.skipped || []).length) (byEnv[body.env] ||= []).push(...body.skipped);
  const said = Object.entries(byEnv).map(([env, versions]) => `${env}: ${versions.slice(0, 10).map((each) => `v${each}`).join(", ")}${versions.length > 10 ? `, … (${versions.length} in all)` : ""}`);
  return said.length ? `not evaluated: ${said.join("; ")}` : "";
}

// Of a part that is zoomed in on, every step is asked for, as far as there is room.
function steps(axes) {
  if (!view.range) return {};
  const [low, high] = view.range;
  if (view.x === "step") return { first: Math.max(0, Math.floor(low) - 1), last: Math.max(0, Math.ceil(high) + 1) };
  const column = view.x === "time" ? 1 : 2;
  const inside = [...(axes?.values() || [])].filter((row) => row[column] >= low && row[column] <= high).map((row) => row[0]);
  return inside.length ? { first: Math.max(0, Math.min(...inside) - 1), last: Math.max(...inside) + 1 } : {};
}

export async function curves(page, name, place, memory) {
  const { run } = memory;
  const range = JSON.stringify(view.range);
  const isNewRange = memory.range !== undefined && memory.range !== range;
  if (memory.step === run.step && !memory.isGrowing && !isNewRange && place.childElementCount) return;
  if (place.querySelector(".brush")) return; // somebody is drawing on one
  memory.range = range;
  const params = steps(memory.axes);
  const fixed = Object.values(CHARTS).flat().flatMap(([, each]) => each);
  const [found, all] = await Promise.all([
    get(`${of(name)}/metrics`, { names: [...fixed, "reward/mean", "batch/off_policy_level/mean"].join(","), spread: 1, axes: 1, points: POINTS, ...params }, page.signal),
    memory.names ? null : get(`${of(name)}/metrics`, { names: "" }, page.signal),
  ]);
  memory.names = all ? all.names : memory.names;
  const evals = evaluations(found.names);
  const families = ofEnvironments(found.names);
  const wanted = [...evals.envs.flatMap((env) => [`eval/${env}/reward/mean`, `eval/${env}/num_skipped`]),
    ...evals.passes.flatMap(([env, figures]) => figures.flatMap((each) => [`eval/${env}/${each}`, `eval/${env}/${each}/low`, `eval/${env}/${each}/high`])),
    ...families.flatMap((family) => family.lines.map(([key]) => key))];
  const more = await inParts(name, wanted, params, page.signal);
  const missed = await skipped(name, evals.envs, more, page.signal);
  if (memory.range !== JSON.stringify(view.range)) return; // zoomed meanwhile: the answer to that comes
  trouble("store", found.stale || "");
  memory.step = run.step;
  memory.isGrowing = found.index.is_growing;
  memory.axes = new Map(found.axes.map((row) => [row[0], row]));
  memory.last = lastOf(found.curves, more, evals.envs);
  draw(place, { found, more, evals, families, missed, axes: memory.axes });
}

function lastOf(curves, more, envs) {
  const last = (points) => points?.[points.length - 1];
  const rewards = envs.map((env) => [env, last(more[`eval/${env}/reward/mean`])]).filter(([, point]) => point);
  const [rate, stale] = ["perf/throughput", "batch/off_policy_level/mean"].map((name) => last(curves[name])?.[1]);
  return {
    evaluation: rewards.length ? rewards.map(([env, [version, value]]) => `${rewards.length > 1 ? `${env} ` : ""}${number(value)} (v${version})`).join(", ") : "–",
    rate: rate === undefined ? "–" : compact(rate), staleness: stale === undefined ? "–" : number(stale, 1),
  };
}

function draw(place, { found, more, evals, families, missed, axes }) {
  const spread = found.spread || {};
  const rewards = Object.keys(spread).filter((each) => each.startsWith("reward/")).sort(); // as the evaluations: one colour an environment
  const plain = (section) => CHARTS[section].map(([title, each, hint, options]) => chart(title, each.filter((key) => found.curves[key]).map((key) => ({ name: label(key, each), points: found.curves[key] })), { hint, axes, ...options }));
  const first = [
    chart("Reward by environment", rewards.length ? rewards.map((each) => ({ name: each.slice(7), points: spread[each] })) : [{ name: "all", points: found.curves["reward/mean"] || [] }], { hint: "mean, with the tenth and the ninetieth percentile", axes }),
    chart("Evaluations", evals.envs.map((env) => ({ name: env, points: more[`eval/${env}/reward/mean`] || [] })), { dots: true, x: "version", hint: "mean reward of held-out tasks", note: missed, axes }),
    ...plain("first"),
    chart("Sampled tokens", [{ name: "tokens", points: spread["length/sampled"] || [] }], { zero: true, hint: "of a rollout, with the tenth and the ninetieth percentile", axes }),
  ];
  const passes = evals.passes.flatMap(([env, figures]) => [["pass@", "at least one of k rollouts passes, with its 95 % interval"], ["pass^", "all of k rollouts pass"]].map(([kind, hint]) => chart(`${kind}k of ${env}`,
    figures.filter((each) => each.startsWith(kind)).map((each) => ({ name: each, points: withInterval(more, `eval/${env}/${each}`) })), { dots: true, named: true, x: "version", hint, axes })));
  const rollouts = [
    ...passes, ...families.map((family) => drawnFamily(family, more, axes)),
    chart("Share of rollouts", [["trained on", "rollouts/trained_share"], ["failed", "rollouts/failed_share"], ["cut off", "rollouts/truncated_share"]].map(([name, key]) => ({ name, points: spread[key] || [] })), { share: true, axes }),
    chart("Staleness", [{ name: "steps", points: spread.staleness || [] }], { hint: "step minus the oldest version of a rollout's tokens", zero: true, axes }),
  ];
  const sections = [["", first], ["Rewards and rollouts", rollouts], ["Learning", plain("Learning")], ["Time", [idle(found.curves, axes), ...plain("Time")]]]
    .map(([title, charts]) => [title, charts.filter((each) => each.querySelector("svg"))]).filter(([, charts]) => charts.length);
  const note = found.index.batches < found.index.known_batches ? h("p", { class: "note" }, `The index has ${found.index.batches} of ${found.index.known_batches} batches; curves of single rollouts grow with it.`) : null;
  fill(place, note, sections.map(([title, charts]) => [title ? h("h2", { class: "section" }, title) : null, h("div", { class: "charts" }, charts)]),
    sections.length ? null : h("p", { class: "none" }, "No step is done yet."));
}

const label = (key, all) => (all.length > 1 ? key.replace(/^(time|policy|is_masked|ratio|advantage|staleness)[/_]/, "").replace(/\/mean$/, "").replaceAll("_", " ") : key);

function idle(found, axes) {
  const waits = new Map((found["time/wait_for_batch"] || []).map(([step, value]) => [step, value]));
  const points = (found["time/step"] || []).filter(([step, value]) => waits.has(step) && value > 0).map(([step, value]) => [step, Math.min(1, waits.get(step) / value)]);
  return chart("Trainer waits", [{ name: "share of a step", points }], { share: true, hint: "share of a step in which the trainer waits for its batch", axes });
}
