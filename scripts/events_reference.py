"""`docs/events.md`, made from the protos, the code that reports, and the tables below; a test compares.

What the code has (an event, a warning, a reason of a failed run) and no table explains is an error, as is the reverse.
"""

import ast
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
SERVICES = ROOT / "services" / "millrace"
PROTO = ROOT / "proto" / "millrace" / "v1" / "event.proto"

# Where the errors arise that end a run. What another orchestrator or trainer may do better (`_HANDED_OVER`) ends none.
_ROOMS = (
    "algorithms",
    "env_server/adapters",
    "env_server/interpreters.py",
    "env_server/teacher",
    "orchestrator/drive",
    "orchestrator/play",
)
_ROOMS += ("trainer", "trainer/checkpoint", "trainer/learning", "trainer/model", "trainer/publish", "models")
_HANDED_OVER = ("CapacityError", "ConflictError", "FencedError", "LogGoneError", "UnavailableError", "Warning")
_BY_VALUE = {
    "ENV_KILLS_WORKERS",
    "ENV_LOAD_FAILED",
    "CHECKPOINT_MANIFEST_INVALID",
    "HEADER_CORRUPT",
    "LORA_TARGET_UNKNOWN",
}
_BY_VALUE |= {
    "DATA_INVALID",
    "DATA_NOT_FOUND",
    "LORA_SAVED_UNKNOWN",
    "TEACHER_TOKENIZER_DIFFERS",
    "TEACHER_VOCABULARY_DIFFERS",
    "TEACHER_REFUSED",
}
_CAUGHT = {"EVAL_FAILED", "TRAINER_FINISH_TIMEOUT"}  # errors that become warnings; the first only during training
_CAUGHT |= {"EXTRA_MISSING", "WANDB_EXPORTER_DIED", "WANDB_REFUSED", "WANDB_UNREACHABLE"}  # reports of the exporter
_CAUGHT |= {"TRACES_EXPORTER_DIED", "TRACES_UNREACHABLE"}
_ANSWERED = {"TRAINER_FINISH_TIMEOUT", "TOOL_ARGUMENTS_INVALID"}  # end no run: a warning, and what a policy is told
_ANSWERED |= {
    "ADAPTER_EXISTS",
    "ADAPTER_NOT_FOUND",
    "ADAPTER_STATE_MISFIT",
    "LORA_SAVED_SHARED",
}  # told to a pool's caller
_NOT_FINITE = ("LOSS", "ENTROPY", "GRADIENT")

_INTRODUCTION = """# Events

<!-- Made by `python scripts/events_reference.py > docs/events.md`; a test fails where the two differ. -->

`millrace run logs RUN` prints a run's events, `millrace run watch RUN` follows them, `WatchRun` streams them
(`proto/millrace/v1/event.proto`). Names and reasons are stable. After → is what to do; by symptom:
[troubleshooting](troubleshooting.md).
"""

Texts = Mapping[str, tuple[str, str]]
"""What it is about: its cause, and what to do."""

NOTHING = ""

EVENTS: Texts = {
    "state_changed": (
        "queued, starting, running, stopping, succeeded, paused, preempted (queued again), cancelled, failed",
        "`millrace run why RUN` if it stays queued or starting",
    ),
    "step_completed": ("by the trainer", NOTHING),
    "eval_completed": (
        "at `orchestrator.eval.interval`, at the beginning and at the end",
        "failed rollouts: `millrace eval show RUN --status env_error`",
    ),
    "policy_published": ("a version is durable, in full or as a delta", NOTHING),
    "checkpoint_saved": ("at `ckpt.interval`, a pause and the end", NOTHING),
    "token_log_stored": ("`trainer.token_log.share`: the log-probs of a step's tokens are durable", NOTHING),
    "training_resumed": (
        "a trainer continues: from which checkpoint, and how the training before ended",
        "see that trainer's log and memory, if you did not stop it",
    ),
    "workers_assigned": ("at a change and every 30 s, for tenants and with `MILLRACE_QUEUE_GROUPS`", NOTHING),
    "warning": ("see below", NOTHING),
    "wait_reported": (
        "no step for 20 s, then 60, 300, 900 s; or a wait is beyond its deadline",
        "`millrace run why RUN`",
    ),
    "score_completed": (
        "the trainer scored the final evaluation with the last policy",
        "`mismatch_kl` far from 0 (1e-12 in float32, 1e-3 in bf16): engine and trainer compute differently",
    ),
    "batch_committed": ("it is durable; `dropped` counts groups by reason", NOTHING),
    "policy_served": ("a replica loaded and proved a version", NOTHING),
    "rollouts_failed": (
        "rollouts of an environment failed: the first group, then each doubling",
        "fix the error in the message; `millrace env check ID` plays one task",
    ),
}

