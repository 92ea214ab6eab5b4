"""What of a resolved config differs from its defaults."""

from millrace.config import RLConfig
from millrace.config.tree import differences


def found(document: dict) -> dict:
    return {each.key: each for each in differences(document, RLConfig)}


def test_only_what_was_chosen_differs():
    document = {
        "max_steps": 40,
        "async_level": 1,
        "orchestrator": {"batch_size": 256, "filters": [], "env": [{"id": "reverse-text", "args": {"n": 1}}]},
    }
    keys = found(document)
    assert [key for key, each in keys.items() if each.differs] == [
        "max_steps",
        "orchestrator.batch_size",
        "orchestrator.env[0].id",
        "orchestrator.env[0].args",
    ]
    assert keys["orchestrator.batch_size"].default == 128
    assert keys["orchestrator.env[0].args"].value == {"n": 1}


def test_what_no_schema_knows_is_shown_too():
    assert found({"from_another_release": {"key": 3}})["from_another_release.key"].differs
