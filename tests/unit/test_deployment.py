"""Ways to deploy vLLM that a proposer has to reckon with: schedulers and stages on several ranks, sleep, front ends, releases."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import envs
from vllm.v1.outputs import ModelRunnerOutput

from vllm_specplugin.cli import diagnosis
from vllm_specplugin.control.uniform import NoPass
from vllm_specplugin.errors import ConfigError
from vllm_specplugin.runtime import install, planning, scheduler_metrics
from vllm_specplugin.runtime.core import Runtime
from vllm_specplugin.runtime.inspect import Engine
from vllm_specplugin.runtime.meter import Meter
from vllm_specplugin.runtime.spec_config import PluginSpeculativeConfig, check_deployment
from vllm_specplugin.types import Capabilities

K = 3
NGRAM, MEDUSA = Capabilities(), Capabilities(hidden_states="last", checkpoint=True)
AUX, EAGLE3 = Capabilities(hidden_states="aux"), Capabilities(hidden_states="aux", checkpoint=True, native="eagle3")


class Spec(PluginSpeculativeConfig):
    """One whose proposer the test makes up."""

    def resolve(self) -> Any:
        return SimpleNamespace(capabilities=self.capabilities)


def deployed(
    capabilities: Capabilities = NGRAM,
    runner: str = "v2",
    backend: str = "mp",
    ranks: int = 1,
    stages: int = 1,
    sleeps: bool = False,
    asynchronous: bool | None = False,
    **keys: Any,
) -> Any:
    """A `VllmConfig`, as far as it is looked at."""
    spec = object.__new__(Spec)
    vars(spec).update(
        plugin={"proposer": "mine", **keys},
        capabilities=capabilities,
        native=capabilities.native,
        runner=runner,
        plans_ahead=False,
        num_speculative_tokens=K,
    )
    return SimpleNamespace(
        speculative_config=spec,
        parallel_config=SimpleNamespace(
            distributed_executor_backend=backend,
            tensor_parallel_size=ranks,
            pipeline_parallel_size=stages,
            prefill_context_parallel_size=1,
            data_parallel_size=1,
        ),
        model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous, max_num_seqs=8),
    )


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was warned of; vLLM says it once in a process."""
    from vllm_specplugin.runtime import spec_config

    lines: list[str] = []

    def warning_once(text: str, *args: object) -> None:
        lines.append(text % args)

    for module in (planning, scheduler_metrics, spec_config):
        monkeypatch.setattr(module.logger, "warning_once", warning_once)
    return lines


# -- a scheduler on every rank -----------------------------------------------------------------------------


def test_v1_is_refused_where_every_rank_schedules() -> None:
    """Ranks of V1 draft each for itself, and would go on with different steps."""
    with pytest.raises(ConfigError, match=r"VLLM_USE_V2_MODEL_RUNNER=1.* or --distributed-executor-backend mp or ray") as refused:
        check_deployment(deployed(runner="v1", backend="external_launcher", ranks=2))
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="external_launcher"):
        check_deployment(deployed(EAGLE3, runner="v1", backend="external_launcher", stages=2))
    check_deployment(deployed(runner="v1", backend="external_launcher"))
    check_deployment(deployed(runner="v1", ranks=2))
    check_deployment(deployed(backend="external_launcher", ranks=2))


@pytest.mark.parametrize(
    ("backend", "ranks", "plans"), [("external_launcher", 2, False), ("external_launcher", 1, True), ("mp", 2, True)]
)
def test_nothing_is_planned_by_the_clocks_of_several_ranks(backend: str, ranks: int, plans: bool, warned: list[str]) -> None:
    config = deployed(EAGLE3, backend=backend, ranks=ranks, asynchronous=True, control="adaptive")
    planning.prepare(config)
    assert config.speculative_config.plans_ahead is plans
    assert [line.split(" draft lengths")[0] for line in warned] == (
        [] if plans else ["'control' is 'adaptive', but with --distributed-executor-backend external_launcher"]
    )


# -- stages, and weights of one's own ----------------------------------------------------------------------


def as_vllm_would(config: Any) -> None:
    """It schedules asynchronously unless asked not to."""
    scheduler = config.scheduler_config
    scheduler.async_scheduling = scheduler.async_scheduling is not False


