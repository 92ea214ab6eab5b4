"""From command line to checked config; everything that is wrong is said before anything starts."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from millrace.cli.errors import CliError
from millrace.cli.main import main
from millrace.cli.session.prepare import choose_run_id, is_path, prepare
from millrace.cli.session.run_session import stack_options
from millrace.errors import InvalidSpecError
from millrace_testing.local.stack_files import write_stack

RL = """
max_steps = 2
seq_len = 64
[model]
name = "{model}"
[orchestrator]
batch_size = 8
rollouts_per_example = 4
[[orchestrator.env]]
id = "reverse-text"
"""


@pytest.fixture
def rl(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "outputs" / "warm"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    path = tmp_path / "rl.toml"
    path.write_text(RL.format(model="outputs/warm"))
    return path


@dataclass(frozen=True, slots=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(tmp_path, monkeypatch, capsys) -> Callable[..., Ended]:
    """Return what the command line does in an empty directory, in this process: starting one costs a second."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> Ended:
        code = main(arguments)
        return Ended(code, *capsys.readouterr())

    return command


def test_flags_and_config(rl):
    prepared = prepare(["@", str(rl), "--trainer.optim.lr", "0", "--plain", "--name", "mine"], environ={})
    assert prepared.config.trainer.optim.lr == 0 and prepared.config.max_steps == 2
    assert prepared.is_plain and prepared.name == "mine" and prepared.server is None
    assert prepared.config.model.name == "outputs/warm"


def test_server_from_flag_before_environment(rl):
    environ = {"MILLRACE_SERVER": "10.0.0.1:1"}
    assert prepare(["@", str(rl)], environ=environ).server == "10.0.0.1:1"
    assert prepare(["@", str(rl), "--server", "127.0.0.1:2"], environ=environ).server == "127.0.0.1:2"
    assert prepare(["@", str(rl)], default_server="127.0.0.1:3", environ={}).server == "127.0.0.1:3"
    with pytest.raises(InvalidSpecError, match="--server"):
        prepare(["@", str(rl), "--server", "nowhere"], environ={})


def test_relative_model_is_absolute_for_a_stack_of_this_machine(rl, tmp_path):
    config = prepare(["@", str(rl), "--server", "127.0.0.1:2"], environ={}).config
    assert config.model.name == config.trainer.model.name == str(tmp_path / "outputs" / "warm")
    assert prepare(["@", str(rl), "--server", "10.0.0.1:2"], environ={}).config.model.name == "outputs/warm"


def test_relative_rows_are_absolute_for_a_stack_of_this_machine(rl, tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}")
    flags = ["@", str(rl), "--trainer.dataset.name", "rows.jsonl", "--server"]
    here = prepare([*flags, "127.0.0.1:2"], environ={}).config
    assert here.trainer.dataset is not None and here.trainer.dataset.name == str(tmp_path / "rows.jsonl")
    away = prepare([*flags, "10.0.0.1:2"], environ={}).config
    assert away.trainer.dataset is not None and away.trainer.dataset.name == "rows.jsonl"


@pytest.fixture
def split(rl, tmp_path) -> list[str]:
    """Return the arguments of a run with one file per service."""
    (tmp_path / "trainer.toml").write_text('max_steps = 60\n[model]\nname = "outputs/warm"\nseq_len = 64\n')
    (tmp_path / "orchestrator.toml").write_text(
        "max_steps = 60\nseq_len = 64\nbatch_size = 8\nrollouts_per_example = 4\n"
        '[model]\nname = "outputs/warm"\n[[env]]\nid = "reverse-text"\n'
    )
    (tmp_path / "inference.toml").write_text('[model]\nname = "outputs/warm"\n')
    return [word for part in ("trainer", "orchestrator", "inference") for word in (f"--{part}", "@", f"{part}.toml")]


def test_relative_model_of_the_split_form_is_absolute_everywhere(split, tmp_path):
    config = prepare([*split, "--server", "127.0.0.1:2"], environ={}).config
    names = {part.model.name for part in (config, config.trainer, config.orchestrator, config.inference)}
    assert names == {str(tmp_path / "outputs" / "warm")}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-0.6B", False),
        ("gpt2", False),
        ("./m", True),
        ("../m", True),
        ("/abs/m", True),
        ("~/m", True),
        ("outputs/warm", True),
        ("a/b/c", True),
        ("runs/warm", False),
    ],
)
def test_is_path(name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_path(name) is expected


def test_output_dir_and_existing_directories_are_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "warm").mkdir(parents=True)
    assert is_path("models/warm") and is_path("out/warm", output_dir="out")


