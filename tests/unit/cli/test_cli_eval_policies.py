"""What `millrace eval` takes: environments by id, policies of a directory, aliases of endpoints."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from millrace.cli.errors import CliError, Interrupted
from millrace.cli.evals.policies import of_directory
from millrace.cli.evals.prepare import find_endpoint, prepare_eval
from millrace.cli.evals.session import begin, claim, evaluate_policies, finished, table
from millrace.cli.main import main
from millrace.errors import AlreadyExistsError, InvalidSpecError
from millrace.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from millrace.policies.peft.config import AdapterSpec
from millrace.policies.tensors import TensorBytes, pack_safetensors, read_places

WEIGHT = np.eye(4, dtype=np.float32)
ENDPOINTS_TOML = """
[[endpoint]]
endpoint_id = "small"
model = "org/small"
url = "https://one.example/v1"
key = "SMALL_KEY"
[[endpoint]]
endpoint_id = "small"
model = "org/small"
api_base_url = "https://two.example/v1"
key = "SMALL_KEY"
"""
ENDPOINTS_PY = (
    'import os\nos.abort()\nENDPOINTS = {"old": {"model": "m", "url": "https://old.example/v1", "key": "OLD"}}\n'
)


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack_safetensors((name, TensorBytes.from_numpy(array)) for name, array in tensors.items())[0])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write(tmp_path / "base" / "model.safetensors", {"layers.0.q_proj.weight": WEIGHT})
    (tmp_path / "base" / "config.json").write_text("{}")
    return tmp_path / "base"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Return step_10 is a whole model, step_20 an adapter."""
    write(tmp_path / "weights" / "step_10" / "model.safetensors", {"layers.0.q_proj.weight": WEIGHT})
    (tmp_path / "weights" / "step_10" / "config.json").write_text("{}")
    adapter = tmp_path / "weights" / "step_20"
    low, high = np.full((2, 4), 0.5, np.float32), np.ones((4, 2), np.float32)
    name = "base_model.model.layers.0.q_proj"
    write(adapter / ADAPTER_WEIGHTS, {f"{name}.lora_A.weight": low, f"{name}.lora_B.weight": high})
    (adapter / ADAPTER_CONFIG).write_bytes(AdapterSpec(rank=2, alpha=4.0, target_modules=("q_proj",)).to_config())
    return tmp_path / "weights"


def test_base_and_steps_of_a_directory_with_an_adapter_merged(weights: Path, base: Path, tmp_path: Path) -> None:
    policies = of_directory(weights, steps=None, has_base=True, base=base)
    assert [each.label for each in policies] == ["base", "step-10", "step-20"]
    assert policies[0].fetch(tmp_path / "x") == base
    assert policies[1].fetch(tmp_path / "y") == weights / "step_10"
    merged = policies[2].fetch(tmp_path / "merged")
    data = (merged / "model.safetensors").read_bytes()
    (place,) = read_places(data, source="merged")
    found = np.frombuffer(data[place.offset : place.offset + place.length_bytes], np.float32).reshape(4, 4)
    assert place.name == "layers.0.q_proj.weight" and (merged / "config.json").is_file()
    np.testing.assert_array_equal(found, WEIGHT + 2.0)  # alpha / rank = 2, times B·A = 1