@pytest.mark.parametrize(
    ("runner", "stages", "asked", "becomes"),
    [
        ("v2", 1, None, False),  # a proposer that waits for the tokens anyhow
        ("v2", 2, None, True),
        ("v2", 2, True, True),
        ("v2", 2, False, "refused"),
        ("v1", 1, None, False),
        ("v1", 2, None, "refused"),
    ],
)
def test_drafts_that_go_through_stages_are_scheduled_ahead(
    runner: str, stages: int, asked: bool | None, becomes: bool | str
) -> None:
    """vLLM's scheduler plans the next step's drafts while a stage has yet to tell the token before them."""
    config = deployed(NGRAM, stages=stages, asynchronous=asked)
    config.use_v2_model_runner = runner == "v2"
    if becomes == "refused":
        with pytest.raises(ConfigError, match=r"Pipeline parallelism .* needs asynchronous scheduling on vLLM's V2 .*Use "):
            install._vllm_config_post_init(as_vllm_would, config)
    else:
        install._vllm_config_post_init(as_vllm_would, config)
        assert config.scheduler_config.async_scheduling is becomes


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_states_of_other_stages_are_refused(runner: str) -> None:
    with pytest.raises(ConfigError, match=r"'mine'.* pipeline_parallel_size 2 these lie on several ranks") as refused:
        check_deployment(deployed(AUX, runner, stages=2))
    assert "\n" not in str(refused.value)
    check_deployment(deployed(AUX, runner, ranks=2))
    check_deployment(deployed(EAGLE3, runner, stages=2))  # vLLM hands its own drafter what it needs
    check_deployment(deployed(MEDUSA, runner, stages=2))


def test_heads_that_sleep_would_lose_are_named(warned: list[str]) -> None:
    for capabilities in (NGRAM, EAGLE3):
        check_deployment(deployed(capabilities, sleeps=True))
    check_deployment(deployed(MEDUSA))
    assert warned == []
    check_deployment(deployed(MEDUSA, sleeps=True))
    (line,) = warned
    assert "'mine'" in line
    assert "after level 2 they are gone, and the engine must be restarted" in line


# -- the scheduler's methods -------------------------------------------------------------------------------


def counting_scheduler(config: Any, outputs: Any) -> Any:
    """A scheduler with our methods around its own, all of whose steps come out alike."""
    scheduler = SimpleNamespace(
        vllm_config=config,
        log_stats=True,
        requests={},
        update_from_output=lambda *_: {0: outputs},
        update_draft_token_ids=None,
    )
    scheduler_metrics.attach(scheduler)  # type: ignore[arg-type]
    return scheduler


def step_that_begins(request_id: str) -> Any:
    """What a scheduler says of a step with a request that is new in it."""
    params = SimpleNamespace(extra_args=None, temperature=0.0, structured_outputs=None, stop=[])
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=request_id, sampling_params=params)],
        scheduled_spec_decode_tokens={},
        num_invalid_spec_tokens=None,
        finished_req_ids=set(),
        preempted_req_ids=None,
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_drafts_of_a_session_s_last_turn_are_dropped(asynchronous: bool) -> None:
    """The worker says nothing where it has no drafts; planned ahead, what is there belongs to the next step already."""
    config = deployed(asynchronous=asynchronous)
    scheduler = counting_scheduler(config, SimpleNamespace(outputs=[], scheduler_stats=None))
    session, other = SimpleNamespace(spec_token_ids=[5, 6]), SimpleNamespace(spec_token_ids=[7])
    scheduler.requests.update(a=session, b=other)
    scheduler.update_from_output(step_that_begins("a"), ModelRunnerOutput(["a"], {"a": 0}, [[1]]))
    assert session.spec_token_ids == ([5, 6] if asynchronous else [])
    assert other.spec_token_ids == [7]


