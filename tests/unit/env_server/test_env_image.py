"""The image that an env-server announces, and what it says to environments that are not for it."""

import pytest

from millrace.env_server.settings import EnvServerSettings, parse_image, require_image
from millrace.errors import InvalidSpecError


def test_the_setting_is_the_name_of_an_image() -> None:
    name = "registry.example.com:5000/team/own-env:1.2@sha256:0123456789abcdef"
    assert EnvServerSettings.from_env({"MILLRACE_ENV_IMAGE": name}).image == name
    assert EnvServerSettings.from_env({}).image == ""
    for wrong in ("has space", "-v", "a" * 600):
        with pytest.raises(ValueError, match="must be the name of a container image"):
            parse_image(wrong)
    with pytest.raises(InvalidSpecError, match="MILLRACE_ENV_IMAGE"):
        EnvServerSettings.from_env({"MILLRACE_ENV_IMAGE": "a\nb"})


@pytest.mark.parametrize(
    ("wanted", "announced", "says"),
    [
        ("a:1", "", "announces no image; start one from a:1 with MILLRACE_ENV_IMAGE=a:1"),
        ("", "a:1", "plays only environments of a:1"),
        ("a:2", "a:1", "which is a:1; correct one of the two"),
    ],
)
def test_an_environment_that_came_to_the_wrong_place_is_refused(wanted: str, announced: str, says: str) -> None:
    with pytest.raises(InvalidSpecError, match=says) as raised:
        require_image(wanted, announced)
    assert raised.value.reason == "ENV_IMAGE_REFUSED" and raised.value.violations[0].field == "orchestrator.env.image"
    require_image(announced, announced)
