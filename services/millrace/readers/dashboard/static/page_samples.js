// The samples of a run: filters, order, pages. What is filtered stands in the address, so that it can be sent to others.
import { get, newest, of, trouble } from "./api.js";
import { append, fill, h, heads, link, number, table, visible } from "./dom.js";
import { advantage, scale } from "./advantage.js";
import { tabs } from "./page_run.js";

const SIZE = 50;
const SORTS = [["-step", "newest first"], ["step", "oldest first"], ["-reward", "highest reward"], ["reward", "lowest reward"], ["-advantage", "highest advantage"], ["advantage", "lowest advantage"], ["-sampled", "longest"], ["sampled", "shortest"], ["-seconds", "slowest"], ["-turns", "most turns"]];
const NUMBERS = [["step", "Batch"], ["version", "Version"], ["min_reward", "Reward ≥"], ["max_reward", "≤"], ["min_advantage", "Advantage ≥"], ["max_advantage", "≤"], ["min_sampled", "Tokens ≥"], ["max_sampled", "≤"], ["ordinal", "Task"]];
const CHOICES = [["outcome", "What came of it", ["trained", "dropped", "failed", "evaluated"]], ["env", "Environment", []], ["status", "Status", []], ["stop", "Stopped by", []], ["reason", "Dropped as", []]];

export async function samplesPage(page, name) {
  const base = `/runs/${encodeURIComponent(name)}/samples`;
  const asked = Object.fromEntries(new URLSearchParams(location.search));
  const body = h("div", {});
  const form = h("form", { class: "filters", onsubmit: (event) => event.preventDefault() });
  const change = (key, value) => {
    if (value) asked[key] = value;
    else delete asked[key];
    if (key !== "offset") delete asked.offset;
    const query = new URLSearchParams(asked);
    history.replaceState(null, "", query.size ? `${base}?${query}` : base);
    look().catch((error) => say(error));
  };
  const say = (error) => {
    if (error.name !== "AbortError") fill(body, h("p", { class: "panel failed" }, error.message));
  };
  let known = "";
  const ask = newest();
  const look = async () => {
    const found = await ask(get(`${of(name)}/samples`, { size: SIZE, ...asked }, page.signal));
    if (!found) return true;
    trouble("store", found.stale || "");
    const names = JSON.stringify(found.names);
    if (names !== known) drawForm(form, asked, found.names, change);
    known = names;
    drawPage(body, name, found, asked, change);
    return found.index.is_growing || !found.index.batches || !(await ended(page, name));
  };
  fill(page.main, tabs(name, "Samples"), form, body);
  drawForm(form, asked, {}, change);
  await page.every(look);
}

async function ended(page, name) {
  return (await get(of(name), {}, page.signal)).has_ended;
}

function drawForm(form, asked, names, change) {
  if (form.contains(document.activeElement) && form.childElementCount) return;
  const fields = CHOICES.map(([key, label, fixed]) => {
    const values = [...new Set([...fixed, ...(names[key] || []), ...(asked[key] ? [asked[key]] : [])])];
    const field = h("select", { onchange: (event) => change(key, event.target.value) }, h("option", { value: "" }, "any"), values.map((value) => h("option", { value }, visible(value).slice(0, 60))));
    field.value = asked[key] || "";
    return h("label", {}, label, field);
  });
  const numbers = NUMBERS.map(([key, label]) => h("label", {}, label, h("input", { type: "text", inputmode: "decimal", size: 6, value: asked[key] || "", onchange: (event) => change(key, event.target.value.trim()) })));
  const words = h("input", { type: "search", value: asked.text || "", placeholder: "in prompt, reply, answer or error", "aria-label": "Find in texts", title: "The end of the prompt, the beginning of the reply, of the answer and of an error; ASCII letters in either case", onchange: (event) => change("text", event.target.value.trim()) });
  const sort = h("select", { onchange: (event) => change("sort", event.target.value) }, SORTS.map(([value, label]) => h("option", { value }, label)));
  sort.value = asked.sort || "-step";
  fill(form, h("label", { class: "words-field" }, "Text", words), fields, numbers, h("label", {}, "Order", sort));
}

function drawPage(body, run, found, asked, change) {
  const at = found.offset;
  const to = Math.min(found.total, at + found.samples.length);
  const pager = h("div", { class: "pager" },
    h("button", { type: "button", disabled: at === 0, onclick: () => change("offset", String(Math.max(0, at - SIZE)) === "0" ? "" : String(at - SIZE)) }, "← Back"),
    h("span", {}, found.total ? `${number(at + 1)}–${number(to)} of ${number(found.total)} samples` : "no sample passes"),
    h("button", { type: "button", disabled: to >= found.total, onclick: () => change("offset", String(at + SIZE)) }, "Next →"),
    h("span", { class: "note" }, growth(found.index)));
  const columns = heads("Batch#", "Environment", "Reward#", "Advantage#", "What came of it", "Prompt", "Reply", "Answer", "Tokens#", "Turns#", "Version#", "Stopped by");
  const largest = Math.max(0, ...found.samples.map((each) => Math.abs(each.advantage ?? 0)));
  const base = `/runs/${encodeURIComponent(run)}/samples/`;
  const rows = found.samples.map((each) => h("tr", {},
    h("td", { class: "num" }, link(base + each.id, String(each.step))), h("td", {}, visible(each.env)),
    h("td", { class: "num" }, number(each.reward)), advantage(each.advantage, largest), h("td", {}, outcome(each)),
    h("td", { class: "said" }, h("a", { href: base + each.id, dir: "auto" }, visible(each.prompt) || "–")),
    each.error ? h("td", { class: "said problem", dir: "auto", title: visible(each.error) }, visible(each.error)) : h("td", { class: "said", dir: "auto", title: visible(each.completion) }, visible(each.completion)),
    h("td", { class: "said answer", dir: "auto" }, visible(each.answer) || "–"),
    h("td", { class: "num" }, number(each.sampled)), h("td", { class: "num" }, number(each.turns)), h("td", { class: "num" }, version(each)),
    h("td", {}, visible(each.stop), " ", each.is_truncated ? h("span", { class: "tag warn" }, "cut off") : null)));
  append(pager, [scale(largest)]);
  fill(body, pager, rows.length ? table(columns, rows, { class: "rows samples" }) : null, unreadable(found.index));
}

function growth(index) {
  if (index.batches < index.known_batches) return `reading batch ${index.batches} of ${index.known_batches}…`;
  return `${number(index.rollouts)} rollouts of ${number(index.batches)} batches are indexed`;
}

function unreadable(index) {
  return index.unreadable.length ? h("p", { class: "panel warned" }, `Of ${number(index.num_unreadable)} batches the rollouts cannot be read (pruned or damaged), the last: batch ${index.unreadable.at(-1).step}: ${index.unreadable.at(-1).problem}`) : null;
}

export const version = (each) => (each.version_min === null ? "–" : each.version_min === each.version_max ? `v${each.version_min}` : `v${each.version_min}–${each.version_max}`);

export function outcome(each) {
  if (each.is_trained) return h("span", { class: "tag ok" }, "trained");
  if (each.status !== "ok") return h("span", { class: "tag bad" }, visible(each.status));
  if (each.purpose !== "train") return h("span", { class: "tag" }, each.purpose);
  return h("span", { class: "tag warn" }, `dropped${each.reason ? `: ${visible(each.reason)}` : ""}`);
}
