"""No key of a foreign config vanishes: take it out or misspell it, and the result or what is said of it is another."""

import copy
import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.config.layers import Layer, Provenance, Tree
from millrace.config.load import build, load
from millrace.config.messages import Effect
from millrace.config.prime_rl import translate
from millrace.config.prime_rl.keys import EVAL_KEYS, RL_KEYS, SFT_KEYS
from millrace.config.prime_rl.meanings import UNBUILT_ALGORITHMS
from millrace.config.sections.algo import COMPARING, DISTILLING, PER_AGENT
from millrace.config.sections.eval import EvalRunConfig
from millrace.config.sections.rl import RLConfig
from millrace.config.sections.sft import SFTConfig
from millrace.config.tree import Kind, Path, SchemaKey, schema_tree
from millrace.errors import InvalidSpecError

Tables = dict[str, Any]

AUTUMN = """\
max_steps = 20
[model]
name = "m"
[deployment]
num_train_gpus = 1
num_infer_gpus = 1
[weight_broadcast]
type = "nccl"
timeout = 1200
[slurm]
job_name = "x"
[trainer.model]
ep = "auto"
impl = "custom"
attn = "auto"
cp = 1
[trainer.model.moe.compute]
type = "deepgemm_fp8"
[trainer.model.fusions]
enabled = ["qkv"]
[trainer.model.ac_offloading]
max_inflight_activations = 5
[trainer.optim]
weight_decay = "auto"
[trainer.loss]
type = "ipo"
eps = 0.25
max_importance_ratio = 100.0
score_centering = false
[orchestrator]
batch_size = 128
constant_trainer_batch_size = true
[orchestrator.model]
trust_remote_code = false
[orchestrator.concurrency]
initial_inflight = 16
[orchestrator.renderer]
name = "qwen3"
clear_thinking = false
[orchestrator.train]
group_size = 16
num_workers = 4
[orchestrator.train.env]
timeout = { rollout = 60 }
[orchestrator.train.algo]
type = "grpo"
length_weighted_baseline = true
failsafe_min_members = 4
continue_prob = 0.0
[orchestrator.train.sampling]
max_completion_tokens = 64
extra_body = { chat_template_kwargs = { enable_thinking = false } }
[[orchestrator.train.source]]
name = "a"
ratio = 0.3
env.taskset.id = "reverse-text"
env.taskset.split = "train"
env.agent.harness.id = "null"
env.agent.max_turns = 3
select = { limit = 10, shuffle = true }
sampler = { type = "standard" }
min_abs_advantage = 0.05
serve = { num_workers = 2 }
[[orchestrator.train.source]]
name = "b"
ratio = 0.7
env.taskset.id = "alphabet-sort"
algo = { type = "max_rl", continue_prob = 0.5 }
[orchestrator.eval]
interval = 5
select = { limit = 8 }
[[orchestrator.eval.source]]
name = "e"
env.taskset.id = "reverse-text"
select = { skip = 4 }
group_size = 2
"""
SUMMER = """\
max_steps = 5
resume.step = 5
[ckpt]
interval = 5
weights_only = true
[orchestrator]
batch_size = 64
group_size = 16
mask_truncated_completions = false
[orchestrator.val]
interval = 1
num_examples = 16
[[orchestrator.train.source]]
name = "a"
env.taskset.id = "reverse-text"
algo = { type = "opd", teacher = { name = "t", base_url = "http://127.0.0.1:8001/v1" } }
curriculum.gates.zero_advantage.type = "advantage_range"
[orchestrator.eval]
interval = 10
num_examples = 4
[inference.deployment]
type = "disaggregated"
num_prefill_replicas = 4
[trainer.loss]
type = "cispo"
ratio_low = 0.5
ratio_high = 3.0
"""
FINE_TUNING = """\
max_steps = 3
[model]
attn = "sdpa"
[model.ac]
freq = 1
[data]
type = "sft"
name = "rows.jsonl"
micro_batch_size = 2
[optim]
weight_decay = "auto"
[val]
interval = 5
eval_on_start = true
[val.data]
type = "sft"
name = "others"
subsets = ["a", "b"]
splits = ["t", "u"]
probabilities = [0.5, 0.25]
stopping_strategy = "first_exhausted"
shuffle = true
seed = 3
batch_size = 16
seq_len = 64
micro_batch_size = 2
num_workers = 2
[val.data.loss_mask]
user = true
[eval]
interval = 3
group_size = 2
skip_first_step = true
retrigger_on_resume = true
cancel_on_new_checkpoint = true
tasks_per_minute = 60
env_server_base_port = 6000
[eval.select]
limit = 16
[eval.client]
base_url = ["http://127.0.0.1:8000/v1"]
[eval.concurrency]
initial_inflight = 8
[eval.sampling]
max_completion_tokens = 64
reasoning_effort = "low"
stop = ["x"]
[[eval.source]]
name = "reverse"
interval = 6
group_size = 3
[eval.source.env.taskset]
id = "reverse-text"
split = "test"
[inference]
enforce_eager = true
[inference.server]
port = 8001
[inference.model]
max_model_len = 128
[deployment]
num_infer_gpus = 1
[renderer]
name = "auto"
"""
HOSTED = """\
type = "lora"
model = "m"
max_steps = 60
batch_size = 64
rollouts_per_example = 8
learning_rate = 1e-4
lora_alpha = 16.0
[sampling]
max_tokens = 512
reasoning_effort = "low"
enable_thinking = false
[[env]]
id = "primeintellect/reverse-text"
[[env]]
id = "primeintellect/alphabet-sort"
args = { min_turns = 2 }
[env.taskset]
system_prompt = "Sort."
[env.harness]
max_turns = 6
[eval]
interval = 20
num_examples = 32
eval_base_model = true
[[eval.env]]
id = "primeintellect/reverse-text"
[checkpoints]
interval = 20
[adapters]
interval = 5
"""
VF_RL = """\
model = "m"
[env]
id = "wordle"
[env.args]
use_think = true
[inference]
gpus = 6
[inference.args]
enforce_eager = true
enable_auto_tool_choice = true
tool_call_parser = "hermes"
[trainer]
gpus = 2
gpu_offset = 6
[trainer.args]
run_name = "wordle 0.5B"
use_lora = true
lora_rank = 16
lora_target_modules = ["q_proj"]
learning_rate = 2e-5
per_device_train_batch_size = 8
gradient_accumulation_steps = 4
num_generations = 16
max_steps = 50
max_tokens = 128
max_seq_len = 1024
scale_rewards = "group"
use_liger = true
report_to = "wandb"
warmup_steps = 5
save_steps = 10
"""
VF_SFT = """\
model = "m"
dataset = "rows"
[sft]
run_name = "warm-up"
max_steps = 10
learning_rate = 2e-5
batch_size = 64
micro_batch_size = 8
max_seq_len = 256
use_lora = true
lora_rank = 4
gradient_checkpointing = true
bf16 = true
logging_steps = 1
"""
VF_EVAL = """\
model = "m"
api_base_url = "http://127.0.0.1:8000/v1"
api_key_var = "KEY"
num_examples = 5
save_results = true
temperature = 0.5
[sampling_args]
max_tokens = 64
[[eval]]
env_id = "a"
env_args = { split = "test" }
rollouts_per_example = 2
[[eval]]
id = "b"
num_examples = 3
"""
PRIME_EVAL = """\
model = "m"
group_size = 2
[client]
base_url = "http://127.0.0.1:8000/v1"
[sampling]
max_completion_tokens = 64
reasoning_effort = "low"
[select]
limit = 8
[env]
timeout = { rollout = 60 }
[[source]]
name = "r"
env.taskset.id = "reverse-text"
env.taskset.split = "test"
[[source]]
env.taskset.id = "b"
select = { limit = 2, shuffle = true }
"""
SPRING = """\
max_steps = 20
clean_output_dir = true
[model]
name = "m"
[orchestrator]
training_mode = "opd"
batch_size = 64
group_size = 8
seq_len = 4096
max_inflight_episodes = 64
[orchestrator.prime_monitor]
run_name = "x"
[orchestrator.teacher.model]
name = "t"
[orchestrator.teacher.client]
base_url = ["http://127.0.0.1:8001/v1"]
[orchestrator.renderer]
name = "qwen3"
enable_thinking = false
[[orchestrator.pre_batch_filters]]
type = "zero_advantage"
enforce = true
[[orchestrator.post_batch_filters]]
type = "gibberish"
[[orchestrator.train.env]]
name = "a"
taskset = { id = "reverse-text", split = "train" }
harness = { id = "bash", runtime = { type = "docker" } }
max_turns = 3
[[orchestrator.train.env]]
name = "b"
env.taskset = { id = "proposer-solver" }
env.n = 4
env.solver.max_turns = 2
max_total_tokens = 512
pool = { type = "static" }
[trainer.model.experimental.lora]
rank = 8
[trainer.optim]
max_concurrent_tasks = 1
[trainer.scheduler]
type = "linear"
decay_steps = 0
min_lr = 1e-7
[trainer.ckpt]
skip_gather_master_weights = true
[inference.vllm_extra]
tokenizer = "t"
"""
LATER_HOSTED = """\
name = "A run"
model = "m"
loss = "rl"
max_inflight_rollouts = 96
cluster_name = "c"
[infrastructure]
compute_size = "L"
[sampling]
max_tokens = 2048
seed = 3
[[env]]
id = "me/one@0.2.1"
version = "latest"
max_retries = 2
[[env]]
name = "two"
max_turns = 50
taskset = { id = "two-v1" }
harness = { id = "mini-swe-agent", runtime = { type = "prime" } }
[eval]
interval = 20
[[eval.env]]
name = "held"
num_examples = 5
taskset = { id = "two-v1", split = "test" }
[[pre_batch_filters]]
type = "zero_advantage"
enforce = true
"""
FIRST_VF_RL = """\
model = "m"
[env]
id = "wordle"
[inference]
gpus = 2
tensor_parallel_size = 2
[trainer]
gpus = 1
batch_size = 64
rollouts_per_example = 8
micro_batch_size = 2
max_seq_len = 1024
run_name = "RG"
use_lora = false
lora_rank = 4
dataloader_num_workers = 4
"""
SEVERAL_EVALS = """\
model = "m"
api_base_url = "http://127.0.0.1:1/v1"
shuffle = true
shuffle_seed = 4
timeout = 60
[sampling]
reasoning = { enabled = true }
[[eval]]
env_id = "a"
num_examples = 3
state_columns = ["info"]
max_concurrent = 2
sampling_args = { temperature = 0.2 }
harness = { max_turns = 4 }
[[eval]]
env_id = "a"
max_tokens = 64
env_args = { split = "test" }
"""
ONE_EVAL = """\
model = "m"
num_tasks = 5
num_rollouts = 2
max_turns = 8
push = false
[client]
base_url = "http://127.0.0.1:1/v1"
timeout = 60
[concurrency]
min_inflight = 2
max_inflight = 4
[taskset]
id = "t-v1"
split = "test"
[harness]
id = "bash"
runtime = { type = "docker" }
"""
MODELS = {id(RL_KEYS): RLConfig, id(SFT_KEYS): SFTConfig, id(EVAL_KEYS): EvalRunConfig}


