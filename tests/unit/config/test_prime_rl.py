"""Keys of prime-rl: every one of its documents and of the usual training guide works, is warned of, or is refused."""

import contextlib
import os
import tomllib
from pathlib import Path

import pytest

from millrace.cli.errors import CliError
from millrace.cli.session.config_file import PARTS, import_config, print_notes, refuse_blocked
from millrace.config import RLConfig, SFTConfig, load, validate_document
from millrace.config.argv import RESERVED_FLAGS
from millrace.config.messages import Effect
from millrace.config.prime_rl.keys import RL_KEYS, SFT_KEYS
from millrace.config.prime_rl.translation import toml
from millrace.config.section import value_at
from millrace.config.sections.eval import EvalRunConfig
from millrace.config.sections.inference import ReplicaConfig
from millrace.config.tree import Kind, schema_tree
from millrace.errors import InvalidSpecError

GUIDE = """\
inference_gpu_ids = [0, 1, 2]
trainer_gpu_ids = [3]
max_steps = 500
seq_len = 16384
[wandb]
project = "my-project"
name = "my-run"
[model]
name = "Qwen/Qwen2.5-7B-Instruct"
[trainer.optim]
lr = 1e-5
weight_decay = 0.0
[trainer.tokenizer]
name = "Qwen/Qwen2.5-7B-Instruct"
[trainer.model.ac]
freq = 1
[trainer.model.lora]
rank = 32
alpha = 32.0
dropout = 0.05
target_modules = ["q_proj", "v_proj"]
[orchestrator]
batch_size = 32
rollouts_per_example = 16
oversampling_factor = 2.0
[orchestrator.sampling]
max_tokens = 1024
temperature = 0.5
[orchestrator.buffer]
online_difficulty_filtering = true
[[orchestrator.env]]
id = "my-env"
args = { dataset_name = "train", difficulty = "hard" }
[orchestrator.eval]
interval = 100
rollouts_per_example = 1
num_examples = 100
[[orchestrator.eval.env]]
id = "my-env"
args = { split = "validation" }
[inference]
gpu_memory_utilization = 0.6
[inference.model]
name = "Qwen/Qwen2.5-7B-Instruct"
enable_auto_tool_choice = true
tool_call_parser = "hermes"
max_model_len = 16384
"""

ENV = ["--orchestrator.env", '[{"id": "a"}, {"id": "b"}]', "--orchestrator.rollouts-per-example", "2"]

