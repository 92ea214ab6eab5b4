"""Conversations as tokens, and which of the tokens are trained on.

Of an assistant's turn those are the tokens that the policy would sample: after the prompt that an engine is given, up
to the first token that ends a turn. This needs the prefix property: the rendered conversation begins with the engine's
prompt, as text and as tokens. A template that rewrites history (one that strips the thinking from earlier turns) breaks
it; then its own generation markers say which tokens are the assistant's, and without markers the row cannot be used.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from millrace.config.sections.data import LossMaskConfig
from millrace.models.vocabulary import TEMPLATE_ERRORS
from millrace.policies.stops import TurnStops, common_prefix, special_tokens, turn_stops
from millrace.trainer.sft.rendering import (
    BadRowError,
    Conversation,
    Message,
    MessagePart,
    Rendering,
    TextTokens,
    call_arguments,
    decoded_arguments,
    render,
    texts_of,
    unwritten_parts,
    with_calls,
    writes_calls_badly,
    writes_tools,
)

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_THINKING = re.compile(r"\b(?:enable_thinking|thinking)\b")  # templates' names of the argument that opens a thought


class Encoded(NamedTuple):
    """Token ids, which of them are trained on, and facts that a fine-tuning reports.

    `lost` names the parts of the context, or of earlier thoughts, that the template leaves out. `is_marked`: the
    template rewrites earlier turns, and its markers say what is trained on. `is_without_tools`: it leaves out the list
    of tools.
    """

    token_ids: list[int]
    trained: list[bool]
    lost: str = ""
    is_marked: bool = False
    is_without_tools: bool = False


class ConversationEncoder:
    """Renders conversations with a tokenizer's chat template, and marks the tokens of trained messages.

    `num_marked` counts conversations that broke the prefix property and were marked by the template itself,
    `num_without_tools` those whose list of tools the template leaves out, `num_poor` those whose context it leaves out
    in part; `lost` names the parts left out of the last one.
    """

    def __init__(self, tokenizer: Any, loss_mask: LossMaskConfig, *, stops: TurnStops | None = None) -> None:
        """Encode with the tokenizer's chat template; `loss_mask` says which roles are trained on.

        `stops` are the tokens that end a turn, None: those that the tokenizer knows.
        """
        self._tokenizer = tokenizer
        self._trained = loss_mask.model_dump()
        self._stops = stops or turn_stops(tokenizer)
        self.num_marked = self.num_without_tools = self.num_poor = 0
        self.lost = ""

    def encode(self, conversation: Conversation, *, num_prompt: int = 0) -> tuple[list[int], list[bool]]:
        """Return the conversation's token ids, and which are trained on; both empty if no message is to be trained on.

        The first `num_prompt` messages are not, nor is an assistant's message that begins the conversation. Raises
        BadRowError if the flags cannot be determined, with the template argument that would help, if any.
        """
        self.lost = ""
        trained = [self._is_trained(index, message) for index, message in enumerate(conversation.messages)]
        flags = [flag and index >= num_prompt for index, flag in enumerate(trained)]
        if not any(flags):
            return [], []
        if conversation.messages[0]["role"] == "assistant" and flags[0]:
            flags[0] = False  # no engine samples it, because there is no prompt before it
            if not any(flags):
                raise BadRowError("it begins with the assistant's turn, before which an engine would be given nothing")
        try:
            encoded = self._encode(conversation, flags)
        except BadRowError as error:
            raise BadRowError(f"{error}{self._other_argument(conversation, flags)}") from error
        self.num_marked += encoded.is_marked
        self.num_without_tools += encoded.is_without_tools
        self.lost = encoded.lost
        self.num_poor += bool(encoded.lost)
        return encoded.token_ids, encoded.trained

    def _encode(self, conversation: Conversation, flags: Sequence[bool]) -> Encoded:
        """Encode the conversation in the first form that the template writes whole, else in that with least left out.

        `flags` say which messages are trained on. Forms differ in how tool calls and their arguments are given. Raises
        the BadRowError of a form that the template renders, else of the first form.
        """
        refused: list[BadRowError] = []
        poor: list[Encoded] = []
        for given in with_calls(conversation):
            try:
                rendering = Rendering(self._tokenizer, given)
                encoded = self._encode_rendered(given, rendering, flags)
            except BadRowError as error:
                refused.append(error)
            except TEMPLATE_ERRORS as error:
                refused.append(BadRowError(f"the chat template refuses it: {error}"))
                refused[-1].__cause__ = error
            else:
                is_bad = writes_calls_badly(given, rendering.whole)
                if not (encoded.lost or is_bad):
                    return encoded
                if is_bad and (broken := _no_json(conversation, flags)):
                    refused.append(BadRowError(broken))
                else:
                    poor.append(encoded)
        if poor:
            return min(poor, key=lambda each: len(each.lost))
        # The error of a form that the template cannot render says less than that of a form that it renders.
        raise next((error for error in refused if error.__cause__ is None), refused[0])

    def _encode_rendered(self, conversation: Conversation, rendering: Rendering, flags: Sequence[bool]) -> Encoded:
        """Encode one form of a conversation; `flags` say which messages are trained on.

        Raises BadRowError if the flags of tokens cannot be determined, or the template leaves out a part that is
        trained on.
        """
        stretches = self._stretches(conversation, rendering, flags)
        encoded = stretches if isinstance(stretches, str) else self._flagged(conversation, rendering, stretches)
        if isinstance(encoded, str):
            encoded = self._marked(conversation, flags, why=encoded)
        turns = [at for at, message in enumerate(conversation.messages) if flags[at] and message["role"] == "assistant"]
        self._require_unbroken(conversation, turns)
        # A template with markers that rewrites earlier turns leaves out their thoughts, which `is_marked` reports.
        thoughts = turns[-1:] if encoded.is_marked else turns
        lost = unwritten_parts(self._tokenizer, conversation, whole=rendering.whole, thoughts=thoughts)
        roles = [message["role"] for message in conversation.messages]
        named = ", ".join(f"{part} ({roles[part.message]})" for part in lost)
        if any(self._is_needed(part, conversation, flags, last=turns[-1:]) for part in lost):
            raise BadRowError(f"the chat template does not write {named}")
        return encoded._replace(
            lost=named,
            is_without_tools=not writes_tools(self._tokenizer, conversation, rendering.whole),
        )

    def _is_needed(
        self, part: MessagePart, conversation: Conversation, flags: Sequence[bool], *, last: Sequence[int]
    ) -> bool:
        """Return whether a part that the template leaves out is needed, because the policy has to learn to sample it.

        That is any part of a trained message (`flags` by message), except for thoughts of earlier turns, which
        templates leave out, unless a turn consists of its thought alone. `last` has the last trained turn.
        """
        if not flags[part.message] or part.kind != "reasoning":
            return flags[part.message]
        message = conversation.messages[part.message]
        return part.message in last or not (message.get("content") or message.get("tool_calls"))

    def _stretches(
        self, conversation: Conversation, rendering: Rendering, flags: Sequence[bool]
    ) -> "list[_Stretch] | str":
        """Return the stretches of the rendered text in order, each trained on or not as `flags` say of the messages.

        If the prefix property is broken, returns a sentence on what changes instead.
        """
        found: list[_Stretch] = []
        messages = conversation.messages
        for index, opens_turn in self._cuts(messages, flags):
            text = rendering.beginning(index, opens_turn=opens_turn) or ""
            end = common_prefix(text, rendering.whole)
            is_whole = 0 < len(text) == end
            is_trained = flags[index] and not opens_turn
            # An assistant's own turn may be rendered with another end once others follow: its first stop says where it
            # ends.
            if not is_whole and not (is_trained and messages[index]["role"] == "assistant"):
                return rendering.what_changed(index)
            is_prompt = opens_turn and flags[index + 1]
            found.append(_Stretch(index=index, end=end, is_trained=is_trained, is_prompt=is_prompt, is_whole=is_whole))
        found.append(_Stretch(index=len(messages) - 1, end=len(rendering.whole), is_trained=flags[-1]))
        return found

    def _flagged(
        self, conversation: Conversation, rendering: Rendering, stretches: "Sequence[_Stretch]"
    ) -> Encoded | str:
        """Return the tokens, with flags of those in trained stretches.

        A trained last turn that the template does not end gets a token that ends it. If the prefix property is broken,
        returns a sentence on what changes instead.
        """
        tokens = TextTokens(self._tokenizer, rendering.whole)
        # The prompts first: each may change the tokens in which the other bounds are looked up.
        prompts = {each.end: tokens.begin_with_prompt(each.end) for each in stretches if each.is_prompt}
        bounds = [prompts[each.end] if each.is_prompt else tokens.before(each.end) for each in stretches]
        token_ids = tokens.token_ids
        trained = [False] * len(token_ids)
        for stretch, start, end in zip(stretches, [0, *bounds], bounds, strict=False):
            if not stretch.is_trained:
                continue
            if conversation.messages[stretch.index]["role"] != "assistant":
                stop = self._end_of_others(token_ids, start, end)
            elif (stop := self._end_of_turn(token_ids, start, end + stretch.is_whole)) is None:
                if not stretch.is_whole:
                    return rendering.what_changed(stretch.index)
                stop = end
                # The template does not end the last turn, and the policy has to learn to end it.
                if stretch is stretches[-1]:
                    self._append_stop(conversation.messages[-1], token_ids, trained)
                    stop = len(token_ids)
            trained[start:stop] = [True] * (stop - start)
        return Encoded(token_ids, trained)

    def _end_of_turn(self, token_ids: Sequence[int], start: int, end: int) -> int | None:
        """Return the index after the first stop in `start` to `end`, the tokens of an assistant's turn.

        None without a stop. `end` may include one token after the turn, because the token that opens the next turn may
        be the stop.
        """
        stops = self._stops.token_ids
        return next((at + 1 for at in range(start, min(end, len(token_ids))) if token_ids[at] in stops), None)

    def _end_of_others(self, token_ids: Sequence[int], start: int, end: int) -> int:
        """Return the index after the last stop in `start` to `end`, the tokens of another role, before space only.

        Return `end` if there is no stop, or if text follows it.
        """
        stops = self._stops.token_ids
        stop = next((at + 1 for at in range(end - 1, start - 1, -1) if token_ids[at] in stops), end)
        return end if self._tokenizer.decode(token_ids[stop:end]).strip() else stop

    def _append_stop(self, message: Message, token_ids: list[int], trained: list[bool]) -> None:
        """Append the token that ends a turn to `token_ids`, and True to `trained`; do nothing if none is known.

        `message` is the last one: a turn with tool calls may end with another token.
        """
        shown = self._stops.call if message.get("tool_calls") else self._stops.answer
        stop = self._tokenizer.eos_token_id if shown is None else shown
        if stop is not None:
            token_ids.append(stop)
            trained.append(True)

    def _cuts(self, messages: Sequence[Message], flags: Sequence[bool]) -> Iterator[tuple[int, bool]]:
        """Yield the messages, by index, after which the text is cut, and whether the cut is after the next header.

        Cuts are where the flag changes, and on both sides of each assistant's message; with True it is after the header
        of the assistant's turn that follows, because headers are not trained on.
        """
        roles = [message["role"] for message in messages]
        for index in range(len(roles) - 1):
            opens_turn = roles[index + 1] == "assistant"
            if flags[index] if opens_turn else (flags[index] != flags[index + 1] or roles[index] == "assistant"):
                yield index, False
            if opens_turn:
                yield index, True

    def _is_trained(self, index: int, message: Message) -> bool:
        """Return whether a message is trained on; raise BadRowError if the message is malformed."""
        name = f"message {index}"
        role = _ROLES.get(str(message.get("role")))
        if role is None:
            raise BadRowError(f"{name} has role {message.get('role')!r}; roles are {', '.join(_ROLES)}")
        content = message.get("content")
        if not isinstance(content, str | list | None):
            raise BadRowError(f"{name} has content that is neither text nor a list of parts")
        for part in content if isinstance(content, list) else []:
            if not isinstance(part, Mapping) or part.get("type", "text") != "text":
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise BadRowError(f"{name} has a part of type {kind!r}; only parts of type 'text' can be trained on")
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
            raise BadRowError(f"{name} has `tool_calls` that are no list of calls")
        return self._trained[role]

    def _require_unbroken(self, conversation: Conversation, turns: Sequence[int]) -> None:
        """Raise BadRowError if the text of one of the messages `turns` has a stop within it.

        No engine would continue after it.
        """
        words = self._tokenizer.convert_ids_to_tokens(sorted(self._stops.token_ids))
        for index in turns:
            for text in texts_of(conversation.messages[index]):
                for word in words:
                    if word and text.partition(word)[2].strip():
                        raise BadRowError(
                            f"message {index} (assistant) has {word!r}, which ends a turn, within its text: no engine "
                            "would continue after it"
                        )

    def _has_markers(self, conversation: Conversation) -> bool:
        """Return whether the chat template has `{% generation %}` markers."""
        return bool(_MARKER.search(self._template(conversation)))

    def _template(self, conversation: Conversation) -> str:
        """Return the chat template that renders the conversation; empty if the tokenizer cannot tell which."""
        with contextlib.suppress(*TEMPLATE_ERRORS):
            return self._tokenizer.get_chat_template(
                conversation.template_arguments.get("chat_template"), tools=conversation.tools
            )
        return ""

    def _marked(self, conversation: Conversation, flags: Sequence[bool], *, why: str) -> Encoded:
        """Return token ids with flags from the template's generation markers.

        Raise BadRowError (`why`) without markers. Templates also mark parts of the header, and text after the end of a
        turn: neither is flagged.
        """
        if not self._has_markers(conversation):
            raise BadRowError(f"{why}; and the template has no `{{% generation %}}` markers that say what to train on")
        if any(flags[at] for at, message in enumerate(conversation.messages) if message["role"] != "assistant"):
            raise BadRowError(f"{why}; and its markers say only what the assistant wrote, see data.loss_mask")
        encoded = render(
            self._tokenizer, conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        token_ids, marks = list(encoded["input_ids"]), [bool(flag) for flag in encoded["assistant_masks"]]
        trained = [False] * len(token_ids)
        headers, start = self._headers(conversation), None
        for first, end in _runs(marks):
            start = _opened(token_ids, first, end, headers)
            if start is None:  # no engine begins a turn so
                continue
            # Markers may leave out the token that ends the turn, which is the next one then.
            stop = self._end_of_turn(token_ids, start, end + 1)
            if stop is None and end == len(marks):
                self._append_stop(conversation.messages[-1], token_ids, trained)
                stop = len(token_ids)
            elif stop is None:
                stop = self._end_of_text(token_ids, start, end)
            trained[start:stop] = [True] * (stop - start)
        if start is None:
            raise BadRowError(why)
        return Encoded(token_ids, trained, is_marked=True)

    def _end_of_text(self, token_ids: Sequence[int], start: int, end: int) -> int:
        """Return the index after the last token that an engine would sample of an assistant's turn without a stop.

        `start` to `end` are the turn's tokens. It is `end`, or that of the last token with text if this one is special,
        which is never sampled.
        """
        last = next(
            (at for at in range(end - 1, start - 1, -1) if self._tokenizer.decode(token_ids[at]).strip()), start
        )
        return last if end > start and token_ids[last] in special_tokens(self._tokenizer) else end

    def _headers(self, conversation: Conversation) -> list[list[int]]:
        """Return the token ids of the headers with which the template opens assistant's turns, the longest first."""
        found: set[tuple[int, ...]] = set()
        for index, message in enumerate(conversation.messages):
            if index > 0 and message["role"] == "assistant":
                before = replace(conversation, messages=conversation.messages[:index])
                with contextlib.suppress(*TEMPLATE_ERRORS):
                    closed, opened = (render(self._tokenizer, before, opens_turn=opens) for opens in (False, True))
                    header = opened[common_prefix(closed, opened) :]
                    found.add(tuple(TextTokens(self._tokenizer, header).token_ids))
        return [list(header) for header in sorted(found, key=len, reverse=True)]

    def _other_argument(self, conversation: Conversation, flags: Sequence[bool]) -> str:
        """Return a hint on the template argument with which a refused conversation can be encoded.

        Empty if none helps.
        """
        template = self._template(conversation)
        for name in sorted(set(_THINKING.findall(template)) - conversation.template_arguments.keys()):
            for value in (False, True):
                arguments = {**conversation.template_arguments, name: value}
                with contextlib.suppress(BadRowError):
                    self._encode(replace(conversation, template_arguments=arguments), flags)
                    return f'; with "chat_template_kwargs": {json.dumps({name: value})} in the row it can be used'
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """The text from the previous stretch up to character `end`, where the message `index` ends.

    `is_prompt`: an engine samples the text after it. `is_whole`: the rendering of the messages up to `index` ends
    there, whatever follows them.
    """

    index: int
    end: int
    is_trained: bool
    is_prompt: bool = False
    is_whole: bool = True


def _no_json(conversation: Conversation, flags: Sequence[bool]) -> str:
    """Return in words which trained message has a tool call with arguments that are text but not JSON.

    Empty if none has.
    """
    for index, message in enumerate(conversation.messages):
        for arguments in call_arguments(message):
            if flags[index] and isinstance(arguments, str) and isinstance(decoded_arguments(arguments), str):
                name = f"message {index} ({message['role']})"
                return f"{name} has arguments of a tool call that are no JSON: {arguments[:60]!r}"
    return ""


def _opened(token_ids: Sequence[int], first: int, end: int, headers: Sequence[list[int]]) -> int | None:
    """Return the index after a header that opens the turn marked from token `first` to before `end`; None without one.

    It is the first of `headers` that begins at `first` or before it, and ends in `first` to `end`, both included.
    """
    for header in headers:
        for at in range(first, min(first + len(header), end) + 1):
            if at >= len(header) and token_ids[at - len(header) : at] == header:
                return at
    return None


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield each run of set flags: its first index, and the index after its last."""
    for is_set, run in groupby(range(len(flags)), key=flags.__getitem__):
        if is_set:
            positions = list(run)
            yield positions[0], positions[-1] + 1
