// Short names of workers, such as trainer-1: where one runs is told when a pointer is over it.
import { bytes, fill, h, heads, number, percent, table, visible } from "./dom.js";

const ID = /\b(trainer|env-server|inference|orchestrator)-([\w.-]*?)-\d+-[0-9a-f]{8}\b/g;
const known = new Map();
const gone = new Map();

// Take what is known of the workers of a run, and the names of all that are here, by id.
export function know(workers, names) {
  for (const [id, name] of Object.entries(names || {})) known.set(id, { id, name });
  for (const each of workers || []) known.set(each.id, each);
  const taken = new Set([...known.values()].map((each) => each.name));
  for (const [id, name] of gone) if (taken.has(name)) gone.delete(id);
}

// Number those in texts who are not here any more, in the order in which they come, by what those who are here leave free.
export function numberGone(texts) {
  const taken = new Set([...known.values()].map((each) => each.name));
  gone.clear();
  for (const [id, service] of texts.flatMap((text) => [...String(text).matchAll(ID)])) {
    if (known.has(id) || gone.has(id)) continue;
    let at = 1;
    while (taken.has(`${service}-${at}`)) at += 1;
    gone.set(id, `${service}-${at}`);
    taken.add(`${service}-${at}`);
  }
}

// A text as plain words, with the names of workers shortened; one that is gone and was not numbered has what tells it from others.
export function short(text) {
  return visible(String(text)).replace(ID, (id, service) => known.get(id)?.name || gone.get(id) || `${service} ${id.slice(-8, -4)}`);
}

export function where(text) {
  const found = [...String(text).matchAll(ID)].map(([id, , host]) => `${known.get(id)?.name || "not here any more"}: ${id}, on ${host}`);
  return found.length ? found.join("\n") : null;
}

export function worker(id) {
  return h("span", { class: "worker", title: where(id) || id }, short(id));
}

export function drawWorkers(place, run) {
  const workers = run.workers || [];
  if (!workers.length) {
    fill(place, h("p", { class: "none" }, run.has_ended ? "The run has ended: it holds no workers." : "No worker is here."));
    return;
  }
  const rows = workers.flatMap((each) => (each.gpus.length ? each.gpus : [null]).map((gpu, at) => h("tr", {},
    h("td", { class: "name" }, at ? "" : worker(each.id), at ? null : h("small", {}, each.host)),
    h("td", {}, at ? "" : h("span", { class: `tag ${each.state === "silent" ? "bad" : each.state === "leaving" ? "warn" : "ok"}` }, each.state)),
    h("td", {}, at ? "" : each.does),
    h("td", { title: gpu?.id }, gpu ? visible(`${gpu.name} ${gpu.index}`) : "–"),
    h("td", { class: "num" }, share(gpu?.utilization)),
    h("td", { class: "num" }, gpu?.memory_total ? [meter(gpu.memory_used / gpu.memory_total), ` ${bytes(gpu.memory_used)} of ${bytes(gpu.memory_total)}`] : "–"),
    h("td", { class: "num" }, gpu?.power_watts === null || gpu?.power_watts === undefined ? "–" : `${number(Math.round(gpu.power_watts))} W`))));
  fill(place, table(heads("Worker", "State", "Does", "GPU", "Utilization#", "Memory#", "Power#"), rows, { class: "rows workers" }),
    h("p", { class: "note" }, "GPUs are those that the worker may use, as NVIDIA's driver says; of a trainer of several machines, those of rank 0's."));
}

const meter = (value) => h("progress", { max: 1, value, "aria-label": "memory used" });
const share = (value) => (value === null || value === undefined ? "–" : [meter(value), ` ${percent(value)}`]);

// All GPUs of a run in one fact; null where there is none.
export function gpuFact(run) {
  const all = (run.workers || []).flatMap((each) => each.gpus);
  if (!all.length) return null;
  const busy = all.map((each) => each.utilization).filter((each) => each !== null && each !== undefined);
  const used = all.reduce((sum, each) => sum + (each.memory_used || 0), 0);
  return `${all.length}: ${busy.length ? percent(busy.reduce((sum, each) => sum + each, 0) / busy.length) : "–"}, ${bytes(used)}`;
}