WORKS = {
    "max_steps": ("7", ("max_steps", 7)),
    "seq_len": ("64", ("seq_len", 64)),
    "model.name": ("m", ("model.name", "m")),
    "inference_gpu_ids": ("[0, 1]", ("inference_gpu_ids", [0, 1])),
    "trainer_gpu_ids": ("[2]", ("trainer_gpu_ids", [2])),
    "output_dir": ("o", ("output_dir", "o")),
    "ckpt.interval": ("5", ("trainer.ckpt.interval", 5)),
    "ckpt.keep": ("2", ("trainer.ckpt.keep_last", 2)),
    "trainer.ckpt.keep_last": ("2", ("trainer.ckpt.keep_last", 2)),
    "trainer.optim.lr": ("1e-5", ("trainer.optim.lr", 1e-5)),
    "trainer.optim.weight_decay": ("0.0", ("trainer.optim.weight_decay", 0.0)),
    "trainer.optim.max_norm": ("0.5", ("trainer.optim.max_norm", 0.5)),
    "trainer.enable_token_export": ("true", ("trainer.token_log.share", 1.0)),
    "trainer.tokenizer.name": ("m", ("trainer.tokenizer.name", "m")),
    "tokenizer.name": ("m", ("trainer.tokenizer.name", "m")),
    "trainer.model.ac.freq": ("1", ("trainer.model.ac.freq", 1)),
    "trainer.model.fsdp_cpu_offload": ("true", ("trainer.model.fsdp_cpu_offload", True)),
    "trainer.model.dp_replicate": ("2", ("trainer.model.dp_replicate", 2)),
    "trainer.model.tp": ("2", ("trainer.model.tp", 2)),
    "trainer.model.reduce_dtype": ("bfloat16", ("trainer.model.reduce_dtype", "bfloat16")),
    "trainer.model.lora.rank": ("8", ("trainer.model.lora.rank", 8)),
    "orchestrator.batch_size": ("32", ("orchestrator.batch_size", 32)),
    "orchestrator.group_size": ("2", ("orchestrator.rollouts_per_example", 2)),
    "orchestrator.micro_batch_size": ("8", ("trainer.micro_batch_tokens", 8 * 2048)),
    "orchestrator.env_ratios": ("[0.25, 0.75]", ("orchestrator.env.1.weight", 0.75)),
    "orchestrator.buffer.env_ratios": ("[0.25, 0.75]", ("orchestrator.env.1.weight", 0.75)),
    "orchestrator.buffer.oversampling_factor": ("2.0", ("orchestrator.oversampling_factor", 2.0)),
    "orchestrator.buffer.seed": ("7", ("orchestrator.seed", 7)),
    "orchestrator.buffer.easy_border": ("0.8", ("orchestrator.buffer.easy_threshold", 0.8)),
    "orchestrator.buffer.hard_threshold": ("0.2", ("orchestrator.buffer.hard_threshold", 0.2)),
    "orchestrator.buffer.online_difficulty_filtering": (
        "true",
        ("orchestrator.buffer.online_difficulty_filtering", True),
    ),
    "orchestrator.oversampling_factor": ("2.0", ("orchestrator.oversampling_factor", 2.0)),
    "orchestrator.sampling.max_tokens": ("9", ("orchestrator.sampling.max_tokens", 9)),
    "orchestrator.sampling.temperature": ("0.5", ("orchestrator.sampling.temperature", 0.5)),
    "orchestrator.sampling.top_p": ("0.9", ("orchestrator.sampling.top_p", 0.9)),
    "orchestrator.sampling.top_k": ("20", ("orchestrator.sampling.top_k", 20)),
    "orchestrator.sampling.min_p": ("0.1", ("orchestrator.sampling.min_p", 0.1)),
    "orchestrator.val.interval": ("5", ("orchestrator.eval.interval", 5)),
    "orchestrator.mask_truncated_completions": ("true", ("orchestrator.filters.0.type", "truncated")),
    "orchestrator.filters": (
        '[{"type": "gibberish", "enforce": false, "logprob_offset": 2}]',
        ("orchestrator.filters.0.logprob_threshold", -13.931),
    ),
    "orchestrator.eval.interval": ("5", ("orchestrator.eval.interval", 5)),
    "orchestrator.eval.num_examples": ("5", ("orchestrator.eval.num_examples", 5)),
    "orchestrator.eval.eval_base_model": ("false", ("orchestrator.eval.skip_first_step", True)),
    "orchestrator.algo.type": ("grpo", ("orchestrator.algo.type", "grpo")),
    "orchestrator.train.sampling.max_completion_tokens": ("9", ("orchestrator.sampling.max_tokens", 9)),
    "monitor.wandb.project": ("p", ("wandb.project", "p")),
    "trainer.monitor.wandb.project": ("p", ("wandb.project", "p")),
    "monitors.wandb.name": ("n", ("wandb.name", "n")),
    "wandb.id": ("x", ("wandb.id", "x")),
    "wandb.log_extras.samples": ("true", ("wandb.log_extras.samples", True)),
    "trainer.monitor.wandb.log_extras.interval": ("10", ("wandb.log_extras.interval", 10)),
    "log.level": ("debug", ("log.level", "debug")),
    "orchestrator.log.level": ("debug", ("log.level", "debug")),
    "inference.server.port": ("8001", ("inference.server.port", 8001)),
    "inference.parallel.tp": ("2", ("inference.parallel.tp", 2)),
    "trainer.model.cp": ("2", ("trainer.model.cp", 2)),
    "trainer.model.ep": ("8", ("trainer.model.ep", 8)),
    "inference.gpu_memory_utilization": ("0.5", ("inference.gpu_memory_utilization", 0.5)),
    "inference.model.max_model_len": ("4096", ("inference.model.max_model_len", 4096)),
    "inference.model.dtype": ("bfloat16", ("inference.model.dtype", "bfloat16")),
    "inference.model.tool_call_parser": ("hermes", ("inference.model.tool_call_parser", "hermes")),
    "inference.model.reasoning_parser": ("qwen3", ("inference.model.reasoning_parser", "qwen3")),
    "inference.model.enable_auto_tool_choice": ("true", ("inference.model.enable_auto_tool_choice", True)),
    "inference.api_server_count": ("4", ("inference.vllm.api_server_count", 4)),
}
"""A key of the documents, a value, and where it has its effect."""

