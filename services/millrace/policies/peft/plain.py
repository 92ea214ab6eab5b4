"""Adapters of the one kind that Millrace trains and engines serve unmerged."""

from dataclasses import replace

from millrace.errors import InvalidStateError
from millrace.policies.adapter import AdapterSpec
from millrace.policies.peft.config import PeftConfig, parse_peft_config


def parse_adapter_config(data: bytes, *, source: str) -> AdapterSpec:
    """What an `adapter_config.json` of a policy says.

    The errors of `parse_peft_config`; InvalidStateError (ADAPTER_NOT_SUPPORTED) if it asks for more than plain LoRA.
    """
    config = parse_peft_config(data, source=source)
    names = config.target_modules
    plain = PeftConfig(r=config.r, lora_alpha=config.lora_alpha, target_modules=names)
    if isinstance(names, str) or replace(config, modules_to_save=()) != plain:
        raise InvalidStateError(
            f"{source} is no plain LoRA adapter of listed layers, which is what is served unmerged",
            reason="ADAPTER_NOT_SUPPORTED",
            remedy="merge it into its base and serve the result",
        )
    return AdapterSpec(
        rank=config.r, alpha=config.lora_alpha, target_modules=names, modules_to_save=config.modules_to_save
    )
