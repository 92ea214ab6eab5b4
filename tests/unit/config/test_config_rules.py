import pytest

from millrace.config import SFTConfig, load, validate_document
from millrace.config.sections.rl import TrainerPart
from millrace.errors import InvalidSpecError


@pytest.mark.parametrize(
    ("argv", "field", "value", "says"),
    [
        (["--orchestrator.batch-size", "100"], "orchestrator.batch_size", "100", "multiple of"),
        (["--orchestrator.batch-size", "100"], "orchestrator.batch_size", "100", "use 96 or 112"),
        (["--orchestrator.batch-size", "8"], "orchestrator.batch_size", "8", "use 16"),
        (["--orchestrator.rollouts-per-example", "1"], "orchestrator.rollouts_per_example", "1", "at least 2 for grpo"),
        (["--async-level", "9"], "orchestrator.max_off_policy_steps", "8", "which is 9"),
        (["--orchestrator.seq-len", "4096"], "trainer.model.seq_len", "2048", "which is 4096"),
        (["--orchestrator.sampling.max-tokens", "2049"], "orchestrator.sampling.max_tokens", "2049", "must be below"),
        (
            ["--orchestrator.eval.sampling.max-tokens", "9999"],
            "orchestrator.eval.sampling.max_tokens",
            "9999",
            "must be below",
        ),
        (["--inference.model.max-model-len", "100"], "inference.model.max_model_len", "100", "which is 2048"),
        (
            ["--inference.engine", "embedded", "--inference.model.tool-call-parser", "hermse"],
            "inference.model.tool_call_parser",
            '"hermse"',
            "write one of hermes, llama3_json, llama4_json, qwen3_coder, qwen3_json, qwen3_xml, or set",
        ),
        (
            ["--inference.engine", "embedded", "--inference.model.reasoning-parser", "kimi_k2"],
            "inference.model.reasoning_parser",
            '"kimi_k2"',
            "write one of deepseek_r1, qwen3, or set",
        ),
        (
            ["--inference.engine", "vllm", "--inference.model.enable-auto-tool-choice", "true"],
            "inference.model.enable_auto_tool_choice",
            "true",
            "needs a parser in vLLM",
        ),
        (
            ["--inference.model.tool-call-parser", "glm47"],
            "inference.model.tool_call_parser",
            '"glm47"',
            "the trainer does not compute",
        ),
        (
            ["--inference.sleep-while-training", "true", "--async-level", "1"],
            "inference.sleep_while_training",
            "true",
            "needs `async_level = 0`: with 1 replicas generate the next batch",
        ),
        (["--trainer.micro-batch-tokens", "100"], "trainer.micro_batch_tokens", "100", "one whole sample"),
        (["--orchestrator.eval.num-examples", "0"], "orchestrator.eval.num_examples", "0", "-1 for all"),
        (["--trainer.scheduler.type", "cosine"], "trainer.scheduler.type", '"cosine"', "needs `max_steps`"),
        (
            ["--trainer.scheduler.type", "linear", "--max-steps", "19"],
            "trainer.scheduler.warmup_steps",
            "10",
            "take 20 steps",
        ),
        (
            ["--trainer.scheduler", '{"type": "linear", "decay_steps": 0}', "--max-steps", "30"],
            "trainer.scheduler.decay_steps",
            "0",
            "at least 1 for linear",
        ),
        (["--trainer.scheduler.decay-steps", "3"], "trainer.scheduler.decay_steps", "3", "no meaning for constant"),
        (["--trainer.scheduler.min-lr", "1e-7"], "trainer.scheduler.min_lr", "1e-07", "no meaning for constant"),
        (
            ["--trainer.scheduler", '{"type": "cosine", "min_lr": 1.0}', "--max-steps", "30"],
            "trainer.scheduler.min_lr",
            "1.0",
            "at most the peak",
        ),
        (["--orchestrator.algo", '{"type": "opo", "credit": "turn"}'], "orchestrator.algo.credit", '"turn"', "for opo"),
        (
            ["--orchestrator.env", '[{"id": "a"}, {"id": "b", "algo": {"type": "rloo", "std_norm": "group"}}]'],
            "orchestrator.env[1].algo.std_norm",
            '"group"',
            "no meaning for rloo",
        ),
    ],
)
def test_keys_that_do_not_fit_together(violations, argv, field, value, says):
    found = violations(*argv)
    assert [violation.field for violation in found] == [field]
    assert found[0].value == value
    assert says in found[0].message
    assert found[0].source


