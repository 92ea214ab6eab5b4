"""A look at a local model before anything starts: what a run would refuse of it, but for its numbers."""

from pathlib import Path

from millrace.models.files import WeightFiles, first_names, read_object, require_no_adapter
from millrace.models.loading import check_weights
from millrace.models.vocabulary import check_tokenizer


def look_at(directory: Path, *, tokenizer: Path, needs_template: bool) -> list[str]:
    """Raise what a run would end with, as `require_no_adapter`, `check_weights` and `check_tokenizer` do; the notes.

    `tokenizer` is the directory that the tokenizer is in.
    """
    require_no_adapter(directory)
    check_weights(directory)
    check_tokenizer(tokenizer, model=directory, needs_template=needs_template)
    beside = WeightFiles.find(directory, read_object(directory / "config.json")).beside
    return [f"{first_names(beside)} beside the model's own weight files: not read"] if beside else []
