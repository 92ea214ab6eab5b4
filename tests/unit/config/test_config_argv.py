import pytest

from millrace.errors import InvalidSpecError


@pytest.mark.parametrize(
    "argv",
    [
        ["--trainer.optim.weight-decay", "0.5"],
        ["--trainer.optim.weight_decay", "0.5"],
        ["--trainer.optim.weight-decay=0.5"],
        ["--trainer.optim", '{"weight_decay": 0.5}'],
        ["--trainer", '{"optim": {"weight_decay": 0.5}}'],
    ],
)
def test_spellings(load_rl, argv):
    assert load_rl(*argv).config.trainer.optim.weight_decay == 0.5


def test_text_becomes_the_type_of_its_key(load_rl):
    config = load_rl(
        *["--trainer.optim.lr", "0", "--run.name", "a1", "--model.name", "7", "--wandb.tags", '["x"]'],
        *["--orchestrator.eval.num-examples", "-1", "--orchestrator.filter-zero-advantages", "false"],
        *["--orchestrator.sampling.extra-body.top_k", "5", "--orchestrator.sampling.extra-body.stop", "now"],
    ).config
    assert config.trainer.optim.lr == 0.0 and isinstance(config.trainer.optim.lr, float)
    assert config.model.name == "7"
    assert config.wandb is not None and config.wandb.tags == ["x"]
    assert config.orchestrator.filter_zero_advantages is False
    assert config.orchestrator.sampling.extra_body == {"top_k": 5, "stop": "now"}


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--orchestrator.filter-zero-advantages"], True),
        (["--orchestrator.filter-zero-advantages", "--max-steps", "3"], True),
        (["--orchestrator.filter-zero-advantages", "refill"], "refill"),
        (["--orchestrator.filter-zero-advantages=shrink"], "shrink"),
        (["--no-orchestrator.filter-zero-advantages"], False),
    ],
)
def test_a_switch_may_have_words_beside_true_and_false(load_rl, argv, value):
    assert load_rl(*argv).config.orchestrator.filter_zero_advantages == value


def test_sections_are_switched_on_and_off(load_rl, tmp_path):
    (tmp_path / "a.toml").write_text("[ckpt]\ninterval = 3\n[wandb]\n")
    assert load_rl("--ckpt").config.trainer.ckpt is not None
    assert load_rl("@a.toml").config.trainer.ckpt.interval == 3
    assert load_rl("@a.toml", "--ckpt").config.trainer.ckpt.interval == 3
    assert load_rl("@a.toml", "--ckpt.keep-last", "2").config.trainer.ckpt.interval == 3
    for off in (["--no-ckpt"], ["--ckpt", "None"], ["--ckpt=null"]):
        config = load_rl("@a.toml", *off).config
        assert config.ckpt is None and config.trainer.ckpt is None and config.wandb is not None


def test_booleans(load_rl):
    key = ["--orchestrator.eval.skip-first-step"]
    for argv, value in [
        (key, True),
        ([*key, "false"], False),
        ([*key, "--seed", "1"], True),
        (["--no-orchestrator.eval.skip-first-step"], False),
        (["--orchestrator.eval.no-skip-first-step"], False),
    ]:
        assert load_rl(*argv).config.orchestrator.eval.skip_first_step is value


def test_reserved_flags_come_back(load_rl):
    loaded = load_rl("--dry-run", "--server", "host:1", "--name=x", "--no-follow", "--plain", "--debug")
    assert loaded.flags == {
        "dry-run": True,
        "server": "host:1",
        "name": "x",
        "follow": False,
        "plain": True,
        "debug": True,
    }
    assert load_rl().flags == {}


@pytest.mark.parametrize(
    ("argv", "field", "says"),
    [
        (["a.toml"], "a.toml", "write `@ a.toml`"),
        (["run"], "run", "belongs to no flag"),
        (["@"], "@", "name of a file"),
        (["--max-steps"], "--max-steps", "needs a value"),
        (["--max-steps", "--seed", "1"], "--max-steps", "needs a value"),
        (["--server"], "--server", "needs a value"),
        (["--dry-run=7"], "--dry-run", "takes no value"),
        (["--dryrun"], "--dryrun", "did you mean `--dry-run`"),
        (["--no-trainer"], "--no-trainer", "cannot be switched off"),
        (["--max-stepz", "3"], "max_stepz", "did you mean `max_steps`"),
        (["--trainer.optim.nonsense", "3"], "trainer.optim.nonsense", "the keys here are"),
        (["--lr", "3"], "lr", "did you mean `trainer.optim.lr`"),
        (["--orchestrator.env", "reverse-text"], "orchestrator.env", "must be a JSON list"),
        (["--orchestrator.env.0.id", "x"], "orchestrator.env.0.id", "replaced as a whole"),
        (["--trainer.optim", "{lr: 1}"], "trainer.optim", "must be a JSON object"),
        (["--trainer.optim", "fast"], "fast", "belongs to no flag"),
        (["--trainer.optim.lr", "fast"], "trainer.optim.lr", "must be a number, not a string"),
        (["--max-steps", "1.5"], "max_steps", "must be an integer, not a string"),
        (["--trainer.optim.lr", "nan"], "trainer.optim.lr", "must be a finite number"),
        (
            ["--orchestrator.filter-zero-advantages=maybe"],
            "orchestrator.filter_zero_advantages",
            "must be true or false",
        ),
        (["--ckpt", "None", "--ckpt.interval", "3"], "ckpt.interval", "keep one of them"),
        (["-x"], "-x", "belongs to no flag"),
    ],
)
def test_wrong_arguments(violations, argv, field, says):
    found = violations(*argv)
    assert [violation.field for violation in found] == [field]
    assert says in found[0].message
    assert found[0].source is not None and found[0].source.startswith("command line")


@pytest.mark.parametrize(
    ("argument", "value"),
    [("--dry-run=False", False), ("--dry-run=FALSE", False), ("--no-dry-run=False", True), ("--dry-run=True", True)],
)
def test_a_switch_of_the_command_is_off_however_false_is_written(load_rl, argument, value):
    assert load_rl(argument).flags["dry-run"] is value


def test_what_is_switched_off_takes_no_value(load_rl):
    with pytest.raises(InvalidSpecError, match="takes no value"):
        load_rl("--no-max-steps=5")
    with pytest.raises(InvalidSpecError, match="takes no value"):
        load_rl("--no-orchestrator.filter-zero-advantages=false")
    assert load_rl("--no-orchestrator.filter-zero-advantages=true").config.orchestrator.filter_zero_advantages is False
