"""Keys of Hosted Training's files, of verifiers' own trainer (`vf-rl`), and of its SFT command."""

from collections.abc import Mapping

from millrace.config.prime_rl import conversions, lab
from millrace.config.prime_rl.meanings import Meaning, blocks, converted, moved, nothing, refused, same
from millrace.config.trl import NOTHING

SAMPLED = "max_tokens temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty"
LOGS = "metrics are stored with the run (`millrace run`, the dashboard); `[wandb]` writes them to Weights & Biases"
SPEED = "kernels, formats and processes are chosen here: this changes speed and memory alone"
UNCUT = "prompts are not cut; one that is too long is an error of its rollout"
OTHER_LOSS = "belongs to a loss of vf-rl that is not here: choose one in `trainer.loss`"
_SLOTS = "devices are given out in order, those of inference first"

HOSTED: Mapping[str, Meaning] = {
    "model": converted(lab.model_name, form=str),
    "type": converted(lab.adapters),
    "env": converted(lab.environments),
    "name": converted(lab.run_name),
    **{
        name: moved(f"orchestrator.{name}")
        for name in (
            "batch_size",
            "rollouts_per_example",
            "oversampling_factor",
            "max_off_policy_steps",
            "sampling",
            "eval",
            "val",
        )
    },
    "loss": converted(lab.hosted_loss),
    "teacher": blocks(
        'a hosted model is no teacher here: serve it, and write `[orchestrator.algo]` with `type = "opd"` and '
        "`teacher = { name, base_url }` (docs/algorithms.md)"
    ),
    "checkpoint_id": refused("is a checkpoint of the platform: download it, and write its directory as `model`"),
    "run_config": blocks("are keys of the platform's own run: write what each is here", {}),
    **same(moved("orchestrator.pre_batch_filters"), "", "pre_batch_filters"),
    **same(moved("orchestrator.post_batch_filters"), "", "post_batch_filters"),
    **same(
        nothing("what is in flight follows from `batch_size` and `oversampling_factor`"), "", "max_inflight_rollouts"
    ),
    **same(
        nothing("machines, images and volumes are yours: there is nothing to choose"),
        "",
        "cluster_name infrastructure tailscale image_tag gpu_type volume volume_size source_ref",
    ),
    "orchestrator.sampling.seed": nothing("every rollout is sampled from a seed of its own, made of `seed`"),
    "group_size": moved("orchestrator.rollouts_per_example"),
    "buffer": moved("orchestrator.buffer"),
    "trajectory_strategy": moved("orchestrator.trajectory_strategy"),
    "learning_rate": moved("trainer.optim.lr"),
    "lora_rank": moved("trainer.model.lora.rank"),
    "lora_alpha": moved("trainer.model.lora.alpha"),
    "checkpoints.interval": moved("ckpt.interval"),
    "checkpoints.keep_cloud": moved("ckpt.keep_last"),
    **same(
        nothing("policies are kept as checkpoints are: `[ckpt]`"),
        "",
        "adapters.interval adapters.keep_last adapters.keep",
    ),
    **same(
        nothing("export the variables before the services are started: environments inherit them"),
        "",
        "env_file env_files",
    ),
    "orchestrator.sampling.enable_thinking": moved(
        "orchestrator.sampling.extra_body.chat_template_kwargs.enable_thinking"
    ),
    "orchestrator.sampling.reasoning_effort": moved("orchestrator.sampling.extra_body.reasoning_effort"),
    "orchestrator.eval.sampling.enable_thinking": moved(
        "orchestrator.eval.sampling.extra_body.chat_template_kwargs.enable_thinking"
    ),
}
"""Hosted Training (2026): flat files, `[[env]]`, `[sampling]`, `[eval]`."""

_ARGS = "trainer.args."