EXCEPTIONS = {
    "trainer.model.attn": "flash_attention_2",
    "trainer.model.impl": "custom",
    "trainer.model.pp": "2",
    "trainer.data.fake.batch_size": "2",
    "orchestrator.algo.length_penalty.type": "linear",
    "orchestrator.advantage.type": "x",
    "trainer.loss.ratio_type": "sequence",
    "ckpt.resume_step": "50",
    "trainer.ckpt.resume_step": "50",
}
"""Keys of features that are built later, accepted with a warning: take a key out when it gets its effect."""

NOTHING_TO_CHOOSE = {
    "trainer.weight_broadcast.type": "nccl",
    "rollout_transport.type": "zmq",
    "slurm.job_name": "x",
    "deployment.type": "multi_node",
    "orchestrator.concurrency.max_inflight": "128",
}

REFUSED = {
    "orchestrator.client.base_url": ("http://127.0.0.1:8000/v1", "A foreign endpoint loads no policies"),
    "orchestrator.teacher_rollout_model": ('{"model": {"name": "m"}}', "millrace eval --tasks train"),
    "orchestrator.use_sft_loss": ("true", "millrace eval --tasks train"),
    "orchestrator.client.api_key_var": ("API_KEY", "engines register with the orchestrator"),
    "orchestrator.sampling.repetition_penalty": ("1.1", "the trainer does not compute"),
    "orchestrator.token_batch_size": ("1000", "use `orchestrator.batch_size`"),
    "orchestrator.buffer.min_reward": ("0.01", "online_difficulty_filtering = true"),
    "orchestrator.buffer.skip_verification": ("true", "rewards are always computed"),
    "inference.api_key": ("x", "keys are never in a config"),
    "trainer.model.ac": ("full", "must be a JSON object"),
    "trainer.arguments.learning_rate": ("1", "unknown key"),
    "trainer.args.learning_rates": ("1", "unknown key"),
}


def flag(key: str, value: str) -> str:
    return f"--{key}={value}"


@pytest.mark.parametrize("key", sorted(WORKS))
def test_a_key_has_its_effect(key):
    value, (path, expected) = WORKS[key]
    loaded = load(RLConfig, [*ENV, "--orchestrator.eval", "--ckpt", flag(key, value)], {})
    where = tuple(int(part) if part.isdigit() else part for part in path.split("."))
    config = loaded.config
    if path.startswith("inference.vllm."):
        assert config.inference.vllm[path.rpartition(".")[2]] == expected
    elif value_at(config, where) != expected:
        assert config.orchestrator.sampling.extra_body == {where[-1]: expected}
    assert all(note.effect is Effect.MEANS for note in loaded.notes)


