"""Keys of prime-rl's RL, SFT and evaluation configs that our schema does not have, and what each means here.

A key that our schema has in the same place is not asked about unless its meaning says so (`is_native`): the line of a
feature that gets built later needs no removal here, though it should go.
"""

from collections.abc import Mapping
from dataclasses import replace

from millrace.config.prime_rl import conversions, lab, meanings, sources
from millrace.config.prime_rl.lab_keys import HOSTED, VF_RL, VF_SFT
from millrace.config.prime_rl.meanings import Meaning, blocks, converted, later, moved, nothing, only, refused, same

STORE = "policies go through the object store; there is nothing to choose"
MEMORY = (
    "memory is saved by `trainer.model.ac`, `trainer.model.fsdp_cpu_offload` and `trainer.model.optim_cpu_offload`: "
    "this has no effect"
)
PARALLEL = "the trainer shards over all ranks that `dp_replicate`, `cp` and `tp` leave: other ways have no effect yet"
CP_STYLE = (
    "`cp` exchanges tokens for attention heads, or gathers keys and values where heads do not divide: no effect yet"
)
EXPERTS = "models with experts are trained like any other: this has no effect yet"
FAKE = "fake data is for --bench: write `--bench --data.fake.type fixed` on the command line"
SLURM = "nothing is submitted to Slurm here: start the services in your own job script (docs/operations.md)"
ENVIRON = "export these variables before the command: services inherit them"
WATCH = "there is no such monitor: every service has GET /metrics, and `millrace run why`"
FLIGHT = "what is in flight follows from `batch_size`, `async_level` and `oversampling_factor`"
ENGINES = (
    "engines register with the orchestrator: start them with MILLRACE_ORCHESTRATOR set. A foreign endpoint loads no "
    "policies, so RL cannot train on its rollouts: play them with `millrace eval --tasks train --client.base-url URL`, "
    "and train on them with `millrace sft` (docs/evaluations.md)"
)
LOSS = (
    "prime-rl's {value} is not here: take default, ipo, or importance_sampling with `trainer.loss.correction` = "
    '[{{type = "token_mask", low = 0.125, high = 8.0}}]'
)
ADVANTAGE = "only `orchestrator.algo.type` chooses how advantages are made: this is not there yet"
LOSS_TYPES = ("default", "ppo", "gspo", "cispo", "importance_sampling", "ipo", "custom")
BUFFER_TYPE = (
    "prime-rl's {value} buffer is not here: for difficulty-pool leave the type out and write easy_threshold and "
    "hard_threshold, for online-difficulty write online_difficulty_filtering = true"
)
VISION = "models with images are not trained yet"


def model_keys(prefix: str) -> dict[str, Meaning]:
    """Return the meanings of keys of the trained model.

    `prefix` is the table that holds them, such as `trainer.model.`.
    """
    return {
        **same(later(MEMORY, False), prefix, "ac_offloading full_offload"),
        **same(nothing("kernels are those of torch and transformers: this changes speed alone"), prefix, "moe fusions"),
        f"{prefix}ep": converted(meanings.automatic, is_native=True),
        f"{prefix}ac.targets": later("mode selective keeps matrix products and attention: no effect yet"),
        **same(later(MEMORY, True, False), prefix, "load_using_meta use_liger"),
        **same(
            later(MEMORY, "disabled"),
            prefix,
            "fused_lm_head_token_chunk_size fused_lm_head_chunk_size lm_head_chunk_size gradient_checkpointing",
        ),
        f"{prefix}compile": converted(conversions.switched, is_native=True),
        **same(later("transformers chooses the attention: no effect yet", "auto", "sdpa"), prefix, "attn"),
        **same(later("models are those of transformers: no effect yet", "auto", "hf"), prefix, "impl"),
        **same(later(PARALLEL, 1, "auto"), prefix, "pp dp_shard ep_comm_backend dp_size"),
        **same(later(CP_STYLE, "ulysses"), prefix, "cp_style"),
        **same(
            later(EXPERTS, False),
            prefix,
            "moe_router_dtype moe_use_grouped_mm moe_fused_kernel freeze_moe_router index_cache deepep_num_sms "
            "deepep_token_chunk_size moe_backend",
        ),
        f"{prefix}quantization": blocks("training in fp8 is not there yet"),
        f"{prefix}debug": blocks("there are no debugging variants of models", {}),
        f"{prefix}vlm": blocks(VISION),
        f"{prefix}experimental.lora": moved(f"{prefix}lora"),
        f"{prefix}trust_remote_code": later("code that comes with a model is not run by the trainer", False),
        f"{prefix}conversion_dir": nothing("models are read as they are"),
        f"{prefix}tokenizer": nothing("name it in `trainer.tokenizer.name`"),
    }