# -- the front end in Rust ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rust", [False, True])
def test_nothing_is_sent_to_a_front_end_that_would_hand_it_on(
    rust: bool, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", str(int(rust)))
    assert rust is envs.VLLM_USE_RUST_FRONTEND
    ended = SimpleNamespace(request_id="a", new_token_ids=[1], finish_reason="stop", kv_transfer_params={"theirs": 1})
    stats = SimpleNamespace(kv_connector_stats=None)
    scheduler = counting_scheduler(deployed(), SimpleNamespace(outputs=[ended], scheduler_stats=stats))
    scheduler.update_from_output(step_that_begins("a"), ModelRunnerOutput(["a"], {"a": 0}, [[1]]))
    ours = not rust
    assert (scheduler_metrics.KEY in ended.kv_transfer_params) is ours
    assert ended.kv_transfer_params["theirs"] == 1
    assert (stats.kv_connector_stats is not None) is ours
    assert len(warned) == rust
    assert all("vllm:specplugin_* and the 400s" in line for line in warned)


@pytest.mark.parametrize(("value", "notes"), [(None, 0), ("0", 0), ("1", 1)])
def test_doctor_says_what_the_front_end_in_rust_leaves_out(
    value: str | None, notes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", value)
    monkeypatch.setattr(diagnosis.inspect, "describe", lambda *_: Engine("cpu", "v2", "", ours=True))
    found = diagnosis.diagnose("m", {"proposer": "ngram"}, {})
    assert sum("VLLM_USE_RUST_FRONTEND" in note for note in found.notes) == notes


# -- steps that vLLM 0.33 drafts nothing in ----------------------------------------------------------------


@pytest.fixture
def asked() -> Callable[[int, int], bool]:
    """Whether a drafter is left out of a step, given what was planned and what vLLM asks of it."""
    meter = Meter(SimpleNamespace(guard=SimpleNamespace(name="", proposer=SimpleNamespace(guards={}))), torch.device("cpu"))  # type: ignore[arg-type]
    left_out: list[bool] = []

    def propose(batch: object, num_speculative_tokens: int) -> None:
        left_out.append(meter.leaves_drafter_out(num_speculative_tokens))

    drafter = SimpleNamespace(propose=propose)
    runner = SimpleNamespace(execute_model=lambda step: None, sample_tokens=lambda: None)
    meter.attach(runner, drafter, "propose")
    batch = SimpleNamespace(num_reqs=1, num_scheduled_tokens=torch.ones(1))
    meter._runtime.k = K

    def step(planned: int, wanted: int) -> bool:
        runner.execute_model(SimpleNamespace(scheduled_spec_decode_tokens={}, num_spec_tokens_to_schedule=planned))
        drafter.propose(batch, num_speculative_tokens=wanted)
        kinds = [kind for kind, *_ in meter._clock.over()]
        assert kinds == ([] if left_out[-1] else ["drafting"])
        return left_out[-1]

    return step


def test_a_drafter_that_was_planned_to_be_left_out_is_told_from_one_with_nothing_to_draft(
    asked: Callable[[int, int], bool],
) -> None:
    assert asked(NoPass(0), NoPass(0))
    assert asked(NoPass(0), 0)  # vLLM 0.33, where no request can use drafts
    assert not asked(0, 0)
    assert not asked(K, 0)
    assert not asked(K, K)


@pytest.mark.parametrize("skips", [False, True])
def test_steps_without_the_drafts_that_were_planned_teach_no_times(skips: bool) -> None:
    told = []
    planner: Any = object.__new__(planning.Planner)
    planner.control = SimpleNamespace(
        judged=lambda *_: None,
        has_lapsed=lambda _: False,
        over=lambda ids, drafts, decoding: told.append((ids, drafts, decoding)),
    )
    step: Any = SimpleNamespace(
        num_scheduled_tokens={"a": 1 + K}, scheduled_spec_decode_tokens={"a": [-1] * K}, skip_drafts=skips
    )
    planner._learn(step, SimpleNamespace(sampled_token_ids=[[1]], req_id_to_index={"a": 0}))
    assert told == [(["a"], K, not skips)]


# -- third parties' hybrids --------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [("ngram", "eagle"), ("ngram", "made up"), ("made up",), ()])
def test_control_takes_a_hybrids_parts_by_name_where_they_are_registered(parts: tuple[str, ...]) -> None:
    capabilities = Capabilities(own_kv_cache=True, parts=parts)
    resolved = SimpleNamespace(config=SimpleNamespace(adaptive=True, proposer="theirs"), capabilities=capabilities)
    runtime = SimpleNamespace(resolved=resolved, k=2, host=SimpleNamespace(max_num_seqs=4), _data_parallel=False)
    control = Runtime._control(runtime, deployed())  # type: ignore[arg-type]
    assert control is not None
    assert control._stateful_sources == ({"eagle"} if "eagle" in parts else {"theirs"})
