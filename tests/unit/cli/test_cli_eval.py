"""The stack that `millrace eval` starts."""

import json
from pathlib import Path

from millrace.cli.evals.prepare import prepare_eval
from millrace.cli.evals.session import eval_stack
from millrace.telemetry.settings import Settings

EVAL = """
[model]
name = "{model}"
[[env]]
id = "reverse-text"
"""
PROTECTED = {
    "MILLRACE_TLS_CERT": "cert.pem",
    "MILLRACE_TLS_KEY": "key.pem",
    "MILLRACE_TLS_CA": "ca.pem",
    "MILLRACE_TOKENS_FILE": "tokens",
    "MILLRACE_WORKER_TOKEN_FILE": "workers",
    "MILLRACE_TOKEN_FILE": "alice.token",
    "MILLRACE_PREFIX": "mine",
}


def test_the_stack_of_an_evaluation_demands_no_token_from_its_own_rollouts(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({}))
    path = tmp_path / "eval.toml"
    path.write_text(EVAL.format(model=model))
    options, modules, config = eval_stack(
        prepare_eval(["@", str(path)], environ=PROTECTED), tmp_path / "run", http_port=4711
    )
    assert options.access == Settings() and options.prefix == "mine"
    assert "inference" in modules and config.client is not None
    assert config.client.base_url == ["http://127.0.0.1:4711/v1"]
    assert options.http_host == "127.0.0.1" and options.listen is None
    assert options.engine_environ["MILLRACE_NEEDS_CHAT_TEMPLATE"] == "1", "its environment plays conversations"