def _said(tables: Tables, keys: dict[str, Any], *, is_built: bool = True) -> tuple[Any, ...]:
    """Return the layer in our schema, and everything that is said of it, by its rules too if it is built."""
    schema = schema_tree(MODELS[id(keys)])
    made = translate(Layer(tree=copy.deepcopy(tables), origin=Provenance(label="a.toml")), schema)
    tree = Tree(schema)
    tree.violations += made.violations
    tree.lay([made.layer])
    violations = [str(violation) for violation in tree.violations]
    try:
        if is_built:
            build(MODELS[id(keys)], tree)
    except InvalidSpecError as error:
        violations = [str(violation) for violation in error.violations]
    return made.layer.tree, [str(note) for note in made.notes], violations


def _leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    match value:
        case dict():
            for key, item in value.items():
                yield from _leaves(item, (*path, key))
        case list() if value and all(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                yield from _leaves(item, (*path, index))
        case _:
            yield path


def _without(tables: Tables, path: Path, renamed: str | None = None) -> Tables:
    """Return the tables without a key, or with another name for it."""
    other = copy.deepcopy(tables)
    here: Any = other
    for part in path[:-1]:
        here = here[part]
    value = here.pop(path[-1])
    if renamed:
        here[renamed] = value
    return other


def _vanishing(tables: Tables, keys: dict[str, Any]) -> list[str]:
    whole = _said(tables, keys)
    found = []
    for path in _leaves(tables):
        wrong = f"{path[-1]}_zz"
        if _said(_without(tables, path), keys) == whole:
            found.append(f"{path} is taken out")
        misspelt = _said(_without(tables, path, wrong), keys)
        if misspelt == whole or wrong not in str(misspelt):
            found.append(f"{path} is misspelt")
    return found


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        *((text, RL_KEYS) for text in (AUTUMN, SUMMER, SPRING, HOSTED, LATER_HOSTED, VF_RL, FIRST_VF_RL)),
        *((text, SFT_KEYS) for text in (FINE_TUNING, VF_SFT)),
        *((text, EVAL_KEYS) for text in (VF_EVAL, PRIME_EVAL, SEVERAL_EVALS, ONE_EVAL)),
    ],
)
def test_every_leaf_of_a_file_counts(text, keys):
    assert _vanishing(tomllib.loads(text), keys) == []


