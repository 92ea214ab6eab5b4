// Tokens coloured by what the log knows of each: advantage, log-prob, trainer − engine, policy version, loss mask.
import { scale, shade } from "./advantage.js";
import { get, newest, of } from "./api.js";
import { fill, h, link, number, panel, visible } from "./dom.js";

const SIZE = 1024;
const VIEWS = [["advantage", "advantage"], ["logprob", "log-prob"], ["difference", "trainer − engine"], ["version", "policy version"], ["mask", "loss mask"]];

export function tokensPanel(page, run, found) {
  let [part, offset, view, data] = [0, 0, "advantage", null];
  const body = h("div", { class: "tokens" });
  const note = h("p", { class: "note" });
  const readout = h("p", { class: "readout", role: "status" }, "Point at a token, or move through them with Tab.");
  const pager = h("div", { class: "pager" });
  const draw = () => data && drawTokens({ body, note, readout, pager, run, group: found.group }, data, view, (next) => {
    offset = next;
    load();
  });
  const ask = newest();
  const load = async () => {
    try {
      const answer = await ask(get(`${of(run)}/samples/${encodeURIComponent(found.id)}/tokens`, { part, offset, size: SIZE }, page.signal));
      if (!answer) return;
      data = answer;
      draw();
    } catch (error) {
      if (error.name !== "AbortError") fill(body, h("p", { class: "none" }, error.message));
    }
  };
  const views = h("select", { "aria-label": "Colour tokens by", onchange: (event) => {
    view = event.target.value;
    draw();
  } }, VIEWS.map(([value, label]) => h("option", { value }, `by ${label}`)));
  const which = found.samples.length > 1 ? h("select", { "aria-label": "Token sequence", onchange: (event) => {
    [part, offset] = [Number(event.target.value), 0];
    load();
  } }, found.samples.map((each, at) => h("option", { value: at }, `sequence ${at + 1}: ${number(each.tokens)} tokens`))) : null;
  load();
  return panel("Tokens", h("div", { class: "tools" }, views, which, pager), note, body, readout);
}

function drawTokens({ body, note, readout, pager, run, group }, data, view, turn) {
  const largest = [...(data.advantages || []), ...group.map((each) => each.advantage)].reduce((most, each) => Math.max(most, Math.abs(each ?? 0)), 1e-6);
  fill(note, NOTES[view](data, largest, run));
  const nodes = data.ids.map((id, at) => {
    const piece = data.texts[at];
    const shown = piece === null ? `⟨${id}⟩` : visible(piece).replace(/\n/g, "⏎").replace(/ /g, "·") || "∅";
    const node = h("span", { class: `token${data.mask[at] ? "" : " off"}`, tabindex: data.mask[at] ? "0" : null, "data-at": at }, shown);
    paint(node, data, at, view, largest);
    return piece && piece.includes("\n") ? [node, h("br", {})] : node;
  });
  fill(body, nodes);
  const say = (event) => {
    const at = event.target.dataset?.at;
    if (at !== undefined) readout.textContent = sentence(data, Number(at));
  };
  body.onpointerover = say;
  body.onfocusin = say;
  fill(pager, data.total > SIZE ? [
    h("button", { type: "button", disabled: data.offset === 0, onclick: () => turn(Math.max(0, data.offset - SIZE)) }, "←"),
    h("span", {}, `tokens ${number(data.offset)}–${number(data.offset + data.ids.length)} of ${number(data.total)}`),
    h("button", { type: "button", disabled: data.offset + SIZE >= data.total, onclick: () => turn(data.offset + SIZE) }, "→")] : null);
}

const NOTES = {
  advantage: (data, largest) => (data.advantages ? ["What training does with a token's probability: ", scale(largest), ", from lower to higher."] : "It was not trained on, or its batch is not kept any more: there are no advantages."),
  logprob: () => "The darker, the less likely the engine found what it sampled.",
  difference,
  version: () => "One colour for each policy version that sampled; an update in the middle shows as a change.",
  mask: () => "Marked tokens are in the loss; the others are prompt or come from the environment.",
};

function difference(data, _, run) {
  const found = data.trainer;
  if (found.reason) {
    const others = (found.samples || []).map((id) => [" ", link(`/runs/${encodeURIComponent(run)}/samples/${id}`, id)]);
    return [`No difference to show: ${visible(found.why)}.`, others.length ? [" Stored are those of", others, "."] : null];
  }
  if (found.mean === null) return "The trainer found no finite log-prob for any of these tokens.";
  const steps = found.minibatch ? ` The batch had taken ${number(found.minibatch)} optimizer steps before.` : "";
  const odd = found.num_not_finite ? ` ${number(found.num_not_finite)} tokens have none: the trainer's is not finite there.` : "";
  return `Difference of the log-probs: mean ${number(found.mean, 4)}, largest ${number(found.max, 4)}, over ${number(found.num_tokens)} tokens. Colour begins at 0.0001, and is deepest from 1 on.${steps}${odd}`;
}

function paint(node, data, at, view, largest) {
  if (!data.mask[at]) return;
  if (view === "mask") node.style.backgroundColor = "var(--c0-soft)";
  else if (view === "version") node.style.backgroundColor = `var(--c${Math.abs(data.versions[at]) % 8}-soft)`;
  else if (view === "logprob") node.style.backgroundColor = `color-mix(in srgb, var(--warn) ${Math.min(80, -data.logprobs[at] * 18).toFixed(0)}%, transparent)`;
  else if (view === "difference") {
    if (data.trainer.reason) return;
    const apart = data.trainer.differences[at];
    const depth = apart === null ? 1 : Math.min(1, Math.max(0, (Math.log10(Math.abs(apart) || 1e-9) + 4) / 4));
    node.style.backgroundColor = depth ? `color-mix(in srgb, var(--bad) ${(5 + 65 * depth).toFixed(0)}%, transparent)` : "";
  } else if (data.advantages) {
    node.style.backgroundColor = shade(data.advantages[at], largest); // null behind the cut of the batch
  }
}

function sentence(data, at) {
  const where = `token ${number(data.offset + at)}, id ${data.ids[at]}`;
  if (!data.mask[at]) return `${where}: not in the loss`;
  const chance = Math.exp(data.logprobs[at]);
  const advantage = data.advantages ? `, advantage ${number(data.advantages[at])}` : "";
  return `${where}: log-prob ${number(data.logprobs[at])} (${(100 * chance).toFixed(1)} %), policy v${data.versions[at]}${advantage}${ofTrainer(data.trainer, at)}`;
}

function ofTrainer(found, at) {
  if (found.reason) return "";
  if (found.is_outside[at]) return "; the truncation leaves it out under the trainer's policy";
  if (found.logprobs[at] === null) return "; the trainer's is not finite";
  return `; trainer ${number(found.logprobs[at])} (${found.differences[at] < 0 ? "−" : "+"}${number(Math.abs(found.differences[at]), 4)}), entropy ${number(found.entropies[at])}`;
}