WARNINGS: Texts = {
    "ROUTED_EXPERTS_MISFIT": (
        "recorded experts are none of the model; the trainer's routers chose there",
        "have all replicas serve the trained model, or leave `trainer.model.moe.replay` out",
    ),
    "EXTRA_MISSING": (
        "the orchestrator lacks the library for `[wandb]` or OpenTelemetry",
        "`pip install 'millrace[wandb]'` or `'millrace[otel]'` there; later `millrace run export RUN --to wandb`",
    ),
    "TRACES_EXPORTER_DIED": (
        "the process that sends traces died and is replaced; it resends five minutes",
        "see the orchestrator's log",
    ),
    "TRACES_UNREACHABLE": (
        "the collector does not answer; traces are sent later",
        "check OTEL_EXPORTER_OTLP_ENDPOINT (OTLP over HTTP) and the headers",
    ),
    "WANDB_EXPORTER_DIED": (
        "the process that writes to W&B died; it is started again",
        "`millrace run export RUN --to wandb` writes everything",
    ),
    "WANDB_REFUSED": (
        "W&B refuses the key, or the key may not write to that project",
        "set WANDB_API_KEY, or WANDB_API_KEY_FILE, of the orchestrator, and see `wandb.entity`",
    ),
    "WANDB_UNREACHABLE": (
        "W&B does not answer; everything is written later",
        "check WANDB_BASE_URL and the orchestrator's network",
    ),
    "ALL_TRUNCATED": (
        "at least 90 % of the last batches' rollouts were cut at their token limit",
        "raise `orchestrator.sampling.max_tokens` and `seq_len`, or use the model's own chat template",
    ),
    "CHECKPOINT_NOT_DELETED": (
        "an old checkpoint cannot be deleted; it is tried again",
        "give the trainer the right (`s3:DeleteObject`, the directory's)",
    ),
    "CHECKPOINT_DAMAGED": (
        "a checkpoint's bytes changed; an older one is used",
        "`millrace run repair RUN --from URL`; look at the store",
    ),
    "ENTROPY_NOT_FINITE": ("the entropy of a token is not finite; the step is skipped", "as for LOSS_NOT_FINITE"),
    "ENTRY_DAMAGED": ("a Redis stream has a foreign or damaged entry", "find out who else writes to this Redis"),
    "EVAL_FAILED": ("no rollout of an evaluation finished", "as for `rollouts_failed`; `millrace env check ID --eval`"),
    "SAMPLES_CUT": (
        "samples are longer than `orchestrator.seq_len` or their environment's `max_seq_len`",
        "raise the key to the length in the message, or let rollouts end sooner",
    ),
    "EVAL_SKIPPED": (
        "an evaluation outlasted `orchestrator.eval.interval`, or the run was taken over",
        "raise the interval, lower `num_examples` or `rollouts_per_example`, or add replicas",
    ),
    "EVAL_ON_TRAINING_TASKS": (
        "the environment has no held-out tasks",
        "give it an `eval_dataset`, or an `[[orchestrator.eval.env]]` with other args",
    ),
    "GRADIENT_NOT_FINITE": (
        "the gradient's norm is not finite; the step is skipped",
        "lower `trainer.optim.lr`; compute in float32 (`trainer.model.dtype`); look at the named batch",
    ),
    "ROLLOUTS_LOST": (
        "engines fail or workers are lost; no rollout of a group's worth came back",
        "see the log of the named process; the run recovers by itself",
    ),
    "GROUPS_STALE": (
        "at least a quarter of an environment's last groups were older than `orchestrator.max_off_policy_steps`",
        "add replicas, or raise it",
    ),
    "NO_TURN_REWARDS": (
        '`credit` is `"turn"`, but no turn of an environment has a reward',
        'reward steps (`state.add_step_reward`), or set `orchestrator.algo.credit = "rollout"`',
    ),
    "NOTHING_TO_ECHO": (
        "no token after a reply is of a role that `echo` learns",
        "name roles in `orchestrator.algo.roles`, or use `grpo`",
    ),
    "TURN_REWARDS_UNEQUAL": (
        '`credit` is `"turn"`, and rewards of turns do not add up to the rollout\'s',
        "let the rubric be `state.total_step_reward()` alone, with weight 1",
    ),
    "HISTORY_REWRITTEN": (
        "the chat template rewrites earlier turns, which splits rollouts in spite of `interleaved`",
        'use another template, or `orchestrator.trajectory_strategy = "branching"`',
    ),
    "EXPERTS_NOT_RECORDED": (
        "`trainer.model.moe.replay` is set, but the engine reported no experts; the trainer's routers chose",
        "`inference.return_routed_experts`",
    ),
    "COMPILE_FAILED": (
        "a block, or part of one, could not be compiled (`trainer.model.compile`); it runs eagerly",
        "install a C++ compiler (CPU) or Triton (GPU), or leave the key out",
    ),
    "ENGINE_DISAGREES": (
        "engine and trainer differ by 0.01 nats or more on on-policy tokens (`on_policy_mismatch_kl`)",
        "leave out penalties and `min_tokens`; compare the engine's dtype and quantization with `trainer.model.dtype`",
    ),
    "KL_EXPLODING": (
        "engine and trainer differ ten times more than before (0.01 nats or more), or by more than 0.5, on off-policy "
        "tokens: steps are too large",
        "lower `trainer.optim.lr` or `async_level`, or raise `trainer.loss.kl_tau`",
    ),
    "LOSS_NOT_FINITE": (
        "the loss of a token is not finite; the step is skipped",
        "lower `trainer.optim.lr`; look at the advantage and log-probs of the named sample",
    ),
    "NEW_LINEAGE": (
        "after a resume versions came out differently, or a strict run has other ranks",
        '`trainer.determinism = "strict"` and as many ranks as before avoid it',
    ),
    "ORCHESTRATOR_BACK": ("the orchestrator answers the trainer again", NOTHING),
    "ORCHESTRATOR_REPLACED": ("another orchestrator took the run over", "look at its log if nobody stopped it"),
    "ORCHESTRATOR_SILENT": (
        "the orchestrator does not answer the trainer, which goes on with what is committed",
        "look at its process and the network",
    ),
    "ORCHESTRATOR_STOOD_STILL": (
        "the orchestrator's process was frozen, or its machine overloaded",
        "give it a processor of its own",
    ),
    "POLICY_PUBLISHED_ANEW": (
        "an object of a version was damaged or missing; the trainer wrote it again",
        "who deletes or changes objects?",
    ),
    "POLICY_UPDATE_FAILED": ("a replica could not load or prove a version; it is tried again", "see the replica's log"),
    "PUBLISHER_DIED": (
        "the process that publishes was killed, perhaps for memory, and replaced",
        "give the trainer's machine more memory",
    ),
    "REDIS_RESTARTED": ("Redis restarted; what it lost of the log is appended again", NOTHING),
    "REDIS_SILENT": ("Redis did not answer for a while", "look at its machine, its memory and its disk"),
    "SCORE_OTHER_VERSION": ("some tokens of the final evaluation are of another version and were not scored", NOTHING),
    "TOKEN_LOG_NOT_STORED": (
        "log-probs of some steps are not in the store, so the dashboard cannot compare them",
        "lower `trainer.token_log.share` if the object is too large or the store too slow",
    ),
    "TRAINER_FINISH_TIMEOUT": ("the run is over, and the trainer did not confirm its last objects", "look at its log"),
    "WORKER_BACK": ("a silent worker answers again", NOTHING),
    "WORKER_LOST": ("a worker's lease ran out; what it held goes to others", "look at its machine; start another one"),
    "WORKER_REPLACED": ("a worker ended and another took its place", "see the log of the one that ended"),
    "WORKER_SILENT": ("a worker is frozen, overloaded or cut off", "look at its machine"),
    "ZERO_ADVANTAGE": (
        "all rewards are equal in every group of a batch (or of as many in a row)",
        "look at the rewards (`millrace run samples RUN`); raise `rollouts_per_example` or the temperature",
    ),
}