@pytest.mark.computes
@pytest.mark.parametrize("keys", [RL_KEYS, SFT_KEYS, EVAL_KEYS], ids=["rl", "sft", "eval"])
@pytest.mark.parametrize(
    "value", [{"inner": 1}, *(pytest.param(value, marks=pytest.mark.long) for value in (1, "x"))], ids=str
)
def test_every_key_of_the_tables_counts(keys, value):
    unheard = []
    for name in keys:
        tables: Tables = {}
        here, *parts = tables, *name.split(".")
        for part in parts[:-1]:
            inner: Tables = {}
            here[part.removesuffix("[]")] = [inner] if part.endswith("[]") else inner
            here = inner
        key = parts[-1].removesuffix("[]")
        bare = _said(tables, keys, is_built=False)
        here[key] = value
        if _said(tables, keys, is_built=False) == bare:
            unheard.append(name)
        here[f"{key}_zz"] = here.pop(key)
        if f"{key}_zz" not in str(_said(tables, keys, is_built=False)):
            unheard.append(f"{name}_zz")
    assert unheard == []


def _is_key(schema: SchemaKey, path: Path) -> bool:
    """Return whether the schema has the key, or a free table that it may stand in."""
    above = [schema.find(path[:length]) for length in range(1, len(path))]
    return schema.find(path) is not None or any(node and node.kind is Kind.FREE_TABLE for node in above)


