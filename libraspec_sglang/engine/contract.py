"""Every name, signature and field of SGLang that the plugin touches, compared when it loads.

The plugin is pinned to one SGLang version because these are internals. A mismatch is reported as
one message that names it, not as an AttributeError in the middle of a request.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect

SUPPORTED = ("0.5.23",)

FUNCTIONS = {
    # dotted path -> parameters we pass or override
    "sglang.srt.speculative.spec_info:SpeculativeAlgorithm.register": (
        "name",
        "supports_overlap",
        "validate_server_args",
        "spec_class",
    ),
    "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2.__init__": (
        "server_args",
        "gpu_id",
        "nccl_port",
        "target_worker",
    ),
    "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2.forward_batch_generation": (
        "batch",
        "on_publish",
        "grammar_barrier",
        "pp_proxy_tensors",
    ),
    "sglang.srt.speculative.dflash_worker_v2:"
    "DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc": (
        "target_hidden",
        "cache_loc",
        "positions",
    ),
    "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2._validate_phase1_sampling_support": (
        "batch",
    ),
    "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2._maybe_build_draft_sampler": (),
    "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2._make_next_draft_input_prefill": (
        "bonus_tokens",
        "seq_lens",
    ),
    "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2._make_next_draft_input_decode": (
        "bonus_tokens",
        "new_seq_lens",
    ),
    "sglang.srt.speculative.dflash_info:DFlashVerifyInput.prepare_for_verify": (
        "batch",
        "target_worker",
    ),
    "sglang.srt.speculative.dflash_info_v2:DFlashDraftInputV2.prepare_for_decode": ("batch",),
    "sglang.srt.speculative.draft_worker_common:make_draft_block_spec_info": (
        "draft_token_num",
        "device",
    ),
    "sglang.srt.speculative.spec_utils:draft_tp_context": ("layout",),
    "sglang.srt.mem_cache.kv_index_translator:KVIndexTranslator.plan_uniform_extend": (
        "req_pool_indices",
        "seq_lens",
        "seq_lens_cpu",
        "width",
        "positions_out",
    ),
    "sglang.srt.mem_cache.kv_loc_plan:KVLocPlan.bind": ("batch", "reader", "cols"),
    "sglang.srt.mem_cache.kv_loc_plan:KVLocPlan.write_ids": ("reader", "cols"),
    "sglang.srt.mem_cache.kv_loc_plan:KVLocPlan.virtual_write_ids": ("cols",),
    "sglang.srt.layers.logprob_processor:compute_spec_logprobs": (
        "batch",
        "logits_output",
        "predict",
        "accept_index",
    ),
    "sglang.srt.layers.sampler:Sampler.forward": (
        "logits_output",
        "sampling_info",
        "return_logprob",
        "top_logprobs_nums",
        "token_ids_logprobs",
        "positions",
    ),
    "sglang.srt.layers.sampler:apply_custom_logit_processor": ("logits", "sampling_batch_info"),
    "sglang.srt.sampling.penaltylib.orchestrator:BatchedPenalizerOrchestrator.apply": (
        "logits",
        "repeat",
    ),
    "sglang.srt.sampling.penaltylib.orchestrator:"
    "BatchedPenalizerOrchestrator.cumulate_output_tokens": ("output_ids",),
    "sglang.srt.sampling.penaltylib.orchestrator:BatchedPenalizerOrchestrator.filter": (),
    "sglang.srt.sampling.penaltylib.orchestrator:BatchedPenalizerOrchestrator.merge": (),
    "sglang.srt.constrained.base_grammar_backend:BaseGrammarObject.accept_token": ("token",),
    "sglang.srt.constrained.base_grammar_backend:BaseGrammarObject.rollback": ("k",),
    "sglang.srt.constrained.base_grammar_backend:BaseGrammarObject.is_terminated": (),
    "sglang.srt.constrained.base_grammar_backend:BaseGrammarObject.allocate_vocab_mask": (
        "vocab_size",
        "batch_size",
        "device",
    ),
    "sglang.srt.constrained.base_grammar_backend:BaseGrammarObject.fill_vocab_mask": (
        "vocab_mask",
        "idx",
    ),
    "sglang.srt.constrained.base_grammar_backend:BaseGrammarObject.move_vocab_mask": (
        "vocab_mask",
        "device",
    ),
    "sglang.srt.constrained.base_grammar_backend:GrammarMask.apply": ("logits",),
    "sglang.srt.managers.overlap_utils:FutureMap.__init__": (),
    "sglang.srt.managers.scheduler:validate_dflash_request": ("req", "enable_overlap"),
    "sglang.srt.layers.attention.flashinfer_backend:fast_prefill_plan": (
        "qo_indptr_host",
        "kv_indptr_host",
        "kv_lens_host",
        "max_q_len",
        "max_kv_len",
    ),
    "sglang.srt.model_executor.model_runner:ModelRunner.init_attention_backends": (),
    "sglang.srt.model_executor.model_runner:ModelRunner._decode_cuda_graph_runner_cls": (),
    "sglang.srt.runtime_context:attn_dp_enabled_of": ("cfg",),
    "sglang.srt.runtime_context:get_exec": (),
    "sglang.srt.server_args:ServerArgs.add_cli_args": ("parser",),
    "sglang.srt.server_args:ServerArgs.from_cli_args": ("args",),
    "sglang.srt.server_args:ServerArgs.resolve_once": (),
}

FIELDS = {
    # class -> dataclass or struct fields we set or read
    "sglang.srt.speculative.dflash_info:DFlashVerifyInput": (
        "draft_token",
        "positions",
        "draft_token_num",
        "num_tokens_per_req",
        "capture_hidden_mode",
        "ragged_verify_layout",
        "live_seq_lens_cpu",
        "kv_loc_plan",
        "kv_loc_cols",
    ),
    "sglang.srt.speculative.dflash_info_v2:DFlashDraftInputV2": (
        "topk_p",
        "topk_index",
        "bonus_tokens",
        "new_seq_lens",
        "hidden_states",
        "nxt_kv_lens_cpu",
        "nxt_kv_lens_sum",
    ),
    "sglang.srt.speculative.ragged_verify:RaggedVerifyLayout": (
        "verify_lens",
        "graph_num_tokens",
        "extend_start_loc",
        "qo_indptr_device",
        "verify_lens_cpu",
        "total_verify_tokens",
    ),
    "sglang.srt.managers.utils:GenerationBatchResult": (
        "logits_output",
        "next_token_ids",
        "accept_lens",
        "cap_lens",
        "can_run_cuda_graph",
        "next_draft_input",
        "speculative_num_draft_tokens",
        "new_seq_lens",
        "routed_experts_output",
        "indexer_topk_output",
    ),
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch": (
        "forward_mode",
        "batch_size",
        "input_ids",
        "req_pool_indices",
        "seq_lens",
        "seq_lens_sum",
        "seq_lens_cpu",
        "positions",
        "input_embeds",
        "spec_algorithm",
        "spec_info",
        "num_token_non_padded",
        "global_num_token_non_padded_cpu",
        "can_run_decode_cuda_graph",
    ),
    "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo": (
        "temperatures",
        "top_ps",
        "top_ks",
        "min_ps",
        "sampling_seed",
        "is_all_greedy",
        "grammars",
        "grammar_mask",
        "logit_bias",
        "penalizer_orchestrator",
        "acc_additive_penalties",
        "acc_scaling_penalties",
        "has_custom_logit_processor",
        "custom_logit_processor",
        "custom_params",
    ),
}


def version_problem() -> str | None:
    """Whether another SGLang than the supported one is installed; cheap."""
    version = _version()
    return None if version in SUPPORTED else f"SGLang {version} is installed"


def require() -> None:
    """Raise ValueError with one readable message where SGLang differs from what we use."""
    found = problems()
    if found:
        raise ValueError(explain(found))


def problems() -> list[str]:
    """What does not match; empty when the plugin can run."""
    wrong_version = version_problem()
    if wrong_version:
        return [wrong_version]
    found = []
    for target, parameters in FUNCTIONS.items():
        obj = _resolve(target)
        if obj is None:
            found.append(f"{target} is missing")
            continue
        accepted = inspect.signature(obj).parameters
        if any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
            continue  # hooked by another plugin: its signature is hidden, its callee is not ours
        found += [f"{target} takes no {name!r}" for name in parameters if name not in accepted]
    for target, fields in FIELDS.items():
        cls = _resolve(target)
        if cls is None:
            found.append(f"{target} is missing")
            continue
        have = set(getattr(cls, "__dataclass_fields__", ())) | set(
            getattr(cls, "__struct_fields__", ())
        )
        found += [f"{target} has no field {name!r}" for name in fields if name not in have]
    return found


def explain(found: list[str]) -> str:
    """One readable message for a contract that does not hold."""
    shown = "; ".join(found[:3]) + ("; ..." if len(found) > 3 else "")
    return (
        f"libraspec-sglang supports SGLang {', '.join(SUPPORTED)}, but {shown}. Install it with "
        f"pip install sglang=={SUPPORTED[-1]}, or use a libraspec-sglang release for your version. "
        "SGLang itself keeps working without --speculative-algorithm LIBRASPEC."
    )


def _version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "(none)"


def _resolve(target: str):
    module, _, name = target.partition(":")
    try:
        obj = importlib.import_module(module)
        for part in name.split("."):
            obj = getattr(obj, part)
    except (ImportError, AttributeError):
        return None
    return obj
