// From a sample to the policies that made it and what came of it; from a version in both directions.
import { get, of, trouble } from "./api.js";
import { bytes, fill, h, link, moment, number, panel, visible } from "./dom.js";
import { tabs } from "./page_run.js";
import { outcome } from "./page_samples.js";

export async function lineagePage(page, run) {
  const base = `/runs/${encodeURIComponent(run)}`;
  const asked = new URLSearchParams(location.search);
  const about = await get(of(run), {}, page.signal);
  const form = h("form", { class: "tools", onsubmit: (event) => {
    event.preventDefault();
    const value = event.target.elements[0].value.trim();
    page.go(value.includes("-") ? `${base}/lineage?sample=${encodeURIComponent(value)}` : `${base}/lineage?version=${encodeURIComponent(value)}`);
  } }, h("input", { placeholder: "a version, or the id of a sample", "aria-label": "Version or sample", value: asked.get("sample") || asked.get("version") || "" }), h("button", {}, "Show"),
  h("span", { class: "note" }, `versions 0 to ${about.version}`));
  const params = asked.get("sample") ? { sample: asked.get("sample") } : { version: asked.get("version") ?? String(about.version) };
  const body = h("div", {});
  fill(page.main, tabs(run, "Lineage"), form, body);
  try {
    const found = await get(`${of(run)}/lineage`, params, page.signal);
    trouble("store", found.stale || "");
    fill(body, params.sample ? ofSample(base, found) : ofVersion(base, found));
  } catch (error) {
    if (error.reason === "INDEX_GROWING") throw error;
    if (error.name !== "AbortError") fill(body, h("p", { class: "panel failed" }, `${error.message}. ${error.remedy}`));
  }
}

const arrow = (words) => h("div", { class: "then" }, h("span", {}, words));

function ofSample(base, found) {
  const made = found.made_by.length ? h("div", { class: "side" }, found.made_by.map((each) => versionBox(base, each))) : panel("No policy", h("p", {}, "Nothing of it was sampled by a policy of this run."));
  return h("div", { class: "flow" }, made, arrow("sampled its tokens"), sampleBox(base, found.sample, found), arrow(found.is_trained ? "is part of" : "was resolved, and not trained on, by"), stepBox(base, found.step),
    found.became ? [arrow("made"), versionBox(base, found.became)] : null);
}

function ofVersion(base, found) {
  const before = found.made_from ? [stepBox(base, found.made_from), arrow("made")] : null;
  const here = found.version.version;
  const few = found.made.samples.map((each) => smallSample(base, each));
  return h("div", { class: "flow" }, before, versionBox(base, found.version, true), arrow("sampled"),
    panel(`${number(found.made.num_samples)} samples with tokens of v${here}`, few.length ? h("ul", { class: "few" }, few) : h("p", { class: "none" }, "none is resolved yet"),
      found.made.num_samples > few.length ? link(`${base}/samples?version=${here}`, "all of them") : null,
      found.made.steps.length ? h("p", {}, "Steps that trained on them: ", found.made.steps.slice(0, 24).map((step) => [link(`${base}/lineage?version=${step + 1}`, String(step + 1)), " "])) : null),
    arrow(`step ${here + 1} made`), found.next.is_known ? versionBox(base, found.next) : panel("The next version", h("p", { class: "none" }, "is not there")));
}

function versionBox(base, each, isHere) {
  const facts = [
    each.published ? `published ${moment(each.published)}, ${bytes(each.size_bytes || 0)} (${each.codec || "?"})` : each.version === 0 ? "the start policy" : "not published",
    ...each.served.map((served) => `served by ${served.replica} from ${moment(served.time)}${served.proof ? ` (${served.proof})` : ""}`),
    each.tokens ? `made ${number(each.tokens)} of its tokens` : null,
    each.batch ? link(`${base}/samples?step=${each.batch.step}`, `made from batch ${each.batch.step}`) : null,
    each.checkpoint ? `checkpoint of step ${each.checkpoint.step}, ${bytes(each.checkpoint.size_bytes || 0)}` : null,
  ].filter(Boolean);
  return h("section", { class: `panel version${isHere ? " here" : ""}` }, h("h2", {}, link(`${base}/lineage?version=${each.version}`, `Policy v${each.version}`)),
    h("ul", {}, facts.map((fact) => h("li", {}, fact))), each.digest ? h("p", {}, "digest ", h("code", {}, each.digest.slice(0, 16))) : null);
}

function stepBox(base, each) {
  const dropped = Object.entries(each.dropped_groups || {}).map(([why, count]) => `${count} ${visible(why)}`).join(", ");
  return panel(`Step ${each.step + 1}, batch ${each.step}`, each.problem ? h("p", { class: "problem" }, each.problem) : null, h("ul", {},
    each.trained === null ? h("li", {}, "its batch is not there") : h("li", {}, link(`${base}/samples?step=${each.step}`, `${number(each.rollouts)} rollouts`), `, ${number(each.trained)} trained on, reward ${number(each.reward)}`),
    dropped ? h("li", {}, `groups dropped: ${dropped}`) : null,
    each.tokens ? h("li", {}, `${number(each.tokens)} tokens, epoch ${each.epoch}`) : null),
  each.key ? h("p", {}, h("code", { title: each.key }, `…/${each.key.split("/").slice(-2).join("/")}`)) : null);
}

function sampleBox(base, each, found) {
  return h("section", { class: "panel here" }, h("h2", {}, link(`${base}/samples/${each.id}`, `Sample ${each.id}`)), h("p", {}, "reward ", number(each.reward), `, advantage ${number(each.advantage)} `, outcome({ ...each, is_trained: found.is_trained })),
    h("p", { class: "said", dir: "auto" }, visible(each.prompt)), h("p", { class: "said reply", dir: "auto" }, visible(each.completion)));
}

function smallSample(base, each) {
  return h("li", {}, link(`${base}/lineage?sample=${each.id}`, each.id), " ", number(each.reward), " ", h("span", { class: "faint", dir: "auto" }, visible(each.completion).slice(0, 60)));
}
