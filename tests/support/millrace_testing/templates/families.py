"""The chat templates that are tried, where they come from, and what their models' documents say ends a turn.

The files are in `.venv-templates` (`scripts/setup_templates.sh`), none of them in this repository.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace_testing.repository import REPOSITORY

HOME = REPOSITORY / ".venv-templates"
"""Where `scripts/setup_templates.sh` puts the packages; it is a directory for PYTHONPATH."""
SOURCES = {
    "trl": HOME / "trl" / "chat_templates",
    "axolotl": HOME / "axolotl" / "utils" / "chat_templates" / "templates",
    "llama.cpp": HOME / "llama.cpp",
}
TRAINED = "TRL's training template of "


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One template: `file` in a source, the tokens of its tokenizer, and its peers.

    `answer` and `call` are the tokens that end an answer and a turn of calls; `call` is None where the template, under
    transformers, writes no calls. `training` is TRL's template that marks what is trained, `renderer` the peer's name
    of the family, `arguments` are given to the template.
    """

    name: str
    source: str
    file: str
    eos: str
    answer: str
    call: str | None
    bos: str | None = None
    training: str | None = None
    renderer: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Return the file with the template."""
        return SOURCES[self.source] / f"{self.file}.jinja"

    @property
    def training_path(self) -> Path | None:
        """Return the file with TRL's training template."""
        return SOURCES["trl"] / f"{self.training}.jinja" if self.training else None


_IM_END, _EOT, _LLAMA = "<|im_end|>", "<|eot_id|>", "<|begin_of_text|>"
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")


def _family(
    name: str,
    file: str,
    eos: str,
    *,
    answer: str = "",
    call: str | None = "",
    bos: str | None = None,
    peer: str = "",
    **arguments: Any,
) -> Family:
    """Return a family of `SOURCE:FILE`; turns end with `eos` unless another token is given. `arguments` are the
    template's.
    """
    source, _, stem = file.partition(":")
    training = f"{stem}_training" if source == "trl" and (SOURCES["trl"] / f"{stem}_training.jinja").is_file() else None
    end = answer or eos
    return Family(
        name=name,
        source=source,
        file=stem,
        eos=eos,
        answer=end,
        call=end if call == "" else call,
        bos=bos,
        training=training,
        renderer=peer or None,
        arguments=arguments,
    )


