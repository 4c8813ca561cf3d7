"""A pipeline as a policy: what is recorded, what is replayed, and from which random numbers."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler

from genrl.diffusion.policy import encoding
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.mdp import kernels
from genrl.mdp.noise import keyed_noise
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES

pytestmark = pytest.mark.usefixtures("no_grad")
STEPS = 4
PROMPTS = ["a red star", "two blue dogs", "one green square", "a cat"]
SAMPLING = {**runs.CALL, "num_inference_steps": STEPS, "max_sequence_length": 16, "guidance_scale": 4.5}
DDIM_SAMPLING = {"num_inference_steps": STEPS, "height": 16, "width": 16, "guidance_scale": 5.0}
LEVELS = {"flow_sde": 0.7, "dance_sde": 0.3, "wan_sde": 1.0, "flow_cps": 0.8, "flow_ddim": 1.0}
FLOW_KERNELS = {name: Kernel(name, level) for name, level in LEVELS.items()}
ACTIONS = (0, 1, 2)  # as trainers have it: the last step is deterministic


def batch(rows: list[int], *, iteration: int = 0, **sampling: object) -> Batch:
    return Batch([PROMPTS[r] for r in rows], [(7, iteration, r) for r in rows], {**SAMPLING, **sampling})


@pytest.mark.parametrize("name", FLOW_KERNELS)
def test_replay_equals_record_between_other_calls(policy: Policy, name: str) -> None:
    """And the recorded number is the density of the stored states."""
    micro_batches = [batch([0, 1]), batch([3, 0], iteration=1)]
    trajectories = [policy.roll_out(one, FLOW_KERNELS[name], ACTIONS) for one in micro_batches]
    for i in reversed(ACTIONS):
        for recorded in trajectories:
            # Each of these makes another grid, or ends in the middle of one.
            policy.generate(batch([1], num_inference_steps=3))
            policy.velocity(batch([2]), recorded.states[i][:1], torch.tensor(0.4))
            policy.decode(batch([1]), recorded.final[:1])
            replayed = policy.replay(recorded.step(i))
            assert torch.equal(replayed.log_prob, recorded.log_probs[i]), f"step {i}"
            again = kernels.log_prob(recorded.states[i + 1], replayed.mean, replayed.std)
            assert torch.equal(again, recorded.log_probs[i]) and again.dtype == torch.float32
            assert float(replayed.step.sigma) == float(recorded.sigmas[i])


@pytest.mark.parametrize(
    "asked",
    [{}, {"clip_sample": True, "clip_sample_range": 1.5}, {"thresholding": True, "sample_max_value": 2.0}],
    ids=["none", "clip", "threshold"],
)
def test_ddim_and_the_bounds_of_a_clean_sample(asked: dict[str, object]) -> None:
    """Without noise a rollout is the scheduler's own DDIM; with noise it replays, whatever was called in between."""
    pipe = FAMILIES["sd15"]().pipe
    config = {**pipe.scheduler.config, "clip_sample": False, "set_alpha_to_one": False, **asked}
    pipe.scheduler = DDIMScheduler.from_config(config)
    policy, sampled = Policy(pipe), replace(batch([0, 1]), sampling=DDIM_SAMPLING)
    torch.testing.assert_close(policy.roll_out(sampled).final, policy.generate(sampled), rtol=1e-4, atol=1e-4)
    recorded = policy.roll_out(sampled, Kernel("ddim", 1.0), range(STEPS))
    assert sorted(recorded.log_probs)[:3] == [0, 1, 2]
    for i, log_prob in recorded.log_probs.items():
        policy.generate(replace(sampled, sampling={**DDIM_SAMPLING, "num_inference_steps": 3}))
        assert torch.equal(policy.replay(recorded.step(i)).log_prob, log_prob)


def test_deterministic_steps_are_not_recorded(policy: Policy) -> None:
    for name, kernel in FLOW_KERNELS.items():  # sigma' = 0 leaves the last without noise, but not that of an SDE
        everywhere = policy.roll_out(batch([0, 1]), kernel, range(STEPS))
        assert sorted(everywhere.log_probs) == (list(range(STEPS)) if name.endswith("sde") else list(ACTIONS)), name
    window = policy.roll_out(batch([0, 1]), FLOW_KERNELS["flow_sde"], (1,))
    assert sorted(window.log_probs) == [1] and sorted(window.states) == [1, 2]
    with pytest.raises(KeyError):
        policy.replay(window.step(2))
    ode = policy.roll_out(batch([0, 1]))
    assert not ode.log_probs
    assert (ode.final - policy.generate(batch([0, 1]))).abs().max() < 1e-5  # Euler steps, as the pipeline's own
    assert torch.equal(window.states[1], policy.roll_out(batch([0, 1]), stop=1).final)  # it starts where the ODE is