def checkpoint_keys(prefix: str) -> dict[str, Meaning]:
    """Return the meanings of checkpoint keys; `prefix` is the table that holds them, such as `ckpt.`."""
    return {
        **same(nothing("checkpoints are in the object store, with the run"), prefix, "output_dir path"),
        **same(
            later("a checkpoint always has all of its parts: no effect"),
            prefix,
            "skip_optimizer skip_progress skip_scheduler skip_dataloader weights weights_only save_format "
            "skip_gather_master_weights "
            "save_adapter_separately wait_for_weights_timeout",
        ),
    }


def optimizer_keys(prefix: str) -> dict[str, Meaning]:
    """Return the meanings of keys of the optimizer, its schedule and fake data.

    `prefix` is the table that holds those tables: `trainer.`, or empty in SFT.
    """
    return {
        f"{prefix}optim.type": only(
            "the optimizer {value} is not here: take adamw, muon or sgd", "adamw", "muon", "sgd"
        ),
        **same(later("Muon's orthogonalisation is torch's own: no effect"), f"{prefix}optim.", "ns_steps adjust_lr_fn"),
        **same(later(MEMORY), f"{prefix}optim.", "max_concurrent_tasks stream_cpu_offload"),
        f"{prefix}scheduler.decay_steps": converted(meanings.no_decay, is_native=True),
        f"{prefix}optim.scheduler": moved(f"{prefix}scheduler"),
        f"{prefix}optim.weight_decay": converted(meanings.weight_decay, is_native=True),
        f"{prefix}data.fake": blocks(FAKE),
    }


def algo_keys(prefix: str) -> dict[str, Meaning]:
    """Return the meanings of keys of an algorithm; `prefix` is its table, of the run or of one environment."""
    return {
        f"{prefix}type": converted(meanings.algorithm, is_native=True),
        f"{prefix}length_weighted_baseline": converted(meanings.length_weighted),
        f"{prefix}failsafe_min_members": nothing("a group is trained on once all of its rollouts have ended"),
        f"{prefix}loss_aggregation": converted(meanings.loss_aggregation),
        f"{prefix}continue_prob": blocks(
            "groups are not played on until they have a success: leave it out, and have groups of equal rewards "
            'replaced with `orchestrator.filter_zero_advantages = "refill"`',
            *(0, 0.0),
        ),
        f"{prefix}dataset_sft": blocks(meanings.ROWS_ALONE),
        f"{prefix}sampling": blocks(meanings.SAMPLED_BY_OTHERS, {}, {"source": "policy"}),
        f"{prefix}length_penalty": blocks(
            "rewards are not lowered by length: leave it out, or write an advantage of your own, "
            '`type = "custom"` with its `import_path` (docs/algorithms.md)'
        ),
        f"{prefix}advantage": converted(meanings.nested_type),
        f"{prefix}teacher.headers_from_env": refused(
            "requests to a teacher carry no headers but the key of `api_key_var`: put a proxy that adds them before it"
        ),
        f"{prefix}filter": blocks(
            "which of these tokens are learned is chosen by role, in `roles` of the same table: leave the function out",
            {},
        ),
        f"{prefix}renderer": nothing("the engine writes the hint of opsd with the model's own chat template", {}),
    }


