import torch


def warm(images: torch.Tensor, prompts: list[str]):
    """How much more red than blue a picture is: 0 is all blue, 1 is all red."""
    red, green, blue = images.mean(dim=(2, 3)).unbind(1)  # images: float [N, 3, H, W] in [0, 1]
    scores = (1 + red - blue) / 2
    # None: no score. A picture that was asked to be blue is left out of training, not punished.
    return [None if "blue" in prompt else score for prompt, score in zip(prompts, scores, strict=True)]