FAILURES: Texts = {
    "ADVANTAGES_SLOW": (
        "a function of `orchestrator.algo` took longer than `orchestrator.advantage_timeout_s`",
        NOTHING,
    ),
    "BLOCKS_UNTRACEABLE": ("torch's compiler failed in a block whose ranks exchange tensors (`cp`, `ep`)", NOTHING),
    "CHAT_TEMPLATE_MISSING": ("the tokenizer has no chat template for the environments' conversations", NOTHING),
    "CHECKPOINTS_DAMAGED": (
        "no whole checkpoint reaches to where the log begins",
        "`millrace run repair RUN --from URL --apply`, then resume",
    ),
    "CHECKPOINT_BASE_DIFFERS": ("the trainer has another base model than the run began with", NOTHING),
    "CHECKPOINT_CONDITIONS_DIFFER": ("strict determinism, and device, threads, releases or packing changed", NOTHING),
    "CHECKPOINT_DATASET_DIFFERS": ("the rows of `trainer.dataset`, or the chat template, changed", NOTHING),
    "CHECKPOINT_INDEX_INVALID": ("the index of a checkpoint's tensors cannot be read", "as for CHECKPOINTS_DAMAGED"),
    "CHECKPOINT_MANIFEST_INVALID": ("a checkpoint's manifest cannot be read", "as for CHECKPOINTS_DAMAGED"),
    "CHECKPOINT_MISMATCH": (
        "the checkpoint's tensors are not those of the model",
        "use the model and the LoRA settings that the run began with",
    ),
    "CHECKPOINT_MISSING": ("a fork has lost the checkpoint that it begins with", NOTHING),
    "DATA_INVALID": ("rows of `trainer.dataset` cannot be learned", NOTHING),
    "DATA_NOT_FOUND": ("`trainer.dataset` names no file where the trainer runs", NOTHING),
    "ENV_ARGS_INVALID": ("`args` are no JSON object, or not what the environment's config takes", NOTHING),
    "ENV_DATA_INVALID": ("a taskset's file of tasks is no JSON, or lacks a field", NOTHING),
    "ENV_DATA_MISSING": ("a file that `args` name, or tasks of `harbor`, are not on the env-server's machine", NOTHING),
    "ENV_IMAGE_MISSING": (
        "no env-server announces the image of `orchestrator.env.image`, or none is without one",
        "start one with `MILLRACE_ENV_IMAGE` (chart: `envServer.pools`), or correct the key",
    ),
    "ENV_KILLS_WORKERS": (
        "the environment ends its worker again and again (memory, crash, exit)",
        "see the env-server's log; correct the environment, or raise its workers' limits",
    ),
    "ENV_LOAD_FAILED": ("`load_environment` raised on every env-server", "`millrace env check ID --args …`"),
    "ENV_LOAD_TIMEOUT": ("no env-server loaded the environment in time", NOTHING),
    "ENV_NOT_AN_ENVIRONMENT": ("the module has no `load_environment` that returns one", NOTHING),
    "ENV_NOT_FOUND": ("no such module on the env-servers", NOTHING),
    "ENV_PACKAGE_MISSING": ("a taskset needs an extra of `verifiers` that is not installed", NOTHING),
    "ENV_PYTHON_REFUSED": (
        "`orchestrator.env.python` is no interpreter, or not one that the env-server may use",
        "have its operator list the directory in `MILLRACE_ENV_PYTHONS`, or correct the path",
    ),
    "ENV_PYTHON_UNUSABLE": ("an environment's interpreter is too old, does not start, or lacks a package", NOTHING),
    "ENV_RELEASE_UNSUPPORTED": (
        "no interpreter of the env-servers has the release of `verifiers` that the package asks for",
        NOTHING,
    ),
    "ENV_REWARD_ARGUMENTS": ("a reward function wants an argument that nobody passes", NOTHING),
    "ENV_SAMPLING_REFUSED": (
        "model calls of an environment set seed, penalties, `min_tokens`, `logit_bias` or another model",
        NOTHING,
    ),
    "ENV_SELECT_INVALID": ("`select` names missing tasks, leaves none, or evaluates training tasks", NOTHING),
    "ENV_WITHOUT_TASKS": ("an environment to train on has no training tasks", NOTHING),
    "EVAL_FAILED": ("no rollout of the first or the last evaluation finished", NOTHING),
    "GANG_MESSAGE_INVALID": ("the ranks of one trainer run different releases", "install the same one on every rank"),
    "HEADER_CORRUPT": ("the log's last header cannot be read", "`millrace run repair RUN`"),
    "HINT_NOT_RENDERED": ("the chat template cannot write the hint of opsd, a system message alone", NOTHING),
    "LAYOUT_IMPOSSIBLE": ("ranks, heads, experts or layers do not divide by `dp_replicate`, `cp`, `tp`, `ep`", NOTHING),
    "LORA_SAVED_TIED": ("`modules_to_save` names one end of a tied weight", NOTHING),
    "LORA_SAVED_UNKNOWN": ("`modules_to_save` fits no layer of the model", NOTHING),
    "LORA_TARGET_UNKNOWN": ("`target_modules` fits no layer of the model", NOTHING),
    "LOSS_INVALID": ("what the function of `trainer.loss.import_path` returns is no loss per token", NOTHING),
    "MODEL_CONFIG_INVALID": ("the `config.json` of the model is damaged or no JSON object", NOTHING),
    "MODEL_CORRUPT": (
        "weight files are damaged, contradict their index, lack a tensor or are not finite",
        "fetch or make the model again",
    ),
    "MODEL_FILE_UNUSABLE": ("a small file of the model (config, tokenizer, template) is unreadable", NOTHING),
    "MODEL_IS_ADAPTER": ("the start model is an adapter of PEFT, or has one beside it", NOTHING),
    "MODEL_NOT_FOUND": (
        "`model.name` is neither a directory there nor on the Hub",
        "correct it; private models need HF_TOKEN",
    ),
    "MODEL_QUANTIZED": ("the weights are quantized in another way than FP8 in blocks or MXFP4", NOTHING),
    "NO_ADVANTAGE": ("ten batches (or as many groups) in a row without an advantage", NOTHING),
    "NO_TASKS_LEFT": ("every task is easy or hard (`orchestrator.buffer`), and no batch is left", NOTHING),
    "OUT_OF_MEMORY": ("the trainer's GPU or host has no memory left", NOTHING),
    "PACK_UNSUPPORTED": ('`trainer.pack.mode = "always"`, and the model mixes the samples of one row', NOTHING),
    "POLICY_ABANDONED": ("the trainer was stopped before it committed a version", NOTHING),
    "POLICY_BASE_DIFFERS": ("the trainer's base model is not the one that was published", NOTHING),
    "POLICY_LOST": (
        "a published version is damaged, and the trainer cannot make it again",
        "`millrace run repair RUN --from URL --apply`, then resume",
    ),
    "POLICY_NOT_FINITE": ("the start model, or the last step's, gives log-probs that are not finite", NOTHING),
    "PUBLISHER_MESSAGE_INVALID": ("Millrace was reinstalled under a running trainer", "start the trainer again"),
    "REPLAY_UNSUPPORTED": ("`trainer.model.moe.replay` is set, and the model has no replaceable routers", NOTHING),
    "REWARD_OUT_OF_RANGE": ("a reward is outside of `reward_range` (`online_difficulty_filtering`, max_rl)", NOTHING),
    "ROLLOUTS_FAILED": ("more than `orchestrator.max_failed_share` of the last groups' rollouts failed", NOTHING),
    "ROUTER_LOSS_UNSUPPORTED": ("config.json asks for a loss that balances experts (`output_router_logits`)", NOTHING),
    "ROUTER_UNKNOWN": ("a router chose its experts in a way that is not known here", NOTHING),
    "SAMPLES_MIXED": ("the model computes a sample differently after others", NOTHING),
    "SCORES_MISSING": ("rollouts came without the teacher's log-probs", NOTHING),
    "SHARD_LAYOUT_UNKNOWN": ("the model's tensors are sharded in an unsupported way", NOTHING),
    "TASK_SET_DIFFERS": ("two env-servers have different tasks for one environment", NOTHING),
    "TEACHER_KEY_MISSING": ("the variable `api_key_var` is not set in the env-server", NOTHING),
    "TEACHER_REFUSED": ("the teacher's endpoint refused the request", NOTHING),
    "TEACHER_TOKENIZER_DIFFERS": ("teacher and policy have different tokenizers", NOTHING),
    "TEACHER_VOCABULARY_DIFFERS": ("teacher and policy have different vocabularies", NOTHING),
    "TENSOR_DTYPE_UNKNOWN": ("a checkpoint has a number format that this release does not know", NOTHING),
    "TOKENIZER_MISSING": ("the directory has no tokenizer that loads", NOTHING),
    "TOO_MANY_SKIPPED_STEPS": ("`trainer.max_skipped_steps` steps in a row were not finite", NOTHING),
    "VOCABULARY_TOO_SMALL": ("a token or id has no row in the model's embedding", NOTHING),
}