def source_keys(prefix: str) -> dict[str, Meaning]:
    """Return the meanings of keys of one environment, trained on or evaluated; `prefix` is its table."""
    return {
        **same(
            nothing("env-servers start workers as they need them, and register by themselves", "auto"),
            prefix,
            "num_workers max_retries address serve pool",
        ),
        f"{prefix}version": nothing("the version that is installed counts: install this one"),
        f"{prefix}taskset": converted(sources.own_taskset),
        f"{prefix}env": converted(sources.own_env),
        f"{prefix}harness": converted(sources.own_harness),
        f"{prefix}runtime": converted(sources.own_runtime),
        **same(
            converted(sources.own_limit),
            prefix,
            "max_turns max_input_tokens max_output_tokens max_total_tokens max_total_completion_tokens",
        ),
        f"{prefix}advantage": converted(sources.own_advantage),
        f"{prefix}extra_env_kwargs": blocks("write them in `args`, which the environment's loader takes", {}),
        **same(nothing("what is lost is played again; what fails by itself is not"), prefix, "retries retry"),
        f"{prefix}timeout": nothing("a rollout has `rollout_timeout_s`"),
    }


def process_keys(prefix: str) -> dict[str, Meaning]:
    """Return the meanings of keys that every process of prime-rl has: where it logs and writes, and how it is watched.

    `prefix` is the table of the process, such as `trainer.`; empty for the top.
    """
    return {
        f"{prefix}log": moved("log"),
        f"{prefix}monitor.wandb": moved("wandb"),
        f"{prefix}monitors.wandb": moved("wandb"),
        f"{prefix}wandb": moved("wandb"),
        f"{prefix}output_dir": converted(conversions.output_dir),
        f"{prefix}env_vars": nothing(ENVIRON, {}),
        f"{prefix}slurm": nothing(SLURM),
        f"{prefix}bench": replace(nothing("write --bench on the command line", False), form=bool),
        **same(nothing(STORE), prefix, "weight_broadcast rollout_transport"),
        **same(
            nothing(WATCH), prefix, "heartbeat metrics_server monitors.file monitors.prime monitor.file monitor.prime"
        ),
        **same(
            later("there is no such switch yet: no effect", False),
            prefix,
            "trace_path profile_path memory_profiler_path gc dist_timeout_seconds matmul_precision clean dry_run "
            "clean_output_dir dashboard",
        ),
    }


_VLLM_FLAGS = (
    "api_server_count enable_lora max_loras max_cpu_loras max_lora_rank enable_prefix_caching seed "
    "enable_expert_parallel all2all_backend enable_eplb enable_dbo data_parallel_size data_parallel_size_local "
    "data_parallel_address data_parallel_rpc_port data_parallel_start_rank headless quantization"
)

SHARED: dict[str, Meaning] = {
    **{key: meaning for key, meaning in process_keys("").items() if key not in ("log", "wandb", "output_dir")},
    "wandb.dir": nothing("the orchestrator keeps its files in a directory of its own (`MILLRACE_SCRATCH_DIR`)"),
    "wandb.shared": nothing("one process writes what all services log, into one run", True),
    "resume": converted(conversions.resume),
    **checkpoint_keys("ckpt."),
    "deployment.num_infer_gpus": converted(conversions.gpus),
    "deployment.num_train_gpus": converted(conversions.gpus),
    **same(
        nothing("several machines are several services: start them on each (docs/operations.md)", "single_node"),
        "deployment.",
        "type num_train_nodes num_infer_nodes num_infer_replicas nodes_per_fsdp_group orchestrator_on_inference "
        "gpus_per_node num_eval_gpus num_teacher_gpus num_teacher_nodes hsdp num_nodes num_gpus",
    ),
    **same(nothing("there is no such choice for logs"), "log.", "vf_level log_data interval ranks_filter file path"),
    "run.dir": nothing("results lie in `output_dir/<run name>`"),
    "toml_files": refused("name the files one after the other instead, the weakest first: `@ base.toml @ this.toml`"),
}
"""At the top of RL and SFT configs."""

