// Asks the orchestrator. What cannot be had is said in the banner, and what was shown before stays.
let csrf = "";
let isReadOnly = false;
const banner = document.getElementById("banner");
let troubles = new Map();

export function trouble(key, words) {
  if (words) troubles.set(key, words);
  else troubles.delete(key);
  const first = [...troubles.values()][0];
  banner.hidden = !first;
  banner.textContent = first ? `${first} – the page shows what was read before.` : "";
}

export function clearTroubles() {
  troubles = new Map();
  trouble("", "");
}

export class Refusal extends Error {
  constructor(status, error) {
    super(error.message || `refused with ${status}`);
    this.status = status;
    this.reason = error.reason || "";
    this.remedy = error.remedy || "";
  }
}

const ANSWER_MS = 60000; // longer than the orchestrator gives its reader
const AUDIT_MS = 330000;

async function answerOf(path, options) {
  let response;
  const late = AbortSignal.timeout(path.endsWith("/audit") ? AUDIT_MS : ANSWER_MS);
  try {
    const signal = options.signal ? AbortSignal.any([options.signal, late]) : late;
    response = await fetch(path, { credentials: "same-origin", ...options, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, { message: "the orchestrator does not answer", reason: "UNREACHABLE" });
  }
  let body = {};
  try {
    body = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (response.ok) throw new Refusal(0, { message: "the answer of the orchestrator broke off", reason: "UNREACHABLE" });
  }
  if (response.ok && response.status !== 202) return body; // 202: asked for too early, and told so
  if (response.status === 401 && !options.silent) location.assign("/login");
  throw new Refusal(response.status, body.error || {});
}

export async function get(path, params, signal) {
  const query = new URLSearchParams(Object.entries(params || {}).filter(([, value]) => value !== "" && value !== null
    && value !== undefined)).toString();
  return answerOf(query ? `${path}?${query}` : path, { signal });
}

// For questions of which each takes the place of the one before: an answer, or an error, that comes when a newer one
// was asked is null.
export function newest() {
  let asked = 0;
  return async (answer) => {
    const mine = ++asked;
    try {
      const found = await answer;
      return mine === asked ? found : null;
    } catch (error) {
      if (mine !== asked) return null;
      throw error;
    }
  };
}

export async function session() {
  const found = await answerOf("/api/session", {});
  csrf = found.csrf;
  isReadOnly = !found.may_write;
  return found;
}

// Whether the token that opened this session may look and nothing else; the server refuses the rest.
export const mayOnlyRead = () => isReadOnly;

export async function post(path, body) {
  return answerOf(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Millrace-CSRF": csrf },
    body: JSON.stringify(body || {}),
  });
}

export const of = (run) => `/api/runs/${encodeURIComponent(run)}`;