def _arguments(prefix: str) -> dict[str, Meaning]:
    """Return the meanings of keys of transformers' trainers, which vf-rl and vf-sft inherit.

    `prefix` is their table.
    """
    optimizers = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw")
    return {
        **same(nothing(SPEED), prefix, " ".join(NOTHING)),
        f"{prefix}optim": blocks("only AdamW is written so: choose another in `trainer.optim.type`", *optimizers),
        f"{prefix}adam_epsilon": blocks("is 1e-8 here", 1e-8),
        f"{prefix}warmup_ratio": blocks("write `warmup_steps`: the share of `max_steps`", 0, 0.0),
        f"{prefix}generation_timeout": nothing("a rollout has `orchestrator.rollout_timeout_s`"),
    }


VF_RL: Mapping[str, Meaning] = {
    "inference.gpus": moved("deployment.num_infer_gpus"),
    "trainer.gpus": moved("deployment.num_train_gpus"),
    "trainer.gpu_offset": nothing(_SLOTS),
    "inference.gpu_offset": nothing(_SLOTS),
    "inference.args": moved("inference.vllm"),
    "inference.vllm.enable_auto_tool_choice": moved("inference.model.enable_auto_tool_choice", is_native=True),
    "trainer.args": converted(lab.trainer_args),
    **{f"{_ARGS}{name}": moved(f"orchestrator.sampling.{name}") for name in SAMPLED.split()},
    f"{_ARGS}run_name": converted(lab.run_name),
    f"{_ARGS}output_dir": moved("output_dir"),
    f"{_ARGS}seed": moved("seed"),
    f"{_ARGS}max_steps": moved("max_steps"),
    f"{_ARGS}max_seq_len": moved("seq_len"),
    f"{_ARGS}num_batches_ahead": moved("async_level"),
    f"{_ARGS}batch_size": moved("orchestrator.batch_size"),
    f"{_ARGS}rollouts_per_example": moved("orchestrator.rollouts_per_example"),
    f"{_ARGS}num_generations": moved("orchestrator.rollouts_per_example"),
    **same(converted(lab.per_device), _ARGS, "per_device_train_batch_size gradient_accumulation_steps"),
    f"{_ARGS}micro_batch_size": converted(conversions.micro_batch_size),
    f"{_ARGS}learning_rate": moved("trainer.optim.lr"),
    f"{_ARGS}weight_decay": moved("trainer.optim.weight_decay"),
    f"{_ARGS}max_grad_norm": moved("trainer.optim.max_norm"),
    f"{_ARGS}adam_beta1": moved("trainer.optim.betas1"),
    f"{_ARGS}adam_beta2": moved("trainer.optim.betas2"),
    f"{_ARGS}lr_scheduler_type": moved("trainer.scheduler.type"),
    f"{_ARGS}warmup_steps": moved("trainer.scheduler.warmup_steps"),
    f"{_ARGS}use_lora": converted(lab.low_rank),
    f"{_ARGS}lora_rank": moved("trainer.model.lora.rank"),
    f"{_ARGS}lora_alpha": moved("trainer.model.lora.alpha"),
    f"{_ARGS}lora_dropout": moved("trainer.model.lora.dropout"),
    f"{_ARGS}lora_modules_to_save": moved("trainer.model.lora.modules_to_save"),
    f"{_ARGS}lora_target_modules": converted(lab.lora_targets),
    f"{_ARGS}lora_use_rslora": nothing("adapters are scaled by alpha / rank, as vf-rl does, too"),
    f"{_ARGS}mask_truncated_completions": moved("orchestrator.mask_truncated_completions"),
    f"{_ARGS}mask_env_responses": moved("orchestrator.mask_env_responses"),
    f"{_ARGS}gradient_checkpointing": converted(lab.recomputed),
    f"{_ARGS}save_steps": moved("ckpt.interval"),
    f"{_ARGS}save_total_limit": moved("ckpt.keep_last"),
    **_arguments(_ARGS),
    f"{_ARGS}scale_rewards": converted(lab.scaled),
    f"{_ARGS}beta": blocks("a KL term is `trainer.loss.kl`: write its `coef`", 0, 0.0),
    f"{_ARGS}zero_truncated_completions": blocks(
        "rollouts that were cut keep their reward, or are not trained on", False
    ),
    f"{_ARGS}importance_sampling_level": blocks(OTHER_LOSS, "token"),
    f"{_ARGS}mask_ratio_low": blocks(OTHER_LOSS, 0.125),
    f"{_ARGS}mask_ratio_high": blocks(OTHER_LOSS, 8.0),
    **same(
        blocks(OTHER_LOSS),
        _ARGS,
        "loss_type epsilon epsilon_high delta vllm_importance_sampling_cap sync_ref_model",
    ),
    **same(nothing(UNCUT), _ARGS, "max_prompt_len max_prompt_length"),
    **same(nothing(LOGS), _ARGS, "report_to logging_steps log_on_each_node eval_strategy eval_steps"),
    **same(
        nothing(SPEED),
        _ARGS,
        "bf16 fp16 tf32 use_liger max_concurrent async_max_queue_size async_generation_timeout vllm_server_host "
        "vllm_server_port vllm_server_timeout generation_batch_size steps_per_generation max_data_workers "
        "disable_dropout remove_unused_columns shuffle_dataset save_only_model save_strategy max_saved_adapters "
        "model_init_kwargs",
    ),
}
"""`vf-rl` (verifiers 0.1): `[env]`, `[inference] gpus`, `[inference.args]`, `[trainer] gpus`, `[trainer.args]`."""

