"""Compares the masks of Millrace with those of two peers, for every family and conversation (`judge`).

PYTHONPATH=.venv-templates python -m millrace_testing.templates.compare > comparison.json
"""

import contextlib
import functools
import io
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from millrace.config.sections.data import LossMaskConfig
from millrace.policies.stops import TurnStops, turn_stops
from millrace.trainer.sft.conversation import ConversationEncoder
from millrace.trainer.sft.rendering import BadRowError
from millrace.trainer.sft.rows import conversation_of
from millrace_testing.templates.conversations import CONVERSATIONS
from millrace_testing.templates.families import FAMILIES, HOME, TRAINED, Family
from millrace_testing.templates.judge import Judge, Sample, outcome_of, runs
from millrace_testing.templates.tokenizers import find_special, make_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one conversation under one template, and the causes of what differs from each peer."""

    family: str
    conversation: str
    outcome: str
    """`trained`, `marked`, or the cause of its refusal."""
    trained: list[str]
    """The stretches that are trained on."""
    message: str = ""
    peers: dict[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What ends a turn of a family, as derived, and what its documents say."""

    family: str
    answer: str | None
    call: str | None
    all: list[str]
    documented: list[str | None]


class Trial:
    """One template with its tokenizer, its peers, and what each makes of a conversation."""

    def __init__(self, family: Family, *, is_training: bool = False) -> None:
        """Take `is_training`: whether TRL's training template counts as the model's own."""
        self.family = family
        path = family.training_path if is_training else family.path
        assert path is not None
        self.name = f"{TRAINED}{family.name}" if is_training else family.name
        self._renderer = None if is_training else family.renderer
        self.tokenizer = make_tokenizer(
            path.read_text(),
            bos=family.bos,
            eos=family.eos,
            more={*filter(None, (family.answer, family.call)), *(_named_by_renderers() if self._renderer else ())},
        )
        self.stops: TurnStops = turn_stops(self.tokenizer)
        self._training = None if family.training_path is None else family.training_path.read_text()

    def millrace(self, row: Any) -> Sample:
        """Return the sample that `millrace sft` makes of a row."""
        encoder = ConversationEncoder(self.tokenizer, LossMaskConfig())
        try:
            token_ids, mask = encoder.encode(conversation_of(row))
        except BadRowError as error:
            return Sample(refusal=str(error))
        return Sample(token_ids, mask, is_marked=bool(encoder.num_marked))

    def peers(self, row: Any) -> Iterator[tuple[str, Sample]]:
        """Yield the sample of each peer that knows the family, with the peer's name."""
        if self._training is not None:
            yield "TRL", self._of_trl(row)
        if self._renderer is not None:
            yield "renderers", self._of_renderers(row)

    def _of_trl(self, row: Any) -> Sample:
        """Return the assistant mask that `assistant_only_loss` takes: of its training template, by the markers in
        it.
        """
        try:
            encoded = self.tokenizer.apply_chat_template(
                row["messages"],
                tools=row.get("tools"),
                **self.family.arguments,
                chat_template=self._training,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except Exception as error:  # noqa: BLE001 -- an edge to foreign code: what a template raises
            return Sample(refusal=f"{type(error).__name__}: {error}")
        return Sample(encoded["input_ids"], [bool(flag) for flag in encoded["assistant_masks"]])

    def _of_renderers(self, row: Any) -> Sample:
        from renderers import build_training_sample, config_from_name, create_renderer

        try:
            renderer = create_renderer(self.tokenizer, config_from_name(self._renderer))
            made = build_training_sample(renderer, row["messages"], tools=row.get("tools"), ensure_final_stop=True)
        except Exception as error:  # noqa: BLE001 -- an edge to foreign code: what a renderer raises
            return Sample(refusal=f"{type(error).__name__}: {error}")
        return Sample(made.token_ids, made.loss_mask)

    def row(self, name: str) -> Row:
        """Return the result for one conversation."""
        row = {**CONVERSATIONS[name], "chat_template_kwargs": self.family.arguments}
        own = self.millrace(row)
        judge = Judge(self.tokenizer, self.stops.token_ids, conversation_of(row), own)
        return Row(
            family=self.name,
            conversation=name,
            outcome=outcome_of(own),
            trained=[self.tokenizer.decode(own.token_ids[start:end]) for start, end in runs(own.mask)],
            message=own.refusal or "",
            peers={peer: judge.causes(theirs) for peer, theirs in self.peers(row)},
        )

    def ends(self) -> Ends:
        """Return the tokens that end a turn."""
        word = self.tokenizer.convert_ids_to_tokens
        answer, call = self.stops.answer, self.stops.call
        return Ends(
            family=self.name,
            answer=None if answer is None else word(answer),
            call=None if call is None else word(call),
            all=sorted(word(stop) for stop in self.stops.token_ids),
            documented=[self.family.answer, self.family.call],
        )


@functools.cache
def _named_by_renderers() -> set[str]:
    """Return the special tokens that the programs of `renderers` name."""
    return find_special("".join(path.read_text() for path in sorted((HOME / "renderers").glob("*.py"))))


def compare(names: Sequence[str] = ()) -> dict[str, Any]:
    """Return all rows and ends, as JSON has them; of the families called `names` only, if any are given."""
    logging.disable(logging.WARNING)
    rows: list[Row] = []
    ends: list[Ends] = []
    for family in FAMILIES:
        if names and family.name not in names:
            continue
        for is_training in (False, True) if family.training else (False,):
            trial = Trial(family, is_training=is_training)
            rows += (trial.row(name) for name in CONVERSATIONS)
            if not is_training:
                ends.append(trial.ends())
    return {"rows": [asdict(row) for row in rows], "ends": [asdict(each) for each in ends]}


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):  # a peer may print
        document = compare(sys.argv[1:])
    json.dump(document, sys.stdout, ensure_ascii=False, indent=1)
