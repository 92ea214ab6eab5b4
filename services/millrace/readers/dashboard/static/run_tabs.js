// The tables of one run: its config, its events, its checkpoints.
import { get, of, trouble } from "./api.js";
import { bytes, fill, h, heads, link, moment, table } from "./dom.js";
import { words } from "./event_words.js";
import { short, where, worker } from "./workers.js";

export function config(place, memory) {
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

const KINDS = [["", "all events"], ["warning,rollouts_failed", "warnings"], ["state_changed,training_resumed", "states"], ["step_completed", "steps"], ["policy_published,policy_served", "policies"], ["eval_completed,score_completed", "evaluations"], ["checkpoint_saved", "checkpoints"], ["wait_reported", "waits"]];

export async function events(page, name, place, memory) {
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
    h("td", { class: "when" }, moment(event.time)), h("td", {}, worker(event.writer)), h("td", {}, event.kind.replaceAll("_", " ")), h("td", { class: "wide", dir: "auto", title: where(words(event)) }, short(words(event)))));
  const more = found.has_more ? h("button", { type: "button", onclick: () => {
    memory.size = Math.min(500, (memory.size || 100) + 200);
    events(page, name, place, memory).catch((error) => trouble("tab", error.message));
  } }, "More") : null;
  fill(place, h("div", { class: "tools" }, choose), rows.length ? table(heads("Time", "Writer", "Kind", "What"), rows, { class: "rows events" }) : h("p", { class: "none" }, "No event is archived yet; that happens every ten seconds."), more);
}

export async function checkpoints(page, name, place) {
  const found = await get(`${of(name)}/checkpoints`, {}, page.signal);
  const rows = found.checkpoints.reverse().map((each) => h("tr", {},
    h("td", { class: "num" }, `v${each.step}`), h("td", {}, moment(each.time)), h("td", {}, bytes(each.size_bytes)), h("td", { class: "wide" }, h("code", {}, each.uri)),
    h("td", {}, command("Fork", `millrace run fork ${name} --step ${each.step}`), " ", command("Replay", `millrace run replay ${name} --step ${Math.max(1, each.step)}`), " ", link(`/runs/${encodeURIComponent(name)}/lineage?version=${each.step}`, "lineage"))));
  fill(place, rows.length ? table(heads("Version#", "Saved", "Size", "Where", ""), rows, { class: "rows" }) : h("p", { class: "none" }, "No checkpoint is there."));
}

function command(label, line) {
  return h("button", { type: "button", title: line, onclick: (event) => {
    const place = event.target.closest("td");
    if (!place.querySelector("pre")) place.append(h("pre", { class: "command" }, line));
  } }, label);
}