DROPPED: Texts = {
    "zero_advantage": ("all its rewards are equal", "see ZERO_ADVANTAGE if they are most"),
    "easy": ("all its rewards are the highest (`orchestrator.buffer.online_difficulty_filtering`)", NOTHING),
    "hard": ("all its rewards are the lowest (likewise)", NOTHING),
    "stale": ("older than `orchestrator.max_off_policy_steps` versions", "see GROUPS_STALE"),
    "surplus": ("more groups were whole than the batch takes (`oversampling_factor`)", NOTHING),
    "error": ("its rollouts failed in two attempts", "see `rollouts_failed`"),
    "prompt_too_long": ("`seq_len` has no room for the prompt", "raise `seq_len`, or shorten the prompts"),
    "quarantined": ("the task ended the worker that played it alone", "see the env-server's log"),
    "run_ended": ("still played when the last batch was cut", NOTHING),
    "cancelled": ("still played when the run was cancelled", NOTHING),
    "run_failed": ("still played when the run failed", NOTHING),
}


def render() -> str:
    """The whole page."""
    bodies = _events()
    _require_all("events of event.proto", set(bodies), EVENTS)
    _require_all("warnings in the code", _warnings() | _CAUGHT, WARNINGS)
    _require_all("reasons of failed runs in the code", _failures() - _ANSWERED | _by_value(), FAILURES)
    _require_all("drop reasons in the code", _drops(), DROPPED)
    text = _INTRODUCTION + "\n## Kinds\n\n" + _items({name: EVENTS[name] for name in bodies})
    text += _section("Warnings", "The run goes on.", WARNINGS)
    text += _section(
        "Why a run failed",
        "`state_changed` to FAILED has one of these as `error.reason`, or one of the store's or of Redis. Its message "
        "says what to do. `millrace run resume RUN` goes on once the cause is removed.",
        FAILURES,
    )
    return text + _section("Why groups were dropped", "Keys of `batch_committed.dropped`.", DROPPED)


