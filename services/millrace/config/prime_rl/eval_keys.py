"""Keys of evaluations: prime-rl's `eval`, and `prime eval` or `vf-eval` of verifiers."""

from collections.abc import Mapping

from millrace.config.prime_rl import lab, sources
from millrace.config.prime_rl.meanings import Meaning, converted, moved, nothing, refused, same

_ENDPOINT = "names no address: write `client.base_url`, with `client.api_key_var` where it wants a key"
EVAL_KEYS: Mapping[str, Meaning] = {
    "model": converted(lab.model_name, form=str),
    "source": converted(sources.eval_sources),
    "eval": converted(lab.environments),
    "env": converted(sources.eval_defaults, form=dict),
    "select": converted(sources.selected),
    "env[].select": converted(sources.selected, is_native=True),
    **same(converted(lab.endpoint), "", "endpoint_id endpoints_path"),
    "api_base_url": moved("client.base_url"),
    "api_key_var": moved("client.api_key_var"),
    "provider": refused(_ENDPOINT),
    "sampling_args": moved("sampling"),
    "max_tokens": moved("sampling.max_tokens"),
    "temperature": moved("sampling.temperature"),
    **same(converted(sources.thinking), "env[].sampling.", "reasoning_effort enable_thinking seed"),
    "sampling.reasoning_effort": moved("sampling.extra_body.reasoning_effort"),
    "sampling.enable_thinking": moved("sampling.extra_body.chat_template_kwargs.enable_thinking"),
    **same(
        nothing("results and rollouts lie in `output_dir/<run name>`"),
        "",
        "save save_results save_every save_to_hf_hub",
    ),
    **same(
        nothing("there is no such choice for evaluations"),
        "",
        "verbose debug tui disable_tui independent_scoring max_retries num_workers state_columns hf_hub_dataset_name "
        "env_dir_path max_concurrent_generation max_concurrent_scoring shuffle rich monitors heartbeat slurm bench "
        "use_tqdm",
    ),
}