def test_missing_model_names_path_directory_source_and_remedy(rl, tmp_path, run):
    done = run("rl", "@", "rl.toml", "--model.name", "outputs/nobody")
    assert done.returncode == 2 and done.stdout == ""
    assert f"model.name: does not exist in {tmp_path} (got outputs/nobody)" in done.stderr
    assert "--model.name" in done.stderr and "millrace sft @" in done.stderr
    assert not (tmp_path / "outputs").joinpath("reverse-text").exists()


def test_directory_without_a_model(rl, tmp_path, run):
    (tmp_path / "outputs" / "warm" / "config.json").unlink()
    done = run("rl", "@", "rl.toml")
    assert done.returncode == 2
    assert "no config.json in" in done.stderr and "rl.toml:5" in done.stderr


def test_all_violations_at_once_with_exit_code_2(rl, tmp_path, run):
    done = run("rl", "@", "rl.toml", "--max-stpes", "3", "--orchestrator.batch-size", "10")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "max_steps" in done.stderr and "batch_size" in done.stderr and "(got 10)" in done.stderr
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["warm"]  # nothing was started


def test_missing_file(run):
    done = run("rl", "@", "nowhere.toml")
    assert done.returncode == 2 and "nowhere.toml" in done.stderr


def test_dry_run_prints_the_resolved_config(rl, run):
    done = run("rl", "@", "rl.toml", "--dry-run", "--model.name", "outputs/nobody")
    assert done.returncode == 0 and "no outputs/nobody on this machine, so the model was not looked at" in done.stderr
    config = json.loads(done.stdout)
    assert config["orchestrator"]["batch_size"] == 8 and config["trainer"]["model"]["name"] == "outputs/nobody"


def test_engine_of_the_stack_gets_what_the_config_says(rl, tmp_path):
    defaults = stack_options(prepare(["@", str(rl)], environ={}), tmp_path)
    assert defaults.engine == "embedded"
    assert (defaults.engine_environ["MILLRACE_MAX_NUM_SEQS"], defaults.engine_environ["MILLRACE_MAX_MODEL_LEN"]) == (
        "256",
        "64",
    )
    flags = ["--inference.max-num-seqs", "3", "--inference.model.max-model-len", "80", "--inference.server.port", "81"]
    chosen = stack_options(prepare(["@", str(rl), *flags], environ={}), tmp_path)
    assert (chosen.engine_environ["MILLRACE_MAX_NUM_SEQS"], chosen.http_port) == ("3", 81)
    assert chosen.engine_environ["MILLRACE_MAX_MODEL_LEN"] == "80"


def test_vllm_of_the_stack_gets_its_flags_by_the_keys_of_the_config(rl, tmp_path):
    flags = ["--inference.vllm.enable-prefix-caching", "false", "--inference.parallel.tp", "2"]
    chosen = stack_options(prepare(["@", str(rl), *flags], environ={"MILLRACE_ENGINE": "vllm"}), tmp_path)
    assert chosen.engine == "vllm"
    assert json.loads(chosen.engine_environ["MILLRACE_VLLM_FLAGS"]) == {
        "inference.max_num_seqs": 256,
        "inference.model.max_model_len": 64,
        "inference.parallel.tp": 2,
        "inference.vllm.enable_prefix_caching": False,
    }
    over = prepare(["@", str(rl), "--inference.engine", "embedded"], environ={"MILLRACE_ENGINE": "vllm"})
    assert over.config.inference.engine == "embedded", "a flag is stronger than the environment"
    with pytest.raises(InvalidSpecError, match=r"inference.vllm: means nothing to the embedded engine"):
        prepare(["@", str(rl), "--inference.engine", "embedded", "--inference.vllm.seed", "1"], environ={})
    auto = prepare(["@", str(rl), "--inference.vllm.seed", "1"], environ={})
    assert stack_options(auto, tmp_path).engine == "vllm", "one of its keys is set"


def test_sft_checks_its_model_and_dry_runs(run):
    done = run("sft", "--model.name", "./nobody")
    assert done.returncode == 2 and "model.name: does not exist" in done.stderr
    done = run("sft", "--dry-run", "--max-steps", "3")
    assert done.returncode == 0 and json.loads(done.stdout)["max_steps"] == 3


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("tune.toml", "[data]\npath = 'x.jsonl'\n", "`millrace sft`: millrace sft @ tune.toml"),
        ("held.toml", "environment_ids = ['a']\n", "`millrace eval`: millrace eval @ held.toml"),
        (
            "trainer.toml",
            "[optim]\nlr = 1e-5\n",
            "'s part of a config: millrace rl --trainer @ trainer.toml …",
        ),
        ("rl.toml", "max_step = 3\n[orchestrator]\n", None),
        ("train.toml", "seq_len = 'long'\n", None),  # our own keys, with a name of prime-rl's
        ("eval_and_sft.toml", "max_stepz = 3\n", None),
    ],
)
def test_a_file_for_another_command_names_it(tmp_path, monkeypatch, name, text, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidSpecError) as caught:
        prepare(["@", name], environ={})
    assert (caught.value.remedy or "").endswith(says or "")
    assert bool(caught.value.remedy) == bool(says)


