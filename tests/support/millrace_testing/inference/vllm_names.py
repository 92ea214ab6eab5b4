"""What our code takes of vLLM without importing it: what it calls, reads, sets and replaces, by the module that has it.

Written as `vllm_sources` says. What it imports is read from our own sources there.
"""

from collections.abc import Mapping

_SERVING = "vllm.entrypoints"

NAMES: Mapping[str, tuple[str, ...]] = {
    # The engine client, which our engine drives and our gate is before.
    "vllm.v1.engine.async_llm": (
        "AsyncLLM.generate(_, _, _, lora_request, data_parallel_rank, priority)",
        "AsyncLLM.abort(_)",
        "AsyncLLM.sleep(level, mode)",
        "AsyncLLM.wake_up(tags)",
        "AsyncLLM.update_weight_version(_)",
        "AsyncLLM.get_weight_version()",
        "AsyncLLM.reset_prefix_cache(reset_running_requests)",
        "AsyncLLM.collective_rpc(_, args)",
        "AsyncLLM.add_lora(_)",
        "AsyncLLM.remove_lora(_)",
        "AsyncLLM.errored",
        "AsyncLLM.vllm_config",
        "AsyncLLM.model_config",
        "AsyncLLM.output_processor",
        "AsyncLLM.engine_core",
    ),
    "vllm.v1.engine.core_client": ("DPAsyncMPClient.call_utility_all_async(_, _, _, _, _)",),
    "vllm.v1.engine.output_processor": (
        "OutputProcessor.request_states",
        "RequestState.is_prefilling",
        "RequestState.external_req_id",
        "RequestState.parent_req",
    ),
    "vllm.v1.engine.parallel_sampling": ("ParentRequest.external_req_id",),
    "vllm.inputs.engine": ("tokens_input(_, cache_salt)",),
    "vllm.outputs": (
        "RequestOutput.outputs",
        "RequestOutput.prompt_logprobs",
        "CompletionOutput.index",
        "CompletionOutput.token_ids",
        "CompletionOutput.finish_reason",
        "CompletionOutput.weight_versions",
        "WeightVersionSpan.version",
        "WeightVersionSpan.start",
        "WeightVersionSpan.end",
    ),
    "vllm.logprobs": ("Logprob.logprob",),
    "vllm.sampling_params": (
        "RequestOutputKind.FINAL_ONLY",
        *(
            f"SamplingParams.{name}"
            for name in (
                "max_tokens",
                "temperature",
                "prompt_logprobs",
                "prompt_logprob_token_ids",
                "detokenize",
                "output_kind",
                "n",
                "stop",
                "stop_token_ids",
                "skip_special_tokens",
                "logprobs",
                "skip_reading_prefix_cache",
            )
        ),
    ),
    "vllm.lora.request": (
        "LoRARequest.lora_name",
        "LoRARequest.lora_int_id",
        "LoRARequest.lora_path",
        "LoRARequest.load_inplace",
    ),
    "vllm.config": (
        *(f"VllmConfig.{name}_config" for name in ("parallel", "scheduler", "model", "load", "lora", "device")),
        "VllmConfig.device_config",
        "ParallelConfig.data_parallel_size",
        "ParallelConfig.world_size",
        "ParallelConfig.nnodes",
        "SchedulerConfig.max_num_seqs",
        "ModelConfig.max_model_len",
        "ModelConfig.model",
        "ModelConfig.model_weights",
        "ModelConfig.revision",
        "ModelConfig.dtype",
        "ModelConfig.hf_text_config",
        "ModelConfig.enable_sleep_mode",
        "LoadConfig.download_dir",
        "LoRAConfig.max_lora_rank",
        "LoRAConfig.target_modules",
        "DeviceConfig.device_type",
    ),
    # The workers, into whose class ours is mixed.
    "vllm.v1.worker.worker_base": ("WorkerBase.rank", "WorkerBase.parallel_config", "WorkerBase.vllm_config"),
    "vllm.v1.worker.gpu_worker": ("Worker.reload_weights(weights_path)", "Worker.model_runner"),
    "vllm.v1.worker.cpu_worker": ("CPUWorker.reload_weights(weights_path)",),
    "vllm.v1.worker.gpu_model_runner": (
        "GPUModelRunner.get_model()",
        "GPUModelRunner.reload_weights(weights_path)",
        "GPUModelRunner.device",
        "GPUModelRunner.model_config",
        "GPUModelRunner.vllm_config",
    ),
    "vllm.v1.worker.gpu.model_runner": (
        "GPUModelRunner.get_model()",
        "GPUModelRunner.reload_weights(weights_path)",
        "GPUModelRunner.device",
        "GPUModelRunner.model_config",
        "GPUModelRunner.vllm_config",
    ),
    "vllm.lora.layers": ("BaseLayerWithLoRA",),
    "vllm.lora.layers.base_linear": ("BaseLinearLayerWithLoRA.base_layer",),
    # Its layerwise reload, whose parts we call and wrap.
    "vllm.model_executor.model_loader.reload.layerwise": (
        "initialize_layerwise_reload(_)",
        "finalize_layerwise_reload(_, _)",
        "get_numel_loaded(_, _)",
        "get_layer_tensors(_)",
        "get_layerwise_info(_)",
        "get_layer_size(_)",
        "is_deferred_attention_layer(_)",
        "_get_original_loader(_)",
        "_layerwise_process(_, _)",
        "make_online_process_loader.online_process_loader",
    ),
    "vllm.model_executor.model_loader.reload.types": (
        "LayerReloadingInfo.can_load()",
        "LayerReloadingInfo.loaded_weights",
        "LayerReloadingInfo.load_numel",
        "LayerReloadingInfo.load_numel_total",
        "LayerReloadingInfo.restore_metadata",
    ),
    "vllm.model_executor.model_loader.reload.meta": (
        "SKIP_TENSORS",
        "restore_layer_on_meta(_, _)",
        "to_meta_tensor(_)",
    ),
    # What its CPU backend packs, and what layers keep beside their weights.
    "vllm.model_executor.layers.linear": ("UnquantizedLinearMethod.process_weights_after_loading(_)",),
    "vllm.model_executor.layers.vocab_parallel_embedding": (
        "UnquantizedEmbeddingMethod.process_weights_after_loading(_)",
    ),
    "vllm.model_executor.layers.utils": ("dispatch_cpu_unquantized_gemm.cpu_linear",),
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": ("UnquantizedFusedMoEMethod.moe_kernel",),
    "vllm.model_executor.layers.attention.mla_attention": (
        "MLAAttention.W_UK_T",
        "MLAAttention.W_UV",
        "MLAAttention.process_weights_after_loading",
    ),
    # The server: its plugins, its parsers, the objects that our routes call, and its requests.
    "vllm.plugins.endpoint_plugins.interface": (
        "EndpointPlugin.name",
        "EndpointPlugin.required_tasks",
        "EndpointPlugin.attach_router[self, app]",
        "EndpointPlugin.init_state[self, engine_client, state, args]",
    ),
    "vllm.parser": (
        "ParserManager.get_parser[cls, tool_parser_name, reasoning_parser_name, enable_auto_tools]",
        "DelegatingParser.parse[self, model_output, request, enable_auto_tools, model_output_token_ids]",
    ),
    "vllm.parser.abstract_parser": (
        "DelegatingParser._initialize_history_tool_call_cnt(_)",
        "DelegatingParser._make_tool_call_id(_)",
    ),
    f"{_SERVING}.generate.base.protocol": ("FunctionCall.id", "FunctionCall.name", "FunctionCall.arguments"),
    f"{_SERVING}.openai.chat_completion.serving": ("OpenAIServingChat.create_chat_completion(_, _)",),
    f"{_SERVING}.openai.completion.serving": ("OpenAIServingCompletion.create_completion(_, _)",),
    f"{_SERVING}.scale_out.token_in_token_out.serving": ("ServingTokens.serve_tokens(_, _)",),
    f"{_SERVING}.openai.models.serving": ("OpenAIServingModels.show_available_models()",),
    f"{_SERVING}.openai.chat_completion.protocol": tuple(
        f"ChatCompletionRequest.{name}"
        for name in (
            *("n", "stop", "stop_token_ids", "skip_special_tokens", "messages", "tools", "tool_choice"),
            *("chat_template_kwargs", "use_beam_search"),
        )
    ),
    f"{_SERVING}.openai.completion.protocol": tuple(
        f"CompletionRequest.{name}"
        for name in ("n", "stop", "stop_token_ids", "skip_special_tokens", "prompt", "max_tokens", "use_beam_search")
    ),
    f"{_SERVING}.scale_out.token_in_token_out.protocol": (
        "GenerateRequest.sampling_params",
        "GenerateRequest.token_ids",
        "GenerateLogProb.token_id",
    ),
    f"{_SERVING}.serve.engine.protocol": ("ErrorResponse.error", "ErrorInfo.code"),
    f"{_SERVING}.launchers.api_server.entry": ("main()",),
    f"{_SERVING}.launchers.launcher": ("*.server",),
    f"{_SERVING}.cli.serve": ("run_headless(_)",),
    f"{_SERVING}.generate.api_router": ("*.openai_serving_chat", "*.openai_serving_completion"),
    f"{_SERVING}.launchers.api_server.app_state": ("*.openai_serving_models",),
    f"{_SERVING}.scale_out.factories": ("*.serving_tokens",),
    "vllm.utils.argparse_utils": ("FlexibleArgumentParser",),
    "vllm.platforms.interface": ("Platform.is_sleep_mode_available()",),
}

FLAGS = (
    *("model", "host", "port", "served_model_name", "enable_scale_out", "logprobs_mode", "worker_extension_cls"),
    *("override_generation_config", "scheduling_policy", "load_format", "dtype", "enable_lora", "max_lora_rank"),
    *("max_loras", "max_cpu_loras", "lora_target_modules", "tool_strict_level", "nnodes", "node_rank"),
)
"""Flags that the launcher gives; the config's own come from `TYPED_FLAGS` and `OWNED`."""

ENVIRONMENT = (
    "VLLM_PLUGINS",
    "VLLM_NO_USAGE_STATS",
    "VLLM_HOST_IP",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_RPC_BASE_PATH",
)
