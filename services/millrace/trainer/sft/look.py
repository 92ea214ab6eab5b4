"""Checks of a fine-tuning's first rows, before anything starts: what is cut or left out, and what is wrong."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.config.sections.data import DataSourceConfig
from millrace.config.sections.rl import RLConfig
from millrace.config.sections.sft import SFTConfig
from millrace.errors import InvalidSpecError
from millrace.models.vocabulary import require_tokenizer
from millrace.policies.stops import turn_stops
from millrace.trainer.sft.data import KEY, RowEncoder
from millrace.trainer.sft.rows import Source, is_conversation, is_local, is_there, load_rows

_MOST = 256
"""Rows of each file that are checked."""


@dataclass(frozen=True, slots=True)
class FirstRows:
    """The first rows of the data under a key of the config, and whether there are no others."""

    key: str
    source: Source
    are_all: bool

    @property
    def have_conversations(self) -> bool:
        """Return whether one of the rows is a conversation rather than text."""
        return any(map(is_conversation, self.source.rows))


def tables(config: SFTConfig) -> Mapping[str, DataSourceConfig]:
    """Return the tables of a config that name data, by their keys ("data", "val.data")."""
    return {"data": config.data} | ({} if config.val is None else {"val.data": config.val.data})


def first_rows(key: str, table: DataSourceConfig, *, is_paired: bool = False) -> FirstRows | None:
    """Return at most `_MOST` rows of each local file; `key` is the name of `table` in the config.

    With `is_paired` rows are preference pairs. None for a dataset of the Hub, or if the path is missing. Raises
    NotFoundError for a subset or split that is missing, and InvalidSpecError for a wrong row, as `load_sources`.
    """
    if not is_local(table.name) or not is_there(table.name):
        return None
    source = load_rows(table, key=key, most=_MOST, is_paired=is_paired)
    return FirstRows(key, source, are_all=len(source.rows) < _MOST)


def look_at_rows(config: SFTConfig, found: FirstRows, *, directory: Path) -> Iterator[str]:
    """Encode the rows `found` for the model in `directory`; yield sentences on rows that are cut or left out.

    `config` has the table from which they were read. Raises InvalidSpecError as `look`, and as `require_tokenizer` for
    a tokenizer that does not fit.
    """
    tokenizer = require_tokenizer(directory, model=directory, needs_template=found.have_conversations)
    data = config.data if config.val is None or found.key == "data" else config.val.data
    encoder = RowEncoder(
        tokenizer,
        seq_len=data.seq_len,
        loss_mask=data.loss_mask or config.data.loss_mask,
        stops=turn_stops(tokenizer, directory),
        key=found.key,
    )
    yield from look(found, encoder, cut=f"{found.key}.seq_len = {data.seq_len}")


def look_at_dataset(config: RLConfig, *, directory: Path) -> Iterator[str]:
    """Encode the first rows of `[trainer.dataset]` for the model in `directory`.

    Yield sentences on those cut or left out. Of a dataset that is not local, or not on this machine, no row is encoded.
    Raises InvalidSpecError as `look`, and as `require_tokenizer` for a tokenizer that does not fit.
    """
    dataset, trainer = config.trainer.dataset, config.trainer
    if dataset is None:
        return
    if (found := first_rows(KEY, dataset)) is None:
        if is_local(dataset.name):
            yield f"there is no {dataset.name} on this machine, so no row was looked at"
        return
    source = directory if trainer.tokenizer.name is None else Path(trainer.tokenizer.name).expanduser()
    tokenizer = require_tokenizer(source, model=directory, needs_template=found.have_conversations)
    encoder = RowEncoder(
        tokenizer,
        seq_len=trainer.model.seq_len,
        loss_mask=dataset.loss_mask,
        stops=turn_stops(tokenizer, directory),
        key=KEY,
        length_key="trainer.model.seq_len",
    )
    yield from look(found, encoder, cut=f"trainer.model.seq_len = {trainer.model.seq_len}")


def look(found: FirstRows, encoder: RowEncoder, *, cut: str) -> Iterator[str]:
    """Encode rows; yield sentences on how many are cut or left out, and `cut` names the length in them.

    Raises InvalidSpecError as a starting run does, if these are all rows. Otherwise the error is a sentence, because a
    run may find enough usable rows among the others.
    """
    places = [found.source.place(index) for index in range(len(found.source.rows))]
    rows = list(zip(found.source.rows, places, strict=True))
    try:
        encoder.require_completion(rows)
        for row, place in rows:
            encoder.encode(row, place=place)
    except InvalidSpecError as error:
        if found.are_all:
            raise
        yield f"of the first {len(rows)} rows: {error}"
        return
    counts = {
        f"cut at {cut}": encoder.num_cut,
        "dropped, because no token that is trained on is left": encoder.num_dropped,
        "left out, because they cannot be encoded": encoder.num_bad,
    }
    for what, count in counts.items():
        if count:
            yield f"of the first {len(rows)} rows {count} are {what}; the longest has {encoder.longest} tokens"