def test_run_ids(rl, tmp_path):
    config = prepare(["@", str(rl)], environ={}).config
    made_up = choose_run_id(config, None, root=tmp_path)
    assert re.fullmatch(r"reverse-text-[0-9a-f]{4}", made_up)
    assert choose_run_id(config, "demo", root=tmp_path) == "demo"
    (tmp_path / "demo").mkdir()
    assert choose_run_id(config, "demo", root=tmp_path) == "demo", "never a silent demo-2"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), (None, False)),
        (("--resume",), (-1, True)),
        (("--ckpt.resume-step", "-1"), (-1, False)),
        (("--ckpt.resume_step", "7"), (7, True)),
        (("--trainer.ckpt.resume_step", "7"), (7, True)),
    ],
)
def test_a_step_to_resume_from_belongs_to_the_command(rl, words, expected):
    prepared = prepare(["@", str(rl), *words], environ={})
    assert (prepared.resume_step, prepared.must_exist) == expected
    assert '"resume_step":null' in prepared.config.resolved_json() or prepared.config.ckpt is None
    assert not re.search(r'"resume_step": ?-?[0-9]', prepared.config.resolved_json())


@pytest.mark.parametrize("command", ["rl", "sft"])
def test_without_a_file_the_hub_is_not_asked(command, tmp_path, run):
    done = run(command)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"Error: name a config file: millrace {command} @ examples/reverse_text/{command}.toml\n"
    assert run("sft", "--max-steps", "3").returncode == 2 and not list(tmp_path.iterdir())


def test_keys_that_a_running_stack_does_not_take_are_named(rl, capsys):
    flags = ["--inference.max-num-seqs", "3", "--log.level", "debug", "--server", "10.0.0.1:1"]
    prepare(["@", str(rl), *flags], environ={})
    assert "without effect there: inference.max_num_seqs, log.level" in capsys.readouterr().err
    prepare(["@", str(rl), "--inference.max-num-seqs", "3"], environ={})
    assert "without effect there" not in capsys.readouterr().err