VF_SFT: Mapping[str, Meaning] = {
    **_arguments("sft."),
    "sft.per_device_train_batch_size": blocks("batches are counted whole: write `batch_size`"),
    "sft.gradient_accumulation_steps": nothing("`batch_size` counts the rows of a step"),
    **same(
        nothing("machines, images and volumes are yours: there is nothing to choose"),
        "",
        "image_tag gpu_type volume volume_size source_ref env_file env_files type name",
    ),
    "model": converted(lab.model_name, form=str),
    "dataset": moved("data.name"),
    "sft.run_name": converted(lab.run_name),
    "sft.output_dir": moved("output_dir"),
    "sft.seed": moved("seed"),
    "sft.max_steps": moved("max_steps"),
    "sft.num_train_epochs": moved("max_epochs"),
    "sft.batch_size": moved("data.batch_size"),
    "sft.micro_batch_size": moved("data.micro_batch_size"),
    "sft.max_seq_len": moved("data.seq_len"),
    "sft.learning_rate": moved("optim.lr"),
    "sft.weight_decay": moved("optim.weight_decay"),
    "sft.max_grad_norm": moved("optim.max_norm"),
    "sft.lr_scheduler_type": moved("scheduler.type"),
    "sft.warmup_steps": moved("scheduler.warmup_steps"),
    "sft.use_lora": converted(lab.low_rank),
    "sft.lora_rank": moved("model.lora.rank"),
    "sft.lora_alpha": moved("model.lora.alpha"),
    "sft.lora_dropout": moved("model.lora.dropout"),
    "sft.lora_target_modules": converted(lab.lora_targets),
    "sft.gradient_checkpointing": converted(lab.recomputed),
    "sft.save_steps": moved("ckpt.interval"),
    "sft.save_total_limit": moved("ckpt.keep_last"),
    **same(nothing(LOGS), "sft.", "report_to logging_steps eval_strategy eval_steps"),
    **same(
        nothing(SPEED),
        "sft.",
        "bf16 fp16 tf32 use_liger use_vllm vllm_sample_every_n_steps vllm_num_samples vllm_server_host "
        "vllm_server_port save_strategy",
    ),
}
"""`vf-sft` (verifiers 0.1): `model`, `dataset`, `[sft]`."""
