"""How a pipeline was before it became a policy, so that it can be one's own again after training."""

from __future__ import annotations

from genrl.diffusion.policy.interfaces import Pipeline


class Untouched:
    """What `Policy` and its loading change on a pipeline beside its networks: class, scheduler, wrapped methods.

    Adapters and weights stay as they are trained.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self.kind, self.attributes = type(pipe), dict(vars(pipe))
        vae = pipe.components.get("vae")
        self.decode = getattr(vae, "__dict__", {}).get("decode")

    def put_back(self, pipe: Pipeline) -> None:
        """Undo the changes, in place."""
        pipe.__class__ = self.kind
        held = vars(pipe)
        held.clear()
        held.update(self.attributes)
        vae = pipe.components.get("vae")
        if vae is not None and "decode" in vars(vae):
            del vae.decode
            if self.decode is not None:
                vae.decode = self.decode
