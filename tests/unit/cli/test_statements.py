"""What the documents of prime-rl state, walked: 218 keys, flags, commands and behaviours, as a person writes them.

Each row has its verdict of before (W worked, P in part, N silently not, R refused, A absent), what is written, and what
must happen now. Behaviour that needs a stack names the tests that prove it. `-s` prints the counts.
"""

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from millrace.cli.main import main
from millrace_testing.statements import (
    EVAL,
    FILES,
    ORCHESTRATOR,
    REPLICA,
    RL,
    SFT,
    TRAINER,
    ParsedCompletion,
    Row,
    absent,
    effect,
    helps,
    key,
    later,
    refused,
    shown,
)

E2E, UNIT, WITH = "tests/e2e", "tests/unit", "tests/integration"
ENTRYPOINTS = [
    effect("W", RL, "orchestrator.batch_size", 32),
    effect("W", "rl @rl.toml", "orchestrator.batch_size", 32),
    effect(
        "W",
        "rl --trainer @ trainer.toml --orchestrator @ orchestrator.toml --inference @ inference.toml",
        "trainer.optim.lr",
        1e-5,
    ),
    effect("W", REPLICA, "inference.parallel.tp", 2),
    effect("W", SFT, "data.name", "rows.jsonl"),
    effect("W", EVAL, "num_examples", 3),
    shown(
        "W",
        "the stack of `rl` is torn down",
        f"{WITH}/local/test_stack_and_cli.py::test_a_run_from_command_to_summary_twice",
    ),
    shown(
        "W",
        "engines outlive a run: millrace up",
        f"{WITH}/local/test_stack_and_cli.py::test_up_serves_runs_and_its_directory_is_locked",
    ),
    key("W", "output-dir", "o", "o"),
    shown(
        "W",
        "two stacks beside each other",
        f"{WITH}/local/test_stack_and_cli.py::test_port_in_use_names_port_purpose_and_remedy",
    ),
    effect("W", f"{REPLICA} --server.port 8001", "inference.server.port", 8001),
    helps("P", "env-server", "--orchestrator", "--listen"),
    shown(
        "P", "torchrun for SFT", f"{WITH}/trainer/test_sft_gang.py::test_torchrun_does_the_same", "docs/guides/sft.md"
    ),
    shown(
        "P",
        "a trainer of several nodes",
        "tests/chart/test_gang.py::test_two_nodes_meet_and_the_leader_has_rank_0",
        f"{WITH}/trainer/test_trainer_gang.py::test_two_ranks_equal_one_and_resume_bit_for_bit",
    ),
    helps("P", "rl", "--KEY VALUE", "--check-environments", "--resume"),
    effect("P", "inference --gpu-memory-utilization 0.5", "inference.gpu_memory_utilization", 0.5),
    effect("R", TRAINER, "trainer.optim.lr", 1e-5),
    effect("R", ORCHESTRATOR, "orchestrator.batch_size", 32),
    refused(
        "R", f"{RL} --orchestrator.client.base-url http://127.0.0.1:8000/v1", "engines register with the orchestrator"
    ),
    refused("R", f"{RL} --orchestrator.client.api-key-var KEY", "engines register with the orchestrator"),
    refused("R", "inference --api-key x", "see docs/security.md for tokens"),
    key("R", "inference-gpu-ids", "[0, 1]", [0, 1]),
    key("R", "trainer-gpu-ids", "[2]", [2]),
    effect("R", f"{RL} --slurm.job-name x", note="start the services in your own job script"),
    absent(
        "A",
        "a script that opens a terminal per process",
        "`millrace rl` shows the run; outputs/RUN/logs has the processes'",
    ),
    shown("A", "one line that sets everything up: make setup", "scripts/setup.sh", "Makefile"),
    shown("A", "a set-up check: millrace doctor, make demo", f"{UNIT}/cli/test_cli_doctor.py", "scripts/demo.sh"),
]
SOURCES = [
    shown("W", "flags over files over variables over defaults", f"{UNIT}/config/test_config_sources.py"),
    effect("W", f"{RL} @ more.toml", "max_steps", 7),
    effect(
        "W", f"{RL} --trainer.optim.weight-decay 0.5 --trainer.optim.max_norm 2.0", "trainer.optim.weight_decay", 0.5
    ),
    shown("W", "MILLRACE_CONFIG__a__b", f"{UNIT}/config/test_config_sources.py"),
    effect("W", f"{RL} --trainer.optim @ optim.toml", "trainer.optim.lr", 2e-5),
    refused("W", f"{RL} --orchestrator.batch-size 34 --dry-run", "use 32 or 36"),
    refused("W", "rl @ two_lengths.toml --inference.model.max-model-len 512 --dry-run", "max_model_len"),
    refused("W", f"{RL} --trainer.model.name x --inference.model.name y --dry-run", "model.name"),
    refused("W", f"{RL} --trainer.optim.lr=-1 --orchestrator.batch-size 34 --dry-run", "2 things are wrong"),
    shown(
        "N",
        "PRIME_* variables",
        f"{UNIT}/config/test_prime_rl.py::test_prime_variables_work_and_foreign_ones_are_left_alone",
    ),
    refused("P", f"{RL} --trainer.model.ac full --dry-run", "set a key of it (`--trainer.model.ac."),
    shown("R", "the training guide's file", f"{UNIT}/config/test_prime_rl.py::test_the_training_guides_file_works"),
]
KEYS = [
    key("W", "max-steps", "5", 5),
    key("W", "seq-len", "512", 512),
    key("W", "model.name", "m", "m"),
    key("W", "trainer.optim.lr", "0", 0),
    key("W", "trainer.optim.weight-decay", "0.0", 0.0),
    key("W", "trainer.optim.max-norm", "0.5", 0.5),
    effect(
        "W",
        f"{RL} --trainer.scheduler.type linear --trainer.scheduler.warmup-steps 3 --max-steps 20",
        "trainer.scheduler.warmup_steps",
        3,
    ),
    key("W", "trainer.model.lora.rank", "8", 8),
    key("W", "trainer.model.lora.alpha", "16", 16),
    key("W", "trainer.model.lora.dropout", "0.1", 0.1),
    key("W", "trainer.model.lora.target-modules", '["q_proj"]', ["q_proj"]),
    key("W", "orchestrator.batch-size", "64", 64),
    key("W", "orchestrator.rollouts-per-example", "8", 8),
    key("W", "orchestrator.oversampling-factor", "2.0", 2.0),
    key("W", "orchestrator.sampling.max-tokens", "9", 9),
    key("W", "orchestrator.sampling.temperature", "0.5", 0.5),
    key("W", "orchestrator.env", '[{"id": "b"}]', "b", "orchestrator.env.0.id"),
    key("W", "orchestrator.env", '[{"id": "b", "args": {"x": 1}}]', {"x": 1}, "orchestrator.env.0.args"),
    effect("W", f"{RL} --inference.model.name m --model.name m", "inference.model.name", "m"),
    key("W", "inference.model.max-model-len", "4096", 4096),
    key("W", "orchestrator.eval.interval", "5", 5),
    key("W", "orchestrator.eval.num-examples", "5", 5),
    key("W", "orchestrator.eval.rollouts-per-example", "3", 3),
    key("W", "ckpt.interval", "5", 5),
    key("W", "ckpt.keep-last", "1", 1),
    effect("W", f"{RL} --ckpt.keep-last 1 --ckpt.keep-interval 4", "ckpt.keep_interval", 4),
    key("P", "orchestrator.sampling.top-p", "0.9", 0.9),
    key("P", "orchestrator.sampling.top-k", "20", 20),
    key(
        "P",
        "orchestrator.eval.env",
        '[{"id": "a", "args": {"split": "test"}}]',
        {"split": "test"},
        "orchestrator.eval.env.0.args",
    ),
    key("P", "inference.gpu-memory-utilization", "0.6", 0.6),
    key("P", "inference.model.tool-call-parser", "hermes", "hermes"),
    key("P", "inference.model.reasoning-parser", "qwen3", "qwen3"),
    key("P", "inference.model.dtype", "bfloat16", "bfloat16"),
    effect("P", f"{RL} --orchestrator.micro-batch-size 8", "trainer.micro_batch_tokens", 8 * 2048, note="tokens"),
    effect("N", f"{RL} --wandb.project p", "wandb.project", "p"),
    effect("N", f"{RL} --wandb.project p --wandb.name n", "wandb.name", "n"),
    shown(
        "N",
        "min_p in extra_body",
        f"{UNIT}/config/test_config_sampling.py::test_truncation_is_taken_over_from_where_other_servers_have_it",
    ),
    refused(
        "N",
        f"{RL} --orchestrator.sampling.extra-body '{{\"repetition_penalty\": 1.1}}' --dry-run",
        "the trainer does not compute",
    ),
    effect("N", f"{RL} --orchestrator.sampling.extra-body '{{\"foo\": 1}}'", note="the embedded engine has no foo"),
    effect("R", f"{RL} --trainer.tokenizer.name t", "trainer.tokenizer.name", "t"),
    effect("R", f"{RL} --trainer.model.ac.freq 1", "trainer.model.ac.freq", 1),
    key("R", "trainer.model.optimization-dtype", "bfloat16", "bfloat16"),
    effect("R", f"{RL} --trainer.model.reduce-dtype bfloat16", "trainer.model.reduce_dtype", "bfloat16"),
    effect("R", f"{RL} --trainer.model.fsdp-cpu-offload", "trainer.model.fsdp_cpu_offload", True),
    key("R", "orchestrator.trajectory-strategy", "interleaved", "interleaved"),
    key("R", "orchestrator.buffer.online-difficulty-filtering", "true", True),
    key("R", "inference.model.enable-auto-tool-choice", "true", True),
    shown(
        "R",
        "ckpt.resume_step",
        f"{UNIT}/cli/test_cli_existing.py",
        f"{UNIT}/cli/test_cli_prepare.py::test_a_step_to_resume_from_belongs_to_the_command",
    ),
    key("R", "orchestrator.sampling.min-p", "0.1", 0.1),
    refused("R", f"{RL} --orchestrator.sampling.repetition-penalty 1.1 --dry-run", "the trainer does not compute"),
    refused("R", f"{RL} --trainer.args.learning-rate 1 --dry-run", "unknown key"),
    later("R", f"{RL} --trainer.model.impl custom", "trainer.model.impl"),
    later("R", f"{RL} --trainer.model.gradient-checkpointing", "trainer.model.gradient_checkpointing"),
]
ALGORITHMS = [
    shown("W", "grpo", f"{UNIT}/algorithms/test_grpo.py", f"{E2E}/test_learns.py::test_held_out_reward_rises"),
    shown(
        "W", "importance weights by ratio", f"{UNIT}/trainer/test_trainer_loss.py::test_each_branch_of_the_default_loss"
    ),
    key("W", "trainer.loss.dppo-mask-low", "0.1", 0.1),
    shown("W", "async_level", f"{WITH}/orchestrator/test_runs.py::test_async_level_0_trains_only_on_the_newest_policy"),
    shown(
        "W",
        "bound of staleness",
        f"{UNIT}/trainer/test_trainer_parts.py::test_staleness_is_per_rollout_by_its_oldest_token",
        f"{WITH}/orchestrator/test_failing_runs.py::test_groups_that_are_all_too_old_are_told",
    ),
    shown(
        "W",
        "updates in flight",
        f"{WITH}/inference/test_policy_service.py::test_a_request_in_flight_carries_both_versions",
    ),
    shown("W", "continuous batching", f"{UNIT}/inference/test_embedded_engine.py"),
    shown(
        "W",
        "one sample per prefix",
        f"{UNIT}/env_server/test_env_samples.py::test_extending_turns_become_one_sample",
        f"{UNIT}/env_server/test_env_samples.py::test_a_turn_that_does_not_extend_begins_a_new_sample",
    ),
    shown("W", "several turns and tools", f"{E2E}/test_environments.py::test_two_turns_and_a_tool_give_exact_tokens"),
    shown(
        "W",
        "constant rewards end the run",
        f"{WITH}/orchestrator/test_failing_runs.py::test_equal_rewards_are_told_at_the_first_batch",
    ),
    key("P", "orchestrator.buffer.online-difficulty-filtering", "true", True),
    shown(
        "P",
        "on-policy distillation",
        f"{E2E}/test_distillation.py::test_a_student_comes_near_its_teacher_although_its_orchestrator_dies",
    ),
    effect(
        "P", f"{RL} --trainer.loss.type custom --trainer.loss.import-path my.losses:fn", "trainer.loss.type", "custom"
    ),
    later("R", f"{RL} --trainer.loss.ratio-type sequence", "trainer.loss.ratio_type"),
    key("R", "orchestrator.algo.type", "opo", "opo"),
    key("R", "orchestrator.algo.type", "rloo", "rloo"),
    refused("R", f"{RL} --orchestrator.algo.type cispo --dry-run", 'must be "grpo" or'),
    key("R", "orchestrator.algo.type", "max_rl", "max_rl"),
    effect("R", f"{RL} --trainer.optim.type muon", "trainer.optim.type", "muon"),
    effect("R", f"{RL} --orchestrator.mask-truncated-completions", "orchestrator.filters.0.action", "mask"),
    key("A", "orchestrator.buffer.easy-threshold", "0.8", 0.8),
    later("A", f"{RL} --orchestrator.algo.type sft", "orchestrator.algo.type"),
]
SCALE = [
    shown("W", "FSDP2", f"{WITH}/trainer/test_trainer_gang.py::test_two_ranks_equal_one_and_resume_bit_for_bit"),
    shown("W", "LoRA", f"{E2E}/test_lora_run.py::test_adapters_learn_on_the_embedded_engine"),
    shown(
        "P",
        "models of transformers",
        f"{UNIT}/trainer/test_lora.py",
        f"{UNIT}/trainer/test_trainer_parts.py",
        now="works in part",
    ),
    effect("R", f"{RL} --trainer.model.tp 2", "trainer.model.tp", 2),
    effect("R", f"{RL} --trainer.model.cp 2", "trainer.model.cp", 2),
    effect("R", f"{RL} --trainer.model.ep 2", "trainer.model.ep", 2),
    effect("R", f"{RL} --trainer.model.compile", "trainer.model.compile", {"fullgraph": False}),
    later("R", f"{RL} --trainer.model.attn flash_attention_2", "trainer.model.attn"),
    later("A", f"{RL} --trainer.model.moe-use-grouped-mm", "trainer.model.moe_use_grouped_mm"),
    effect("A", f"{RL} --trainer.model.ac.freq 2", "trainer.model.ac.freq", 2),
    effect("A", f"{RL} --trainer.model.optim-cpu-offload", "trainer.model.optim_cpu_offload", True),
    later("A", f"{RL} --trainer.model.use-liger", "trainer.model.use_liger"),
]
VLLM_FLAGS = {
    "data-parallel-size": (4, "R"),
    "data-parallel-size-local": (2, "R"),
    "data-parallel-address": ("10.0.0.1", "R"),
    "data-parallel-rpc-port": (13345, "R"),
    "data-parallel-start-rank": (2, "R"),
}
INFERENCE = [
    shown(
        "W",
        "routes of an OpenAI server",
        f"{WITH}/inference/test_inference_http.py::test_stream_is_valid_and_ends_with_usage",
    ),
    shown("W", "no vLLM: the remedy", f"{UNIT}/cli/test_cli_inference.py"),
    shown(
        "W",
        "the policy comes again after a resume",
        f"{WITH}/inference/test_policy_service.py",
        "tests/chaos/test_replicas.py::test_replicas_join_fall_behind_hang_die_and_leave_mid_run",
    ),
    shown(
        "P",
        "POST /update_weights, of vLLM",
        f"{WITH}/inference_vllm/test_vllm_failures.py::test_a_fixed_model_and_weights_over_http",
        now="works in part",
    ),
    shown(
        "P",
        "POST /reload_weights, of vLLM",
        f"{WITH}/inference_vllm/test_vllm_failures.py::test_a_fixed_model_and_weights_over_http",
        now="works in part",
    ),
    shown(
        "P",
        "several replicas",
        "tests/chaos/test_replicas.py::test_replicas_join_fall_behind_hang_die_and_leave_mid_run",
    ),
    shown(
        "P",
        "data and tensor parallel engines",
        f"{WITH}/inference_vllm/test_vllm_parallel.py::test_two_engine_cores_change_together",
        f"{WITH}/inference_vllm/test_vllm_parallel.py::test_two_ranks_hold_prove_and_fail_as_one",
    ),
    effect("P", f"{REPLICA} --vllm.headless --vllm.data-parallel-size 4", "inference.vllm.headless", True),
    effect("R", "inference --tensor-parallel-size 4", "inference.vllm.tensor-parallel-size", 4),
    *(
        effect(before, f"inference --{flag} {value}", f"inference.vllm.{flag}", value)
        for flag, (value, before) in VLLM_FLAGS.items()
    ),
    effect("R", "inference --headless", "inference.vllm.headless", True),
    shown(
        "A",
        "other engines, for evaluations and for rows of SFT; in RL they are refused",
        f"{E2E}/test_eval_command.py::test_the_server_of_transformers_is_evaluated",
        f"{E2E}/test_eval_command.py::test_a_model_is_trained_on_rollouts_of_the_server_of_transformers",
        f"{UNIT}/config/test_prime_rl.py::test_a_refusal_says_what_to_write",
        now="works in part",
    ),
]
TUNING = [
    shown(
        "W",
        "rows with prompt and completion",
        f"{UNIT}/trainer/test_trainer_sft.py::test_loss_is_on_the_completion_and_its_stop_token_only",
    ),
    shown(
        "W",
        "text without a template",
        f"{UNIT}/trainer/test_trainer_sft.py::test_messages_and_text_give_the_same_sample",
    ),
    shown(
        "W",
        "what SFT writes begins RL",
        f"{UNIT}/trainer/test_trainer_sft.py::test_fine_tuning_lowers_the_loss_and_writes_a_model_that_loads",
    ),
    effect(
        "W",
        f"{SFT} --optim.lr 1e-4 --optim.betas1 0.8 --scheduler.type cosine --scheduler.warmup-steps 1",
        "optim.lr",
        1e-4,
    ),
    shown("W", "data sets of the Hub", f"{UNIT}/trainer/test_sft_order.py::test_a_subset_and_split_of_the_hub"),
    shown(
        "P",
        "the prefix property",
        f"{UNIT}/trainer/test_sft_conversations.py::test_generation_markers_say_what_is_trained_where_history_is_rewritten",
    ),
    shown(
        "P",
        "resume with other max_steps",
        f"{UNIT}/trainer/test_sft_runs.py::test_another_training_is_refused_by_the_key",
        "docs/guides/sft.md",
    ),
    shown(
        "N",
        "loss on the assistant's turns",
        f"{UNIT}/trainer/test_sft_conversations.py::test_users_and_tools_inside_a_completion_are_not_trained_on",
    ),
    shown(
        "N",
        "a column of tools",
        f"{UNIT}/trainer/test_sft_conversations.py::test_tools_and_template_arguments_reach_the_template",
    ),
    effect("R", f"{SFT} --model.lora.rank 8", "model.lora.rank", 8),
    effect("R", f"{SFT} --data.micro-batch-size 4", "micro_batch_tokens", 4 * 128, note="tokens"),
    effect("R", f"{SFT} --bench --data.fake.type variable"),
    effect("R", f"{SFT} --model.ac.freq 1", "model.ac.freq", 1),
    effect("R", f"{SFT} --val.interval 5", "val.interval", 5),
]
EVALS = [
    effect("W", f"{EVAL} --client.base-url http://127.0.0.1:9/v1", "client.base_url", ["http://127.0.0.1:9/v1"]),
    effect("W", f"{EVAL} --model.name m", "model.name", "m"),
    effect("W", f"{EVAL} --num-examples 20 --rollouts-per-example 2", "num_examples", 20),
    effect("W", f"{EVAL} --environment-ids a,b", "env.1.id", "b"),
    shown(
        "W",
        "evaluations during training",
        f"{UNIT}/orchestrator/test_evals.py::test_each_environment_has_its_own_counts_and_interval",
    ),
    key("W", "orchestrator.eval.skip-first-step", "true", True),
    shown(
        "W", "other clients ask our engine", f"{WITH}/inference/test_inference_http.py::test_models_name_the_context"
    ),
    shown(
        "P",
        "the key of an endpoint",
        f"{E2E}/test_eval_command.py::test_an_endpoint_is_evaluated_although_its_orchestrator_dies",
        f"{UNIT}/cli/test_cli_eval.py",
    ),
    shown("P", "a local model beside MILLRACE_SERVER", f"{UNIT}/cli/test_cli_eval.py", now="refused with a sentence"),
    shown(
        "R",
        "adapters of a LoRA run",
        f"{UNIT}/cli/test_cli_eval_policies.py::test_base_and_steps_of_a_directory_with_an_adapter_merged",
    ),
    shown(
        "R",
        "--environment-ids",
        f"{UNIT}/cli/test_cli_eval_policies.py::test_the_command_line_names_environments_and_policies",
    ),
    helps("R", "eval", "--weights-dir DIR"),
    helps("R", "eval", "--steps 10,20"),
    helps("R", "eval", "--no-eval-base"),
    refused("R", "eval --env.id a --model.name m --dry-run", "give the list as JSON"),
    shown("A", "endpoints.py", f"{UNIT}/cli/test_cli_eval_policies.py::test_an_old_registry_is_read_and_not_run"),
    helps("A", "eval show", "--sort", "--full"),
]
CHECKPOINTS = [
    shown("W", "off unless asked for", f"{WITH}/trainer/test_trainer_runs.py::test_no_checkpoints_unless_asked_for"),
    shown(
        "W",
        "model, optimizer and progress",
        f"{WITH}/trainer/test_trainer_runs.py::test_stop_and_resume_equals_an_unbroken_run",
    ),
    shown(
        "W",
        "a stack that is started again goes on",
        f"{E2E}/test_kill_and_restart.py::test_kill_9_of_the_whole_stack_loses_and_repeats_nothing",
    ),
    shown(
        "W",
        "weights in Hugging Face format",
        f"{UNIT}/cli/test_cli_results.py::test_collect_downloads_verifies_and_plots",
    ),
    helps("P", "rl", "--resume"),
    shown(
        "R",
        "--ckpt.resume-step",
        f"{UNIT}/cli/test_cli_existing.py::test_another_config_is_refused_naming_the_keys_and_forks_where_a_step_is_named",
    ),
    key("R", "ckpt.keep", "2", 2, "ckpt.keep_last"),
    key("R", "ckpt.save-async", "false", False),
    effect("R", f"{RL} --wandb.id x", "wandb.id", "x"),
]
WATCHING = [
    shown(
        "W",
        "a log per process",
        f"{UNIT}/cli/test_cli_progress.py::test_log_lines_carry_time_and_writer_for_every_kind_of_event",
    ),
    shown(
        "W",
        "metrics and plot",
        f"{UNIT}/cli/test_cli_results.py::test_metrics_file_has_one_line_per_step_eval_and_score",
    ),
    shown("W", "a live view", f"{UNIT}/cli/test_cli_progress.py::test_live_view_draws_the_run"),
    effect("N", f"{RL} --wandb.offline", "wandb.offline", True),
    effect("N", f"{RL} --wandb.entity e --wandb.group g --wandb.tags '[\"t\"]'", "wandb.tags", ["t"]),
    effect("R", f"{RL} --wandb.dir x", note="wandb.dir"),
    effect("R", f"{RL} --wandb.id x", "wandb.id", "x"),
    effect("R", f"{RL} --monitor.wandb.project p", "wandb.project", "p"),
    effect("R", f"{RL} --wandb.log-extras.samples", "wandb.log_extras.samples", True),
    effect("R", f"{RL} --wandb.log-extras.distributions", "wandb.log_extras.distributions", True),
    effect("R", f"{RL} --wandb.log-extras.interval 10", "wandb.log_extras.interval", 10),
    effect("A", f"{RL} --wandb", "wandb.project", "millrace"),
    effect("A", f"{RL} --wandb.name n", "wandb.name", "n"),
]
BENCHES = [
    effect("R", f"{RL} --bench"),
    effect(
        "R", f"{SFT} --bench --data.fake.type fixed --data.micro-batch-size 8 --data.batch-size 8 --data.seq-len 128"
    ),
    effect("R", f"{RL} --bench --trainer.data.fake.batch-size 2"),
    effect("R", f"{TRAINER} --bench --data.fake.micro_batch_size 8 --data.fake.batch_size 128 --data.fake.seq_len 128"),
]
SERVICE = [
    shown(
        "W",
        "load_environment",
        f"{UNIT}/env_server/test_env_values.py::test_module_name",
        "docs/guides/first_environment.md",
    ),
    key("W", "orchestrator.env", '[{"id": "a", "args": {"n": 3}}]', 3, "orchestrator.env.0.args.n"),
    key("W", "orchestrator.env", '[{"id": "a", "weight": 2.0}, {"id": "b"}]', 2.0, "orchestrator.env.0.weight"),
    shown("W", "an environment that is not installed", f"{E2E}/test_bad_input.py::test_unknown_environment"),
    shown("W", "wrong args of an environment", f"{E2E}/test_bad_input.py::test_load_environment_raises"),
    helps("W", "run", "submit", "list", "show", "watch", "logs", "cancel"),
    helps("W", "run", "pause", "resume", "fork", "replay", "audit"),
    shown("W", "reflection", f"{WITH}/rpc/test_rpc_serve.py::test_reflection_lists_the_services"),
    shown("W", "two clients", f"{UNIT}/client/test_client_runs.py::test_sync_facade"),
    shown("W", "marks of slow tests and of tests on GPUs", "pyproject.toml"),
    shown(
        "W",
        "loops that can be read",
        "services/millrace/orchestrator/drive/loop.py",
        "services/millrace/trainer/loop.py",
    ),
    shown(
        "P",
        "environments are packages: pip installs them",
        f"{UNIT}/env_server/test_env_values.py::test_unknown_module_says_how_it_was_looked_up",
    ),
    shown(
        "P",
        "a queue of runs",
        f"{WITH}/orchestrator/test_recovery.py::test_two_runs_share_one_trainer_in_the_order_of_their_creation",
        now="works in part",
    ),
    absent("A", "many LoRA runs on one pool", "one run at a time has the engines; many runs are a later issue"),
]
TROUBLES = [
    refused("W", f"{RL} --orchestrator.batch-size 34 --dry-run", "must be a multiple of"),
    shown(
        "W",
        "an environment that does not load",
        f"{WITH}/orchestrator/test_runs.py::test_an_environment_that_does_not_load_fails_the_run_and_says_why",
    ),
    shown(
        "W",
        "an engine that is not there",
        f"{WITH}/orchestrator/test_explained.py::test_a_policy_that_nobody_serves_is_up_to_inference",
    ),
    shown(
        "N",
        "all rollouts fail",
        f"{E2E}/test_first_mistakes.py::test_a_mistake_ends_the_run_and_is_named",
        f"{WITH}/orchestrator/test_failing_runs.py::test_a_run_whose_rollouts_all_fail_ends_with_the_first_real_error",
    ),
    shown(
        "N",
        "a reward that is NaN",
        f"{UNIT}/env_server/test_env_values.py::test_reward_must_be_finite",
        f"{E2E}/test_first_mistakes.py::test_a_mistake_ends_the_run_and_is_named",
    ),
]
GROUPS: dict[str, Sequence[Row]] = {
    "entrypoints": ENTRYPOINTS,
    "sources": SOURCES,
    "keys": KEYS,
    "algorithms": ALGORITHMS,
    "scale": SCALE,
    "inference": INFERENCE,
    "tuning": TUNING,
    "evals": EVALS,
    "checkpoints": CHECKPOINTS,
    "watching": WATCHING,
    "benches": BENCHES,
    "service": SERVICE,
    "troubles": TROUBLES,
}
ROWS = [(f"{group}-{number}", row) for group, rows in GROUPS.items() for number, row in enumerate(rows, start=1)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the files of FILES are."""
    found = tmp_path_factory.mktemp("statements")
    for name, text in FILES.items():
        (found / name).write_text(text)
    return found


@pytest.mark.parametrize("row", [pytest.param(row, id=where) for where, row in ROWS])
def test_a_statement_holds(
    row: Row, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.delenv("MILLRACE_SERVER", raising=False)

    def run(command: str) -> ParsedCompletion:
        code = main(shlex.split(command))
        captured = capsys.readouterr()
        return ParsedCompletion(code, captured.out, captured.err)

    row.check(run)


def test_every_statement_has_a_row() -> None:
    before = Counter(row.before for _, row in ROWS)
    now = Counter(row.now for _, row in ROWS)
    print(f"before: {dict(before)}; now: {dict(now)}")
    for where, row in ROWS:
        if row.now in ("absent", "works in part"):
            print(f"{where} {row.now}: {row.name}")
    assert before == {"W": 94, "P": 30, "N": 12, "R": 67, "A": 15}
