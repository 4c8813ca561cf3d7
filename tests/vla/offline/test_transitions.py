"""Transitions from any behaviour, and IQL's critics on them."""

import numpy as np
import pytest
import torch

from genrl.mdp.noise import generator, keyed_noise
from genrl.playground.minitable import MiniTable, demonstrate, expert_chunk, task
from genrl.runtime.weights import state
from genrl.vla.data.frames import STD_FLOOR, frame_statistics
from genrl.vla.methods.fisor.train import judged
from genrl.vla.offline import transitions as offline
from genrl.vla.offline.critics import Critics, Learning, train_iql
from genrl.vla.offline.imitation import imitate
from genrl.vla.policies.policy import ACTION, ENVIRONMENT, IMAGE, STATE, TOKENS, tokenise
from genrl.vla.rollout.collect import RolloutPlan, collect
from genrl.vla.rollout.sampling import Diffusion, FlowSteps
from genrl.vla.simulators.contract import Simulation
from genrl.vla.simulators.tables import open_environment
from tests.vla import frail
from tests.vla.frail import FINE, RAISE
from tests.vla.tiny_policies import FACTS, WORDS, diffusion, flow, frames, minitable_frames

READS = offline.Words(WORDS)


def expert_data(count: int = 12, noise: float = 0.0, seed: int = 3, **how):
    env = MiniTable(count, image_size=0, chunk=4)

    def behave(observation, decision):
        chunk = expert_chunk(env.state, 4)
        chunk += np.random.default_rng([seed, decision]).normal(0, noise, chunk.shape) if noise else 0.0
        return torch.from_numpy(chunk.astype(np.float32))

    return offline.play(env, behave, READS, decisions=10, seed=seed, **how)


def test_an_experts_episodes_are_recorded_one_after_the_other() -> None:
    data = expert_data(gamma=0.9)
    ends = data.done.nonzero()[:, 0]
    assert data.success.sum() == data.terminated.sum() == data.done.sum() == len(ends) > 12
    assert torch.equal(data.reward > 0, data.success)
    # success after n actions pays gamma^(n - 1), and gamma^n is the discount of what follows
    torch.testing.assert_close(data.reward[ends], 0.9 ** (data.n_executed[ends].float() - 1))
    torch.testing.assert_close(data.discount, 0.9 ** data.n_executed.float())
    for episode in data.episode.unique():
        own = (data.episode == episode).nonzero()[:, 0]
        for name in (STATE, ENVIRONMENT):
            assert torch.equal(data.observation[name][own[1:]], data.next_observation[name][own[:-1]])
        assert len({tuple(row.tolist()) for row in data.observation[TOKENS][own]}) == 1
    assert torch.equal(data.observation[TOKENS], data.next_observation[TOKENS])
    assert data.cost.abs().max() == 0


def test_an_episode_that_a_simulator_lost_is_left_out() -> None:
    """Of four walks the second raises in its second decision; a lost one is neither safe nor a failure."""

    class Reads:
        inputs = (STATE,)

        def tokenise(self, instructions):
            raise AssertionError("not read")

    def behave(observation, decision):
        chunk = torch.full((4, 2, 2), 0.1)
        chunk[..., 1] = FINE
        chunk[1, 1, 1] = RAISE if decision == 1 else FINE
        return chunk

    env = open_environment(Simulation(f"{frail.__file__}:make", num_envs=4, chunk=2))
    data = offline.play(env, behave, Reads(), decisions=6, seed=3, one_episode=True)
    env.close()
    assert env.dropped == 1 and data.episode.unique().tolist() == [0, 2, 3]
    assert judged(data)["eval/length_mean"] == 6.0


