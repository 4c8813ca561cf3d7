"""What policies and simulators are called, and where they are found: built in, installed, or in a file (`plugins`)."""

from __future__ import annotations

from genrl.config.plugins import Group

EMBEDDED = {
    "tiny_flow_vla": "genrl.vla.policies.embedded:TinyFlowVLA",
    "diffusion_mlp": "genrl.vla.policies.embedded:DiffusionMLP",
}
"""Policies that are made here: by `policy.new`, from a folder too."""
PUBLISHED = {
    "pi0": "genrl.vla.policies.pi0:PI0",
    "pi05": "genrl.vla.policies.pi0:PI0",
    "smolvla": "genrl.vla.policies.smolvla:SmolVLA",
    "groot": "genrl.vla.policies.groot:Groot",
    "diffusion": "genrl.vla.policies.diffusion_policy:DiffusionPolicy",
    "openvla": "genrl.vla.policies.openvla:OpenVLA",
}
"""Policies that come from a folder alone."""
BOTH = {"act": "genrl.vla.policies.act:ACT"}
"""Published policies that `policy.new` makes, too; `policy.new.args` are their settings by LeRobot's names."""
PREDICTS = {
    **{"tiny_flow_vla": "velocity", "diffusion_mlp": "noise", "act": "actions"},
    **{"pi0": "velocity", "pi05": "velocity", "smolvla": "velocity", "groot": "velocity"},
    "diffusion": "noise",
}
"""What a policy of this type predicts."""
SAMPLERS = {"velocity": "flow_sde", "noise": "diffusion", "tokens": "tokens", "actions": "regression"}
"""The sampler to name for a policy that predicts so."""
POLICIES = Group("policy", EMBEDDED | PUBLISHED | BOTH, "genrl.policies")
"""Classes, as `genrl.vla.policies.policy` says; a policy's name is the `type` of its config.json, an OpenVLA's the
`model_type`."""
SIMULATORS = Group(
    "simulator",
    {
        "minitable": "genrl.playground.minitable.env:describe",
        "metaworld": "genrl.vla.simulators.metaworld:describe",
        "maniskill": "genrl.vla.simulators.maniskill:describe",
        "libero": "genrl.vla.simulators.libero.env:describe",
        "point_maze": "genrl.vla.simulators.robotics.families:describe_point_maze",
        "fetch": "genrl.vla.simulators.robotics.families:describe_fetch",
        "reacher": "genrl.vla.simulators.robotics.families:describe_reacher",
    },
    "genrl.simulators",
)
"""Built in: functions (tasks, reading, settings) -> `simulator.Description`. From outside: functions that return a
gymnasium environment."""
EXPERTS = Group(
    "scripted expert",
    {
        "minitable": "genrl.playground.minitable.demonstrations:minitable_expert",
        "metaworld": "genrl.vla.simulators.metaworld:demonstrate",
        "libero": "genrl.vla.simulators.libero.expert:demonstrate",
        "point_maze": "genrl.vla.simulators.robotics.families:demonstrate_point_maze",
        "fetch": "genrl.vla.simulators.robotics.families:demonstrate_fetch",
        "reacher": "genrl.vla.simulators.robotics.families:demonstrate_reacher",
    },
    "",
)
"""Demonstrations, by the simulator, which also says what the expert would do from any state (`simulator.Expert`):
functions (tasks, count, seed, max_steps, image_size, points, and cameras where there are several) -> `frames.Shown`."""
WORLDS = Group("world to make data in", {"minitable": "genrl.playground.minitable.world:TableWorld"}, "")
"""What methods that make their own data know of a simulator: functions (tasks, max_steps) -> `demonstrations.World`."""