@pytest.mark.parametrize(
    ("envs", "field", "says"),
    [
        ('[{"id": "a"}, {"id": "a"}]', "orchestrator.env[1].name", "`orchestrator.env[0]` is called `a` too"),
        ('[{"id": "all"}]', "orchestrator.env[0].name", "must not be `all`"),
    ],
)
def test_env_names(violations, envs, field, says):
    found = violations("--orchestrator.env", envs, "--orchestrator.eval", "--orchestrator.rollouts-per-example", "2")
    assert [violation.field for violation in found] == [field]
    assert says in found[0].message


@pytest.mark.parametrize(
    ("envs", "fields"),
    [
        ('[{"id": "a", "args": {"x": 1}}]', []),
        ('[{"id": "a", "args": {"x": 2}, "name": "other"}]', []),
        ('[{"id": "a", "args": {"x": 2}}]', []),
        ('[{"id": "a", "args": {"x": 2}, "name": "a"}]', ["orchestrator.eval.env[0].args"]),
        ('[{"id": "c"}, {"id": "b", "name": "a", "args": {"x": 1}}]', ["orchestrator.eval.env[1].id"]),
    ],
)
def test_an_eval_env_with_the_name_of_a_training_env_is_that_env(violations, load_rl, envs, fields):
    argv = ["--orchestrator.env", '[{"id": "a", "args": {"x": 1}}]', "--orchestrator.eval.env", envs]
    if not fields:
        evaluation = load_rl(*argv).config.orchestrator.eval
        assert evaluation is not None
        others = [env.name for env in evaluation.env if env.args == {"x": 2}]
        assert others in ([], ["other"], ["a-eval"]), "the same id with other args is another environment"
        return
    found = violations(*argv)
    assert [violation.field for violation in found] == fields
    assert "both environments are called `a`" in found[0].message and found[0].source


def test_eval_env_names_are_checked_on_their_own(violations):
    found = violations("--orchestrator.eval.env", '[{"id": "x", "name": "all"}]')
    assert [violation.field for violation in found] == ["orchestrator.eval.env[0].name"]


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--trainer.optim.lr=-1"], "trainer.optim.lr"),
        (["--trainer.optim.betas1", "1.0"], "trainer.optim.betas1"),
        (["--trainer.optim.max-norm", "0"], "trainer.optim.max_norm"),
        (["--max-steps", "0"], "max_steps"),
        (["--async-level=-1"], "async_level"),
        (["--orchestrator.sampling.temperature", "0"], "orchestrator.sampling.temperature"),
        (["--orchestrator.sampling.top-p", "1.5"], "orchestrator.sampling.top_p"),
        (["--orchestrator.sampling.max-tokens", "0"], "orchestrator.sampling.max_tokens"),
        (["--orchestrator.oversampling-factor", "0.5"], "orchestrator.oversampling_factor"),
        (["--orchestrator.rollout-timeout-s", "0"], "orchestrator.rollout_timeout_s"),
        (["--inference.max-num-seqs", "0"], "inference.max_num_seqs"),
        (["--inference.server.port", "70000"], "inference.server.port"),
        (["--run.name", "My Run"], "run.name"),
        (["--orchestrator.env", "[]"], "orchestrator.env"),
        (["--orchestrator.env", '[{"id": "a", "weight": 0}]'], "orchestrator.env[0].weight"),
    ],
)
def test_bounds_of_single_keys(violations, argv, field):
    found = violations(*argv)
    assert [violation.field for violation in found] == [field]
    assert found[0].message


@pytest.mark.parametrize(
    "argv",
    [
        ["--trainer.optim.lr", "0"],
        ["--trainer.scheduler", '{"type": "linear", "warmup_steps": 0, "decay_steps": 1}', "--max-steps", "1"],
        ["--trainer.scheduler.warmup-steps", "5", "--max-steps", "1"],
        ["--async-level", "8"],
        ["--trainer.model.seq-len", "4096"],
        ["--orchestrator.sampling.max-tokens", "2047"],
        ["--orchestrator.env", '[{"id": "a"}, {"id": "a", "name": "b"}]'],
        ["--orchestrator.eval.sampling.temperature", "0"],
    ],
)
def test_the_last_allowed_values(load_rl, argv):
    load_rl(*argv)