def test_of_a_stack_that_was_started_here_only_what_differs_is_named(rl, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = {"inference.engine": "embedded", "inference.server.port": 8000, "log.level": "info"}
    write_stack(tmp_path / "outputs" / "local", "127.0.0.1:50051", settings=settings)
    same = ["--inference.engine", "embedded", "--inference.server.port", "8000", "--log.level", "info"]
    prepare(["@", str(rl), *same, "--server", "localhost:50051"], environ={})
    assert "keeps its own settings" not in capsys.readouterr().err
    other = ["--inference.engine", "embedded", "--log.level", "debug", "--inference.max-num-seqs", "3"]
    prepare(["@", str(rl), *other, "--server", "localhost:50051"], environ={})
    note = capsys.readouterr().err.strip()
    assert note.endswith('inference.max_num_seqs (asked 3, there 256), log.level (asked "debug", there "info")')


def test_a_dry_run_prints_what_is_set_and_nothing_else(rl, capsys):
    flags = ["--trainer.optim.lr", "1e-4", "--dry-run", "--set-only"]
    shown = prepare(["@", str(rl), *flags], environ={}).shown
    assert shown is not None and shown["trainer"] == {"optim": {"lr": 1e-4}}
    assert shown.keys() <= {"max_steps", "seq_len", "model", "orchestrator", "trainer"}
    assert prepare(["@", str(rl), "--dry-run"], environ={}).shown is None
    with pytest.raises(CliError, match="says what a dry run prints"):
        prepare(["@", str(rl), "--set-only"], environ={})


def test_labels(rl):
    found = prepare(["@", str(rl), "--label", "team=a", "--label=note=x=y", "--server", "h:1"], environ={})
    assert found.labels == {"team": "a", "note": "x=y"}
    for wrong in (["--label"], ["--label", "team"], ["--label", "=x"]):
        with pytest.raises(CliError, match="is no label"):
            prepare(["@", str(rl), *wrong], environ={})


ONE_ENV = {
    "rl": ("--orchestrator.env", ("--group-size", "2", "--orchestrator.eval.env", '[{"id": "own"}]')),
    "eval": ("--env", ()),
    "sft": ("--eval.env", ("--data.name", "owner/rows", "--max-steps", "3")),
}


@pytest.mark.parametrize("command", ONE_ENV)
def test_a_dry_run_refuses_an_environment_that_is_not_installed_here(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").touch()
    (tmp_path / "empty").mkdir()
    key, more = ONE_ENV[command]

    def dry_run(*ids: str, **keys: str) -> tuple[int, str]:
        envs = json.dumps([{"id": each, **keys} for each in ids])
        code = main([command, "--model.name", "gpt2", "--dry-run", key, envs, *more])
        return code, capsys.readouterr().err

    assert dry_run("own")[0] == dry_run("someone/reverse-text@0.1.0")[0] == dry_run("nobody", image="an/image")[0] == 0
    code, said = dry_run("own", "revers-text")
    assert code == 2 and f"{key[2:]}[1].id: no Python module 'revers_text' in {tmp_path} or the venv " in said
    assert "did you mean reverse-text?" in said and "name its --server" in said
    code, said = dry_run("empty")
    assert code == 2 and "install it there, or put empty.py here" in said


def test_a_dry_run_for_a_server_looks_for_no_environment_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--group-size", "2", "--orchestrator.env", '[{"id": "nobody"}]', "--server", "127.0.0.1:1"]
    assert main(["rl", "--model.name", "gpt2", "--dry-run", *flags]) == 0
    assert "nobody" not in capsys.readouterr().err


def test_a_dry_run_looks_into_the_interpreter_that_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    packages = tmp_path / "venv/lib/python3.11/site-packages"
    (packages / "verifiers-0.4.0.dist-info").mkdir(parents=True)
    (packages / "verifiers-0.4.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: verifiers\nVersion: 0.4.0\n"
    )
    (packages / "there.py").touch()
    python = f"{tmp_path}/venv/bin/python"
    (tmp_path / "venv/bin").mkdir()
    Path(python).symlink_to(sys.executable)
    envs = [{"id": "there", "python": python}, {"id": "reverse-text", "python": python}]
    flags = ["--group-size", "2", "--orchestrator.env", json.dumps(envs)]
    assert main(["rl", "--model.name", "gpt2", "--dry-run", *flags]) == 2
    said = capsys.readouterr().err
    assert f"orchestrator.env[1].id: no Python module 'reverse_text' in {tmp_path} or {python}" in said


def test_a_dry_run_refuses_an_interpreter_that_a_stack_here_could_not_use(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def dry_run(python: str) -> str:
        envs = json.dumps([{"id": "reverse-text", "python": python}])
        flags = ["--group-size", "2", "--orchestrator.env", envs]
        assert main(["rl", "--model.name", "gpt2", "--dry-run", *flags]) == 2
        return capsys.readouterr().err

    assert "orchestrator.env[0].python: must be an absolute path" in dry_run("python3")
    assert "orchestrator.env[0].python: is not there" in dry_run(f"{tmp_path}/venv/bin/python")
    monkeypatch.setenv("MILLRACE_ENV_PYTHONS", "")
    assert "MILLRACE_ENV_PYTHONS of the env-server is not set, which allows none" in dry_run(sys.executable)
    monkeypatch.setenv("MILLRACE_ENV_PYTHONS", str(tmp_path))
    assert f"allows what lies below {tmp_path}" in dry_run(sys.executable)


def test_a_dry_run_looks_where_the_env_server_may_play(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    packages = tmp_path / "pythons/one/lib/python3.11/site-packages"
    (packages / "verifiers-0.4.0.dist-info").mkdir(parents=True)
    (packages / "verifiers-0.4.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: verifiers\nVersion: 0.4.0\n"
    )
    (packages / "elsewhere.py").touch()
    (tmp_path / "pythons/one/bin").mkdir()
    (tmp_path / "pythons/one/bin/python").symlink_to(sys.executable)
    flags = ["--group-size", "2", "--orchestrator.env", '[{"id": "elsewhere"}]']
    monkeypatch.setenv("MILLRACE_ENV_PYTHONS", str(tmp_path / "pythons"))
    assert main(["rl", "--model.name", "gpt2", "--dry-run", *flags]) == 0
    monkeypatch.delenv("MILLRACE_ENV_PYTHONS")
    assert main(["rl", "--model.name", "gpt2", "--dry-run", *flags]) == 2
    assert "no Python module 'elsewhere'" in capsys.readouterr().err


def test_a_relative_directory_of_interpreters_is_refused_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILLRACE_ENV_PYTHONS", "venvs")
    flags = ["--group-size", "2", "--orchestrator.env", '[{"id": "reverse-text"}]']
    assert main(["rl", "--model.name", "gpt2", "--dry-run", *flags]) == 2
    assert "MILLRACE_ENV_PYTHONS" in capsys.readouterr().err
