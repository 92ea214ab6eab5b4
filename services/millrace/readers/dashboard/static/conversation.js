// A conversation as chat: tools, reasoning and what the system says are folded.
import { h, number, text, visible } from "./dom.js";

export function message(said) {
  const role = String(said.role || "?");
  const kind = ["user", "assistant", "system", "tool", "note"].includes(role) ? role : "other";
  const body = [];
  if (said.reasoning_content || said.reasoning) body.push(fold("reasoning", said.reasoning_content || said.reasoning));
  const pieces = Array.isArray(said.content) ? said.content : [said.content];
  for (const piece of pieces) {
    if (piece === null || piece === undefined || piece === "") continue;
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