SPLIT_2025: dict[str, Meaning] = {
    "orchestrator.environment": converted(conversions.environment),
    "orchestrator.eval.environment_ids": converted(conversions.evaluated_ids),
    "orchestrator.eval.num_examples": converted(conversions.per_environment, is_native=True),
    "orchestrator.eval.rollouts_per_example": converted(conversions.per_environment, is_native=True),
    "orchestrator.eval.max_concurrent": nothing(FLIGHT),
    "orchestrator.eval.eval_base_model": converted(conversions.eval_base_model),
    "orchestrator.micro_batch_size": converted(conversions.micro_batch_size),
    "orchestrator.mask_truncated_completions": converted(conversions.truncated_mask),
    "orchestrator.mask_env_responses": nothing("only sampled tokens are trained on", True),
    "orchestrator.rollouts_per_prompt": moved("orchestrator.rollouts_per_example"),
    "orchestrator.ckpt": moved("ckpt", "is part of every checkpoint: `[ckpt]`"),
    "orchestrator.num_train_workers": nothing("trainers register with the orchestrator by themselves"),
    "trainer.async_level": moved("async_level"),
    "trainer.max_async_level": moved("async_level"),
    "trainer.weights": nothing("policies are in the object store; `[ckpt]` says which are kept"),
}
"""Split files of 2025: one per service, `[environment]`, `[monitor.wandb]`, counts of evaluations as lists."""

