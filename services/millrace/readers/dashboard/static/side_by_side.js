// The members of a group next to each other: what all were asked once, then each conversation from where they part.
import { get, of } from "./api.js";
import { message } from "./conversation.js";
import { h, link, number, panel, visible } from "./dom.js";
import { outcome } from "./page_samples.js";

const MOST = 8;

export async function sideBySide(page, run, found) {
  const at = found.group.findIndex((each) => each.id === found.id);
  const first = Math.max(0, Math.min(at - MOST / 2, found.group.length - MOST));
  const shown = found.group.slice(first, first + MOST);
  const told = await Promise.all(shown.map((each) => (each.id === found.id ? found.messages : messages(page, run, each.id))));
  const same = common(told.filter(Array.isArray));
  const base = `/runs/${encodeURIComponent(run)}/samples/`;
  const sides = shown.map((each, place) => h("section", { class: each.id === found.id ? "member here" : "member" },
    h("h3", {}, link(`${base}${each.id}?side=1`, `Member ${each.member + 1}`)),
    h("p", { class: "faint" }, "reward ", number(each.reward), `, advantage ${number(each.advantage)} `, each.is_trained ? null : outcome(each)),
    Array.isArray(told[place]) ? h("div", { class: "chat" }, told[place].slice(same).map(message)) : h("p", { class: "none" }, visible(told[place]))));
  const more = found.group.length > shown.length ? `, ${shown.length} of ${found.group.length}` : "";
  return panel(`Its group side by side${more}`,
    same ? h("div", { class: "chat" }, found.messages.slice(0, same).map(message)) : null,
    h("div", { class: "members scroll", tabindex: "0", role: "group", "aria-label": "members of the group" }, sides));
}

// The messages of a member, or why there are none.
async function messages(page, run, id) {
  try {
    return (await get(`${of(run)}/samples/${encodeURIComponent(id)}`, {}, page.signal)).messages;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return error.message;
  }
}

function common(conversations) {
  const texts = conversations.map((all) => all.map((each) => JSON.stringify(each)));
  let count = 0;
  while (texts.length > 1 && texts.every((all) => count < all.length && all[count] === texts[0][count])) count += 1;
  return count;
}