def test_a_sample_can_be_made_again_alone(policy: Policy) -> None:
    """Its noise is that of its key, whatever the batch; the first may be shared."""
    together = policy.roll_out(batch([0, 1, 2]), FLOW_KERNELS["flow_sde"], ACTIONS)
    alone = policy.roll_out(batch([2]), FLOW_KERNELS["flow_sde"], ACTIONS)
    # A larger batch takes other kernels, which round otherwise; noise does not depend on the batch at all.
    assert torch.equal(alone.states[0][0], together.states[0][2])
    for i in ACTIONS:
        noise = keyed_noise(alone.states[0].shape[1:], 7, 0, 2, "step", i)
        for recorded, row in ((together, 2), (alone, 0)):
            replayed = policy.replay(recorded.step(i))
            expected = replayed.mean[row] + replayed.std[row] * noise
            assert torch.equal(recorded.states[i + 1][row], expected)
    assert (alone.final[0] - together.final[2]).abs().max() < 1e-4 * together.final.abs().max()
    shared = replace(batch([0, 0]), keys=[(7, 0, 0), (7, 0, 1)], initial_keys=[(7, 0, "group", 0)] * 2)
    recorded = policy.roll_out(shared, FLOW_KERNELS["flow_sde"], ACTIONS)
    assert torch.equal(recorded.states[0][0], recorded.states[0][1])
    assert not torch.equal(recorded.states[1][0], recorded.states[1][1])
    assert torch.equal(policy.replay(recorded.step(2)).log_prob, recorded.log_probs[2])


def test_autocast_keeps_an_exact_ratio_and_is_in_use(policy: Policy) -> None:
    """But not in decoding; also beside a bfloat16 decoder, as in full fine-tuning of a model of that precision."""
    half = Policy(FAMILIES["sd3"]().pipe, autocast=torch.bfloat16)
    recorded = half.roll_out(batch([0, 1]), FLOW_KERNELS["flow_sde"], ACTIONS)
    exact = policy.roll_out(batch([0, 1]), FLOW_KERNELS["flow_sde"], ACTIONS)
    assert not torch.equal(recorded.final, exact.final)
    assert (recorded.final - exact.final).abs().max() < 0.1
    for i in ACTIONS:
        assert recorded.states[i].dtype == torch.float32
        assert not torch.equal(recorded.states[i], recorded.states[i].bfloat16().float())
        assert torch.equal(half.replay(recorded.step(i)).log_prob, recorded.log_probs[i])
    assert torch.equal(half.decode(batch([0, 1]), exact.final), policy.decode(batch([0, 1]), exact.final))
    half.pipe.vae.bfloat16()
    dtypes: list[torch.dtype] = []
    half.pipe.vae.decoder.register_forward_pre_hook(lambda module, args: dtypes.append(args[0].dtype))
    assert half.decode(batch([0, 1]), exact.final).isfinite().all() and dtypes == [torch.bfloat16]


def count_encodings(policy: Policy) -> list[int]:
    seen: list[int] = []
    policy.pipe.text_encoder.register_forward_pre_hook(lambda module, arguments: seen.append(len(arguments[0])))
    return seen


def test_each_distinct_prompt_is_encoded_once_and_kept_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(FAMILIES["sd3"]().pipe)
    policy.roll_out(batch([0], guidance_scale=1.0))  # the first batch of several also finds the batch axes
    policy.roll_out(batch([0, 1], guidance_scale=1.0))
    seen = count_encodings(policy)
    policy.roll_out(batch([0, 1, 2, 1], guidance_scale=1.0))
    assert seen == [1]  # the one new prompt, alone
    policy.roll_out(batch([2, 0], guidance_scale=1.0))
    policy.decode(batch([2, 0], guidance_scale=1.0), torch.zeros(2, 4, 8, 8))
    assert seen == [1]
    monkeypatch.setattr(encoding, "MAX_BYTES", 1)  # one is kept, whatever its size
    seen.clear()
    for prompt in ("four", "four", "one", "four"):
        how = {"do_classifier_free_guidance": False, "max_sequence_length": 16}
        policy.pipe.encode_prompt(prompt=[prompt], prompt_2=None, prompt_3=None, **how)
    assert seen == [1, 1, 1]


