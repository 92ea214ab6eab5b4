"""A release of vLLM that was not tried is named before anything of it is imported."""

import tomllib

import pytest

from millrace.errors import InvalidStateError
from millrace.inference.vllm import releases
from millrace.inference.vllm.gate import name_tokens
from millrace_testing.repository import REPOSITORY


@pytest.mark.parametrize("release", [*releases.TRIED, "0.32.3", "0.33.0+cu129", "0.33.1rc2"])
def test_a_release_that_was_tried_and_its_patches_are_taken(release: str) -> None:
    assert releases.require_tried(release) == ""


@pytest.mark.parametrize("release", ["0.31.0", "0.34.0", "0.3.2", "1.0", "dev", "0.330.0"])
def test_another_release_is_refused_with_what_to_install(release: str) -> None:
    with pytest.raises(InvalidStateError) as caught:
        releases.require_tried(release)
    message = str(caught.value)
    assert f"vLLM {release} is installed, and Millrace was tried with 0.32.0 and 0.33.0" in message
    assert caught.value.reason == "VLLM_NOT_TRIED" and "install millrace[vllm]" in (caught.value.remedy or "")


def test_a_user_may_try_another_one_and_is_warned() -> None:
    assert "vLLM 0.34.0 is installed" in releases.require_tried("0.34.0", may_be_untried=True)
    assert "not known" in releases.require_tried("", may_be_untried=True)


def test_the_extra_takes_what_was_tried() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    [bounds] = [each for each in project["optional-dependencies"]["vllm"] if each.startswith("vllm")]
    first, last = (
        tuple(int(part) for part in release.split(".")) for release in (releases.TRIED[0], releases.TRIED[-1])
    )
    assert bounds == f"vllm>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"


def test_tokens_are_named_where_they_have_ids_alone() -> None:
    body = {"choices": [{"logprobs": {"content": [{"token_id": 7}, {"token": "a"}]}}, {"logprobs": None}, {}]}
    name_tokens(body)
    assert body["choices"][0]["logprobs"] == {"content": [{"token_id": 7, "token": "token_id:7"}, {"token": "a"}]}
