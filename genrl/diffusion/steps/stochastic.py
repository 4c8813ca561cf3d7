"""Settings of methods that train on the transitions of a stochastic sampler. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from genrl.config.errors import Finding
from genrl.config.section import NonNegative
from genrl.diffusion.config.kernels import Kernel, kernel_problem, noise_problem
from genrl.diffusion.config.schema import Calls, DiffusionMethod, Guided, too_few_steps
from genrl.mdp.plan import describe, make_plan

if TYPE_CHECKING:
    from genrl.diffusion.config.schema import Config


class Stochastic(DiffusionMethod):
    """A method whose samples are drawn by a transition kernel with noise."""

    kernel: Kernel = "ddim"
    """Transition density of the steps; ddim is for epsilon- and v-prediction models, the others for flows. An
    installed one, or path/file.py:name, too."""
    noise_level: NonNegative | None = 1.0
    """Noise of the kernel (ddim eta 1, flow_sde 0.7, dance_sde 0.3, flow_cps 0.8, flow_ddim eta 1); wan_sde: null."""

    @property
    def transition(self) -> str | None:
        """The kernel of its stochastic steps."""
        return self.kernel

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        wrong = kernel_problem(self.kernel)
        if wrong is not None:
            yield ("trainer.kernel",), wrong
        elif (wrong := noise_problem(self.kernel, self.noise_level)) is not None:
            yield ("trainer.noise_level", "trainer.kernel"), wrong


class EveryStep(Stochastic):
    """A method that compares log-probabilities with the reference's at every step but the last, which has no noise."""

    @property
    def uses_reference(self) -> bool:
        """Whether training evaluates the model before training."""
        return True

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        text = "the last step is never stochastic, so with 1 step nothing is trained; use 2 or more (D3PO: 20)"
        yield from too_few_steps(config, text)

    def calls(self, config: Config, guided: Guided) -> Calls:
        """The policy and the reference at each trained step. (PRDP: the reference once and the policy twice in an
        epoch, but for the first, whose values are recorded.)"""
        sampling, guidance = config.sampling, guided(config.sampling.guidance_scale)
        images, trained = sampling.images_per_iteration, max(1, sampling.num_inference_steps - 1)
        backward = images * trained * self.epochs * guidance
        drawn = images * sampling.num_inference_steps * guidance
        return Calls(float(drawn), 2.0 * backward, float(backward), float(trained))

    def rollout(self, config: Config, guidance: int) -> Iterator[str]:
        """How the samples of a group come about, for `genrl plan`."""
        trained = range(config.sampling.num_inference_steps - 1)
        noise = dict.fromkeys(trained, self.noise_level or 0.0)
        chains = make_plan(len(trained) + 1, noise=noise, roots=config.sampling.group_size)
        yield describe(chains, trained, calls_per_state=guidance).rsplit("\n", 1)[0]