ONE_FILE: dict[str, Meaning] = {
    "orchestrator.buffer.seed": moved("orchestrator.seed"),
    "orchestrator.buffer.oversampling_factor": moved("orchestrator.oversampling_factor"),
    "orchestrator.buffer.type": only(BUFFER_TYPE, "simple"),
    "orchestrator.buffer.hash_keys": nothing("tasks are known by their index and their task set's digest"),
    "orchestrator.buffer.from_scratch": nothing("the pools follow from the run's own log", True),
    "orchestrator.buffer.skip_verification": refused(
        "rewards are always computed; leave it out, and the thresholds too if no task shall be moved", False
    ),
    **same(
        refused("groups are filtered at a mean of exactly 0 or 1: write online_difficulty_filtering = true instead"),
        "orchestrator.buffer.",
        "min_reward max_reward",
    ),
    "orchestrator.val": converted(conversions.validation),
    "orchestrator.env_ratios": converted(conversions.ratios),
    "orchestrator.buffer.env_ratios": converted(conversions.ratios),
    "orchestrator.advantage": blocks(ADVANTAGE, {}, {"type": "default"}),
    "orchestrator.filters[].enforce": converted(conversions.enforced),
    "orchestrator.filters[].logprob_offset": converted(conversions.logprob_offset),
    "orchestrator.model.lora": nothing("an adapter is named by its policy"),
    "orchestrator.model.trust_remote_code": later("code that comes with a model is not run", False),
    "orchestrator.model.vlm": blocks(VISION),
    "orchestrator.training_mode": converted(meanings.training_mode),
    **{f"orchestrator.student.{key}": moved(f"orchestrator.{key}") for key in ("model", "client")},
    "orchestrator.student.name": moved("orchestrator.model.name"),
    "orchestrator.teacher.model": moved("orchestrator.algo.teacher"),
    "orchestrator.teacher.client": moved("orchestrator.algo.teacher"),
    "orchestrator.teacher.name": moved("orchestrator.algo.teacher.name"),
    "orchestrator.optim": converted(meanings.own_optimizer),
    "orchestrator.pre_batch_filters": converted(conversions.batch_filters),
    "orchestrator.post_batch_filters": converted(conversions.batch_filters),
    "orchestrator.filters": converted(conversions.batch_filters, is_native=True),
    "orchestrator.drop_context_limits_before_advantage": converted(conversions.dropped_when_cut),
    "orchestrator.zero_truncated_completions": blocks(
        'a rollout that was cut keeps its reward: write `[[orchestrator.filters]]` with `type = "truncated"`, and '
        '`action = "drop"`, "mask" or "penalise"',
        False,
    ),
    **same(
        blocks("a run ends with its steps: leave it out, and set `max_steps`"),
        "orchestrator.",
        "max_finalized_groups stop_when",
    ),
    **same(
        nothing("groups of which nothing is left to train on are replaced, and what fails ends the run by itself"),
        "orchestrator.",
        "max_consecutive_zero_trainable_batches max_zero_output_batches preserve_groups",
    ),
    **same(nothing("the log of the run has every rollout"), "orchestrator.", "save_train_group_stats"),
    **same(nothing(WATCH), "orchestrator.", "prime_monitor"),
    **same(nothing("environments choose: `renderer` in their `args`"), "orchestrator.", "pool_size"),
    "orchestrator.teacher_model": blocks('name the teacher in `orchestrator.algo.teacher`, with `type = "opd"`'),
    "orchestrator.eval.retry": nothing("what is lost is played again"),
    **same(
        nothing("results of evaluations are stored with the run, and do not hold it up"),
        "orchestrator.eval.",
        "save save_to_hf save_to_disk watcher cancel_inflight_rollouts_on_eval skip_eval_on_resume "
        "skip_eval_on_restart retrigger_on_resume",
    ),
    **source_keys("orchestrator.env[]."),
    **source_keys("orchestrator.eval.env[]."),
    **same(converted(sources.thinking), "orchestrator.env[].sampling.", "reasoning_effort enable_thinking"),
    **same(
        blocks("which tasks are drawn is the run's: `[orchestrator.buffer]`", {}, {"type": "standard"}),
        "orchestrator.env[].",
        "sampler curriculum.sampler",
    ),
    "orchestrator.env[].curriculum.gates": nothing("groups without any advantage are left out all the same"),
    **algo_keys("orchestrator.env[].algo."),
    **same(blocks("belongs to opsd, the algorithm of a whole run"), "orchestrator.env[].algo.", "demo_key template"),
    **same(converted(sources.thinking), "orchestrator.eval.env[].sampling.", "reasoning_effort enable_thinking seed"),
    "orchestrator.eval.env[].select": converted(sources.selected, is_native=True),
    "orchestrator.eval.env[].skip_verification": nothing("nothing is verified beforehand"),
    "teacher_inference": blocks("start the teacher yourself, and name it in `orchestrator.algo.teacher`"),
    "teacher_gpu_ids": nothing("start the teacher yourself"),
    "trainer.loss.type": only(LOSS, *LOSS_TYPES, other={"icepop": meanings.icepop}),
    **same(converted(meanings.loss_part), "trainer.loss.", "eps ratio_low ratio_high"),
    "trainer.loss.score_centering": blocks(
        "needs the engine's probability of every token that `top_p` and `top_k` leave, and the log keeps that of the "
        "sampled one alone: leave it out; `trainer.loss.max_importance_ratio` and `trainer.loss.correction` bound what "
        "drifts",
        False,
    ),
    **same(
        blocks(
            "is no part of any loss here: `trainer.loss.type` has the ratio of a token or of a sequence (gspo), "
            "clip_low and clip_high bound it, and `trainer.loss.correction` masks what drifts (docs/algorithms.md)"
        ),
        "trainer.loss.",
        "ratio_type ratio_length_norm mask_ratio_high mask_ratio_low clip_ratio "
        "kl_mask_high kl_mask_low token_mask_high token_mask_low geo_mask_high geo_mask_low sequence_mask_low "
        "sequence_mask_high sequence_clip_high teacher_tau kl_coef",
    ),
    "inference.model.rope_scaling": moved("inference.vllm.rope_scaling"),
    **{f"inference.{flag}": moved(f"inference.vllm.{flag}") for flag in _VLLM_FLAGS.split()},
    "inference.api_key": refused("keys are never in a config: see docs/security.md for tokens"),
}
"""The one file of early 2026."""