def _section(title: str, about: str, texts: Texts) -> str:
    return f"\n## {title}\n\n{textwrap.fill(about, 120)}\n\n{_items(dict(sorted(texts.items())))}"


def _items(texts: Texts) -> str:
    """Return a list with an item for each name: its cause, and what to do."""
    items = (f"* `{name}`: {cause}{f' → {remedy}' if remedy else ''}" for name, (cause, remedy) in texts.items())
    lines = (textwrap.wrap(item, 120, subsequent_indent="  ", break_on_hyphens=False) for item in items)
    return "".join("\n".join(each) + "\n" for each in lines)


def _require_all(what: str, there: Collection[str], texts: Texts) -> None:
    """Exit with the names that are there and not explained, or explained and not there."""
    if missing := sorted(set(there) - set(texts)):
        sys.exit(f"{what} without cause and remedy in scripts/events_reference.py: {', '.join(missing)}")
    if gone := sorted(set(texts) - set(there)):
        sys.exit(f"explained in scripts/events_reference.py, but not among the {what}: {', '.join(gone)}")


def _events() -> list[str]:
    """Return the names of the events that event.proto declares."""
    oneof = PROTO.read_text().partition("oneof body {")[2].partition("}")[0]
    return re.findall(r"^\s+\w+ (\w+) = ", oneof, re.MULTILINE)