@pytest.mark.parametrize("key", sorted(EXCEPTIONS))
def test_a_key_of_a_later_feature_is_accepted_with_one_warning(key, capsys):
    loaded = load(RLConfig, [*ENV, flag(key, EXCEPTIONS[key])], {})
    unbuilt = [note for note in loaded.notes if note.effect in (Effect.LATER, Effect.BLOCKS)]
    if schema_tree(RLConfig).find(tuple(key.split("."))) is not None:
        assert not unbuilt, "it has its effect now: take it out of the exceptions"
        return
    (note,) = unbuilt
    print_notes(loaded.notes)
    assert "command line" in str(note) and capsys.readouterr().err.count("without effect yet:") == 1
    if note.effect is Effect.BLOCKS:
        with pytest.raises(CliError, match="would learn something else"):
            refuse_blocked(loaded.notes)
    else:
        refuse_blocked(loaded.notes)


@pytest.mark.parametrize("key", sorted(NOTHING_TO_CHOOSE))
def test_where_there_is_nothing_to_choose_a_note_says_so(key):
    loaded = load(RLConfig, [*ENV, flag(key, NOTHING_TO_CHOOSE[key])], {})
    assert [note.effect for note in loaded.notes] == [Effect.NOTHING]
    assert loaded.notes[0].text


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_refusal_says_what_to_write(key):
    value, says = REFUSED[key]
    with pytest.raises(InvalidSpecError) as caught:
        load(RLConfig, [*ENV, flag(key, value)], {})
    assert [violation for violation in caught.value.violations if says in violation.message]


def test_the_training_guides_file_works(tmp_path):
    (tmp_path / "guide.toml").write_text(GUIDE)
    loaded = load(RLConfig, ["@", "guide.toml"], {}, cwd=tmp_path)
    config = loaded.config
    assert config.inference.needs_vllm and config.inference.engine == "auto"
    assert [env.name for env in config.orchestrator.eval.env] == ["my-env-eval"]
    unbuilt = [note for note in loaded.notes if note.effect in (Effect.LATER, Effect.BLOCKS)]
    assert unbuilt == [] and config.trainer.model.ac.freq == 1
    assert all("guide.toml:" in note.source for note in loaded.notes)


HEAD = """\
max_steps = 20
seq_len = 2048
[deployment]
num_train_gpus = 1
num_infer_gpus = 2
[monitors.wandb]
project = "p"
[orchestrator]
batch_size = 128
group_size = 16
[orchestrator.renderer]
name = "qwen3"
[orchestrator.train.sampling]
max_completion_tokens = 128
[[orchestrator.train.source]]
name = "sort"
ratio = 2.0
[orchestrator.train.source.env.taskset]
id = "alphabet-sort"
min_turns = 3
[orchestrator.train.source.env.taskset.task]
power_per_turn = false
[orchestrator.train.source.env.agent]
timeout = { rollout = 60 }
[orchestrator.train.source.env.agent.harness]
id = "null"
[orchestrator.train.source.env.agent.runtime]
type = "subprocess"
[[orchestrator.eval.source]]
name = "test"
num_examples = 5
group_size = 4
interval = 10
[orchestrator.eval.source.env.taskset]
id = "alphabet-sort"
[inference.vllm]
model = "m"
tool_call_parser = "auto"
tensor_parallel_size = 2
[model]
name = "m"
"""


def test_the_schema_of_late_2026_is_read(tmp_path):
    (tmp_path / "a.toml").write_text(HEAD)
    config = load(RLConfig, ["@", "a.toml"], {}, cwd=tmp_path).config
    (env,) = config.orchestrator.env
    assert (env.name, env.id, env.weight) == ("sort", "alphabet-sort", 2.0)
    roles = {"agent": {"timeout": {"rollout": 60}}}
    assert env.args == {"min_turns": 3, "task": {"power_per_turn": False}, "env": roles, "renderer": "qwen3"}
    (evaluated,) = config.orchestrator.eval.env
    assert (evaluated.num_examples, evaluated.rollouts_per_example, evaluated.interval) == (5, 4, 10)
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ([0, 1], [2])
    assert config.inference.vllm == {"tensor_parallel_size": 2} and config.wandb.project == "p"


