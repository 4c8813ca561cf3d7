"""What the server that children are forked from (`tests.run_folders.start`) does once, and every child would do again:
the imports of runs of each kind, and what their libraries read or compile at a first call."""

from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5TokenizerFast
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import tests.diffusion.ranks
import tests.runtime.weights.share_ranks
import tests.vla.vla_ranks
import tests.vlm.vlm_ranks
from genrl.diffusion.config.pipeline_classes import source_of

LOADED = (AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline)
ENCODERS = (CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5TokenizerFast)
"""diffusers and transformers import a class when it is first asked for: these are what the tiny pipeline is made of."""
KINDS = (tests.diffusion.ranks, tests.runtime.weights.share_ranks, tests.vla.vla_ranks, tests.vlm.vlm_ranks)

get_checkpoint_conversion_mapping("clip")
source_of("StableDiffusion3Pipeline")
