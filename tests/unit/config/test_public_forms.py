"""Forms that public files have beside those of prime-rl's own repository: what they are here, and which are refused."""

import pytest

from millrace.config.load import Loaded, load
from millrace.config.messages import Effect
from millrace.config.prime_rl.translation import kind_of
from millrace.config.sections.eval import EvalRunConfig
from millrace.config.sections.rl import RLConfig
from millrace.errors import InvalidSpecError

RL = 'max_steps = 5\nmodel = { name = "m" }\n[orchestrator]\nbatch_size = 64\ngroup_size = 8\n'
ENV = '[[orchestrator.train.env]]\nid = "a"\n'
HOSTED = 'model = "m"\nbatch_size = 64\n'
EVAL = 'model = "m"\n[client]\nbase_url = "http://127.0.0.1:1/v1"\n'


@pytest.fixture
def read(tmp_path):
    def read_text(text: str, model: type = RLConfig) -> Loaded:
        (tmp_path / "a.toml").write_text(text)
        return load(model, ["@", str(tmp_path / "a.toml")], {})

    return read_text


def wrong(read, text: str, model: type = RLConfig) -> dict[str, str]:
    with pytest.raises(InvalidSpecError) as caught:
        read(text, model)
    return {violation.field: violation.message for violation in caught.value.violations}


def test_a_taskset_and_a_harness_may_stand_in_the_environments_own_table(read):
    text = (
        f'{RL}[[orchestrator.train.env]]\nname = "n"\ntaskset = {{ id = "t", split = "x" }}\nmax_turns = 3\n'
        'harness = { id = "bash", runtime = { type = "docker" } }\n'
        '[[orchestrator.train.env]]\nname = "o"\nenv.taskset = { id = "u" }\nenv.n = 4\nenv.solver.max_turns = 2\n'
    )
    own, inner = read(text).config.orchestrator.env
    agent = {"max_turns": 3, "harness": {"id": "bash"}, "runtime": {"type": "docker"}}
    assert (own.id, own.args) == ("t", {"split": "x", "env": {"agent": agent}})
    assert (inner.id, inner.args) == ("u", {"env": {"n": 4, "solver": {"max_turns": 2}}})


def test_a_limit_of_an_environment_without_a_taskset_keeps_the_run_from_starting(read):
    notes = read(f"{RL}{ENV}max_total_completion_tokens = 9\n").notes
    assert [note.effect for note in notes if note.path[-1] == "max_total_completion_tokens"] == [Effect.BLOCKS]
    assert all(note.effect is not Effect.BLOCKS for note in read(f"{RL}{ENV}max_total_completion_tokens = -1\n").notes)


def test_an_unknown_key_of_a_table_that_only_prime_rl_has_is_named_itself(read):
    found = wrong(read, f"{RL}{ENV}[deployment]\nnum_train_gpus = 1\nnum_trian_gpus = 2\n")
    assert list(found) == ["deployment.num_trian_gpus"] and "deployment.num_train_gpus" in str(found)


@pytest.mark.parametrize(
    ("filters", "means"),
    [
        ('[[orchestrator.filters]]\ntype = "zero_advantage"\nenforce = false', False),
        ('[[orchestrator.filters]]\ntype = "zero_advantage"', True),
        ('[[orchestrator.pre_batch_filters]]\ntype = "zero_advantage"\nenforce = true', "refill"),
        ('[[orchestrator.pre_batch_filters]]\ntype = "zero_advantage"', True),
        ('[[orchestrator.post_batch_filters]]\ntype = "zero_advantage"\nenforce = false', False),
    ],
)
def test_zero_advantages_are_filtered_by_a_key(read, filters, means):
    orchestrator = read(f"{RL}{ENV}{filters}\n").config.orchestrator
    assert orchestrator.filter_zero_advantages == means and not orchestrator.filters


