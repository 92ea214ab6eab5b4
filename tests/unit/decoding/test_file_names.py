"""Names of files that others wrote lead nowhere but below the directory that they are written to."""

import pytest

from millrace.decoding import require_file_name


@pytest.mark.parametrize("name", ["config.json", "additional_chat_templates/tool use.jinja", "a/b/c/d.txt", "ä.model"])
def test_names_of_files_may_lie_in_directories(name: str) -> None:
    assert require_file_name(name) == name


_ABOVE = ["..", "../x", "a/../b", "a/./b", "/etc/x", "a//b", "a/", "", ".hidden", "a/.git/b", "a/b/c/d/e"]
_OF_OTHER_SYSTEMS = ["a\\b", "C:x", "a\0b", "a\nb", "a.", "a ", "a*", "a?"]


@pytest.mark.parametrize("name", [*_ABOVE, *_OF_OTHER_SYSTEMS])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="plain name"):
        require_file_name(name)
