"""What becomes of every parameter of a model request, and how several completions of one prompt travel.

One table for each API that is spoken: OpenAI's chats, completions and responses, and Anthropic's messages. Requests are
read by it, and what it does not have is refused: nothing that changes an answer is ignored. A test walks the signatures
of the SDKs of both vendors.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from millrace.errors import InvalidSpecError, Violation

# Which tokens top-p, top-k and min-p leave: one definition for the embedded engine, which samples, and the trainer.
#
# It computes with the torch tensors that it is given, and imports no torch: most services do without. vLLM means the
# same, in the same order: min-p, then top-k, then top-p.

_ONE = 2.0**40
"""A probability of 1 as an integer: finer than float32, and a sum over any vocabulary fits into int64."""


def kept_tokens(logprobs: Any, *, top_p: Any, top_k: Any, min_p: Any) -> Any:
    """Return which tokens min-p, top-k and top-p, in this order, leave of log-probs [..., V]: bool [..., V].

    The bounds are tensors [...]. Top-p is a share of the probability that min-p and top-k leave, and the token that
    crosses it stays. The likeliest token always stays. All tokens that are as likely as the last of the top-k stay. Of
    equally likely tokens at the border of the top-p those with the smaller ids stay. A bound that is off (top_p 1,
    top_k 0, min_p 0) cuts nothing, not even by rounding. Probabilities are summed as integers, so that every device
    cuts alike.
    """
    # All below is [..., V] in the order of `ordered`, the likeliest first; stable, so that equal ones are in order of
    # ids.
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    probs = ordered.exp()
    keep = probs >= min_p[..., None] * probs[..., :1]
    # The log-prob of the k-th likeliest, [..., 1]; at k = 0, which is off, any.
    last = ordered.gather(-1, (top_k - 1).clamp(0, ordered.shape[-1] - 1).long()[..., None])
    keep &= (ordered >= last) | (top_k[..., None] == 0)
    if (top_p < 1).any():
        # Integers add up to the same sum in any order: trainer and engine cut at the same token.
        shares = (probs.masked_fill(~keep, 0) * _ONE).long()
        # A token stays while the tokens before it have not filled top_p, so the one that crosses the bound stays.
        before = shares.cumsum(dim=-1) - shares
        room = top_p[..., None].double() * shares.sum(dim=-1, keepdim=True)
        keep &= (before < room) | (top_p[..., None] >= 1)
    # Rounding could drop even the likeliest token, and an empty choice cannot be sampled from.
    keep[..., 0] = True
    # Back from the order of probability to that of token ids.
    return keep.new_zeros(keep.shape).scatter_(-1, order, keep)


_SHOWN_CHARS = 200
_MAX_VIOLATIONS = 20


class Treatment(StrEnum):
    """What becomes of a parameter."""

    ANSWERED = "answered"
    REFUSED = "refused"
    HARMLESS = "harmless"
    OVERRULED = "the run's"
    """The run's own value is used in place of an agent's, whose answer says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One of a request's parameters."""

    fate: Treatment
    why: str = ""
    """Why it is refused, or harmless; of an answered one what is particular about it."""
    neutral: Sequence[Any] = ()
    """Values of a refused one that ask for what happens anyway."""


def _answered(why: str = "") -> Parameter:
    """Return the table's row of a parameter that is supported; `why` says what is particular about it."""
    return Parameter(fate=Treatment.ANSWERED, why=why)


def _refused(why: str, *neutral: Any) -> Parameter:
    """Return the table's row of a parameter that is refused because of `why`, except for values in `neutral`.

    Those ask for what happens anyway.
    """
    return Parameter(fate=Treatment.REFUSED, why=why, neutral=neutral)


def _harmless(why: str) -> Parameter:
    """Return the table's row of a parameter that is accepted and has no effect on an answer, as `why` says."""
    return Parameter(fate=Treatment.HARMLESS, why=why)