def test_filters_of_a_batch_only_count_unless_they_are_enforced(read):
    text = '[[orchestrator.post_batch_filters]]\ntype = "gibberish"\n[[orchestrator.pre_batch_filters]]\n'
    text += 'type = "repetition"\nenforce = true\nwindow = 9\n'
    filters = read(f"{RL}{ENV}{text}").config.orchestrator.filters
    assert sorted((each.type, each.action) for each in filters) == [("gibberish", "count"), ("repetition", "mask")]


def test_modes_and_teachers_of_the_spring(read):
    teacher = '[orchestrator.teacher.model]\nname = "t"\n[orchestrator.teacher.client]\nbase_url = ["http://h:1/v1"]\n'
    text = RL.replace("batch_size", 'training_mode = "opd"\nbatch_size')
    algo = read(f"{text}{ENV}{teacher}").config.orchestrator.algo
    assert algo.type == "opd" and (algo.teacher.name, algo.teacher.base_url) == ("t", ["http://h:1/v1"])
    assert read(f"{text.replace('opd', 'rl')}{ENV}").config.orchestrator.algo.type == "grpo"
    nested = f'{RL}{ENV}[orchestrator.algo.advantage]\ntype = "max_rl"\n'
    assert read(nested).config.orchestrator.algo.type == "max_rl"


def test_a_linear_schedule_that_never_decays_is_constant(read):
    text = f'{RL}{ENV}[trainer.scheduler]\ntype = "linear"\nwarmup_steps = 2\ndecay_steps = 0\n'
    scheduler = read(text).config.trainer.scheduler
    assert (scheduler.type, scheduler.warmup_steps) == ("constant", 2)


def test_the_length_that_the_orchestrator_cuts_is_the_trainers_too(read):
    config = read(f"{RL.replace('batch_size', 'seq_len = 4096' + chr(10) + 'batch_size')}{ENV}").config
    assert config.trainer.model.seq_len == 4096


def test_how_a_renderer_thinks_is_sampled_so(read):
    config = read(f'{RL}{ENV}[orchestrator.renderer]\nname = "qwen3"\nenable_thinking = false\n').config
    assert config.orchestrator.sampling.extra_body == {"chat_template_kwargs": {"enable_thinking": False}}


def test_hosted_trainings_own_defaults_and_lengths(read):
    text = f'{HOSTED}[sampling]\nmax_tokens = 2048\n[[env]]\nid = "me/a@0.2"\n'
    config = read(text).config
    assert (config.trainer.optim.lr, config.trainer.model.lora.alpha, config.seq_len) == (1e-4, 16.0, 4096)
    assert (config.max_steps, config.orchestrator.rollouts_per_example) == (100, 8)
    assert config.orchestrator.env[0].id == "me/a"
    whole = read(f'type = "full_finetune"\n{text}').config
    assert whole.trainer.model.lora is None and whole.trainer.optim.lr == 1e-4
    assert "directory" in wrong(read, f'checkpoint_id = "x"\n{text}')["checkpoint_id"]
    distilled = read(f'loss = "sft"\n{text}[teacher]\nmodel = "t"\n')
    assert [note.path for note in distilled.notes if note.effect is Effect.BLOCKS]


def test_an_evaluated_environment_of_hosted_training_has_a_taskset_as_well(read):
    text = f'{HOSTED}[[env]]\nid = "a"\n[eval]\ninterval = 2\n[[eval.env]]\nname = "h"\ntaskset = {{ id = "t" }}\n'
    (held,) = read(text).config.orchestrator.eval.env
    assert (held.name, held.id) == ("h", "t")


