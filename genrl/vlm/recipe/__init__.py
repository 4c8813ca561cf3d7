"""What a method for token policies is made of: named choices with their constants, and nothing else. No torch.

A `Preset` is one row of the table of published methods (`presets.py`). Every choice is a section of the configuration
with a `name`, so that a preset is plain data which YAML can hold. What the choices compute is in
`genrl.objectives.tokens`; `genrl.vlm.methods.policy_loss` composes them. A constant that is an argument of the named
function means what it means there. Tensors that a choice reads from `TokenBatch.extra` ([B, T] unless said otherwise)
are in [brackets].
"""
