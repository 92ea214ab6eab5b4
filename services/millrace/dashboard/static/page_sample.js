// One sample: the conversation, what came of it, its group, and its tokens.
import { get, of, trouble } from "./api.js";
import { fill, h, heads, link, number, panel, seconds, table, text, visible } from "./dom.js";
import { tabs } from "./page_run.js";
import { outcome, reward, version } from "./page_samples.js";
import { tokensPanel } from "./tokens.js";

export async function samplePage(page, run, id) {
  const found = await get(`${of(run)}/samples/${encodeURIComponent(id)}`, {}, page.signal);
  trouble("store", found.stale || "");
  const group = found.group.map((each) => each.id);
  const at = group.indexOf(found.id);
  const base = `/runs/${encodeURIComponent(run)}`;
  const to = (index) => () => group[index] && page.go(`${base}/samples/${group[index]}`);
  page.keys = { j: to(at + 1), k: to(at - 1) };
  const facts = [
    ["reward", reward(found.reward)], ["advantage", number(found.advantage)], ["what came of it", outcome(found)], ["policy", link(`${base}/lineage?sample=${found.id}`, version(found))],
    ["step", link(`${base}/samples?step=${found.step}`, String(found.step))], ["environment", visible(found.env)], ["task", visible(found.task_id) || String(found.task_index)],
    ["stopped by", visible(found.stop) || "–"], ["tokens", `${number(found.sampled)} of ${number(found.tokens)}`], ["turns", number(found.turns)],
    ["time", `${seconds(found.seconds)}, ${seconds(found.model_seconds)} in the engine`], ["temperature", number(found.temperature, 2)], ["attempt", String(found.attempt)], ["env-server", visible(found.env_server)],
  ];
  fill(page.main, tabs(run, "Samples"),
    h("div", { class: "title" }, h("h1", {}, `Sample ${found.id}`), h("span", { class: "faint" }, `member ${found.member + 1} of ${found.group_size}`), h("span", { class: "grow" }),
      h("button", { type: "button", disabled: at < 1, onclick: to(at - 1) }, "← Member"), " ", h("button", { type: "button", disabled: at < 0 || at + 1 >= group.length, onclick: to(at + 1) }, "Member →"), " ",
      link(`${base}/lineage?sample=${found.id}`, "Lineage")),
    found.error ? h("div", { class: "panel failed" }, h("b", {}, visible(found.error.type)), text(found.error.message), found.error.frames ? h("pre", {}, visible(found.error.frames)) : null) : null,
    h("dl", { class: "facts" }, facts.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)))),
    h("div", { class: "columns" },
      panel("Conversation", h("div", { class: "chat" }, found.messages.map(message))),
      h("div", {}, parts(found), groupPanel(run, found))),
    found.samples.length ? tokensPanel(page, run, found) : null);
}

function message(said) {
  const role = String(said.role || "?");
  const kind = ["user", "assistant", "system", "tool", "note"].includes(role) ? role : "other";
  const body = [];
  if (said.reasoning_content || said.reasoning) body.push(fold("reasoning", said.reasoning_content || said.reasoning));
  const pieces = Array.isArray(said.content) ? said.content : [said.content];
  for (const piece of pieces) {
    if (piece === null || piece === undefined) continue;
    if (typeof piece === "object") body.push(piece.type === "text" || piece.text ? spoken(String(piece.text)) : fold(String(piece.type || "part"), JSON.stringify(piece, null, 1)));
    else if (kind === "system" || kind === "tool") body.push(fold(kind, String(piece)));
    else body.push(...spoken(String(piece)));
  }
  for (const call of Array.isArray(said.tool_calls) ? said.tool_calls : []) {
    const asked = call?.function || call || {};
    body.push(fold(`calls ${asked.name || "?"}`, typeof asked.arguments === "string" ? asked.arguments : JSON.stringify(asked.arguments ?? {}, null, 1)));
  }
  return h("div", { class: `message ${kind}` }, h("div", { class: "role" }, visible(role).slice(0, 40)), body.length ? body : h("div", { class: "faint" }, "(nothing)"));
}

// What stands between <think> and </think> is folded.
function spoken(said) {
  const begin = said.indexOf("<think>"); // no pattern: one goes back for each of thousands without an end
  const end = begin < 0 ? -1 : said.indexOf("</think>", begin);
  if (end < 0) return [text(said)];
  return [begin ? text(said.slice(0, begin)) : null, fold("reasoning", said.slice(begin + 7, end)), text(said.slice(end + 8))];
}

function fold(name, content) {
  const whole = String(content);
  const isOpen = whole.length < 300 && !["reasoning"].includes(name);
  return h("details", { open: isOpen }, h("summary", {}, `${visible(name).slice(0, 80)} (${number(whole.length)} characters)`), text(whole));
}

function parts(found) {
  const rows = Object.entries(found.metrics).map(([name, value]) => h("tr", {}, h("td", {}, visible(name)), h("td", { class: "num" }, number(value))));
  const traces = found.traces.map((each) => h("tr", {}, h("td", {}, `agent ${visible(each.agent)}`), h("td", { class: "num" }, number(each.reward))));
  return panel("Reward", table(heads("Part", "Value#"), [h("tr", { class: "sum" }, h("td", {}, "reward"), h("td", { class: "num" }, number(found.reward))), traces, rows], { class: "rows" }),
    h("details", {}, h("summary", {}, "sampling parameters"), h("pre", {}, visible(found.sampling))));
}

function groupPanel(run, found) {
  const base = `/runs/${encodeURIComponent(run)}/samples/`;
  const rows = found.group.map((each) => h("tr", { class: each.id === found.id ? "here" : "" },
    h("td", { class: "num" }, link(base + each.id, String(each.member + 1))), h("td", { class: "num" }, reward(each.reward)), h("td", { class: "num" }, number(each.advantage)),
    h("td", {}, each.is_trained ? "" : outcome(each)), h("td", { class: "said", dir: "auto" }, visible(each.completion))));
  return panel(`Its group (${found.group.length})`, table(heads("#", "Reward#", "Advantage#", "", "Reply"), rows, { class: "rows group" }));
}