def test_an_adapter_that_is_not_known_is_refused_before_anything_is_played(
    weights: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = weights / "step_20" / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": "pissa_niter_16"}))
    words = ["eval", "--environment-ids", "a", "--model.name", str(base), "--weights-dir", str(weights)]
    assert main([*words, "--output-dir", str(tmp_path / "out")]) != 0
    told = f'{path} is an adapter that is not merged here: init_lora_weights is "pissa_niter_16"'
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_merged_by_a_command_and_is_no_start_model(
    weights: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, made = weights / "step_20", tmp_path / "made"
    assert main(["eval", "--environment-ids", "a", "--model.name", str(adapter)]) == 2
    assert f"millrace merge {adapter} --base BASE" in capsys.readouterr().err
    assert main(["merge", str(adapter), "--base", str(base), "--to", str(made)]) == 0
    assert capsys.readouterr().out.strip() == str(made)
    assert {path.name for path in made.iterdir()} == {"config.json", "model.safetensors"}
    assert main(["merge", str(adapter), "--base", str(base), "--to", str(made)]) == 2
    assert "not an empty directory" in capsys.readouterr().err


def test_a_step_that_is_not_there_and_nothing_to_evaluate(weights: Path, base: Path, tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"holds no step 30") as caught:
        of_directory(weights, steps=[10, 30], has_base=True, base=base)
    assert "there are 10, 20" in str(caught.value.hint)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CliError, match="nothing to evaluate"):
        of_directory(tmp_path / "empty", steps=None, has_base=False, base=None)
    with pytest.raises(CliError, match="base model is to be evaluated"):
        of_directory(weights, steps=None, has_base=True, base=tmp_path / "empty")


def test_the_command_line_names_environments_and_policies(weights: Path, base: Path, capsys) -> None:
    common = ["--environment-ids", "a-b,c", "--model.name", str(base), "--weights-dir", str(weights)]
    prepared = prepare_eval([*common, "--steps", "20", "--no-eval-base"], environ={})
    assert [each.id for each in prepared.config.env] == ["a-b", "c"]
    assert [each.step for each in prepared.policies] == [20]
    with pytest.raises(CliError, match="serves its own model"):
        prepare_eval([*common, "--client.base-url", "https://one.example/v1"], environ={})
    with pytest.raises(CliError, match=r"not by 127.0.0.1:1 \(--server"):
        prepare_eval([*common, "--server", "127.0.0.1:1"], environ={})
    capsys.readouterr()
    assert prepare_eval(common, environ={"MILLRACE_SERVER": "127.0.0.1:1"}).server is None
    assert "a stack of this command serves the policies, not 127.0.0.1:1 (MILLRACE_SERVER)" in capsys.readouterr().err
    with pytest.raises(CliError, match="which steps of what"):
        prepare_eval(["--environment-ids=a", "--model.name", str(base), "--steps", "1"], environ={})
    with pytest.raises(CliError, match="needs its name"):
        prepare_eval(["--environment-ids=a", "--model.name", str(base), "--resume"], environ={})


def test_a_model_that_is_not_named_can_be_named_by_a_flag() -> None:
    with pytest.raises(InvalidSpecError, match=r"model: is required; .*, or give --model\.name"):
        prepare_eval(["--environment-ids", "a"], environ={})


def test_a_name_that_is_taken_is_refused_and_one_that_is_not_there_does_not_go_on(base: Path, tmp_path: Path) -> None:
    common = ["--environment-ids", "a", "--model.name", str(base), "--output-dir", str(tmp_path / "out"), "--name", "x"]
    (tmp_path / "out" / "x").mkdir(parents=True)
    with pytest.raises(CliError, match="there is no evaluation x"):
        claim(prepare_eval([*common, "--resume"], environ={}))
    assert claim(prepare_eval(common, environ={})) == tmp_path / "out" / "x", "an empty directory is nobody's"
    (tmp_path / "out" / "x" / "eval.json").write_text("{}")
    with pytest.raises(AlreadyExistsError, match="exists already") as caught:
        claim(prepare_eval(common, environ={}))
    assert "--resume" in (caught.value.remedy or "")
    assert claim(prepare_eval([*common, "--resume"], environ={})) == tmp_path / "out" / "x"


def test_policies_of_a_taken_name_are_refused_before_any_is_played(weights: Path, base: Path, tmp_path: Path) -> None:
    common = ["--environment-ids", "a", "--model.name", str(base), "--weights-dir", str(weights)]
    prepared = prepare_eval([*common, "--output-dir", str(tmp_path / "out"), "--name", "x"], environ={})
    (tmp_path / "out" / "x-step-20" / "logs").mkdir(parents=True)
    with pytest.raises(AlreadyExistsError, match="x-step-20 exists already"):
        evaluate_policies(prepared)
    assert not (tmp_path / "out" / "x").exists()


def test_an_interrupted_comparison_says_how_it_goes_on(
    weights: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--environment-ids", "a", "--model.name", str(base), "--weights-dir", str(weights)]
    prepared = prepare_eval([*common, "--output-dir", str(tmp_path / "out"), "--name", "x"], environ={})

    def interrupted(work: object) -> None:
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr("millrace.cli.interrupts.run", interrupted)
    with pytest.raises(Interrupted):
        evaluate_policies(prepared)
    assert capsys.readouterr().err.splitlines()[-1].endswith("give the same command with --name x --resume")


def test_an_evaluation_goes_on_after_a_kill_while_its_beginning_is_written(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["--environment-ids", "a", "--model.name", str(base), "--output-dir", str(tmp_path / "out")]
    prepared = prepare_eval([*common, "--name", "x", "--resume"], environ={})
    write_text = Path.write_text

    def killed(path: Path, text: str) -> int:
        write_text(path, text[: len(text) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            begin(prepared, tmp_path / "out" / "x")
    assert finished(prepared) is None
    port = begin(prepared, claim(prepared))
    assert begin(prepared, claim(prepared)) == port, "the port of the first whole attempt"


def test_an_evaluation_does_not_go_on_with_other_files(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "my_env.py"
    module.write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    common = ["--environment-ids", "my-env", "--model.name", str(base), "--output-dir", str(tmp_path / "out")]
    prepared = prepare_eval([*common, "--name", "x", "--resume"], environ={})
    begin(prepared, tmp_path / "out" / "x")
    assert finished(prepared) is None, "the same files go on"
    module.write_text("VALUE = 2\n")
    with pytest.raises(CliError, match="begun with another environment my-env: the files there have changed"):
        finished(prepared)
    module.write_text("VALUE = 1\n")
    write(base / "model.safetensors", {"layers.0.q_proj.weight": WEIGHT * 2})
    with pytest.raises(CliError, match="begun with another model"):
        finished(prepared)


def test_the_digest_of_a_policy_is_of_all_that_it_is_made_of(weights: Path, base: Path) -> None:
    def digests() -> list[str]:
        return [each.digest() for each in of_directory(weights, steps=None, has_base=True, base=base)]

    first = digests()
    assert first[0] == first[1] != first[2] and digests() == first, "the base and step 10 hold the same bytes"
    write(base / "model.safetensors", {"layers.0.q_proj.weight": WEIGHT * 2})
    second = digests()
    assert [a == b for a, b in zip(first, second, strict=True)] == [False, True, False], "an adapter has its base"


def test_an_alias_of_an_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.toml"
    path.write_text(ENDPOINTS_TOML)
    words = ["--environment-ids", "a", "--model.name", "small", "--endpoints-path", str(path)]
    config = prepare_eval(words, environ={"SMALL_KEY": "x"}).config
    assert config.model.name == "org/small" and config.client is not None
    assert config.client.base_url == ["https://one.example/v1", "https://two.example/v1"]
    assert config.client.api_key_var == "SMALL_KEY"
    with pytest.raises(CliError, match="has no endpoint 'large'"):
        find_endpoint("large", str(path))


def test_an_old_registry_is_read_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.py"
    path.write_text(ENDPOINTS_PY)
    found = find_endpoint("old", str(path))
    assert found is not None and (found.model, found.urls, found.key_var) == ("m", ("https://old.example/v1",), "OLD")
    path.write_text("ENDPOINTS = dict(a=1)")
    with pytest.raises(CliError, match="lists no endpoints"):
        find_endpoint("old", str(path))


def test_a_table_over_policies() -> None:
    env = {"reward_mean": 0.5, "reward_sem": 0.1, "pass@1": 0.4, "pass@1/ci95": [0.3, 0.5]}
    env |= {"num_rollouts": 8, "num_failed": 0, "seconds": 2.0}
    lines = table({"name": "x", "policies": [{"policy": "base", "step": None, "envs": {"a": env}}]})
    assert lines[0].split()[:2] == ["policy", "environment"] and "0.400 [0.30, 0.50]" in lines[1]
