"""`genrl train` for a vision-language model that acts in an environment."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from accelerate import Accelerator

from genrl.config.vlm import VLMConfig
from genrl.config.vlm_agents import Critic, Environment
from genrl.runtime import frame
from genrl.runtime.loop import Loop
from genrl.runtime.optimization import Schedule, adamw
from genrl.runtime.process import Process
from genrl.runtime.weights import Weights
from genrl.vlm.environments.hosts import open_host
from genrl.vlm.methods.agents import trainer
from genrl.vlm.methods.agents.critic import ValueHead
from genrl.vlm.methods.agents.episodes import Table
from genrl.vlm.methods.agents.run import EpisodesRun
from genrl.vlm.methods.compose import preset_of
from genrl.vlm.methods.extras import needed
from genrl.vlm.methods.recipe import CriticAdvantage
from genrl.vlm.policies.folder import open_policy
from genrl.vlm.policies.policy import Policy

MEMORY_HINT = "lower trainer.micro_batch, environment.parallel or generation.max_new_tokens"


def settings_of(config: VLMConfig) -> Environment:
    """The section `environment`, which is there."""
    assert config.environment is not None
    return config.environment


def check_processes(config: VLMConfig, num_processes: int) -> None:
    """ValueError where episodes cannot be shared out to the processes."""
    critic = isinstance(preset_of(config).advantage, CriticAdvantage)
    key = "environment.parallel" if critic else "generation.prompts_per_iteration"
    number = settings_of(config).parallel if critic else config.generation.prompts_per_iteration
    if number % num_processes:
        raise ValueError(f"{key}: {number} cannot be shared out evenly to {num_processes} processes")


def check_environment(config: VLMConfig, policy: Policy) -> None:
    """ValueError for an environment that cannot be opened, or whose first prompt does not fit into the model."""
    settings = settings_of(config)
    host = open_host(settings)
    try:
        table = Table(settings, host)
        table.begin({0: 0}, "train")
        policy.check_room([policy.encode(table.prompt(0))], config.generation.max_new_tokens)
    finally:
        host.close()


def prepare(config: VLMConfig, accelerator: Accelerator) -> Policy:
    """The model, seen to fit its environment, before anything is written."""
    preset_of(config)
    policy = open_policy(config, accelerator.device)
    check_environment(config, policy)
    return policy


def method_of(config: VLMConfig) -> Callable[[Any, Any], None]:
    """The function that trains."""
    return trainer.train


def open_run(config: VLMConfig, process: Process, policy: Policy, stack: ExitStack) -> EpisodesRun:
    """What one process trains with: environments, reference, critic, optimiser, log; `stack` closes them."""
    preset, settings = preset_of(config), settings_of(config)
    need = needed(preset)
    device = process.accelerator.device
    reference = None
    if need.ref and policy.peft is None:
        reference = open_policy(config, device)
        reference.model.requires_grad_(False)
    groups: list[dict[str, Any]] = [{"params": policy.parameters, "name": "policy"}]
    rates = {"policy": config.optimizer.lr}
    critic = None
    if isinstance(preset.advantage, CriticAdvantage):
        own = config.trainer.critic or Critic()
        width = policy.model.config.get_text_config().hidden_size
        critic = ValueHead(width, own.hidden, config.seed).to(device)
        groups.append({"params": list(critic.parameters()), "name": "critic"})
        rates["critic"] = own.lr
    tables = []
    for _ in range(2):  # of training, whose episodes go on, and of evaluation
        host = open_host(settings)
        stack.callback(host.close)
        tables.append(Table(settings, host))
    run = EpisodesRun(process, config, settings, preset, need, policy, reference, critic, tables[0], tables[1])
    weights = Weights({name: p for name, p in policy.model.named_parameters() if p.requires_grad})
    optimizer = adamw(groups, config.optimizer)
    schedule = Schedule(config.optimizer, rates, config.iterations)
    run.loop = Loop(config, process, weights, optimizer, schedule, run, retries=config.trainer.fit_batch)
    return run


KIND = frame.Kind("steps", check_processes, prepare, open_run, method_of, MEMORY_HINT)
