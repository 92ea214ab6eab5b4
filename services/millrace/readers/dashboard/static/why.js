// Why a run is where it is: a line while all is well, open where it is stuck. Each wait is told once: in the chain, or below it.
import { fill, h, seconds } from "./dom.js";
import { short, where } from "./workers.js";

const MOST = 12;
const STUCK = ["overdue", "silent", "missing", "storage"];

export function drawWhy(place, run) {
  if (run.has_ended) {
    fill(place);
    return;
  }
  const chain = (run.why.chain || []).slice(0, MOST);
  const told = new Set(chain.map((each) => `${each.name} ${each.does}`));
  const waits = run.why.waits.filter((wait) => !told.has(`${wait.owner} waits for ${wait.reason}`)).slice(0, MOST);
  const isStuck = stuck(run, chain);
  const before = place.querySelector("details");
  // Drawn again every few seconds: what somebody opened or folded stays so, until the run gets stuck or goes on.
  const isOpen = before && before.dataset.stuck === String(isStuck) ? before.open : isStuck;
  const list = waits.length ? h("ul", { class: "chain", "aria-label": "Other waits" }, waits.map((wait) => h("li", { title: where(`${wait.owner} ${wait.reason} ${wait.waits_on}`) },
    h("b", {}, short(wait.owner)), h("span", { class: "arrow" }, `waits ${seconds(wait.age_seconds)} for`), h("span", { dir: "auto" }, short(wait.reason)),
    wait.waits_on ? [h("span", { class: "arrow" }, "←"), h("b", {}, short(wait.waits_on))] : null))) : null;
  fill(place, h("details", { class: `why-line${isStuck ? " warned" : ""}`, open: isOpen, "data-stuck": String(isStuck) },
    h("summary", {}, h("b", {}, isStuck ? "Stuck: " : "Now: "), headline(run, chain)),
    chain.length > 1 ? h("ol", { class: "why", "aria-label": "Who waits for whom, from the first that waits to what is waited for" }, chain.map(box)) : null, list));
}

// The one thing to know: what is stuck, else what the run does.
function headline(run, chain) {
  const each = chain.find((found) => STUCK.includes(found.state)) || chain[0];
  if (!each) return short(run.why.summary);
  const isStuck = STUCK.includes(each.state);
  const age = each.age_seconds ? `, ${seconds(each.age_seconds)}${each.deadline_seconds ? ` of ${seconds(each.deadline_seconds)}` : ""}` : "";
  return h("span", { dir: "auto" }, isStuck && chain.length > 1 ? `${short(each.name)} (${WORDS[each.state]}${age})` : `${short(each.name)} ${short(each.does)}${age}`);
}

function stuck(run, chain) {
  if (chain.some((each) => STUCK.includes(each.state))) return true;
  if (run.why.waits.some((wait) => wait.deadline_seconds > 0 && wait.age_seconds > wait.deadline_seconds)) return true;
  return run.state === "RUNNING" && !run.held_by.length;
}

const WORDS = { waits: "waits", overdue: "overdue", works: "at work", silent: "silent", missing: "missing", storage: "no answer", end: "waited for" };

function box(each) {
  const limit = each.deadline_seconds ? ` of ${seconds(each.deadline_seconds)}` : "";
  return h("li", { class: `why-box why-${each.state in WORDS ? each.state : "end"}`, title: where(`${each.name} ${each.does}`) },
    h("span", { class: "why-state" }, WORDS[each.state] || each.state, each.age_seconds ? ` ${seconds(each.age_seconds)}${limit}` : ""),
    h("b", {}, short(each.name)), h("span", { dir: "auto" }, short(each.does)));
}