HEAD: dict[str, Meaning] = {
    "orchestrator.train.source": converted(sources.train_sources),
    "orchestrator.train.env": converted(sources.train_env),
    "orchestrator.train.algo": moved("orchestrator.algo"),
    "orchestrator.train.select": converted(sources.train_select),
    "orchestrator.train.sampling": moved("orchestrator.sampling"),
    "orchestrator.train.filter_zero_advantages": moved("orchestrator.filter_zero_advantages"),
    "orchestrator.train.group_size": moved("orchestrator.rollouts_per_example"),
    **same(nothing("env-servers start workers as they need them"), "orchestrator.train.", "num_workers max_retries"),
    "orchestrator.constant_trainer_batch_size": converted(meanings.constant_batch),
    "orchestrator.eval.env": converted(sources.eval_defaults, form=dict),
    "orchestrator.eval.select": converted(sources.selected),
    "orchestrator.eval.source": converted(sources.eval_sources),
    "orchestrator.eval.sampling.reasoning_effort": moved("orchestrator.eval.sampling.extra_body.reasoning_effort"),
    **algo_keys("orchestrator.algo."),
    "orchestrator.algo.teacher.base_url": converted(meanings.as_list, is_native=True),
    **same(
        nothing(FLIGHT),
        "orchestrator.",
        "concurrency tasks_per_minute max_concurrent max_inflight_rollouts max_inflight max_concurrent_rollouts "
        "max_inflight_episodes",
    ),
    "orchestrator.renderer": converted(conversions.renderer),
    "orchestrator.client": refused(ENGINES),
    "orchestrator.token_batch_size": refused("batches are counted in rollouts: use `orchestrator.batch_size`"),
    "orchestrator.use_renderer": nothing("environments choose: `renderer` in their `args`"),
    "orchestrator.model.client": refused(ENGINES),
    **same(
        nothing("engines report by themselves"),
        "orchestrator.",
        "collect_inference_metrics inference_metrics_roles env_server_base_port pad_to_multiple_of num_workers "
        "workers_per_env use_token_client",
    ),
    "orchestrator.use_sft_loss": refused(meanings.SAMPLED_BY_OTHERS, False),
    "orchestrator.teacher_rollout_model": refused(meanings.SAMPLED_BY_OTHERS),
    "orchestrator.tokenizer": moved("trainer.tokenizer"),
    "tokenizer": moved("trainer.tokenizer"),
    "trainer.tokenizer.chat_template": later("the model's own chat template counts: no effect yet"),
    "trainer.tokenizer.trust_remote_code": later("code that comes with a tokenizer is not run", False),
    **same(
        later("there is no such switch yet: no effect", False),
        "trainer.",
        "max_concurrent_runs recompute_logprobs experimental",
    ),
    "trainer.enable_router_replay": moved("trainer.model.moe.replay"),
    "trainer.enable_token_export": converted(conversions.token_export),
    "inference.vllm_extra": moved("inference.vllm"),
    "inference.enable_return_routed_experts": moved("inference.return_routed_experts"),
    "pd_disagg": nothing("prefill and decoding are not parted here: this changes speed alone", {}),
    "inference.vllm.model": moved("inference.model.name", is_native=True),
    "inference.vllm.enable_return_routed_experts": moved("inference.return_routed_experts", is_native=True),
    "inference.vllm.tool_call_parser": moved("inference.model.tool_call_parser", neutral=("auto",), is_native=True),
    "inference.vllm.reasoning_parser": moved("inference.model.reasoning_parser", neutral=("auto",), is_native=True),
    "inference.server.liveness_timeout_seconds": nothing("an engine that does not answer is seen by the orchestrator"),
    **same(
        nothing("rollouts are spread over replicas by the orchestrator"),
        "inference.",
        "router backend_port deployment use_pd_kv_transfer",
    ),
    **same(
        later("this is a matter of vLLM's own flags: set them in `[inference.vllm]`", False, True),
        "inference.",
        "use_deep_gemm kv_cache_offload enable_fp32_lm_head enable_fp32_router_logits",
    ),
    **same(nothing("say it on the command line"), "inference.", "dry_run"),
}
"""The schema of August 2026: `orchestrator.train`, `monitors`, `renderer`, `deployment`."""

RL_KEYS: Mapping[str, Meaning] = {
    **SHARED,
    "model.vlm": blocks(VISION),
    **process_keys("trainer."),
    **process_keys("orchestrator."),
    **process_keys("inference."),
    **model_keys("trainer.model."),
    **checkpoint_keys("trainer.ckpt."),
    **optimizer_keys("trainer."),
    "trainer.resume": converted(conversions.resume),
    "orchestrator.resume": converted(conversions.resume),
    **SPLIT_2025,
    **ONE_FILE,
    **HEAD,
    **HOSTED,
    **VF_RL,
}


# Keys of prime-rl's SFT configs that our schema does not have, and what each means here.