def test_sft_rules():
    with pytest.raises(InvalidSpecError) as caught:
        load(SFTConfig, ["--scheduler.type", "linear", "--micro-batch-tokens", "10"], {})
    assert [violation.field for violation in caught.value.violations] == ["scheduler.type", "micro_batch_tokens"]


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--trainer.model.tp", "2", "--trainer.model.lora"], "trainer.model.tp"),
        (["--trainer.model.compile", "--trainer.determinism", "strict"], "trainer.determinism"),
        (
            ["--trainer.model.optimization-dtype", "bfloat16", "--trainer.model.dtype", "float32"],
            "trainer.model.optimization_dtype",
        ),
    ],
)
def test_a_trainer_file_alone_is_checked_as_in_a_run(violations, argv, field):
    with pytest.raises(InvalidSpecError) as caught:
        load(TrainerPart, argv, {})
    alone = [(violation.field, violation.message) for violation in caught.value.violations]
    assert [name for name, _ in alone] == [field]
    assert alone == [(violation.field, violation.message) for violation in violations(*argv)]


def test_server_reports_the_same_violations(violations):
    local = violations("--orchestrator.batch-size", "100", "--trainer.optim.lrr", "1")
    document = {
        "orchestrator": {"env": [{"id": "reverse-text"}], "rollouts_per_example": 16, "batch_size": 100},
        "trainer": {"optim": {"lrr": 1}},
    }
    with pytest.raises(InvalidSpecError) as caught:
        validate_document(document)
    remote = caught.value.violations
    assert [(v.field, v.value, v.message) for v in remote] == [(v.field, v.value, v.message) for v in local]
    assert {violation.source for violation in remote} == {"config_json"}


@pytest.mark.parametrize("document", ["{", "[1]", b"\xff", "3"])
def test_documents_that_are_no_object(document):
    with pytest.raises(InvalidSpecError, match="config_json"):
        validate_document(document)


def test_a_limit_of_just_the_room_is_lowered_with_a_note(load_rl):
    loaded = load_rl("--orchestrator.sampling.max-tokens", "2048", "--orchestrator.eval")
    assert loaded.config.orchestrator.sampling.max_tokens == 2047
    assert loaded.config.orchestrator.eval.sampling.max_tokens == 2047
    (note,) = loaded.notes
    assert "is 2047: it must be below `orchestrator.seq_len`" in str(note) and "command line" in note.source


@pytest.mark.parametrize(
    ("argv", "field", "says"),
    [
        (["--seed", str(2**63)], "seed", "64 bits"),
        (["--ckpt.interval", str(10**20)], "ckpt.interval", "64 bits"),
        (["--trainer.optim.lr", "1e39"], "trainer.optim.lr", "float32"),
        (["--trainer.optim.lr", "1e-50"], "trainer.optim.lr", "float32"),
    ],
)
def test_numbers_that_no_generator_log_or_tensor_holds(violations, argv, field, says):
    found = violations(*argv)
    assert [each.field for each in found] == [field] and says in found[0].message


def test_a_warm_up_of_all_steps_is_told(load_rl):
    (note,) = load_rl("--max-steps", "5", "--trainer.scheduler.warmup-steps", "5").notes
    assert "trainer.scheduler.warmup_steps (command line" in str(note) and "none has the peak" in str(note)
    assert load_rl("--max-steps", "6", "--trainer.scheduler.warmup-steps", "5").notes == ()


def test_an_interval_of_kept_checkpoints_says_that_it_does_nothing_alone(load_rl):
    loaded = load_rl("--ckpt.keep-interval", "50")
    (note,) = loaded.notes
    assert str(note).startswith("ckpt.keep_interval (command line (--ckpt.keep-interval)): has no effect without")
    assert "`ckpt.keep_last`: then every checkpoint is kept" in str(note)
    assert load_rl("--ckpt.keep-interval", "50", "--trainer.ckpt.keep-last", "2").notes == ()


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--orchestrator.algo.kl-coef", "0.5"], "orchestrator.algo.kl_coef"),
        (["--trainer.policy.delta=false", "--trainer.policy.anchor-interval", "5"], "trainer.policy.anchor_interval"),
        (["--trainer.policy.delta=false", "--trainer.policy.skip-deltas", "[3]"], "trainer.policy.skip_deltas"),
    ],
)
def test_keys_without_effect_are_refused(violations, argv, field):
    assert [violation.field for violation in violations(*argv)] == [field]


def test_did_you_mean_only_where_place_and_type_fit(violations):
    (found,) = violations("--orchestrator.evel.interval", "5")
    assert "`orchestrator.eval`" in found.message
    (found,) = violations("--models", "[1]")
    assert "did you mean" not in found.message, "a list is no table"
