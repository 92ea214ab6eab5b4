// An event in a line of words.
import { bytes, number, percent, seconds } from "./dom.js";

const short = (name) => String(name || "").replace("RUN_STATE_", "").toLowerCase();

const SAY = {
  state_changed: (body) => `${short(body.old_state)} → ${short(body.new_state)}${body.reason ? `: ${body.reason}` : ""}${body.error ? ` [${body.error.reason}] ${body.error.message}` : ""}`,
  step_completed: (body) => `step ${(body.step || 0) + 1}: reward ${number(body.reward_mean || 0)}, ${number(body.num_tokens || 0)} tokens, ${seconds(body.step_seconds || 0)} of which ${percent((body.wait_seconds || 0) / (body.step_seconds || 1))} waiting`,
  eval_completed: (body) => `${body.env}: policy v${body.policy_version || 0}${(body.policy_version_max || 0) > (body.policy_version || 0) ? `–v${body.policy_version_max}` : ""} has reward ${number(body.reward_mean || 0)} over ${number((body.num_rollouts || 0) + (body.num_failed || 0))} rollouts${body.num_failed ? `, ${body.num_failed} failed` : ""}${(body.skipped || []).length ? `; not evaluated before it: ${body.skipped.map((each) => `v${each}`).join(", ")}` : ""}`,
  policy_published: (body) => `policy v${body.version || 0}: ${bytes(body.size_bytes || 0)} (${body.codec || "?"}) in ${seconds(body.seconds || 0)}`,
  policy_served: (body) => `${body.replica} serves v${body.version || 0}; it stood still for ${seconds(body.pause_seconds || 0)}`,
  checkpoint_saved: (body) => `checkpoint v${body.step || 0}, ${bytes(body.size_bytes || 0)}`,
  token_log_stored: (body) => `log-probs of step ${(body.step || 0) + 1} are stored, ${bytes(body.size_bytes || 0)}`,
  training_resumed: (body) => `training goes on ${body.step ? `behind step ${body.step} (${body.start})` : `from ${body.start}`}${(body.published || 0) > (body.step || 0) ? `, up to step ${body.published} it is trained again` : ""}: ${body.reason}`,
  workers_assigned: (body) => `accelerators: ${body.trainer_accelerators || 0} train, ${body.replica_accelerators || 0} generate`,
  warning: (body) => `${body.message} [${body.reason}]`,
  wait_reported: (body) => `${body.wait.owner} waits for ${body.wait.reason}${body.wait.waits_on ? ` ← ${body.wait.waits_on}` : ""} (${seconds(body.wait.age_seconds || 0)})`,
  score_completed: (body) => `policy v${body.version || 0}: mismatch KL ${number(body.mismatch_kl || 0)} over ${number(body.num_tokens || 0)} tokens`,
  batch_committed: (body) => `batch of step ${(body.step || 0) + 1}: ${body.num_trained || 0} groups trained${Object.entries(body.dropped || {}).map(([why, count]) => `, ${count} ${why}`).join("")}`,
  rollouts_failed: (body) => body.message,
};

export function words(event) {
  return (SAY[event.kind] || (() => "an event of a kind that this page does not know"))(event.body);
}
