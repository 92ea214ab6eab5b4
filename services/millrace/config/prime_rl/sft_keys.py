"""Keys of prime-rl's SFT configs that our schema does not have, and what each means here."""

from collections.abc import Mapping

from millrace.config.prime_rl import conversions, sources
from millrace.config.prime_rl.lab_keys import VF_SFT
from millrace.config.prime_rl.meanings import Meaning, blocks, converted, later, moved, nothing, only, same
from millrace.config.prime_rl.rl_keys import (
    FAKE,
    RL_KEYS,
    SHARED,
    STORE,
    checkpoint_keys,
    model_keys,
    optimizer_keys,
    source_keys,
)

_NO_LOOP = "a fine-tuning samples nothing that it learns from: evaluations are `[eval]`, or `millrace eval`"
_OWN_SERVERS = "each evaluation starts an engine and env-servers of its own: `[inference]` says which engine"
_FINISHED = "every evaluation is finished; the training waits where `eval.max_pending` of them are not"
_EVAL: Mapping[str, Meaning] = {
    "eval.source": converted(sources.eval_sources),
    "eval.env": converted(sources.eval_defaults, form=dict),
    "eval.select": converted(sources.selected),
    "eval.environment_ids": converted(conversions.evaluated_ids),
    "eval.eval_base_model": converted(conversions.eval_base_model),
    "eval.cancel_on_new_checkpoint": nothing(_FINISHED, False),
    **same(nothing(_OWN_SERVERS), "eval.", "client env_server_base_port"),
    **same(nothing("`eval.max_concurrent` rollouts are played at once"), "eval.", "concurrency tasks_per_minute"),
    **same(
        nothing("a step is evaluated once, also where the run goes on behind it"),
        "eval.",
        "retrigger_on_resume skip_eval_on_resume skip_eval_on_restart",
    ),
    **same(nothing("what is lost is played again"), "eval.", "retry max_retries"),
    **same(nothing("results lie in `evals` of the run's directory"), "eval.", "save save_to_hf save_to_disk"),
    **{
        f"eval.sampling.{key}": moved(f"eval.sampling.extra_body.{key}")
        for key in ("reasoning_effort", "presence_penalty", "frequency_penalty", "min_tokens", "stop", "seed")
    },
    "eval.sampling.enable_thinking": moved("eval.sampling.extra_body.chat_template_kwargs.enable_thinking"),
    **source_keys("eval.env[]."),
    **same(converted(sources.thinking), "eval.env[].sampling.", "reasoning_effort enable_thinking seed"),
    "eval.env[].select": converted(sources.selected, is_native=True),
    "eval.env[].skip_verification": nothing("nothing is verified beforehand"),
}
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
    **_EVAL,
    **{key: meaning for key, meaning in RL_KEYS.items() if key.startswith("inference.")},
    "orchestrator": later(_NO_LOOP, {}),
    "env_server_base_port": nothing(_OWN_SERVERS),
    "weight_broadcast": nothing(STORE),
    "tokenizer": later("the model's own tokenizer counts: no effect yet"),
    "renderer": later("the model's own chat template counts: no effect yet"),
    "loss": blocks("only the cross entropy of completions is there", {}),
    "loss_impl": later("there is one implementation of the loss: no effect"),
    "max_epochs": later("set `max_steps`: passes over the data are not counted"),
    **VF_SFT,
}