def test_what_cannot_become_a_policy_is_refused(policy: Policy) -> None:
    methods = policy.pipe.encode_prompt, policy.pipe.prepare_latents, policy.pipe.scheduler
    with pytest.raises(ValueError, match="this StableDiffusion3Pipeline is a policy already"):
        Policy(policy.pipe)
    assert methods == (policy.pipe.encode_prompt, policy.pipe.prepare_latents, policy.pipe.scheduler)
    pipe = FAMILIES["sd3"]().pipe
    pipe.register_modules(transformer=None)
    with pytest.raises(ValueError, match="StableDiffusion3Pipeline has no denoiser"):
        Policy(pipe)

    class Plain(type(pipe)):  # type: ignore[misc]
        def __call__(self, prompt: str) -> None: ...

    with pytest.raises(ValueError, match="Plain.__call__ is not decorated by torch.no_grad"):
        Policy(Plain(**FAMILIES["sd3"]().pipe.components))


@pytest.mark.parametrize(("guidance", "factor"), [(4.5, 2), (1.0, 1)])
def test_model_calls_are_the_closed_form(guidance: float, factor: int) -> None:
    policy, sampled = Policy(FAMILIES["sd3"]().pipe), batch([0, 1, 2], guidance_scale=guidance)

    def calls(run: Callable[[], object]) -> int:
        before = policy.model_calls
        run()
        return policy.model_calls - before

    recorded = policy.roll_out(sampled, FLOW_KERNELS["flow_sde"], ACTIONS)
    assert policy.model_calls == STEPS * 3 * factor
    assert calls(lambda: policy.replay(recorded.step(1))) == 3 * factor
    assert calls(lambda: policy.velocity(sampled, recorded.final, torch.tensor(0.5))) == 3 * factor
    assert calls(lambda: policy.decode(sampled, recorded.final)) == 0
    assert calls(lambda: policy.generate(sampled)) == STEPS * 3 * factor
    assert calls(lambda: policy.roll_out(sampled, start=1, stop=3, state=recorded.final)) == 2 * 3 * factor
    unequal = torch.tensor([0.7, 0.3, 0.7])  # the first time it is asked, uncounted, whether timesteps broadcast
    assert [calls(lambda: policy.velocity(sampled, recorded.final, unequal)) for _ in range(2)] == [3 * factor] * 2
    with pytest.raises(RuntimeError, match="planted"), policy.uncounted():
        assert calls(lambda: policy.roll_out(batch([0]))) > 0
        before = policy.model_calls
        raise RuntimeError("planted")
    assert policy.model_calls < before


def test_a_plain_call_afterwards_is_the_pipelines_own(policy: Policy) -> None:
    """Nothing is left behind by a call, nor by one that failed, nor by states of another shape."""
    recorded = policy.roll_out(batch([0]), FLOW_KERNELS["flow_sde"], ACTIONS)
    wanted = runs.picture(FAMILIES["sd3"]().pipe)
    policy.replay(recorded.step(1))
    assert np.array_equal(runs.picture(policy.pipe), wanted)
    with pytest.raises(TypeError):
        policy.replay(recorded.step(1, batch([0], no_such_argument=1)))
    assert np.array_equal(runs.picture(policy.pipe), wanted)
    with pytest.raises(ValueError, match=r"prepare_latents makes latents of shape \(1, 4, 16, 16\)"):
        policy.replay(recorded.step(1, batch([0], height=32, width=32)))
    assert torch.equal(policy.replay(recorded.step(1)).log_prob, recorded.log_probs[1])


def test_no_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device of which nothing can be read: reading a value would stop the host until all is done."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())  # knows no such device
    monkeypatch.setattr(encoding, "_to", lambda value, device: value)  # of a prompt once, before the first step
    family = FAMILIES["sd3"]()
    policy = Policy(family.pipe.to("meta"))
    policy.denoiser.requires_grad_(True)
    trajectory = policy.roll_out(family.batch(), Kernel("flow_sde", 0.7), range(3))
    with torch.enable_grad():
        replayed = policy.replay(trajectory.step(1))
        (replayed.log_prob - trajectory.log_probs[1]).exp().mean().backward()
    assert replayed.log_prob.is_meta and all(p.grad is not None for p in policy.denoiser.parameters())
