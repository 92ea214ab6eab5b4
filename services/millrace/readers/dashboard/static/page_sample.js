// One sample: the conversation, what came of it, its group, and its tokens.
import { get, of, trouble } from "./api.js";
import { message } from "./conversation.js";
import { fill, h, heads, link, number, panel, seconds, table, text, visible } from "./dom.js";
import { tabs } from "./page_run.js";
import { advantage, scale } from "./advantage.js";
import { outcome, version } from "./page_samples.js";
import { sideBySide } from "./side_by_side.js";
import { tokensPanel } from "./tokens.js";
import { worker } from "./workers.js";

export async function samplePage(page, run, id) {
  const found = await get(`${of(run)}/samples/${encodeURIComponent(id)}`, {}, page.signal);
  trouble("store", found.stale || "");
  const group = found.group.map((each) => each.id);
  const at = group.indexOf(found.id);
  const base = `/runs/${encodeURIComponent(run)}`;
  const isSide = new URLSearchParams(location.search).has("side");
  const to = (index) => () => group[index] && page.go(`${base}/samples/${group[index]}${isSide ? "?side=1" : ""}`);
  const other = `${base}/samples/${found.id}${isSide ? "" : "?side=1"}`;
  page.keys = { j: to(at + 1), k: to(at - 1), g: () => page.go(other) };
  const facts = [
    ["reward", number(found.reward)], ["advantage", number(found.advantage)], ["what came of it", outcome(found)], ["policy", link(`${base}/lineage?sample=${found.id}`, version(found))],
    ["batch", link(`${base}/samples?step=${found.step}`, String(found.step))], ["environment", visible(found.env)], ...(found.eval_id ? [["evaluation", visible(found.eval_id)]] : []), ["task", visible(found.task_id) || String(found.task_index)],
    ["stopped by", visible(found.stop) || "–"], ["tokens", `${number(found.sampled)} of ${number(found.tokens)}`], ["turns", number(found.turns)],
    ["time", `${seconds(found.seconds)}, ${seconds(found.model_seconds)} in the engine`], ["temperature", number(found.temperature, 2)], ["attempt", String(found.attempt)], ["env-server", worker(found.env_server)],
  ];
  fill(page.main, tabs(run, "Samples"),
    h("div", { class: "title" }, h("h1", {}, `Sample ${found.id}`), h("span", { class: "faint" }, `member ${found.member + 1} of ${found.group_size}`), h("span", { class: "grow" }),
      h("button", { type: "button", disabled: at < 1, onclick: to(at - 1) }, "← Member"), " ", h("button", { type: "button", disabled: at < 0 || at + 1 >= group.length, onclick: to(at + 1) }, "Member →"), " ",
      group.length > 1 ? [link(other, isSide ? "This one alone" : "Side by side"), " "] : null, link(`${base}/lineage?sample=${found.id}`, "Lineage")),
    found.error ? h("div", { class: "panel failed" }, h("b", {}, visible(found.error.type)), text(found.error.message), found.error.frames ? h("pre", {}, visible(found.error.frames)) : null) : null,
    h("dl", { class: "facts" }, facts.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)))),
    isSide ? await sideBySide(page, run, found) : null,
    h("div", { class: "columns" },
      h("div", {}, isSide ? groupPanel(run, found) : panel("Conversation", conversation(found)), found.samples.length ? tokensPanel(page, run, found) : null),
      h("div", {}, parts(found), isSide ? null : groupPanel(run, found))));
}

// What the reply is compared with stands beside the last of it.
function conversation(found) {
  const shown = found.messages.map(message);
  const answer = found.given?.answer;
  const last = found.messages.findLastIndex((each) => each.role === "assistant");
  if (answer === undefined || answer === null || last < 0) return h("div", { class: "chat" }, shown);
  const beside = h("div", { class: "message expected" }, h("div", { class: "role" }, "answer"), text(typeof answer === "string" ? answer : JSON.stringify(answer)));
  return h("div", { class: "chat" }, shown.slice(0, last), h("div", { class: "pair" }, shown[last], beside), shown.slice(last + 1));
}

function parts(found) {
  const rows = Object.entries(found.metrics).map(([name, value]) => h("tr", {}, h("td", {}, visible(name)), h("td", { class: "num" }, number(value))));
  const traces = found.traces.map((each) => h("tr", {}, h("td", {}, `agent ${visible(each.agent)}`), h("td", { class: "num" }, number(each.reward))));
  const given = Object.entries(found.given || {}).map(([name, value]) => h("tr", {}, h("td", {}, visible(name)), h("td", {}, text(typeof value === "string" ? value : JSON.stringify(value)))));
  const scored = given.length ? table(heads("Scored with", ""), given, { class: "rows" }) : null;
  return panel("Reward", scored, table(heads("Part", "Value#"), [h("tr", { class: "sum" }, h("td", {}, "reward"), h("td", { class: "num" }, number(found.reward))), traces, rows], { class: "rows" }),
    h("details", {}, h("summary", {}, "sampling parameters"), h("pre", {}, visible(found.sampling))));
}

function groupPanel(run, found) {
  const base = `/runs/${encodeURIComponent(run)}/samples/`;
  const largest = Math.max(0, ...found.group.map((each) => Math.abs(each.advantage ?? 0)));
  const rows = found.group.map((each) => h("tr", { class: each.id === found.id ? "here" : "" },
    h("td", { class: "num" }, link(base + each.id, String(each.member + 1))), h("td", { class: "num" }, number(each.reward)), advantage(each.advantage, largest),
    h("td", {}, each.is_trained ? "" : outcome(each)), each.error ? h("td", { class: "said problem", dir: "auto", title: visible(each.error) }, visible(each.error)) : h("td", { class: "said", dir: "auto", title: visible(each.completion) }, visible(each.completion))));
  return panel(`Its group (${found.group.length})`, h("p", { class: "note" }, scale(largest)), table(heads("#", "Reward#", "Advantage#", "", "Reply"), rows, { class: "rows group" }));
}