ORCH_2025 = """\
max_steps = 5
batch_size = 16
micro_batch_size = 8
seq_len = 64
rollouts_per_example = 4
mask_truncated_completions = false
[monitor.wandb]
[monitor.wandb.log_extras]
interval = 10
[environment]
id = "hendrycks-math"
[environment.args]
min_solve_rate = 0.1
[eval]
interval = 50
environment_ids = ["math500", "aime2024"]
rollouts_per_example = [1, 16]
[sampling]
max_tokens = 64
[ckpt]
interval = 100
"""
TRAIN_2025 = '[optim]\nlr = 1e-6\n[ckpt]\ninterval = 100\n[model]\nname = "m"\n[monitor.wandb]\n'
INFER_2025 = '[model]\nname = "m"\n[parallel]\ndp = 2\n'


def test_the_split_files_of_2025_are_read_together_and_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"orch.toml": ORCH_2025, "train.toml": TRAIN_2025, "infer.toml": INFER_2025}.items():
        Path(name).write_text(text)
    files = ["--orchestrator", "@", "orch.toml", "--trainer", "@", "train.toml", "--inference", "@", "infer.toml"]
    config = load(RLConfig, files, {}).config
    assert config.orchestrator.env[0].args == {"min_solve_rate": 0.1}
    assert [(env.id, env.rollouts_per_example) for env in config.orchestrator.eval.env] == [
        ("math500", 1),
        ("aime2024", 16),
    ]
    assert config.trainer.micro_batch_tokens == 8 * 64 and config.ckpt.interval == 100
    assert config.orchestrator.sampling.max_tokens == 63, "one below seq_len, with a note"
    text, _, how = import_config(["orch.toml", "train.toml", "infer.toml"], kind=None, out=None)
    assert how == "millrace rl @ FILE"
    Path("ours.toml").write_text(text)
    assert load(RLConfig, ["@", "ours.toml"], {}).config == config
    assert load(RLConfig, ["@", "ours.toml"], {}).notes[0].path == ("orchestrator", "sampling", "max_tokens")
    for name, part in (("orch.toml", "orchestrator"), ("train.toml", "trainer"), ("infer.toml", "inference")):
        _, _, how = import_config([name], kind=None, out=None)
        assert how == f"millrace {part} @ FILE"


@pytest.mark.parametrize(
    ("evaluation", "ids", "intervals"),
    [
        ("", [], []),
        ('[[orchestrator.eval.env]]\nid = "other"', ["other", "a"], [None, 5]),
        ('[[orchestrator.eval.env]]\nid = "a"', ["a"], [None]),
    ],
    ids=["alone", "beside other evaluations", "of what is evaluated anyway"],
)
def test_validation_is_an_evaluation_of_the_training_environments(tmp_path, evaluation, ids, intervals):
    written = (
        '[[orchestrator.env]]\nid = "a"\n[orchestrator]\nrollouts_per_example = 4\n[orchestrator.val]\ninterval = 5\n'
        + evaluation
    )
    (tmp_path / "rl.toml").write_text(written)
    evaluated = load(RLConfig, ["@", str(tmp_path / "rl.toml")]).config.orchestrator.eval
    assert [env.id for env in evaluated.env] == (ids or ["a"])
    assert [env.interval for env in evaluated.env] == (intervals or [None])
    assert (evaluated.interval, evaluated.num_examples) == ((5, 16) if not ids else (100, -1))


@pytest.mark.parametrize("evaluation", [True, 3, "often", [1]])
def test_an_evaluation_that_is_no_table_is_refused_beside_a_validation(evaluation):
    tree = {"eval": evaluation, "orchestrator": {"env": [{"id": "a"}], "val": {"interval": 5}}}
    with pytest.raises(InvalidSpecError) as refused:
        validate_document(tree)
    assert any(each.field.endswith("eval") for each in refused.value.violations)


