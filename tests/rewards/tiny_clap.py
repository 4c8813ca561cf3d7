"""A random CLAP of a few thousand numbers, saved in the true format."""

from pathlib import Path

import torch

from genrl_rewards.models.checkpoints import transformers
from tests.rewards.tiny_clip import byte_symbols

RATE, SECONDS = 800, 2


def save_tiny_clap(folder: Path) -> Path:
    torch.manual_seed(0)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *byte_symbols(), "<mask>"]
    words = transformers.RobertaTokenizer(vocab={token: k for k, token in enumerate(tokens)}, merges=[])
    words.model_max_length = 60
    text = {"vocab_size": len(tokens), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"intermediate_size": 16, "max_position_embeddings": 64}
    audio = {"window_size": 4, "num_mel_bins": 16, "spec_size": 64, "patch_embeds_hidden_size": 8, "hidden_size": 16}
    audio |= {"depths": [1, 1], "num_attention_heads": [2, 2], "num_hidden_layers": 2, "num_classes": 4}
    config = transformers.ClapConfig(text_config=text, audio_config=audio, projection_dim=8)
    transformers.ClapModel(config).save_pretrained(folder)
    sound = {"feature_size": 16, "sampling_rate": RATE, "hop_length": 20, "max_length_s": SECONDS}
    sound |= {"fft_window_size": 64, "frequency_max": 400, "truncation": "rand_trunc"}
    features = transformers.ClapFeatureExtractor(**sound)
    transformers.ClapProcessor(features, words).save_pretrained(folder)
    return folder
