"""The tokenizer of a model against the model: every token that it can give has a row, and it is one at all."""

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
    """Return the tokenizer in a directory.

    NotFoundError (TOKENIZER_MISSING) if there is none that has any text's tokens.

    transformers makes one of a few special tokens where a directory has no files of it.
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
    """Check as `require_tokenizer` does a tokenizer that engines load.

    One with code of its own is left to the engines.
    """
    try:
        require_tokenizer(directory, model=model, needs_template=needs_template)
    except NotFoundError as error:
        if not (directory / _CONFIG).is_file() or _CODE not in read_object(directory / _CONFIG):
            raise
        logger.warning("the tokenizer has code of its own and is not looked at", extra={"error": error.message})


def require_tokenizer(directory: Path, *, model: Path, needs_template: bool) -> Any:
    """Return the tokenizer in `directory` for the model in `model`, of which config.json is read.

    Refused if it does not fit.

    Raises as `load_tokenizer`, `check_tokens` and, where a template is needed, `require_template`.
    """
    tokenizer = load_tokenizer(directory)
    num_rows = _num_rows_of(read_object(model / "config.json"))
    if num_rows is not None:
        check_tokens(tokenizer, model, num_rows=num_rows)
    if needs_template:
        require_template(tokenizer, directory)
    return tokenizer


def check_tokens(tokenizer: Any, directory: Path, *, num_rows: int) -> None:
    """Raise InvalidStateError (VOCABULARY_TOO_SMALL) if a token of the tokenizer or configs has no row in the
    embedding.

    Tokens that the tokenizer names as those of images, sounds or the like are left out: a model of text has no rows for
    them, and no text becomes them. `directory` has the configs of the model.
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
    """Raise InvalidStateError (CHAT_TEMPLATE_MISSING) if the tokenizer in `directory` cannot write a conversation."""
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
    """Return the rows of the embedding as config.json says them; None if it does not."""
    text = config.get("text_config")
    found = text.get("vocab_size") if isinstance(text, dict) else None
    found = config.get("vocab_size") if found is None else found
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


def _named_specials(tokenizer: Any) -> dict[str, str]:
    """Return special tokens by the name of what they are for."""
    return {name: str(text) for name, text in tokenizer.special_tokens_map.items() if not isinstance(text, list)}


def _configured(directory: Path) -> Iterator[tuple[str, str, int]]:
    """Yield file, key and id of the special tokens that the model's configs name; none is -1 in old ones.

    CorruptObjectError (MODEL_FILE_UNUSABLE) for what is no id: engines and trainers read it in different ways.
    """
    for name in _CONFIGS:
        if not (directory / name).is_file():
            continue
        document = read_object(directory / name)
        text = document.get("text_config")
        for place in (document, text if isinstance(text, dict) else {}):
            for key in _IDS:
                found = place.get(key)
                for index in found if isinstance(found, list) else [found]:
                    if index is not None and type(index) is not int:
                        raise model_file_unusable(directory / name, f"{key} is {index!r}, and not the id of a token")
                    if index is not None:
                        yield name, key, index


def _missing(directory: Path, problem: str) -> NotFoundError:
    return NotFoundError(
        f"the tokenizer in {str(directory)!r} {problem}",
        reason="TOKENIZER_MISSING",
        remedy="copy the model's tokenizer files (tokenizer.json, tokenizer_config.json, or tokenizer.model) there, or "
        "name their directory in trainer.tokenizer.name",
        metadata={"model": str(directory)},
    )


# Chat templates as the foreign code that they are.

TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a chat template, which is foreign code, raises for a conversation that it does not know.

Its own errors, and those of the operations in it: text joined with a list of parts, a tool that is no schema.
"""

_DEFAULT = "default"


def why_no_template(tokenizer: Any) -> str | None:
    """Return what a tokenizer has instead of a chat template for any conversation; None if it has one.

    What a template refuses of a conversation is its own affair; one that is no Jinja refuses all of them.
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