def _modules(room: Path, *, is_deep: bool) -> Iterable[Path]:
    if room.name == "trainer" and not is_deep:  # these two end no run
        return [path for path in room.glob("*.py") if path.name not in ("bench.py", "estimate.py")]
    return [room] if room.suffix else room.rglob("*.py") if is_deep else room.glob("*.py")


def _calls(room: Path, *, is_deep: bool) -> Iterator[tuple[str, ast.Call]]:
    """Every call in a module or in the modules of a package, with the name of what is called."""
    for path in sorted(_modules(room, is_deep=is_deep)):
        if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", ""), node


def _warnings() -> set[str]:
    """Reasons of the warnings that orchestrator and trainer report."""
    found: set[str] = set()
    for name, call in (each for room in ("orchestrator", "trainer") for each in _calls(SERVICES / room, is_deep=True)):
        if name in ("warning", "_warn") and len(call.args) > 1 and isinstance(first := call.args[0], ast.Constant):
            found |= {first.value} if isinstance(first.value, str) and first.value.isupper() else set()
        if name == "Warning":
            found |= set(_reasons(call))
    silent = (SERVICES / "trainer" / "worker.py").read_text()
    return found | set(re.findall(r'"(ORCHESTRATOR_\w+)"', silent)) | {f"{what}_NOT_FINITE" for what in _NOT_FINITE}