def test_what_a_message_promises_or_names_is_so():
    """A key that is there is not said to be missing, and what a message sends people to exists."""
    for keys, model in ((RL_KEYS, RLConfig), (SFT_KEYS, SFTConfig), (EVAL_KEYS, EvalRunConfig)):
        schemas = [schema_tree(model), schema_tree(RLConfig)]
        for name, meaning in keys.items():
            path = tuple(name.replace("[]", "").split("."))
            if meaning.effect in (Effect.LATER, Effect.BLOCKS):
                assert schemas[0].find(path) is None, f"{name} is there: {meaning.text}"
            said = meaning.text if meaning.act is None else ""
            for named in re.findall(r"`\[?\[?((?:orchestrator|trainer|inference|data)\.[a-z0-9_.]+)\b", said):
                assert any(_is_key(schema, tuple(named.split("."))) for schema in schemas) or named in keys, name
    (choices,) = [node for node in schema_tree(RLConfig).walk() if node.path == ("orchestrator", "algo", "type")]
    built = {*COMPARING, *PER_AGENT, *DISTILLING, "custom"}
    assert set(choices.annotation.__args__) - built <= set(UNBUILT_ALGORITHMS)
    assert not built & set(UNBUILT_ALGORITHMS)


def test_an_endpoint_is_read_where_the_file_lists_it(tmp_path):
    (tmp_path / "eval.toml").write_text('endpoints_path = "all.toml"\nendpoint_id = "small"\n[[eval]]\nid = "a"\n')
    (tmp_path / "all.toml").write_text(
        '[[endpoint]]\nendpoint_id = "small"\nmodel = "m"\nurl = "http://127.0.0.1:1/v1"\nkey = "KEY"\n'
    )
    config = load(EvalRunConfig, ["@", str(tmp_path / "eval.toml")], {}).config
    assert config.client is not None
    assert (config.model.name, config.client.base_url, config.client.api_key_var) == (
        "m",
        ["http://127.0.0.1:1/v1"],
        "KEY",
    )
    for text, says in (
        ("[[endpoint]]\nendpoint_id = 1", "is none of the endpoints"),
        ("[[", "all.toml"),
        ("", "none of"),
    ):
        (tmp_path / "all.toml").write_text(text)
        with pytest.raises(InvalidSpecError, match=says):
            load(EvalRunConfig, ["@", str(tmp_path / "eval.toml")], {})
    (tmp_path / "all.toml").unlink()
    with pytest.raises(InvalidSpecError, match="no such file"):
        load(EvalRunConfig, ["@", str(tmp_path / "eval.toml")], {})


def test_what_a_layout_or_adapters_leave_no_room_for_is_left_out_with_a_note(tmp_path):
    (tmp_path / "sft.toml").write_text('[model]\nname = "m"\ncp = 2\ncompile = { fullgraph = true }\n')
    loaded = load(SFTConfig, ["@", str(tmp_path / "sft.toml")], {})
    assert loaded.config.model.compile is not None and not loaded.config.model.compile.fullgraph
    assert [(note.path[-1], note.effect) for note in loaded.notes] == [("fullgraph", Effect.LATER)]
    (tmp_path / "sft.toml").write_text('[model]\nname = "m"\ntp = 2\ncompile = {}\n')
    loaded = load(SFTConfig, ["@", str(tmp_path / "sft.toml")], {})
    assert loaded.config.model.compile is None and [note.path[-1] for note in loaded.notes] == ["compile"]
    (tmp_path / "sft.toml").write_text(
        '[model]\nname = "m"\ncp = 2\ncompile = {}\noptimization_dtype = "bfloat16"\nlora = { rank = 4 }\n'
    )
    loaded = load(SFTConfig, ["@", str(tmp_path / "sft.toml")], {})
    assert loaded.config.model.compile is not None and loaded.config.model.optimization_dtype == "float32"
    assert [note.path[-1] for note in loaded.notes] == ["optimization_dtype"]
    assert all(note.effect is Effect.LATER for note in loaded.notes)