def test_vf_rl_without_its_table_of_arguments(read):
    text = 'model = "m"\n[env]\nid = "w"\n[inference]\ngpus = 2\nenforce_eager = true\n[trainer]\ngpus = 1\n'
    config = read(f"{text}batch_size = 64\nmax_seq_len = 1024\ndataloader_num_workers = 4\n").config
    assert (config.orchestrator.batch_size, config.seq_len, config.max_steps) == (64, 1024, 500)
    assert config.trainer.model.lora.rank == 8 and config.inference.vllm == {"enforce_eager": True}
    assert read(f"{text}").config.orchestrator.rollouts_per_example == 16
    assert read(f"{text}use_lora = false\nlora_rank = 4\n").config.trainer.model.lora is None
    assert list(wrong(read, f"{text}batch_sise = 64\n")) == ["trainer.args.batch_sise"]


def test_the_only_environment_of_an_evaluation_stands_at_its_top(read):
    text = 'num_tasks = 5\nnum_rollouts = 2\nmax_turns = 8\n[taskset]\nid = "t"\nsplit = "x"\n'
    config = read(f'model = "m"\n{text}[concurrency]\nmax_inflight = 4\n', EvalRunConfig).config
    assert (config.num_examples, config.rollouts_per_example, config.max_concurrent) == (5, 2, 4)
    assert (config.env[0].id, config.env[0].args) == ("t", {"split": "x", "env": {"agent": {"max_turns": 8}}})
    roles = read(f'{EVAL}[env]\nid = "judge"\n[env.taskset]\nid = "t"\n[env.solver]\nmax_turns = 2\n', EvalRunConfig)
    assert roles.config.env[0].args == {"env": {"id": "judge", "solver": {"max_turns": 2}}}


def test_several_evaluations_of_one_environment_have_samplings_of_their_own(read):
    text = f'{EVAL}[[eval]]\nid = "a"\nsampling_args = {{ temperature = 0.2 }}\n[[eval]]\nid = "a"\nmax_tokens = 9\n'
    first, second = read(text, EvalRunConfig).config.env
    assert (first.name, second.name) == ("a", "a-2")
    assert (first.sampling.temperature, second.sampling.max_tokens) == (0.2, 9)
    shuffled = read(f'shuffle = true\nshuffle_seed = 4\n{EVAL}[[eval]]\nid = "a"\n', EvalRunConfig).config.env[0]
    assert shuffled.select.shuffle and shuffled.select.seed == 4


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ('url = "http://h:1/v1"\ntype = "anthropic_messages"', "speaks anthropic_messages"),
        ('url = "http://h:1/v1"\nheaders = { A = "b" }', "headers"),
        ('key = "K"', "has no `url`"),
    ],
)
def test_an_endpoint_that_would_be_asked_otherwise_is_refused(read, tmp_path, endpoint, says):
    (tmp_path / "e.toml").write_text(f'[[endpoint]]\nendpoint_id = "x"\nmodel = "m"\n{endpoint}\n')
    text = 'endpoints_path = "e.toml"\nendpoint_id = "x"\n[[eval]]\nid = "a"\n'
    assert says in wrong(read, text, EvalRunConfig)["endpoint_id"]


def test_what_an_evaluation_cannot_send_is_refused_by_name(read):
    found = wrong(read, f'headers = {{ A = "b" }}\n{EVAL}[[eval]]\nid = "a"\n', EvalRunConfig)
    assert "proxy" in found["headers"]
    assert "[[eval]]" in wrong(read, f'{EVAL}[[ablation]]\nenv_id = "a"\n', EvalRunConfig)["ablation"]


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        ({"model": "m", "taskset": {"id": "t"}, "harness": {}}, "eval"),
        ({"num_tasks": 2, "env": {"id": "t"}}, "eval"),
        ({"ablation": [{}]}, "eval"),
        ({"model": "m", "env": [{"id": "a"}], "dataset": {"split": "train"}}, "rl"),
        ({"model": "m", "env": {"id": "a"}, "trainer": {"gpus": 1}}, "rl"),
        ({"model": "m", "dataset": "rows", "sft": {}}, "sft"),
    ],
)
def test_what_a_flat_file_configures(tree, kind):
    assert kind_of(tree, "a.toml") == kind