_NO_LOOP = "a fine-tuning samples nothing that it learns from: evaluations are `[eval]`, or `millrace eval`"
_OWN_SERVERS = "each evaluation starts an engine and env-servers of its own: `[inference]` says which engine"
_FINISHED = "every evaluation is finished; the training waits where `eval.max_pending` of them are not"
_EVAL: Mapping[str, Meaning] = {
    "eval.source": converted(sources.eval_sources),
    "eval.env": converted(sources.eval_defaults, form=dict),
    "eval.select": converted(sources.selected),
    "eval.environment_ids": converted(conversions.evaluated_ids),
    "eval.eval_base_model": converted(conversions.eval_base_model),
    "eval.cancel_on_new_checkpoint": nothing(_FINISHED, False),
    **same(nothing(_OWN_SERVERS), "eval.", "client env_server_base_port"),
    **same(nothing("`eval.max_concurrent` rollouts are played at once"), "eval.", "concurrency tasks_per_minute"),
    **same(
        nothing("a step is evaluated once, also where the run goes on after it"),
        "eval.",
        "retrigger_on_resume skip_eval_on_resume skip_eval_on_restart",
    ),
    **same(nothing("what is lost is played again"), "eval.", "retry max_retries"),
    **same(nothing("results are in `evals` of the run's directory"), "eval.", "save save_to_hf save_to_disk"),
    **{
        f"eval.sampling.{key}": moved(f"eval.sampling.extra_body.{key}")
        for key in ("reasoning_effort", "presence_penalty", "frequency_penalty", "min_tokens", "stop", "seed")
    },
    "eval.sampling.enable_thinking": moved("eval.sampling.extra_body.chat_template_kwargs.enable_thinking"),
    **source_keys("eval.env[]."),
    **same(converted(sources.thinking), "eval.env[].sampling.", "reasoning_effort enable_thinking seed"),
    "eval.env[].select": converted(sources.selected, is_native=True),
    "eval.env[].skip_verification": nothing("nothing is verified beforehand"),
}
_FAKE_VALIDATION = "a loss on made-up tokens says nothing: name rows with `val.data.name`, or leave [val] out"
_ALL_ROWS = (
    "each validation takes all rows, in micro-batches of `micro_batch_tokens`: the mean per token is the same in any "
    "order and in batches of any size"
)

SFT_KEYS: Mapping[str, Meaning] = {
    **SHARED,
    **model_keys("model."),
    "model.seq_len": nothing("`data.seq_len` counts"),
    **checkpoint_keys("ckpt."),
    **optimizer_keys(""),
    **{f"{table}.type": only("there is no data of type {value} yet", "sft") for table in ("data", "val.data")},
    **same(blocks(FAKE), "data.", "fake length input_ids"),
    **same(later(_FAKE_VALIDATION), "val.data.", "fake length input_ids"),
    **same(nothing(_ALL_ROWS), "val.data.", "batch_size micro_batch_size pack_function pack shuffle num_workers"),
    **{
        f"{table}.source": blocks("rows of several places are one dataset's: write `name`, `subsets` and `splits`")
        for table in ("data", "val.data")
    },
    **{
        f"{table}.chat_template_kwargs": blocks(
            "a template is applied with its own defaults: change them in the model's `chat_template.jinja`", {}
        )
        for table in ("data", "val.data")
    },
    "data.micro_batch_size": converted(conversions.micro_batch_size),
    **same(later("rows are packed up to `micro_batch_tokens`: no effect"), "data.", "pack"),
    "data.num_workers": nothing("the trainer encodes each row when a step takes it"),
    **_EVAL,
    **{key: meaning for key, meaning in RL_KEYS.items() if key.startswith("inference.")},
    "orchestrator": later(_NO_LOOP, {}),
    "env_server_base_port": nothing(_OWN_SERVERS),
    "weight_broadcast": nothing(STORE),
    "tokenizer": later("the model's own tokenizer counts: no effect yet"),
    "renderer": later("the model's own chat template counts: no effect yet"),
    "loss": blocks("only the cross entropy of completions is there", {}),
    "loss_impl": later("there is one implementation of the loss: no effect"),
    "max_epochs": later("set `max_steps`: passes over the data are not counted"),
    **VF_SFT,
}


# Keys of evaluations: prime-rl's `eval`, and `prime eval` or `vf-eval` of verifiers.