def _overruled(why: str) -> Parameter:
    """Return the table's row of a parameter that is accepted, and whose value the run's own replaces because of
    `why`.
    """
    return Parameter(fate=Treatment.OVERRULED, why=why)


_FREE = "what is sampled is not constrained"
_NO_OTHER = "the policy gives text alone"
_STATELESS = "nothing is kept between requests; send the whole conversation"
_TEMPLATE = "set the variables of the chat template by `chat_template_kwargs`"
_LABEL = _harmless("a label in a provider's logs")
_CACHE = _harmless("says what a provider may keep for later; an answer is the same without")
_PLACE = _harmless("says where and how soon a provider computes")
_CLIENTS = _harmless("an argument of the client's own; it changes what is sent, not what is answered")
_IN_BODY = _refused("clients send its fields by themselves", {})
_RUNS = _overruled("the policy is trained on what the run's own sampling draws")
_TOOL_CHOICE = '"auto" and "none" are answered; a forced call is refused: ' + _FREE

_SAMPLING: dict[str, Parameter] = {
    **{name: _answered() for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **{name: _answered() for name in ("presence_penalty", "frequency_penalty", "min_tokens", "seed", "max_tokens")},
    **{name: _answered() for name in ("stop", "stop_token_ids", "ignore_eos", "skip_special_tokens")},
    "include_stop_str_in_output": _answered(),
    "logit_bias": _refused("log-probs of biased tokens cannot be trained on", {}),
    "bad_words": _refused(_FREE, []),
    "allowed_token_ids": _refused(_FREE, []),
    "logits_processors": _refused(_FREE, []),
    "use_beam_search": _refused("a beam is not a sample", False),
    "best_of": _refused("ask for `n` answers and choose", 1),
    "length_penalty": _refused("is one of beam search", 1, 1.0),
    "structured_outputs": _refused(_FREE),
    **{f"guided_{kind}": _refused(_FREE) for kind in ("json", "regex", "choice", "grammar")},
    "guided_decoding_backend": _refused(_FREE),
    "guided_whitespace_pattern": _refused(_FREE),
    "truncate_prompt_tokens": _refused("cutting a prompt is its sender's", 0),
    "spaces_between_special_tokens": _refused("text is decoded with them", True),
    "thinking_token_budget": _refused(_FREE),
    "vllm_xargs": _refused("there are no plugins of vLLM", {}),
    "kv_transfer_params": _refused("caches are not passed on", {}),
    "mm_processor_kwargs": _refused(_NO_OTHER, {}),
    "cache_salt": _CACHE,
    "priority": _PLACE,
    "request_id": _LABEL,
    "routed_experts_prompt_start": _answered("has an effect where the engine records experts"),
    **dict.fromkeys(("extra_headers", "extra_query", "timeout"), _CLIENTS),
    "extra_body": _IN_BODY,
}
"""What requests of all routes of OpenAI's and vLLM's kind have."""

_COMPLETION: dict[str, Parameter] = {
    **_SAMPLING,
    **{name: _answered() for name in ("model", "n", "stream", "stream_options", "logprobs")},
    **{name: _answered() for name in ("return_token_ids", "return_tokens_as_token_ids", "stream_choices")},
    "prompt_logprobs": _refused("there are log-probs of the prompt's own tokens, of /v1/completions alone", False),
    "user": _LABEL,
}

CHAT: Mapping[str, Parameter] = {
    **_COMPLETION,
    **{name: _answered() for name in ("messages", "tools", "max_completion_tokens", "chat_template_kwargs")},
    **{name: _answered() for name in ("add_generation_prompt", "continue_final_message")},
    "tool_choice": _answered(_TOOL_CHOICE),
    "top_logprobs": _refused("there are log-probs of sampled tokens alone", 0),
    "audio": _refused(_NO_OTHER),
    "modalities": _refused(_NO_OTHER, ["text"]),
    "functions": _refused("send `tools`", []),
    "function_call": _refused("send `tools` and `tool_choice`", "none"),
    "parallel_tool_calls": _refused("the model calls as many tools as it likes: " + _FREE, True),
    "prediction": _refused("nothing is predicted"),
    "moderation": _refused("nothing is moderated"),
    "response_format": _refused(_FREE, {"type": "text"}),
    "reasoning_effort": _refused(_TEMPLATE),
    "thinking": _refused(_TEMPLATE),
    "enable_thinking": _refused(_TEMPLATE),
    "include_reasoning": _refused("what the model thought is given where its parser finds it", True),
    "verbosity": _refused("say it in the prompt", "medium"),
    "web_search_options": _refused("nothing is searched for; give the model a tool"),
    "chat_template": _refused("the template is the policy's own"),
    "chat_template_content_format": _refused("the template is the policy's own", "auto"),
    "documents": _refused("put them into a message", []),
    "echo": _refused("a chat is answered with the reply alone", False),
    "add_special_tokens": _refused("the template adds what belongs there", False),
    "media_io_kwargs": _refused(_NO_OTHER, {}),
    **dict.fromkeys(("store", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), _CACHE),
    **dict.fromkeys(("metadata", "safety_identifier"), _LABEL),
    "service_tier": _PLACE,
}
"""`POST /v1/chat/completions`."""

_SAME = "members of a group would say the same"
_WHOLE = "an agent is answered with text; what is trained on is kept beside it"

AGENT_CHAT: Mapping[str, Parameter] = {
    **CHAT,
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p"), _RUNS),
    "repetition_penalty": _refused("log-probs of it cannot be trained on", 1, 1.0),
    "presence_penalty": _refused("log-probs of it cannot be trained on", 0, 0.0),
    "frequency_penalty": _refused("log-probs of it cannot be trained on", 0, 0.0),
    "min_tokens": _refused("log-probs of it cannot be trained on", 0),
    "seed": _refused(_SAME),
    "stop_token_ids": _refused("send texts as `stop`", []),
    "ignore_eos": _refused("a reply ends where the policy ends it", False),
    "skip_special_tokens": _refused(_WHOLE, True),
    "include_stop_str_in_output": _refused(_WHOLE, False),
    "logprobs": _refused(_WHOLE, False),
    "return_token_ids": _refused(_WHOLE, False),
    "return_tokens_as_token_ids": _refused(_WHOLE, False),
    "stream_choices": _refused(_WHOLE, False),
    "chat_template_kwargs": _refused("set them for the run: `orchestrator.sampling.extra_body`", {}),
    "add_generation_prompt": _refused(_WHOLE, True),
    "continue_final_message": _refused(_WHOLE, False),
    "routed_experts_prompt_start": _harmless("an agent is given no experts"),
}
"""`POST /v1/chat/completions` at the address of an agent."""

COMPLETIONS: Mapping[str, Parameter] = {
    **_COMPLETION,
    **{name: _answered() for name in ("prompt", "add_special_tokens", "prompt_logprobs")},
    "suffix": _refused("text goes on where the prompt ends", ""),
    "echo": _refused("a prompt is answered with what follows it alone", False),
    "response_format": _refused(_FREE, {"type": "text"}),
    "prompt_embeds": _refused("prompts are text or tokens"),
}
"""`POST /v1/completions`."""

GENERATE_SAMPLING: Mapping[str, Parameter] = {
    **_SAMPLING,
    **{name: _answered() for name in ("n", "logprobs", "prompt_logprobs")},
    "detokenize": _harmless("tokens are answered, and no text"),
    "output_kind": _harmless("the answer comes as one"),
    "response_format": _refused(_FREE, {"type": "text"}),
}
"""`sampling_params` of `POST /inference/v1/generate`."""

GENERATE: Mapping[str, Parameter] = {
    **{name: _answered() for name in ("model", "token_ids", "sampling_params", "request_id", "stream")},
    "cache_salt": _CACHE,
    "priority": _PLACE,
    "features": _refused(_NO_OTHER, {}, []),
    "stream_options": _harmless("there are no streams on this route"),
    "kv_transfer_params": _refused("caches are not passed on", {}),
}
"""`POST /inference/v1/generate`."""

TOKENIZE: Mapping[str, Parameter] = {
    **{name: _answered() for name in ("model", "prompt", "messages", "tools", "chat_template_kwargs")},
    **{name: _answered() for name in ("add_special_tokens", "add_generation_prompt", "continue_final_message")},
    "return_token_strs": _answered(),
    "chat_template": _refused("the template is the policy's own"),
    "mm_processor_kwargs": _refused(_NO_OTHER, {}),
}
"""`POST /tokenize`."""

STREAM_OPTIONS: Mapping[str, Parameter] = {
    "include_usage": _answered(),
    "include_obfuscation": _harmless("pads events against who counts their bytes"),
    "continuous_usage_stats": _refused("usage comes with the last event", False),
}
"""`stream_options` of chats, completions and responses."""

RESPONSES: Mapping[str, Parameter] = {
    **{name: _answered() for name in ("input", "instructions", "model", "max_output_tokens")},
    **{name: _answered() for name in ("stream", "stream_options", "tools")},
    **dict.fromkeys(("temperature", "top_p"), _RUNS),
    "tool_choice": _answered(_TOOL_CHOICE),
    "parallel_tool_calls": CHAT["parallel_tool_calls"],
    "top_logprobs": CHAT["top_logprobs"],
    "reasoning": _refused(_TEMPLATE, {}),
    "text": _refused(_FREE, {}, {"format": {"type": "text"}}),
    "truncation": _refused("cutting a prompt is its sender's", "disabled"),
    "background": _refused("an answer comes while one waits", False),
    "conversation": _refused(_STATELESS),
    "previous_response_id": _refused(_STATELESS),
    "prompt": _refused("there are no stored prompts"),
    "context_management": _refused("the agent shortens its conversation itself", []),
    "max_tool_calls": _refused("tools are called by the agent"),
    "include": _refused("what the policy said is given, and no more", [], ["reasoning.encrypted_content"]),
    "image": _refused(_NO_OTHER),
    "moderation": CHAT["moderation"],
    "access_programs": _refused("there are none"),
    **dict.fromkeys(("store", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), _CACHE),
    **dict.fromkeys(("metadata", "safety_identifier", "user"), _LABEL),
    "service_tier": _PLACE,
    **dict.fromkeys(("extra_headers", "extra_query", "timeout"), _CLIENTS),
    "extra_body": _IN_BODY,
}
"""`POST /v1/responses`."""

MESSAGES: Mapping[str, Parameter] = {
    **{name: _answered() for name in ("messages", "system", "model", "max_tokens", "stop_sequences")},
    **{name: _answered() for name in ("stream", "tools")},
    **dict.fromkeys(("temperature", "top_p", "top_k"), _RUNS),
    "tool_choice": _answered(_TOOL_CHOICE),
    "thinking": _refused(_TEMPLATE, {"type": "disabled"}),
    "output_config": _refused(_FREE, {}),
    "container": _refused("nothing is run for the agent"),
    "mcp_servers": _refused("tools are called by the agent", []),
    "context_management": _refused("the agent shortens its conversation itself", {}),
    "diagnostics": _refused("there are none"),
    "speed": _refused("there is one", "standard"),
    "cache_control": _CACHE,
    "metadata": _LABEL,
    "user_profile_id": _LABEL,
    "workspace_id": _LABEL,
    "service_tier": _PLACE,
    "inference_geo": _PLACE,
    "betas": _harmless("names what a client can read"),
    **dict.fromkeys(("extra_headers", "extra_query", "timeout"), _CLIENTS),
    "extra_body": _IN_BODY,
}
"""`POST /v1/messages`, Anthropic's."""


def check_parameters(
    given: Mapping[str, Any], known: Mapping[str, Parameter], *, where: str = "", answered: bool = True
) -> None:
    """Raise InvalidSpecError naming every parameter of a request that the table `known` lacks or refuses.

    `given` has the values by name; null counts as not sent. `where` is put before names in the error. With `answered`
    False those that the table calls answered are refused as unknown, too: it is for what a schema left over after it
    took its own.
    """
    wrong = [
        Violation(field=f"{where}{name}", value=_shown(value), message=problem)
        for name, value in given.items()
        if value is not None and (problem := _problem(value, known.get(name), answered=answered))
    ]
    if wrong:
        raise InvalidSpecError(wrong[:_MAX_VIOLATIONS], reason="REQUEST_INVALID")


def _problem(value: Any, parameter: Parameter | None, *, answered: bool) -> str:
    """Return what is wrong with a parameter's value, empty if nothing is.

    `parameter` is its row in the table, None if it has none; `answered` is that of `check_parameters`.
    """
    if parameter is None or (parameter.fate is Treatment.ANSWERED and not answered):
        return "is not known here, and what is not known is not ignored; leave it out"
    # By type, too: 1 == True, and 0 == False.
    is_neutral = any(value == each and type(value) is type(each) for each in parameter.neutral)
    if parameter.fate is not Treatment.REFUSED or is_neutral:
        return ""
    return f"is not supported: {parameter.why}; leave it out"


def check_tools(tools: Any, *, field: str = "tools") -> None:
    """Raise InvalidSpecError unless `tools` is a list of well-formed function tools, each with a name of its own.

    `field` names the list in the error. A chat template would write malformed ones down as they are.
    """
    if not isinstance(tools, list):
        raise _wrong(field, tools, "must be a list of functions")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"{field}[{index}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise _wrong(where, tool, 'must be {"type": "function", "function": {"name": …}}')
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise _wrong(f"{where}.function.name", name, "must be a text")
        if name in names:
            raise _wrong(f"{where}.function.name", name, "is the name of two tools")
        names.add(name)
        if not isinstance(function.get("description") or "", str):
            raise _wrong(f"{where}.function.description", function["description"], "must be a text")
        schema = function.get("parameters") or {}
        if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
            raise _wrong(f"{where}.function.parameters", schema, "must be a JSON schema of an object")


def check_tool_choice(choice: Any) -> None:
    """Raise InvalidSpecError for a choice that would force a call: all but null, "auto" and "none"."""
    if choice not in (None, "auto", "none"):
        raise _wrong("tool_choice", choice, f'must be "auto" or "none": {_FREE}')


def _wrong(field: str, value: Any, message: str) -> InvalidSpecError:
    """Return the error that a field of a request has this value, which is wrong as `message` says."""
    return InvalidSpecError([Violation(field=field, value=_shown(value), message=message)], reason="REQUEST_INVALID")


def _shown(value: Any) -> str:
    """Return a value as JSON for an error message, cut to 200 characters."""
    return json.dumps(value, default=str)[:_SHOWN_CHARS]


# Several completions of one prompt in one answer, each sent as soon as it has ended, as engines and env workers
# agree.
#
# An engine that can do so says it by a header of its answers to chats and to texts. A request with `n` and the field
# below is then answered by lines, one per choice in the order in which they end: `{"index": …, "status": …, "body":
# …}`, where status and body are those of an answer to a request for this choice alone, whose own index is 0, but for
# its log-probs. They are one list, in the order of its `token_ids`: to name every token in text costs more than all
# the rest.

HEADER = "x-millrace-choices"
"""Of an answer: `lines` if the engine sends choices one by one."""
LINES = "lines"
FIELD = "stream_choices"
"""Of a request: it wants that."""
LOGPROBS = "token_logprobs"
"""Of a choice's `logprobs`: OpenAI's name for texts; for chats its API has `content`."""
CONTENT_TYPE = "application/x-ndjson"
MAX_CHOICES = 128
"""`n` of one request."""