def test_a_rollout_holds_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    step = MiniTable.step
    for policy, sampler in (
        (flow(), FlowSteps("flow_cps", 4, 0.7, "all")),
        (diffusion(), Diffusion(steps=5, ft_denoising_steps=5)),
    ):
        sent: list[np.ndarray] = []
        monkeypatch.setattr(MiniTable, "step", lambda env, a, to=sent: to.append(np.array(a)) or step(env, a))
        env = MiniTable(6, image_size=0, chunk=4, max_steps=12)
        rollout = collect(env, policy, sampler, RolloutPlan(decisions=5, seed=0, iteration=0))
        data = offline.from_rollout(rollout, policy, gamma=0.95)
        wanted = torch.from_numpy(np.stack(sent))[rollout.valid]
        torch.testing.assert_close(data.action, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(data.done, rollout.done[rollout.valid]) and len(data.reward) == int(rollout.valid.sum())
        final = rollout.observations[STATE][1:][rollout.valid]
        assert torch.equal(data.next_observation[STATE], final)
    env = MiniTable(4, image_size=0)
    rollout = collect(env, flow(), FlowSteps(steps=6), RolloutPlan(decisions=3, seed=0, iteration=0))
    with pytest.raises(ValueError, match="does not hold its chunks"):
        offline.from_rollout(rollout, flow(), gamma=0.9)


def test_sets_are_merged_and_cut() -> None:
    one, other = expert_data(4, one_episode=True), expert_data(5, seed=9, one_episode=True)
    both = offline.merge(one, other)
    assert len(both.reward) == len(one.reward) + len(other.reward)
    assert sorted(both.episode.unique().tolist()) == list(range(9))
    lost = both._replace(success=both.success & (both.episode != 1))
    assert both.done.sum() == 9 and torch.equal(offline.successful(lost), lost.episode != 1)
    back = offline.take(both, both.episode >= 4)
    assert torch.equal(back.observation[STATE], other.observation[STATE]) and torch.equal(back.action, other.action)
    assert set(offline.frames_of(both)) == {STATE, ENVIRONMENT, TOKENS, ACTION}


def test_what_undoes_an_iteration_copies_of_a_store_what_may_change() -> None:
    net = torch.nn.Linear(2, 2)
    store = offline.Store(net=net)
    store.data = {"transitions": expert_data(2, one_episode=True), "figures": {"a": 1.5}}
    store.data["labels"] = {ACTION: torch.ones(3, 4, 3)}
    copied = state.copied(store.state_dict())
    assert copied["data"]["transitions"]["$transitions"]["action"] is store.data["transitions"].action  # nobody writes
    assert copied["data"]["labels"][ACTION] is store.data["labels"][ACTION]
    store.data["labels"] |= {STATE: torch.ones(3, 2)}
    assert list(copied["data"]["labels"]) == [ACTION]
    assert copied["modules"]["net"]["weight"].data_ptr() != net.weight.data_ptr()


def test_a_critic_looks_no_further_than_the_data() -> None:
    """Actions beyond the demonstrated range do no more, so they are worth no more."""
    torch.manual_seed(0)
    critics = Critics(FACTS, frame_statistics(frames()), 12, width=16)
    torch.nn.init.normal_(critics.q[0].head[-1].weight)
    observation = {name: value[:4] for name, value in expert_data(4, one_episode=True).observation.items()}
    far = torch.full((4, 4, 3), 5.0)
    assert torch.equal(critics.q_values(observation, far), critics.q_values(observation, 10 * far))
    near = keyed_noise((4, 4, 3), 1) * 0.3
    assert not torch.equal(critics.q_values(observation, near)[0], critics.q_values(observation, 2 * near)[0])


def test_the_losses_of_iql_by_hand() -> None:
    """Of its first step, over all rows it drew; then the slow copies have followed."""
    data = expert_data(20, 1.0, one_episode=True, gamma=0.95)
    torch.manual_seed(0)
    critics = Critics(FACTS, frame_statistics(offline.frames_of(data)), 12, width=16)
    for net in (*critics.q, *critics.slow, critics.v):
        torch.nn.init.normal_(net.head[-1].weight)
    how = Learning(gamma=0.98, batch_size=64, expectile=0.8, rate=0.25)
    sampled = offline.take(data, torch.randint(len(data.reward), (64,), generator=generator(3, "iql", 0)))
    with torch.no_grad():
        value, following = critics.v(sampled.observation), critics.v(sampled.next_observation)
        advantage = critics.slow_q(sampled.observation, sampled.action).amin(0) - value
        torch.testing.assert_close(critics.advantage(sampled.observation, sampled.action), advantage)
        target = sampled.reward + sampled.discount * torch.where(sampled.terminated, 0.0, following)
        errors = (critics.q_values(sampled.observation, sampled.action) - target).square().mean()
    wanted = {"q_loss": errors.item(), "value": value.mean().item()}
    wanted["value_loss"] = float((torch.where(advantage < 0, 0.2, 0.8) * advantage.square()).mean())
    before, fast = ({n: p.clone() for n, p in part.named_parameters()} for part in (critics.slow, critics.q))
    (actual,) = train_iql(critics, data, how, steps=1, seed=3)
    assert actual == pytest.approx(wanted, rel=1e-4)
    for name, p in critics.slow.named_parameters():
        torch.testing.assert_close(p, 0.75 * before[name] + 0.25 * critics.q.get_parameter(name))
    assert any(not torch.equal(p, fast[name]) for name, p in critics.q.named_parameters())


# -- Demonstrations as frames, supervised losses, and that training is a function of its seed
def test_frames_are_what_the_environment_shows_and_what_the_expert_does() -> None:
    keys, tasks, row = task.episode_keys(0, np.arange(4), np.zeros(4)), (0, 4), 0
    seen = minitable_frames(demonstrate(keys, tasks), image_size=32)
    for key in keys:
        env = MiniTable(1, chunk=1, tasks=tasks)
        shown, _ = env.reset(seed=0, options={"episodes": np.array([key])})
        ended = False
        while not ended:
            assert np.array_equal(seen[IMAGE][row].numpy(), shown["pixels"][0])
            assert np.array_equal(seen[STATE][row].numpy(), shown["agent_pos"][0])
            assert np.array_equal(seen[ENVIRONMENT][row].numpy(), shown["environment_state"][0])
            assert np.array_equal(seen[ACTION][row].numpy(), expert_chunk(env.state, 4)[0])
            assert torch.equal(seen[TOKENS][row], tokenise(env.task_description, WORDS)[0])
            shown, _, terminated, _, _ = env.step(seen[ACTION][row, :1].numpy()[None])
            ended, row = bool(terminated[0]), row + 1
    assert {len(value) for value in seen.values()} == {row}


def test_statistics_have_a_floor_and_a_loss_that_is_not_finite_says_its_step() -> None:
    still = {STATE: torch.zeros(5, 2), ACTION: torch.zeros(5, 3), TOKENS: torch.ones(5, 2, dtype=torch.int64)}
    result = frame_statistics(still)
    assert set(result) == {STATE, ACTION}
    assert result[STATE]["std"].tolist() == pytest.approx([STD_FLOOR] * 2) and result[ACTION]["std"].abs().max() == 0
    spoilt = frames() | {STATE: frames()[STATE] * torch.nan}
    with pytest.raises(FloatingPointError, match="step 0"):
        next(imitate(flow(FACTS), spoilt, seed=1, steps=6, batch_size=8, learning_rate=1e-3))
