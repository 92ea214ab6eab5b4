"""Checks of a model's tokenizer: it loads, every token has a row in the embedding, and it has a chat template."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from millrace.errors import InvalidStateError, NotFoundError
from millrace.models.configs import read_tokenizer
from millrace.models.files import model_file_unusable, read_object

logger = logging.getLogger(__name__)

_CONFIGS = ("config.json", "generation_config.json")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GENERAL = frozenset({"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"})
_CONFIG, _CODE = "tokenizer_config.json", "auto_map"
_MOST_SHOWN = 3


def load_tokenizer(directory: Path) -> Any:
    """Return the tokenizer in a directory, loaded by transformers.

    Raise NotFoundError (TOKENIZER_MISSING) if it does not load.

    One that has only special tokens is refused, too: transformers makes such a tokenizer without any files.
    """
    for name in ("config.json", _CONFIG):  # AutoTokenizer reads both
        if (directory / name).exists():
            read_object(directory / name)
    try:
        tokenizer = read_tokenizer(directory)
    except Exception as error:  # foreign code on foreign files: tokenizers raises classes of its own
        raise _missing(directory, f"does not load: {' '.join(str(error).split())[:500]}") from error
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        raise _missing(directory, "has no tokens but special ones: its files are not there")
    return tokenizer


def check_tokenizer(directory: Path, *, model: Path, needs_template: bool) -> None:
    """Raise if the tokenizer in `directory` does not load or does not fit the model in directory `model`.

    With `needs_template` it must have a usable chat template. Raises as `require_tokenizer`. A tokenizer that does not
    load and needs code of its own, which engines may load, is only logged.
    """
    try:
        require_tokenizer(directory, model=model, needs_template=needs_template)
    except NotFoundError as error:
        if not (directory / _CONFIG).is_file() or _CODE not in read_object(directory / _CONFIG):
            raise
        logger.warning("the tokenizer has code of its own and is not looked at", extra={"error": error.message})


def require_tokenizer(directory: Path, *, model: Path, needs_template: bool) -> Any:
    """Return the tokenizer in `directory`, after checking that it fits the model in directory `model`.

    With `needs_template` it must have a usable chat template. Raises as `load_tokenizer`, `check_tokens` and
    `require_template`.
    """
    tokenizer = load_tokenizer(directory)
    num_rows = _num_rows_of(read_object(model / "config.json"))
    if num_rows is not None:
        check_tokens(tokenizer, model, num_rows=num_rows)
    if needs_template:
        require_template(tokenizer, directory)
    return tokenizer


def check_tokens(tokenizer: Any, directory: Path, *, num_rows: int) -> None:
    """Raise InvalidStateError (VOCABULARY_TOO_SMALL) if the id of a token has none of the `num_rows` embedding rows.

    Checked are the tokenizer's tokens and those in the model's configs in `directory`. Special tokens for images,
    sounds and the like are left out, because no text becomes them and a model of text has no rows for them.
    """
    other = {text for name, text in _named_specials(tokenizer).items() if name not in _GENERAL}
    wrong = [
        f"token {json.dumps(token, ensure_ascii=False)} has id {index}"
        for token, index in sorted(tokenizer.get_vocab().items(), key=lambda each: each[1])
        if index >= num_rows and token not in other
    ]
    wrong += [f"{key} of {name} is {index}" for name, key, index in _configured(directory) if index >= num_rows]
    if wrong:
        more = len(wrong) - _MOST_SHOWN
        shown = "; ".join(wrong[:_MOST_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise InvalidStateError(
            f"the model in {str(directory)!r} has embeddings for ids 0 to {num_rows - 1}, and {shown}",
            reason="VOCABULARY_TOO_SMALL",
            remedy="use the tokenizer that belongs to the model (model.name, trainer.tokenizer.name), or give the "
            "model rows for them: resize_token_embeddings() of transformers, then save_pretrained()",
            metadata={"model": str(directory)},
        )


def require_template(tokenizer: Any, directory: Path) -> None:
    """Raise InvalidStateError (CHAT_TEMPLATE_MISSING) if the tokenizer, of `directory`, has no usable chat template."""
    if (problem := why_no_template(tokenizer)) is None:
        return
    raise InvalidStateError(
        f"the tokenizer in {str(directory)!r} has {problem}, and environments play conversations",
        reason="CHAT_TEMPLATE_MISSING",
        remedy="put chat_template.jinja beside the tokenizer (that of the model's instruction-tuned sibling), or name "
        "its file in inference.model.chat_template (vLLM); an environment that has texts completed says "
        'message_type = "completion" in its args',
        metadata={"model": str(directory)},
    )


def _num_rows_of(config: Mapping[str, Any]) -> int | None:
    """Return the embedding's number of rows that config.json states; None if it states none."""
    text = config.get("text_config")
    found = text.get("vocab_size") if isinstance(text, dict) else None
    found = config.get("vocab_size") if found is None else found
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


def _named_specials(tokenizer: Any) -> dict[str, str]:
    """Return a tokenizer's special tokens by their role, such as `eos_token`; lists of tokens are left out."""
    return {name: str(text) for name, text in tokenizer.special_tokens_map.items() if not isinstance(text, list)}


def _configured(directory: Path) -> Iterator[tuple[str, str, int]]:
    """Yield file, key and id of the bos, eos and pad tokens in config.json and generation_config.json.

    An id may be -1, with which older configs say that there is none. Raises CorruptObjectError (MODEL_FILE_UNUSABLE)
    for a value that is no integer, which programs read differently.
    """
    for name in _CONFIGS:
        if not (directory / name).is_file():
            continue
        document = read_object(directory / name)
        text = document.get("text_config")
        # A model with a text part may have these keys at either level.
        for place in (document, text if isinstance(text, dict) else {}):
            for key in _IDS:
                found = place.get(key)
                for index in found if isinstance(found, list) else [found]:
                    if index is not None and type(index) is not int:
                        raise model_file_unusable(directory / name, f"{key} is {index!r}, and not the id of a token")
                    if index is not None:
                        yield name, key, index


def _missing(directory: Path, problem: str) -> NotFoundError:
    """Return the error (TOKENIZER_MISSING) that the tokenizer in a directory has this problem."""
    return NotFoundError(
        f"the tokenizer in {str(directory)!r} {problem}",
        reason="TOKENIZER_MISSING",
        remedy="copy the model's tokenizer files (tokenizer.json, tokenizer_config.json, or tokenizer.model) there, or "
        "name their directory in trainer.tokenizer.name",
        metadata={"model": str(directory)},
    )


# Chat templates, which are foreign code.

TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""The errors that a chat template, which is foreign code, raises for a conversation that it cannot render.

They are its own errors, and those of its operations: text joined with a list of parts, a tool that is no schema.
"""

_DEFAULT = "default"


def why_no_template(tokenizer: Any) -> str | None:
    """Return what a tokenizer has instead of a usable chat template, as part of a message; None if it has one.

    A template is unusable if it is no valid Jinja; one that refuses a trial conversation may accept others.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return "no chat template"
    if isinstance(template, dict) and _DEFAULT not in template:
        return f"no chat template for conversations without tools (it has {', '.join(sorted(template))})"
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
    except TemplateSyntaxError as error:
        return f"a chat template that cannot be read (line {error.lineno}: {error.message})"
    except TEMPLATE_ERRORS:
        return None
    return None
