// The audit's answer: whether the log keeps its promises, what it breaks, what is worth knowing, and what was not seen.
import { of, post } from "./api.js";
import { bytes, fill, h, heads, number, panel, table, visible } from "./dom.js";

const reports = new Map();

// Asks once, when the tab is opened first; again only when somebody says so, because an audit reads the whole log.
export async function audit(name, place, memory) {
  if (memory.isAudited) return;
  memory.isAudited = true;
  if (reports.has(name)) {
    show(name, place, memory, reports.get(name));
    return;
  }
  fill(place, h("p", { class: "loading" }, "Reading the log and the object store… A long run takes minutes."));
  let report;
  try {
    report = await post(`${of(name)}/audit`, {});
  } catch (error) {
    fill(place, h("div", { class: "panel failed" }, h("b", {}, error.message), error.remedy ? h("p", {}, `Remedy: ${error.remedy}`) : null), again(name, place, memory));
    return;
  }
  reports.set(name, report);
  show(name, place, memory, report);
}

function show(name, place, memory, report) {
  const broken = report.violations || [];
  fill(place,
    h("p", { class: `panel verdict ${broken.length ? "failed" : "kept"}` }, h("b", {}, broken.length
      ? `${number(broken.length)} ${broken.length === 1 ? "promise is" : "promises are"} broken.` : "Every promise that was looked at is kept.")),
    h("dl", { class: "facts" }, facts(report).map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)))),
    findings("What is broken", broken), findings("Worth knowing", report.notes), findings("Not looked at", report.not_seen),
    h("p", {}, again(name, place, memory), " Every byte of every object: ", h("code", {}, `millrace run audit ${name} --deep`)));
}

function again(name, place, memory) {
  return h("button", { type: "button", onclick: () => {
    memory.isAudited = false;
    reports.delete(name);
    audit(name, place, memory);
  } }, "Audit again");
}

function facts(report) {
  const dropped = Object.entries(report.dropped || {}).map(([reason, count]) => `${reason} ${number(count)}`).join(", ");
  const epochs = Object.entries(report.epochs || {}).map(([role, count]) => `${role} ${number(count)}`).join(", ");
  return [
    ["steps", number(report.num_steps || 0)], ["groups trained", number(report.num_trained || 0)], ["dropped", dropped || "none"],
    ["open", number(report.num_open || 0)], ["rollouts", number(report.num_rollouts || 0)], ["policies", number(report.num_policies || 0)],
    ["checkpoints", number(report.num_checkpoints || 0)], ["events", number(report.num_events || 0)], ["held by (times)", epochs || "nobody yet"],
    ["bytes compared", bytes(report.num_bytes_verified || 0)], ["log", report.is_closed ? "closed" : "open"],
    ["chain hash", h("code", {}, (report.chain_hash || "–").slice(0, 16))],
  ];
}

function findings(title, found) {
  if (!found?.length) return null;
  const rows = found.map((each) => h("tr", {}, h("td", { class: "when" }, h("code", {}, each.check)), h("td", { class: "wide", dir: "auto" }, visible(each.message))));
  return panel(`${title} (${number(found.length)})`, table(heads("Check", "What, and where"), rows, { class: "rows" }));
}
