"""Keys of prime-rl's SFT configs that our schema does not have, and what each means here."""

from collections.abc import Mapping

from millrace.config.prime_rl import conversions
from millrace.config.prime_rl.lab_keys import VF_SFT
from millrace.config.prime_rl.meanings import Meaning, blocks, converted, later, nothing, only, same
from millrace.config.prime_rl.rl_keys import FAKE, SHARED, STORE, checkpoint_keys, model_keys, optimizer_keys

_EVALUATED = "there are no evaluations during SFT: evaluate its checkpoints with `millrace eval`"
_FAKE_VALIDATION = "a loss on made-up tokens says nothing: name rows with `val.data.name`, or leave [val] out"
_ALL_ROWS = (
    "each validation takes all rows, in micro-batches of `micro_batch_tokens`: the mean per token is the same in any "
    "order and in batches of any size"
)

SFT_KEYS: Mapping[str, Meaning] = {
    **SHARED,
    **model_keys("model."),
    "model.seq_len": nothing("`data.seq_len` counts"),
    **checkpoint_keys("ckpt."),
    **optimizer_keys(""),
    **{f"{table}.type": only("there is no data of type {value} yet", "sft") for table in ("data", "val.data")},
    **same(blocks(FAKE), "data.", "fake length input_ids"),
    **same(later(_FAKE_VALIDATION), "val.data.", "fake length input_ids"),
    **same(nothing(_ALL_ROWS), "val.data.", "batch_size micro_batch_size pack_function pack shuffle num_workers"),
    "data.micro_batch_size": converted(conversions.micro_batch_size),
    **same(later("rows are packed up to `micro_batch_tokens`: no effect"), "data.", "pack"),
    "data.num_workers": nothing("the trainer encodes each row when a step takes it"),
    "eval": later(_EVALUATED),
    "inference": later(_EVALUATED, {}),
    "orchestrator": later(_EVALUATED, {}),
    "env_server_base_port": nothing(_EVALUATED),
    "weight_broadcast": nothing(STORE),
    "tokenizer": later("the model's own tokenizer counts: no effect yet"),
    "renderer": later("the model's own chat template counts: no effect yet"),
    "loss": blocks("only the cross entropy of completions is there", {}),
    "loss_impl": later("there is one implementation of the loss: no effect"),
    "max_epochs": later("set `max_steps`: passes over the data are not counted"),
    **VF_SFT,
}
