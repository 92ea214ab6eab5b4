import pytest

EVERYTHING_WRONG = """\
max_step = 20
seq_len = "1k"

[model]
name = ""

[trainer.optim]
lr = -1
lrr = 3

[trainer.scheduler]
type = "liner"

[orchestrator]
batch_size = 100
group_size = 16

[[orchestrator.env]]
id = "a"

[[orchestrator.env]]
name = "b"
"""


def test_everything_wrong_is_reported_at_once(violations, tmp_path):
    (tmp_path / "bad.toml").write_text(EVERYTHING_WRONG)
    found = violations("@", "bad.toml", "--seed", "x", minimal=False)
    assert {(violation.field, violation.value, violation.source) for violation in found} == {
        ("max_step", "20", "bad.toml:1"),
        ("seq_len", '"1k"', "bad.toml:2"),
        ("model.name", '""', "bad.toml:5"),
        ("trainer.optim.lr", "-1", "bad.toml:8"),
        ("trainer.optim.lrr", "3", "bad.toml:9"),
        ("trainer.scheduler.type", '"liner"', "bad.toml:12"),
        ("orchestrator.batch_size", "100", "bad.toml:15"),
        ("orchestrator.env[1].id", None, "bad.toml:21"),
        ("seed", '"x"', "command line (--seed)"),
    }
    messages = {violation.field: violation.message for violation in found}
    assert "did you mean `max_steps`" in messages["max_step"]
    assert "did you mean `trainer.optim.lr`" in messages["trainer.optim.lrr"]
    assert 'did you mean "linear"' in messages["trainer.scheduler.type"]
    assert "must be at least 0" in messages["trainer.optim.lr"]
    assert "use 96 or 112" in messages["orchestrator.batch_size"]


def test_a_misspelt_required_key_is_reported_once(violations):
    found = violations("--orchestrator", '{"envs": [{"id": "a"}], "rollout_per_example": 8}', minimal=False)
    assert [violation.field for violation in found] == ["orchestrator.envs", "orchestrator.rollout_per_example"]


def test_what_is_required_and_missing(violations):
    found = violations("--orchestrator.rollouts-per-example", "8", minimal=False)
    assert [(violation.field, violation.value) for violation in found] == [("orchestrator.env", None)]
    assert "[[orchestrator.env]]" in found[0].message


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        ("a = 1\nb = \n", 2, "Invalid value"),
        ("a = 1\n[b\n", 2, "line 2"),
        ('a = "x', 1, "malformed TOML"),
        ("[a]\nb = 1\n[a]\n", 3, "line 3"),
    ],
)
def test_malformed_toml_names_file_and_line(violations, tmp_path, content, line, says):
    (tmp_path / "bad.toml").write_text(content)
    (found,) = violations("@", "bad.toml")
    assert found.source == f"bad.toml:{line}"
    assert says in found.message
    assert found.value == content.splitlines()[line - 1].strip()


def test_malformed_json_names_file_and_line(violations, tmp_path):
    (tmp_path / "bad.json").write_text('{"a": 1\n"b": 2}')
    (found,) = violations("@", "bad.json")
    assert found.source == "bad.json:2" and "malformed JSON" in found.message
    (tmp_path / "list.json").write_text("[]")
    (found,) = violations("@", "list.json")
    assert "one JSON object" in found.message


def test_a_missing_file_names_the_directory_and_a_neighbour(violations, tmp_path):
    (tmp_path / "reverse_text.toml").write_text("")
    (found,) = violations("@", "revers_text.toml")
    assert found.value == "revers_text.toml" and str(tmp_path) in found.message
    assert "did you mean reverse_text.toml?" in found.message
    (found,) = violations("@", "there/is/none.toml")
    assert "no such file" in found.message


def test_files_that_cannot_be_read(violations, tmp_path):
    (found,) = violations("@", ".")
    assert "cannot be read" in found.message
    (tmp_path / "latin.toml").write_bytes(b"a = '\xe9'")
    (found,) = violations("@", "latin.toml")
    assert "not UTF-8" in found.message


