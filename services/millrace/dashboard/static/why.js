// Why a run is where it is: the chain of waits as boxes with arrows, and below it every wait of its processes.
import { fill, h, panel, seconds, visible } from "./dom.js";

const MOST = 12;

export function drawWhy(place, run) {
  if (run.has_ended) {
    fill(place);
    return;
  }
  const isOpen = place.querySelector("details")?.open ?? true; // drawn again every few seconds: what was folded stays so
  const boxes = (run.why.chain || []).slice(0, MOST).map(box);
  const waits = run.why.waits.slice(0, MOST).map((wait) => h("li", {},
    h("b", {}, visible(wait.owner)), h("span", { class: "arrow" }, `waits ${seconds(wait.age_seconds)} for`), h("span", { dir: "auto" }, visible(wait.reason)),
    wait.waits_on ? [h("span", { class: "arrow" }, "←"), h("b", {}, visible(wait.waits_on))] : null));
  fill(place, panel("Why it is where it is",
    boxes.length ? h("ol", { class: "why", "aria-label": "Who waits for whom, from the first that waits to what is waited for" }, boxes) : null,
    h("p", { class: "summary" }, visible(run.why.summary)),
    waits.length ? h("details", { open: isOpen }, h("summary", {}, `Every wait (${run.why.waits.length})`), h("ol", { class: "chain" }, waits)) : null));
}

const WORDS = { waits: "waits", overdue: "overdue", works: "at work", silent: "silent", missing: "missing", storage: "no answer", end: "waited for" };

function box(each) {
  const limit = each.deadline_seconds ? ` of ${seconds(each.deadline_seconds)}` : "";
  return h("li", { class: `why-box why-${each.state in WORDS ? each.state : "end"}` },
    h("span", { class: "why-state" }, WORDS[each.state] || each.state, each.age_seconds ? ` ${seconds(each.age_seconds)}${limit}` : ""),
    h("b", {}, visible(each.name)), h("span", { dir: "auto" }, visible(each.does)));
}