def test_an_imported_file_means_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"head.toml": HEAD, "guide.toml": GUIDE}.items():
        Path(name).write_text(text)
        written, _, _ = import_config([name], kind=None, out=None)
        Path("ours.toml").write_text(written)
        ours = load(RLConfig, ["@", "ours.toml"], {})
        assert ours.config == load(RLConfig, ["@", name], {}).config
        assert not ours.notes, "nothing is left of prime-rl's words"


def test_what_a_file_is_has_to_be_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text('[model]\nname = "m"\n')
    with pytest.raises(CliError, match="nothing in it tells"):
        import_config(["x.toml"], kind=None, out=None)
    assert import_config(["x.toml"], kind="sft", out=None)[2] == "millrace sft @ FILE"


def test_sft_files_are_read(tmp_path):
    (tmp_path / "sft.toml").write_text(
        'max_steps = 5\n[model]\nname = "m"\ncompile = "None"\n[data]\nseq_len = 64\nmicro-batch-size = 4\n'
        "[tokenizer]\nname = 't'\n[deployment]\nnum_train_gpus = 1\n[slurm]\njob_name = 'x'\n[model.ac]\nfreq = 1\n"
    )
    loaded = load(SFTConfig, ["@", "sft.toml"], {}, cwd=tmp_path)
    assert loaded.config.micro_batch_tokens == 4 * 64
    later = {".".join(note.path) for note in loaded.notes if note.effect is Effect.LATER}
    assert later == {"tokenizer"} and loaded.config.model.ac.freq == 1


@pytest.mark.parametrize(("keys", "model"), [(RL_KEYS, RLConfig), (SFT_KEYS, SFTConfig)])
def test_the_tables_fit_our_schema(keys, model):
    schema = schema_tree(model)
    for key, meaning in keys.items():
        path = tuple(key.replace("[]", "").split("."))
        assert meaning.text, key
        if meaning.to:
            target = tuple(meaning.to.split("."))
            parents = [schema.find(target[:length]) for length in range(1, len(target) + 1)]
            is_free = any(node is not None and node.kind is Kind.FREE_TABLE for node in parents)
            assert schema.find(target) is not None or is_free or meaning.to in keys, f"{key} goes to {meaning.to}"
        assert not meaning.is_native or schema.find(path) or schema.find(path[:-1]), f"{key} is no key of ours"


@pytest.mark.computes
@pytest.mark.parametrize(("keys", "model"), [(RL_KEYS, RLConfig), (SFT_KEYS, SFTConfig)])
@pytest.mark.parametrize(
    "value", [3, {"x": 1}, *(pytest.param(value, marks=pytest.mark.long) for value in (False, "x", [3], [None]))]
)
def test_a_value_of_any_type_is_taken_or_refused(keys, model, value):
    for key in keys:
        document = value
        for part in reversed(key.split(".")):
            document = {part.removesuffix("[]"): [document] if part.endswith("[]") else document}
        with contextlib.suppress(InvalidSpecError):
            validate_document(document, model)


def test_prime_variables_work_and_foreign_ones_are_left_alone():
    env = {
        "PRIME_MODEL__NAME": "m",
        "PRIME_MAX_STEPS": "7",
        "PRIME_LOG_LEVEL": "DEBUG",
        "PRIME_TRAINER__OPTIM__LR": "1e-5",
        "PRIME_API_KEY": "secret",
    }
    loaded = load(RLConfig, ENV, env)
    config = loaded.config
    assert (config.model.name, config.max_steps, config.log.level) == ("m", 7, "debug")
    assert config.trainer.optim.lr == 1e-5 and loaded.sources["max_steps"] == "PRIME_MAX_STEPS"
    with pytest.raises(InvalidSpecError) as caught:
        load(RLConfig, ENV, {"PRIME_TRAINER__OPTIMM__LR": "1"})
    assert caught.value.violations[0].source == "PRIME_TRAINER__OPTIMM__LR"
    replica = load(ReplicaConfig, [], {"PRIME_MODEL__NAME": "m"}, section="inference")
    assert replica.config.inference.model.name == "m"