FAMILIES: tuple[Family, ...] = (
    _family("Llama 3", "trl:llama3", _EOT, call=None, bos=_LLAMA),
    _family("Llama 3.1", "trl:llama3_1", _EOT, bos=_LLAMA),
    _family("Llama 3.2", "trl:llama3_2", _EOT, bos=_LLAMA, peer="llama-3", date_string="26 Jul 2024"),
    _family("Llama 3.3", "llama.cpp:meta-llama-Llama-3.3-70B-Instruct", _EOT, bos=_LLAMA),
    _family("Llama 4", "axolotl:llama4", "<|eot|>", bos=_LLAMA),
    _family("Qwen 2.5", "trl:qwen2_5", _IM_END),
    _family("Qwen 2.5 (base)", "trl:qwen2_5", "<|endoftext|>", answer=_IM_END),
    _family("Qwen 2.5-VL", "trl:qwen2_5_vl", _IM_END, call=None),
    _family("Qwen 3", "trl:qwen3", _IM_END, peer="qwen3"),
    _family("Qwen 3 2507", "trl:qwen3_instruct_2507", _IM_END, peer="qwen3"),
    _family("Qwen 3-VL", "trl:qwen3_vl", _IM_END, peer="qwen3-vl"),
    _family("Qwen 3-Coder", "llama.cpp:Qwen3-Coder", _IM_END),
    _family("Qwen 3.5 (thinks)", "trl:qwen3_5_think", _IM_END, peer="qwen3.5"),
    _family("Qwen 3.5 (does not)", "trl:qwen3_5_nothink", _IM_END),
    _family("Qwen 3.6", "trl:qwen3_6", _IM_END, peer="qwen3.6"),
    _family("Qwen 3.8", "trl:qwen3_8", _IM_END, peer="qwen3.8"),
    _family("QwQ", "llama.cpp:Qwen-QwQ-32B", _IM_END),
    _family("Gemma 1", "trl:gemma", "<eos>", answer="<end_of_turn>", call=None, bos="<bos>"),
    _family("Gemma 2", "llama.cpp:google-gemma-2-2b-it", "<eos>", answer="<end_of_turn>", call=None, bos="<bos>"),
    _family("Gemma 3", "trl:gemma3", "<eos>", answer="<end_of_turn>", call=None, bos="<bos>"),
    _family("Gemma 4", "trl:gemma4_v5", "<eos>", answer="<turn|>", call="<|tool_response>", bos="<bos>", peer="gemma4"),
    _family("Phi-3", "trl:phi3", "<|endoftext|>", answer="<|end|>", call=None, bos="<s>"),
    _family("Phi-3.5", "trl:phi3_5", "<|endoftext|>", answer="<|end|>", call=None, bos="<s>"),
    _family("Phi-4", "axolotl:phi_4", _IM_END, call=None, bos="<|endoftext|>"),
    _family("DeepSeek-V3", "trl:deepseekv3", _DEEPSEEK[1], bos=_DEEPSEEK[0], peer="deepseek-v3"),
    _family("DeepSeek-V3.1", "llama.cpp:deepseek-ai-DeepSeek-V3.1", _DEEPSEEK[1], bos=_DEEPSEEK[0]),
    _family(
        "DeepSeek-R1-Distill", "trl:deepseek_r1_distill", _DEEPSEEK[1], call=None, bos=_DEEPSEEK[0], peer="deepseek-r1"
    ),
    _family("GLM-4.5", "trl:glm4moe", "<|endoftext|>", answer="<|user|>", call="<|observation|>", peer="glm-4.5"),
    _family("GLM-4.6", "llama.cpp:GLM-4.6", "<|endoftext|>", answer="<|user|>", call="<|observation|>"),
    _family(
        "GLM-4.7", "llama.cpp:GLM-4.7-Flash", "<|endoftext|>", answer="<|user|>", call="<|observation|>", peer="glm-5"
    ),
    _family("Kimi K2", "llama.cpp:Kimi-K2-Instruct", _IM_END, call=None, peer="kimi-k2"),
    _family("Kimi K2 Thinking", "llama.cpp:Kimi-K2-Thinking", _IM_END, call=None),
    _family("MiniMax-M2", "llama.cpp:MiniMax-M2", "[e~[", bos="]~!b[", peer="minimax-m2"),
    _family("gpt-oss", "trl:gptoss", "<|return|>", call="<|call|>", bos="<|startoftext|>"),
    _family("Mistral 7B v0.1", "axolotl:mistral_v1", "</s>", call=None, bos="<s>"),
    _family("Mistral Nemo", "llama.cpp:mistralai-Mistral-Nemo-Instruct-2407", "</s>", bos="<s>"),
    _family("Mistral Small 3.2", "llama.cpp:Mistral-Small-3.2-24B-Instruct-2506", "</s>", bos="<s>"),
    _family("Ministral 3", "llama.cpp:mistralai-Ministral-3-14B-Reasoning-2512", "</s>", bos="<s>"),
    _family("SmolLM3", "llama.cpp:HuggingFaceTB-SmolLM3-3B", _IM_END, call=None),
    _family("Granite 3.3", "llama.cpp:ibm-granite-granite-3.3-2B-Instruct", "<|end_of_text|>", call=None),
    _family("Granite 4.0", "llama.cpp:ibm-granite-granite-4.0", "<|end_of_text|>"),
    _family("Nemotron 3", "trl:nemotron_3_nano", _IM_END, bos="<s>", peer="nemotron-3"),
    _family("Command R7B", "trl:cohere2", "<|END_OF_TURN_TOKEN|>", call=None, bos="<BOS_TOKEN>"),
    _family("LFM2", "trl:lfm2_v2", _IM_END, bos="<|startoftext|>"),
    _family("EXAONE 4", "axolotl:exaone4", "[|endofturn|]", bos="[BOS]"),
    _family("Falcon-H1", "axolotl:falcon_h1", _IM_END, call=None, bos=_LLAMA),
)