_ENDPOINT = "names no address: write `client.base_url`, with `client.api_key_var` where it wants a key"
_HEADERS = "requests carry no headers but the key of `client.api_key_var`: put a proxy that adds them before it"
_NO_CHOICE = "there is no such choice for evaluations"
_SAVED = "save save_results save_every save_to_hf_hub save_to_hf save_to_disk hf_hub_dataset_name"
_OF_EVALUATIONS = (
    "env_dir_path independent_scoring state_columns num_workers disable_env_server verbose debug max_retries"
)
_SAMPLED = "reasoning reasoning_effort seed stop presence_penalty frequency_penalty min_tokens verbosity"
EVAL_KEYS: Mapping[str, Meaning] = {
    **{key: each for key, each in SHARED.items() if key.partition(".")[0] in ("log", "run", "env_vars", "slurm")},
    **source_keys("env[]."),
    "toml_files": SHARED["toml_files"],
    "model": converted(lab.model_name, form=str),
    "source": converted(sources.eval_sources),
    "eval": converted(lab.environments),
    "env": converted(sources.eval_defaults, form=dict),
    "select": converted(sources.selected),
    "env[].select": converted(sources.selected, is_native=True),
    **same(converted(lab.endpoint), "", "endpoint_id endpoints_path"),
    "ablation": refused("is a sweep: write an [[eval]] for each of its combinations, each with a `name`"),
    "environment_ids": converted(conversions.evaluated_ids),
    **same(
        converted(conversions.evaluated_counts, is_native=True), "", "num_examples rollouts_per_example max_concurrent"
    ),
    "num_tasks": moved("num_examples"),
    "num_rollouts": moved("rollouts_per_example"),
    **same(
        converted(sources.only_environment),
        "",
        "taskset harness runtime max_turns max_input_tokens max_output_tokens max_total_tokens env_id env_args",
    ),
    "concurrency.max_inflight": moved("max_concurrent"),
    **same(nothing("`max_concurrent` rollouts are played at once"), "concurrency.", "min_inflight initial_inflight"),
    "tasks_per_minute": nothing("`max_concurrent` rollouts are played at once"),
    "timeout": moved("rollout_timeout_s"),
    **same(refused(_HEADERS), "", "header headers header_from_state headers_from_state"),
    **same(refused(_HEADERS), "client.", "headers headers_from_env extra_headers_from_state"),
    "client.base_url": converted(meanings.as_list, is_native=True),
    **same(
        nothing(_NO_CHOICE),
        "client.",
        "timeout connect_timeout max_connections max_keepalive_connections "
        "max_retries skip_model_check admin_base_url elastic wait_for_ready_timeout",
    ),
    "client.type": converted(lab.client_type),
    "api_client_type": converted(lab.client_type),
    "extra_env_kwargs": blocks("write them in `args`, which the environment's loader takes", {}),
    **same(converted(sources.shuffled), "", "shuffle shuffle_seed"),
    "api_base_url": moved("client.base_url"),
    "api_key_var": moved("client.api_key_var"),
    "provider": refused(_ENDPOINT),
    "sampling_args": moved("sampling"),
    "max_tokens": moved("sampling.max_tokens"),
    "temperature": moved("sampling.temperature"),
    **same(converted(sources.thinking), "env[].sampling.", "reasoning_effort enable_thinking seed"),
    **{f"sampling.{key}": moved(f"sampling.extra_body.{key}") for key in _SAMPLED.split()},
    "sampling.enable_thinking": moved("sampling.extra_body.chat_template_kwargs.enable_thinking"),
    **{
        f"{prefix}{key}": nothing("results and rollouts lie in `output_dir/<run name>`")
        for prefix in ("", "env[].")
        for key in _SAVED.split()
    },
    **same(nothing(_NO_CHOICE), "env[].", _OF_EVALUATIONS),
    **same(
        nothing(_NO_CHOICE),
        "",
        f"{_OF_EVALUATIONS} tui disable_tui max_concurrent_generation max_concurrent_scoring rich monitors "
        "heartbeat bench use_tqdm dashboard push clean clean_output_dir resume resume_path server dry_run "
        "wandb env_server_base_port",
    ),
}