def test_a_document_for_a_server_has_no_key_without_effect():
    document = {
        "orchestrator": {"env": [{"id": "a"}], "rollouts_per_example": 2},
        "trainer": {"model": {"impl": "custom"}},
    }
    with pytest.raises(InvalidSpecError, match="no effect"):
        validate_document(document)


@pytest.mark.parametrize("key", ["orchestrator.algo", "orchestrator.train.algo"])
def test_loss_aggregation_is_the_trainers(key):
    loaded = load(RLConfig, [*ENV, f"--{key}.loss-aggregation", "prompt"], {})
    assert loaded.config.trainer.loss.aggregation == "prompt"
    assert load(RLConfig, [*ENV, f"--{key}.loss-aggregation", "token"], {}).config.trainer.loss.aggregation == "token"
    with pytest.raises(InvalidSpecError, match='must be "token" or "prompt"'):
        load(RLConfig, [*ENV, f"--{key}.loss-aggregation", "group"], {})


@pytest.mark.parametrize(
    ("flags", "instead"),
    [
        ("--trainer.loss.type ipo --trainer.loss.score-centering true", "trainer.loss.max_importance_ratio"),
        ("--orchestrator.algo.continue-prob 0.5", 'orchestrator.filter_zero_advantages = "refill"'),
        ("--orchestrator.algo.type dataset_sft", "`millrace sft`"),
        ("--orchestrator.algo.type echo --orchestrator.algo.filter.import-path a.b", "is chosen by role"),
        ("--orchestrator.algo.dataset-sft.name rows", "`millrace sft`"),
    ],
)
def test_what_prime_rl_has_beyond_ours_is_refused_with_what_to_write(flags, instead):
    loaded = load(RLConfig, [*ENV, *flags.split()], {})
    (blocked,) = [note for note in loaded.notes if note.effect is Effect.BLOCKS]
    assert instead in blocked.text


def test_written_toml_is_read_as_it_was():
    tree = {
        "a": 'x"\n\\é\x7f',
        "b": [1, 2.5, True],
        "t": {"inner": {"k": 1e-05, "none": None}, "empty": {}},
        "l": [{"id": "x", "args": {"deep": {"list": [{"a": 1}]}, "key with space": "v"}}],
    }
    expected = {**tree, "t": {"inner": {"k": 1e-05}, "empty": {}}}
    assert tomllib.loads(toml(tree)) == expected


FILES = os.environ.get("MILLRACE_PRIME_RL_CONFIGS", "")


@pytest.mark.skipif(not FILES, reason="MILLRACE_PRIME_RL_CONFIGS names no directory with configs of prime-rl")
def test_files_in_the_wild_import_and_pass_a_dry_run(tmp_path):
    """At least 48 of 54; the refused ones are printed with `-s`, each with its sentences."""
    files, refused = sorted(Path(FILES).rglob("*.toml")), []
    for index, path in enumerate(files):
        try:
            text, _, how = import_config([str(path)], kind=None, out=None)
            ours = tmp_path / f"{index}.toml"
            ours.write_text(text)
            command = how.split()[1]
            if command in PARTS:
                part = PARTS[command]
                argv = part.named(["@", str(ours)], reserved=RESERVED_FLAGS)
                load(part.document, argv, {}, section=part.section)
            else:
                load({"rl": RLConfig, "sft": SFTConfig, "eval": EvalRunConfig}[command], ["@", str(ours)], {})
        except (CliError, InvalidSpecError) as error:
            refused.append(path)
            print(f"{path.relative_to(FILES)}: {error}")
    print(f"{len(files) - len(refused)} of {len(files)} files import and pass --dry-run")
    assert len(refused) * 54 <= 6 * len(files)
