"""Arguments of TRL's GRPO and SFT trainers: reading their files, and what each argument means here.

Defaults are those of TRL 1.16.0 with transformers 5.23.0.
"""

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.config.files import MAX_FILE_BYTES, UnreadableFileError, read_file
from millrace.config.messages import Effect, Note, is_trl
from millrace.errors import Violation

_COMMON: Mapping[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "weight_decay": 0.0, "adam_beta1": 0.9,
    "adam_beta2": 0.999, "max_grad_norm": 1.0, "num_train_epochs": 3.0, "max_steps": -1, "lr_scheduler_type": "linear",
    "warmup_steps": 0, "save_strategy": "steps", "save_steps": 500, "seed": 42,
}  # fmt: skip
RL_DEFAULTS: Mapping[str, Any] = {
    **_COMMON, "learning_rate": 1e-6, "num_generations": 8, "max_completion_length": 512, "temperature": 1.0,
    "beta": 0.0, "epsilon": 0.2, "num_iterations": 1, "loss_type": "dapo", "scale_rewards": "group",
    "importance_sampling_level": "token",
}  # fmt: skip
SFT_DEFAULTS: Mapping[str, Any] = {**_COMMON, "learning_rate": 2e-5, "max_length": 1024, "packing": False}
ENVIRONMENT = "your-environment"
"""What represents the environment, which TRL has in pieces: a data set and functions in Python."""
_PROMPT = 512
"""Tokens that are assumed for a prompt where the file has no limit."""
_AGGREGATION = {"dapo": "token", "bnpo": "token", "grpo": "sequence", "dr_grpo": "constant", "cispo": "token"}
_OF_ENVIRONMENT = (
    *("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "reward_funcs", "reward_weights"),
    *("reward_model_name_or_path", "dataset_streaming"),
)
NOTHING = (
    *("logging_steps", "logging_strategy", "logging_first_step", "log_completions", "num_completions_to_print"),
    *("report_to", "use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_server_host", "vllm_server_port"),
    *("vllm_server_base_url", "vllm_server_timeout", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode"),
    *("bf16", "tf32", "gradient_checkpointing", "gradient_checkpointing_kwargs", "attn_implementation", "do_train"),
    *("remove_unused_columns", "dataloader_num_workers", "dataset_num_proc", "push_to_hub", "hub_model_id"),
    *("ddp_find_unused_parameters", "disable_tqdm", "overwrite_output_dir", "log_level", "use_liger_kernel"),
    *("save_only_model", "per_device_eval_batch_size", "trust_remote_code", "dtype", "torch_dtype", "padding_free"),
    *("logging_dir", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
    *("ddp_timeout", "ddp_backend", "ddp_bucket_cap_mb", "hub_strategy", "hub_private_repo", "deepspeed", "fsdp"),
    *("fsdp_config", "accelerator_config", "save_safetensors", "load_best_model_at_end", "torch_compile"),
)
"""Arguments of transformers' trainers that change nothing of what is learned."""


@dataclass(slots=True)
class TrlTranslation:
    """What a file of TRL is in our schema; with `violations` it means nothing here."""

    kind: str
    tree: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)


# Arguments of TRL's trainers as users keep them: YAML or JSON for `trl grpo --config`, or a script with a config.

_CONFIGS = {"GRPOConfig": "rl", "SFTConfig": "sft"}
_BESIDE = {"GRPOTrainer", "SFTTrainer", "ModelConfig", "ScriptArguments", "LoraConfig"}
_RENAMED = {
    "GRPOTrainer": {"model": "model_name_or_path"},
    "SFTTrainer": {"model": "model_name_or_path"},
    "LoraConfig": {"r": "lora_r", "bias": "lora_bias", "task_type": "lora_task_type"},
}
_OF_RL = {"num_generations", "max_completion_length", "beta", "epsilon", "reward_funcs", "scale_rewards", "use_vllm"}
_OF_SFT = {"max_length", "max_seq_length", "packing", "assistant_only_loss", "completion_only_loss"}
_OF_SFT |= {"dataset_text_field", "padding_free"}


@dataclass(slots=True)
class Arguments:
    """What a file says: values by TRL's name, where each is, and what is computed there."""

    values: dict[str, Any]
    kind: str | None
    """`rl` or `sft`; None where nothing tells."""
    places: dict[str, str] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)
    """The text of values that only running the script would give."""


def read_arguments(name: str) -> Arguments | None:
    """Return TRL's arguments in a YAML, JSON, TOML or Python file; None if it has none of them.

    Raises UnreadableFileError for a file that cannot be read.
    """
    suffix = Path(name).suffix.lower()
    if suffix == ".py":
        return _read_script(name)
    values = _read_yaml(name) if suffix in (".yaml", ".yml") else read_file(name).tree
    if not isinstance(values, dict) or not is_trl(values):
        return None
    return Arguments(values=dict(values), kind=_kind(values))


def _kind(values: Mapping[str, Any]) -> str | None:
    """Return the trainer that the arguments are for, `rl` or `sft`; None if they fit both or neither."""
    of_rl, of_sft = bool(values.keys() & _OF_RL), bool(values.keys() & _OF_SFT)
    return None if of_rl == of_sft else "rl" if of_rl else "sft"


def _text(name: str) -> str:
    """Return the text of the file `name`; raise UnreadableFileError if it is missing, too large, or not UTF-8."""
    try:
        data = Path(name).read_bytes()
        if len(data) > MAX_FILE_BYTES:
            message = f"has more than {MAX_FILE_BYTES} bytes; it is no config file"
            raise UnreadableFileError(name, message, source="command line")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 text (byte {error.start}); save it as UTF-8"
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
    raise UnreadableFileError(name, message, source="command line")


def _read_yaml(name: str) -> Any:
    """Return the content of a YAML file; raise UnreadableFileError if it is malformed, or PyYAML is not installed."""
    text = _text(name)
    try:
        import yaml  # transformers brings it
    except ModuleNotFoundError as error:
        message = "is YAML, and PyYAML is not installed here; `pip install pyyaml`, or save it as JSON"
        raise UnreadableFileError(name, message, source="command line") from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = name if mark is None else f"{name}:{mark.line + 1}"
        message = f"malformed YAML: {getattr(error, 'problem', None) or error}; fix it"
        raise UnreadableFileError(name, message, source=where) from error


def _read_script(name: str) -> Arguments | None:
    """Return the arguments of the calls of TRL's classes in a Python file, which is parsed and not run.

    None if it makes no GRPOConfig or SFTConfig. Raises UnreadableFileError for a file that is no Python.
    """
    try:
        tree = ast.parse(_text(name))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        message = f"malformed Python: {error}; fix it"
        raise UnreadableFileError(name, message, source=f"{name}:{getattr(error, 'lineno', None) or 1}") from error
    found = Arguments(values={}, kind=None)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if called in _CONFIGS:
            found.kind = _CONFIGS[called]
        elif called not in _BESIDE:
            continue
        for keyword in call.keywords:
            _take(found, called, keyword, name)
        if called == "LoraConfig":
            found.values.setdefault("use_peft", True)
    return found if found.kind is not None else None


def _take(found: Arguments, called: str, keyword: ast.keyword, name: str) -> None:
    """Put an argument of a call into `found`: its value if it is a literal, else the text of the expression.

    `called` is the name of the class, `name` the file. Objects that the script hands to a trainer are left out.
    """
    if keyword.arg is None:  # `**kwargs`
        found.computed[f"**{ast.unparse(keyword.value)}"] = ast.unparse(keyword.value)
        return
    key = _RENAMED.get(called, {}).get(keyword.arg, keyword.arg)
    is_wiring = called.endswith("Trainer") and key not in ("model_name_or_path", "reward_funcs")
    if is_wiring:  # the objects that the script has made: their own calls are read
        return
    found.places[key] = f"{name}:{keyword.value.lineno}"
    try:
        found.values[key] = ast.literal_eval(keyword.value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        found.computed[key] = ast.unparse(keyword.value)


def translate(arguments: Arguments, kind: str, *, source: str) -> TrlTranslation:
    """Return what the arguments of a GRPO (`kind` `rl`) or SFT (`sft`) trainer are in our schema.

    `source` names their file.
    """
    reading = _Reading(arguments, TrlTranslation(kind), source, RL_DEFAULTS if kind == "rl" else SFT_DEFAULTS)
    (_rl if kind == "rl" else _sft)(reading)
    reading.finish()
    return reading.out


class _Reading:
    """Takes the arguments one by one, and says of those that are left that nobody knows them."""

    def __init__(self, arguments: Arguments, out: TrlTranslation, source: str, defaults: Mapping[str, Any]) -> None:
        """Begin with all arguments, of which each method takes some; `defaults` are TRL's, `source` names the file.

        Arguments that the script computes are refused at once, but for those of the environment.
        """
        self._left = dict(arguments.values)
        self._given = arguments
        self._defaults = defaults
        self._source = source
        self.out = out
        for name, text in arguments.computed.items():
            if name in _OF_ENVIRONMENT:  # reported with the environment
                continue
            self.refuse(name, text, "is computed in the script: write its value there")

    def has(self, name: str) -> bool:
        """Return whether the file sets the argument."""
        return name in self._given.values

    def given(self, name: str) -> Any:
        """Return the value of an argument in the file, taken or not; None if the file does not set it."""
        return self._given.values.get(name)

    def drop(self, name: str) -> None:
        """Take an argument without a message, because that of another argument covers it."""
        self._left.pop(name, None)

    def take(self, name: str) -> Any:
        """Take an argument and return its value: the file's, or TRL's default, or None if TRL has none."""
        return self._left.pop(name, self._defaults.get(name))

    def number(self, name: str, *, least: float = 0.0, is_whole: bool = False) -> float:
        """Take an argument that is a number, or text of one such as `1e-6`, which TRL reads as a number.

        Return its value. A value below `least`, or with a fraction although `is_whole`, is refused; the number returned
        is a placeholder then.
        """
        value = _number(self.take(name))
        if value is None or value < least or (is_whole and value != int(value)):
            kind = "a whole number" if is_whole else "a number"
            self.refuse(name, self._given.values.get(name), f"must be {kind} of at least {least:g}")
            return max(1.0, least)
        return value

    def whole(self, name: str, *, least: int = 1) -> int:
        """Take an argument that is a whole number and return its value.

        Refuse one that is not, or that is below `least`.
        """
        return int(self.number(name, least=least, is_whole=True))

    def put(self, path: str, value: Any) -> None:
        """Set the key at the dotted `path` of our schema."""
        *tables, last = path.split(".")
        table = self.out.tree
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value

    def note(self, name: str, effect: Effect, text: str) -> None:
        """Record for the user what became of the argument `name`, with its place in the file, or as TRL's default."""
        place = self._given.places.get(name, self._source if self.has(name) else f"{self._source}: TRL's default")
        self.out.notes.append(Note(path=(name,), source=place, effect=effect, text=text))

    def refuse(self, name: str, value: Any, message: str) -> None:
        """Record an error of the argument `name`; `message` says what is unsupported and what to write instead."""
        place = self._given.places.get(name, self._source)
        shown = None if value is None else str(value)[:80]
        self.out.violations.append(Violation(field=name, value=shown, message=message, source=place))

    def move(self, name: str, path: str, *, convert: Callable[[Any], Any] | None = None, text: str = "") -> None:
        """Take an argument and set the key at `path` to its value, which may be TRL's default, with a note.

        `convert` changes the value; `text` replaces the note. Nothing is set if neither the file nor TRL has a value.
        """
        if name not in self._left and name not in self._defaults:
            return
        value = self.take(name)
        if value is not None:
            self.put(path, value if convert is None else convert(value))
            self.note(name, Effect.MEANS, text or f"is `{path}` here")

    def finish(self) -> None:
        """Note the arguments left that have no effect here, and refuse all others that no method has taken."""
        for name in [each for each in NOTHING if each in self._left]:
            del self._left[name]
            self.note(name, Effect.NOTHING, "there is nothing to choose here: it changes nothing of what is learned")
        for name, value in self._left.items():
            message = "is none of the arguments of TRL that are translated; take it out, and write what it means here"
            self.refuse(name, value, f"{message} (docs/configuration.md)")


def _number(value: Any) -> float | None:
    """Return a finite number, which may be written as text; None for any other value."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def _shared(reading: _Reading, prefix: str) -> None:
    """Translate the arguments of both trainers: model, optimizer, adapters, checkpoints, names and reports.

    `prefix` is the table of the trainer here: `trainer.`, or empty in SFT.
    """
    reading.move("model_name_or_path", "model.name")
    lr = reading.number("learning_rate")
    reading.put(f"{prefix}optim.lr", lr)
    reading.note("learning_rate", Effect.MEANS, f"is `{prefix}optim.lr` here, {lr:g}")
    for name, key in (("weight_decay", "weight_decay"), ("adam_beta1", "betas1"), ("adam_beta2", "betas2")):
        reading.put(f"{prefix}optim.{key}", reading.number(name))
        reading.note(name, Effect.MEANS, f"is `{prefix}optim.{key}` here")
    if (norm := reading.number("max_grad_norm")) > 0:
        reading.put(f"{prefix}optim.max_norm", norm)
        reading.note("max_grad_norm", Effect.MEANS, f"is `{prefix}optim.max_norm` here")
    else:
        reading.refuse("max_grad_norm", norm, "must be above 0: gradients are always scaled down to a norm here")
    if reading.has("optim") and not str(value := reading.take("optim")).startswith("adamw"):
        reading.refuse("optim", value, f"must be one of the adamw kinds, or set `{prefix}optim.type` by hand")
    if reading.has("adam_epsilon") and reading.number("adam_epsilon") != 1e-8:
        reading.refuse("adam_epsilon", None, "must be 1e-8, which it is here")
    reading.move("seed", "seed")
    reading.move("run_name", "run.name")
    reading.move("output_dir", "output_dir")
    _adapters(reading, f"{prefix}model.lora")
    _checkpoints(reading)
    if "wandb" in str(reading.given("report_to")):
        reading.put("wandb.project", str(reading.take("project") or "huggingface"))
        reading.note("report_to", Effect.MEANS, "is `[wandb]` here")
        reading.take("report_to")


def _adapters(reading: _Reading, path: str) -> None:
    """Translate the arguments of LoRA into the table at `path`; without `use_peft` they are noted as without effect."""
    names = {
        "lora_r": "rank",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "lora_target_modules": "target_modules",
    }
    is_on = reading.take("use_peft")
    found = {name: reading.take(name) for name in names if reading.has(name)}
    if not is_on:
        for name in found:
            reading.note(name, Effect.NOTHING, "without `use_peft` all weights are trained")
        return
    # The defaults of TRL's ModelConfig.
    values = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05} | found
    for name, value in values.items():
        if value == "all-linear":
            value = [r".*\.(q|k|v|o|gate|up|down)_proj"]
        reading.put(f"{path}.{names[name]}", [value] if isinstance(value, str) else value)
        reading.note(name, Effect.MEANS, f"is `{path}.{names[name]}` here")


def _checkpoints(reading: _Reading) -> None:
    """Translate how often checkpoints are saved, and how many are kept, into `[ckpt]`."""
    strategy, every = reading.take("save_strategy"), reading.number("save_steps", least=0)
    limit = reading.take("save_total_limit")
    if strategy in ("no", False):
        return
    if strategy != "steps" or every < 1 or every != int(every):
        reading.refuse("save_steps", every, 'must be a whole number of steps, with `save_strategy` "steps" or "no"')
        return
    reading.put("ckpt.interval", int(every))
    reading.note("save_steps", Effect.MEANS, "is `ckpt.interval` here")
    if limit is not None:
        reading.put("ckpt.keep_last", limit)
        reading.note("save_total_limit", Effect.MEANS, "is `ckpt.keep_last` here")


def _schedule(reading: _Reading, prefix: str, *, steps_in_batch: int, needs: str) -> None:
    """Translate the number of steps, warm-up and decay of the learning rate.

    A step here is `steps_in_batch` of TRL's. `prefix` is the table of the trainer. A file that counts epochs is
    refused; `needs` says how many steps they are.
    """
    max_steps = reading.take("max_steps")
    epochs = reading.take("num_train_epochs")
    kind = str(reading.take("lr_scheduler_type"))
    warmup = reading.number("warmup_steps")
    if reading.has("warmup_ratio") and not warmup:
        warmup = reading.number("warmup_ratio")
    is_counted = isinstance(max_steps, int) and max_steps > 0
    if not is_counted:
        reading.refuse(
            "max_steps" if reading.has("max_steps") else "num_train_epochs",
            epochs,
            f"{epochs} epochs are as many steps as the data makes of them: write `max_steps` into the file, {needs}",
        )
        return
    if kind not in ("linear", "cosine", "constant", "constant_with_warmup"):
        reading.refuse("lr_scheduler_type", kind, "must be linear, cosine, constant or constant_with_warmup here")
        return
    steps = math.ceil(max_steps / steps_in_batch)
    # Below 1 it is a share of the steps, as in transformers.
    warm = math.ceil(max_steps * warmup / steps_in_batch) if warmup < 1 else math.ceil(warmup / steps_in_batch)
    warm = min(0 if kind == "constant" else warm, steps - 1)
    reading.put("max_steps", steps)
    reading.note("max_steps", Effect.MEANS, f"is `max_steps` here, {steps}; it goes before `num_train_epochs`")
    reading.put(f"{prefix}scheduler.type", "constant" if kind.startswith("constant") else kind)
    reading.put(f"{prefix}scheduler.warmup_steps", warm)
    if kind == "linear":
        reading.put(f"{prefix}scheduler.decay_steps", steps - warm)
    reading.note("lr_scheduler_type", Effect.MEANS, f"is `{prefix}scheduler` here: {kind}, {warm} steps of warm-up")


def _rl(reading: _Reading) -> None:
    """Translate the arguments of a GRPO trainer: batches, sampling, loss, and what both trainers have.

    The environment becomes a placeholder: TRL has a data set and functions in its place.
    """
    per_device, accumulated = reading.whole("per_device_train_batch_size"), reading.whole("gradient_accumulation_steps")
    members = reading.whole("num_generations", least=2)
    per_step = per_device * accumulated
    batch = per_step
    if reading.has("generation_batch_size"):
        batch = reading.whole("generation_batch_size")
    elif reading.has("steps_per_generation"):
        batch = per_device * reading.whole("steps_per_generation")
    steps_in_batch = max(1, batch // per_step)
    if batch % members or batch % per_step:
        reading.refuse(
            "num_generations",
            members,
            f"a batch of {batch} rollouts must be whole groups, and whole steps of {per_step}",
        )
    if (times := reading.whole("num_iterations")) > 1:
        reading.refuse("num_iterations", times, "must be 1: a batch is learned from once here")
    reading.put("orchestrator.batch_size", batch)
    of_one = "of one device: with N of them write N times as many"
    reading.note(
        "per_device_train_batch_size", Effect.MEANS, f"`orchestrator.batch_size` is {batch} rollouts, {of_one}"
    )
    reading.note(
        "gradient_accumulation_steps", Effect.MEANS, "the trainer cuts a batch by `trainer.micro_batch_tokens`"
    )
    if steps_in_batch > 1:
        reading.put("trainer.minibatches", steps_in_batch)
        reading.note("steps_per_generation", Effect.MEANS, f"is `trainer.minibatches` here, {steps_in_batch}")
    reading.put("orchestrator.rollouts_per_example", members)
    reading.note("num_generations", Effect.MEANS, "is `orchestrator.rollouts_per_example` here")
    reading.put("orchestrator.filter_zero_advantages", False)  # their tokens count in TRL's mean, and in its KL term
    reading.put("async_level", 0)
    reading.note("async_level", Effect.MEANS, "TRL trains on what the newest policy has sampled: `async_level` is 0")
    needs = f"epochs × prompts × {members} rollouts / {per_step} of a step"
    _schedule(reading, "trainer.", steps_in_batch=steps_in_batch, needs=needs)
    _sampling(reading)
    _loss(reading)
    _shared(reading, "trainer.")
    reading.put("orchestrator.env", [{"id": ENVIRONMENT}])
    text = "data set and reward functions are an environment here: write one (docs/guides/reward.md), and name it"
    reading.note("reward_funcs", Effect.MEANS, f"{text} in `orchestrator.env`, where {ENVIRONMENT} stands for it")
    for name in _OF_ENVIRONMENT:
        reading.drop(name)


def _sampling(reading: _Reading) -> None:
    """Translate lengths, sampling and how rewards are scaled; a limit for prompts is assumed if the file has none."""
    longest = reading.whole("max_completion_length")
    reading.put("orchestrator.sampling.max_tokens", longest)
    reading.note("max_completion_length", Effect.MEANS, "is `orchestrator.sampling.max_tokens` here")
    prompt = reading.whole("max_prompt_length") if reading.given("max_prompt_length") is not None else None
    context = reading.whole("vllm_max_model_length") if reading.given("vllm_max_model_length") is not None else None
    together = (_PROMPT if prompt is None else prompt) + longest if context is None else context
    reading.put("seq_len", together)
    said = "max_prompt_length" if context is None else "vllm_max_model_length"
    is_guess = prompt is None and context is None
    what = f"TRL has no limit for prompts: {_PROMPT} tokens are assumed" if is_guess else "prompt and reply together"
    reading.note(said, Effect.MEANS, f"`seq_len` is {together}: {what}")
    for name in ("max_prompt_length", "vllm_max_model_length"):
        reading.drop(name)
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        reading.move(name, f"orchestrator.sampling.{name}")
    scaled = reading.take("scale_rewards")
    scaled = {True: "group", False: "none"}.get(scaled, scaled)
    if scaled in ("group", "batch", "none"):
        reading.put("orchestrator.algo.std_norm", scaled)
        reading.note("scale_rewards", Effect.MEANS, f'is `orchestrator.algo.std_norm` here, "{scaled}"')
    else:
        reading.refuse("scale_rewards", scaled, 'must be "group", "batch" or "none"')


def _loss(reading: _Reading) -> None:
    """Translate the loss: its type, clipping, aggregation, KL term and corrections."""
    kind, level = str(reading.take("loss_type")), reading.take("importance_sampling_level")
    low = reading.number("epsilon")
    high = reading.number("epsilon_high") if reading.has("epsilon_high") else low
    if kind not in _AGGREGATION:
        reading.refuse("loss_type", kind, f"is not here: take one of {', '.join(_AGGREGATION)}")
        return
    if level not in ("token", "sequence"):
        reading.refuse("importance_sampling_level", level, 'must be "token" or "sequence"')
        return
    ours = "cispo" if kind == "cispo" else "gspo" if level == "sequence" else "ppo"
    reading.put("trainer.loss.type", ours)
    if ours == "cispo" and high < 1:
        reading.refuse("epsilon_high", high, "must be at least 1 with cispo: it is the largest ratio there, such as 5")
    elif ours == "cispo":  # TRL clips from above alone, at epsilon_high itself
        reading.put("trainer.loss.clip_low", 1.0)
        reading.put("trainer.loss.clip_high", high - 1.0)
    else:
        reading.put("trainer.loss.clip_low", low)
        reading.put("trainer.loss.clip_high", high)
    reading.note("epsilon", Effect.MEANS, f'`trainer.loss` is "{ours}" with its `clip_low` and `clip_high`')
    aggregation = "sequence" if ours == "gspo" and kind != "dr_grpo" else _AGGREGATION[kind]
    reading.put("trainer.loss.aggregation", aggregation)
    if aggregation == "constant":
        reading.put("trainer.loss.constant_tokens", reading.out.tree["orchestrator"]["sampling"]["max_tokens"])
    reading.note("loss_type", Effect.MEANS, f'tokens weigh as `trainer.loss.aggregation` = "{aggregation}" says')
    if (beta := reading.number("beta")) > 0:
        reading.put("trainer.loss.kl.coef", beta)
        reading.note("beta", Effect.MEANS, "is `trainer.loss.kl.coef` here, with the estimator k3")
    else:
        reading.note("beta", Effect.SAME, "")
    if reading.has("delta") and reading.take("delta") is not None:
        reading.put("trainer.loss.max_importance_ratio", reading.given("delta"))
        reading.note("delta", Effect.MEANS, "is `trainer.loss.max_importance_ratio` here")
    if reading.has("entropy_coef"):
        reading.move("entropy_coef", "trainer.loss.entropy_coef")
    for name in ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"):
        if reading.has(name):
            reading.take(name)
            text = "the ratio of the loss is to the engine's own log-probs: `trainer.loss.correction` corrects further"
            reading.note(name, Effect.MEANS, text)


def _sft(reading: _Reading) -> None:
    """Translate the arguments of an SFT trainer: batches, data, packing, loss mask, and what both trainers have."""
    per_device, accumulated = reading.whole("per_device_train_batch_size"), reading.whole("gradient_accumulation_steps")
    reading.put("data.batch_size", per_device * accumulated)
    text = (
        f"`data.batch_size` is {per_device * accumulated} samples, of one device: with N of them write N times as many"
    )
    reading.note("per_device_train_batch_size", Effect.MEANS, text)
    reading.move("dataset_name", "data.name")
    reading.move("dataset_train_split", "data.split")
    reading.move("dataset_config", "data.subsets", convert=lambda value: [value])
    longest = "max_seq_length" if reading.has("max_seq_length") else "max_length"
    if longest != "max_length":
        reading.take("max_length")
    reading.put("data.seq_len", reading.whole(longest, least=2))
    reading.note(longest, Effect.MEANS, "is `data.seq_len` here")
    is_packed = reading.take("packing")
    reading.put("data.pack_function", "cat" if is_packed else "stack")
    reading.note("packing", Effect.MEANS, f'`data.pack_function` is "{"cat" if is_packed else "stack"}"')
    _schedule(reading, "", steps_in_batch=1, needs=f"epochs × rows / {per_device * accumulated}")
    only_assistant = reading.take("assistant_only_loss")
    reading.take("completion_only_loss")
    if only_assistant:
        reading.note("assistant_only_loss", Effect.SAME, "")
    else:
        text = "TRL trains on every token of a conversation, here on the assistant's: set `data.loss_mask` for others"
        reading.note(
            "assistant_only_loss", Effect.MEANS, f"{text}; of prompts and completions both train the completion"
        )
    for name in ("shuffle_dataset", "dataset_test_split", "eval_strategy", "eval_steps"):
        if reading.has(name):
            reading.take(name)
            reading.note(name, Effect.NOTHING, "rows are drawn in a random order; validation is `[val]`, with its data")
    if reading.has("dataset_text_field") and (value := reading.take("dataset_text_field")) != "text":
        reading.refuse("dataset_text_field", value, "rows of one text are written as prompt and completion here")
    _shared(reading, "")