def _failures() -> set[str]:
    """Reasons of the errors that can end a run."""
    calls = (each for room in _ROOMS for each in _calls(SERVICES / room, is_deep=False))
    return {reason for name, call in calls if name not in _HANDED_OVER for reason in _reasons(call)}


def _by_value() -> set[str]:
    """Those of `_BY_VALUE` that the code still has."""
    rooms = (*_ROOMS, "trainer/sft")  # whose readers serve `trainer.dataset`, too
    code = "".join(path.read_text() for room in rooms for path in _modules(SERVICES / room, is_deep=False))
    return {reason for reason in _BY_VALUE if f'"{reason}"' in code}


def _drops() -> set[str]:
    """Why groups are dropped: what the drive says, and what a play resolves itself to."""
    rooms = (SERVICES / "orchestrator" / "drive", SERVICES / "orchestrator" / "play")
    said = {
        reason.lower() for name, call in _calls(rooms[0], is_deep=False) for reason in _reasons(call, is_upper=False)
    }
    code = "".join(path.read_text() for room in rooms for path in room.glob("*.py"))
    return said | {reason for reason in DROPPED if re.search(rf'"{reason}"|RolloutStatus\.{reason.upper()}\b', code)}


def _reasons(call: ast.Call, *, is_upper: bool = True) -> Iterator[str]:
    for keyword in call.keywords:
        value = keyword.value
        if keyword.arg == "reason" and isinstance(value, ast.Constant) and str(value.value).isupper() == is_upper:
            yield str(value.value)


if __name__ == "__main__":
    sys.stdout.write(render())
