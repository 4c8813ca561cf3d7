"""Opening a run of a vision-language model that acts in an environment."""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module
from typing import Any, cast

from genrl.runtime.loop.process import Process
from genrl.vlm.common import open_reference
from genrl.vlm.config.environment import Environment
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.environments.hosts import open_host
from genrl.vlm.episodes.critic import ValueHead
from genrl.vlm.episodes.episodes import Table
from genrl.vlm.episodes.run import EpisodesRun
from genrl.vlm.methods.episodes.settings import Critic, Episodes
from genrl.vlm.policies.policy import Policy


def settings_of(config: VLMConfig) -> Environment:
    """The section `environment`, which is there."""
    assert config.environment is not None
    return config.environment


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


def critic_of(config: VLMConfig, policy: Policy) -> ValueHead | None:
    """The value function, where the method has one."""
    method = cast(Episodes, config.trainer)
    if not method.with_critic:
        return None
    width = policy.model.config.get_text_config().hidden_size
    module, _, name = method.critic_class.partition(":")
    made: Any = getattr(import_module(module), name)
    critic: ValueHead = made(width, (method.critic or Critic()).hidden, config.seed).to(policy.device)
    return critic


def open_run(config: VLMConfig, process: Process, policy: Policy, stack: ExitStack) -> EpisodesRun:
    """What one process trains with: environments, reference, critic, optimiser, log; `stack` closes them."""
    settings, reference = settings_of(config), open_reference(config, process, policy)
    critic = critic_of(config, policy)
    tables = []
    for _ in range(2):  # of training, whose episodes go on, and of evaluation
        host = open_host(settings)
        stack.callback(host.close)
        tables.append(Table(settings, host))
    return EpisodesRun(config, process, policy, reference, settings, critic, *tables)
