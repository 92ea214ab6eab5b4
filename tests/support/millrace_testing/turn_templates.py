"""Small chat templates that end and open turns as those of well-known families do, and tokenizers for them."""

import re
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_SPECIAL = re.compile(r"<\|[a-z_]+\|>|<[a-z]+_of_turn>|</?think>")

_CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI = (  # an end of the text after the end of the last turn
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
GLM = (  # the next role's token ends a turn
    "{% for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}\n{{ m.content }}"
    + _CALLS
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HARMONY = (  # the last turn ends otherwise than earlier ones, and a thought ends as those do
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.reasoning_content and loop.last %}<|message|>"
    "{{ m.reasoning_content }}<|end|><|start|>assistant{% endif %}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
COMMAND = (  # the assistant's turn is opened whether it is asked for or not, and a response has an end of its own
    "{% for m in messages %}<|turn|>{{ '<|chatbot|>' if m.role == 'assistant' else '<|user|>' }}{{ m.content }}"
    "{{ '<|end_response|>' if m.role == 'assistant' }}<|end_turn|>{% endfor %}<|turn|><|chatbot|>"
)
RESPONDS = (  # a call ends with the token that opens its result, in the same turn
    "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content }}<|response_end|>"
    "{% else %}{% if m.role != 'assistant' or loop.first or loop.previtem.role != 'tool' %}<|turn|>{{ m.role }}\n"
    "{% endif %}{{ m.content }}{% if m.tool_calls %}"
    + _CALLS
    + "<|response|>{% else %}<|turn_end|>\n{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn|>assistant\n{% endif %}"
)
THINKS = (  # an engine's prompt opens a thought, which a turn without one leaves empty
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n"
    "{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)


def tokenizer_of(
    template: str | None, *, eos: str | None = "<|im_end|>", bos: str | None = None, adds_eos: bool = False
) -> Any:
    """Return a tokenizer of bytes in which two line breaks are one token, with the special tokens of a template."""
    vocabulary = {character: at for at, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary["ĊĊ"] = len(vocabulary)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)|\s+|\S"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    words = set(_SPECIAL.findall(template or ""))
    if re.search(r"<\|(?:\{\{ |' \+ )m\.role", template or ""):
        words |= {"<|user|>", "<|assistant|>", "<|system|>"}
    known = sorted(words | {word for word in (eos, bos) if word})
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in known])
    if adds_eos and eos:
        made.post_processor = processors.TemplateProcessing(
            single=f"$A {eos}", special_tokens=[(eos, made.token_to_id(eos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos, bos_token=bos)
    tokenizer.chat_template = template
    return tokenizer