def test_files_may_begin_with_a_byte_order_mark(load_rl, tmp_path):
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbfseed = 4\n")
    assert load_rl("@bom.toml").config.seed == 4


def test_shapes_that_are_wrong(violations, tmp_path):
    (tmp_path / "shapes.toml").write_text('trainer = 3\n[orchestrator]\nenv = "a"\nrollouts_per_example = 2\n')
    found = violations("@", "shapes.toml", minimal=False)
    assert {violation.field for violation in found} == {"trainer", "orchestrator.env"}
    assert all("must be" in violation.message for violation in found)
    (found,) = violations("--orchestrator.env", '[3, {"id": "a"}]')
    assert found.field == "orchestrator.env[0]" and "must be" in found.message


def test_two_names_of_one_key(violations, load_rl, tmp_path):
    (tmp_path / "a.toml").write_text("[orchestrator]\ngroup_size = 8\nrollouts_per_example = 4\n")
    (found,) = violations("@", "a.toml")
    assert "means the same as" in found.message
    (tmp_path / "b.toml").write_text("max_async_level = 2\n[orchestrator.sampling]\nmax_completion_tokens = 9\n")
    env = ["--orchestrator.env", '[{"id": "a"}]']
    config = load_rl("@", "b.toml", *env, "--orchestrator.group-size", "8", minimal=False).config
    assert config.orchestrator.async_level == 2
    assert config.orchestrator.sampling.max_tokens == 9
    assert config.orchestrator.rollouts_per_example == 8


def test_an_alias_is_named_where_it_is_written(violations, tmp_path):
    (tmp_path / "a.toml").write_text("[orchestrator]\n\ngroup_size = 0\n")
    found = violations("--orchestrator.env", '[{"id": "a"}]', "@", "a.toml", minimal=False)
    assert [(violation.field, violation.source) for violation in found] == [
        ("orchestrator.rollouts_per_example", "a.toml:3")
    ]


@pytest.mark.parametrize(
    "table",
    ['api_key_var = "sk-123"', 'api_key = "hunter2"', 'token = "hunter2"', 'base_url = "sk-123"'],
)
def test_secrets_are_not_repeated(violations, tmp_path, table):
    (tmp_path / "a.toml").write_text(f"[orchestrator.client]\n{table}\n")
    found = violations("@", "a.toml")
    assert [(violation.field, violation.value) for violation in found] == [("orchestrator.client", None)]
    assert "engines register" in found[0].message
    assert not any(secret in str(violation) for violation in found for secret in ("hunter2", "sk-123"))


def test_long_values_are_cut(violations):
    (found,) = violations("--max-steps", "9" * 50 + "x" * 500)
    assert found.value is not None and len(found.value) == 80


def test_a_required_key_says_how_it_is_written(violations):
    (found,) = violations(minimal=False)
    assert str(found) == "orchestrator: is required; write a table [orchestrator] into the config file"


def test_a_bound_is_said_once(violations):
    (found,) = violations("--async-level", "-1")
    assert found.message.count("at least 0") == 1


def test_a_value_of_a_long_list_is_answered_by_the_list_alone(violations) -> None:
    (found,) = violations("--trainer.determinism", "gar")
    assert 'must be "auto" or "strict"' in found.message and found.message.endswith("says what each of them is")
    (found,) = violations("--orchestrator.algo.type", "gar")
    assert 'must be "grpo" or "rloo"' in found.message and "docs/algorithms.md" in found.message
    assert len(found.message) < 300


def test_prime_rls_bench_is_a_switch(load_rl, violations, tmp_path) -> None:
    """A key of `bench` that nothing reads is refused: the whole table would pass as the switch."""
    (tmp_path / "bench.toml").write_text("bench = true")
    assert load_rl("@", "bench.toml").notes
    (tmp_path / "bench.toml").write_text("bench = 3")
    assert [found.field for found in violations("@", "bench.toml")] == ["bench"]
    assert [found.field for found in violations("--bench.prompt-tokens", "32")] == ["bench"]
