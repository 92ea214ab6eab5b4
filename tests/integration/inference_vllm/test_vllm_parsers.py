"""vLLM's own parsers make of well-formed texts what ours do, and the config's keys bring them to its server."""

import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.config.sections.inference import InferenceConfig
from millrace.inference.launch_env import vllm_flags
from millrace_testing.inference import parser_cases, parser_replies, published, tiny, vllm_server
from millrace_testing.patience import patient

pytestmark = pytest.mark.timeout(600)

MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


def write_tokenizer(directory: Path) -> None:
    """The tiny tokenizer with the symbols that vLLM's parsers look for in a vocabulary."""
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.add_tokens(MARKS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|python_tag|>"]})
    tokenizer.save_pretrained(directory)


def said_by_vllm(vllm_python: str, script: str, tmp_path: Path) -> Any:
    """Return what vLLM's parsers make of a table."""
    write_tokenizer(tmp_path)
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "VLLM_", "PYTHON"))
    }
    environ["PYTHONPATH"] = str(Path(script).parents[2])  # millrace itself is installed there
    done = subprocess.run(
        [vllm_python, script, str(tmp_path), str(tmp_path / "said.json")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=patient(300),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((tmp_path / "said.json").read_text())


def test_vllm_makes_the_same_of_well_formed_texts(vllm_python: str, tmp_path: Path) -> None:
    said = said_by_vllm(vllm_python, parser_cases.__file__, tmp_path)
    expected = json.loads(json.dumps([case.said for case in parser_cases.CASES]))
    for case, theirs, ours in zip(parser_cases.CASES, said, expected, strict=True):
        assert theirs == ours, case


def test_vllm_says_of_every_reply_what_the_table_has(vllm_python: str, tmp_path: Path) -> None:
    """Where ours say something else, the table has that, too, and why; and our replicas say what ours do."""
    table = parser_replies.replies()
    stock, ours = said_by_vllm(vllm_python, parser_replies.__file__, tmp_path)
    for reply, theirs, said in zip(table, stock, ours, strict=True):
        assert json.dumps(theirs) == json.dumps(reply.vllm), reply  # NaN, too
        assert json.dumps(said) == json.dumps(reply.expected), reply


@pytest.fixture(scope="module")
def server(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield a replica whose flags are what our config makes of the keys."""
    directory = tmp_path_factory.mktemp("parsers")
    model: Any = published.model(99)
    published.files(model, directory / "model")
    model.save_pretrained(directory / "model")
    write_tokenizer(directory / "model")
    config = InferenceConfig.model_validate(
        {
            "engine": "vllm",
            "max_num_seqs": 4,
            "model": {
                "tool_call_parser": "hermes",
                "reasoning_parser": "deepseek_r1",
                "max_model_len": 256,
                "enforce_eager": True,
            },
            "vllm": {"block_size": 32},
        }
    )
    yield from vllm_server.serving(vllm_python, directory / "model", directory, **vllm_flags(config))


@pytest.fixture
async def client(server: Any) -> AsyncIterator[Any]:
    async with server.client() as client:
        yield client


async def test_a_request_with_tools_is_served_and_its_thought_is_reasoning(client: Any) -> None:
    """Without automatic tool choice vLLM refuses it; without a reasoning parser the text would be content."""
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": "x"}],
        "tools": parser_cases.TOOLS[1:],
        "max_tokens": 8,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    code, answer, _ = await client.post("/v1/chat/completions", body)
    assert code == 200, answer
    [choice] = answer["choices"]
    assert choice["message"]["content"] is None and choice["message"]["reasoning"], "no thought ends within 8 tokens"
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 8


async def test_a_special_token_as_stop_string_ends_the_reply_or_is_refused(client: Any) -> None:
    """The text that vLLM looks for strings in leaves special tokens out, so that alone it would never end there."""
    sampling = {"max_tokens": 200, "ignore_eos": True, "temperature": 2.0}
    asked = {"model": "policy", "return_token_ids": True, **sampling}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    choice: dict[str, Any] = {}
    for seed in range(40):
        body = asked | chat | {"seed": seed, "stop": ["<|im_start|>", "zzz"]}
        code, answer, _ = await client.post("/v1/chat/completions", body)
        assert code == 200, answer
        [choice] = answer["choices"]
        if choice["finish_reason"] == "stop":
            break
    [special] = {choice["token_ids"][-1], choice["stop_reason"]}
    assert choice["token_ids"].count(special) == 1
    raw = {"model": "policy", "token_ids": [1, 2], "sampling_params": {**sampling, "seed": 1, "stop": ["<|im_start|>"]}}
    code, answer, _ = await client.post("/inference/v1/generate", raw)
    assert code == 200 and special not in answer["choices"][0]["token_ids"][:-1], answer
    for route, prompt in (("completions", {"prompt": "x"}), ("chat/completions", chat)):
        code, answer, _ = await client.post(f"/v1/{route}", asked | prompt | {"stop": "so <|im_start|>"})
        assert code == 400 and "would never match" in answer["error"]["message"]


IGNORED = [
    ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "functions"),
    ("/v1/chat/completions", {"modalities": ["audio"]}, "modalities"),
    ("/v1/chat/completions", {"best_of": 2}, "best_of"),
    ("/v1/chat/completions", {"guided_json": {}}, "guided_json"),
    ("/v1/chat/completions", {"nonsense": 1}, "nonsense"),
    ("/v1/chat/completions", {"stream": True, "stream_options": {"nonsense": 1}}, "stream_options.nonsense"),
    ("/v1/chat/completions", {"tools": [parser_cases.TOOLS[0], parser_cases.TOOLS[0]]}, "tools[1].function.name"),
    ("/v1/completions", {"best_of": 2}, "best_of"),
    ("/v1/responses", {"max_tool_calls": 3}, "max_tool_calls"),
    ("/v1/responses", {"nonsense": 1}, "nonsense"),
    ("/v1/messages", {"mcp_servers": [{}]}, "mcp_servers"),
    ("/tokenize", {"nonsense": 1}, "nonsense"),
    ("/inference/v1/generate", {"nonsense": 1}, "nonsense"),
    ("/inference/v1/generate", {"sampling_params": {"best_of": 2, "max_tokens": 1}}, "sampling_params.best_of"),
]
CHAT_BODY = {"model": "policy", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT_BODY,
    "/v1/completions": {"model": "policy", "prompt": "x", "max_tokens": 2},
    "/v1/responses": {"model": "policy", "input": "x", "max_output_tokens": 2},
    "/v1/messages": CHAT_BODY,
    "/tokenize": {"model": "policy", "prompt": "x"},
    "/inference/v1/generate": {"model": "policy", "token_ids": [1, 2], "sampling_params": {"max_tokens": 1}},
}


@pytest.mark.parametrize("route", BODIES)
async def test_what_vllm_would_ignore_is_refused_by_name(client: Any, route: str) -> None:
    code, answer, _ = await client.post(route, BODIES[route])
    assert code == 200, answer
    for path, said, field in IGNORED:
        if path == route:
            code, answer, _ = await client.post(route, BODIES[route] | said)
            assert (code, answer["error"]["param"]) == (400, field), answer


async def test_what_vllm_reads_and_what_changes_no_answer_is_taken(client: Any) -> None:
    for said in (
        {"documents": [{"title": "t", "text": "x"}]},
        {"parallel_tool_calls": False},
        {"truncate_prompt_tokens": 4},
        {"logit_bias": {"5": 1.0}},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "modalities": ["text"]},
        {"stream_choices": True, "nonsense": None},
    ):
        code, answer, _ = await client.post("/v1/chat/completions", CHAT_BODY | said)
        assert code == 200, (said, answer)
