"""Random MusicGens of a few ten thousand numbers in the true format: T5 encoder, decoder of codebooks, EnCodec."""

from pathlib import Path

import torch

from genrl_rewards.models.checkpoints import transformers

CODES, RATE, FRAME = 8, 800, 40
WORDS = ("a", "low", "high", "rising", "falling", "steady", "tune")


def save(folder: Path, *, books: int = 4, channels: int = 1, hidden: int = 32) -> Path:
    """A checkpoint with its processor. books: of all channels; hidden: of the decoder, the text's is 16."""
    torch.manual_seed(0)
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{word}", -1.0) for word in WORDS)]
    words = transformers.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=64)
    text = transformers.T5Config(vocab_size=len(words), d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
    audio = transformers.EncodecConfig(
        target_bandwidths=[books // channels * RATE // FRAME * 3 / 1000],
        **{"sampling_rate": RATE, "hidden_size": 8, "num_filters": 2, "upsampling_ratios": [5, 8], "kernel_size": 3},
        **{"last_kernel_size": 3, "use_causal_conv": False, "num_lstm_layers": 1, "codebook_size": CODES},
    )
    sizes = {"max_position_embeddings": 32, "num_hidden_layers": 2, "ffn_dim": 32, "num_attention_heads": 4}
    sizes |= {"hidden_size": hidden, "num_codebooks": books, "audio_channels": channels}
    ids = dict.fromkeys(("vocab_size", "pad_token_id", "bos_token_id"), CODES)
    decoder = transformers.MusicgenDecoderConfig(**sizes, **ids)
    config = transformers.MusicgenConfig(text_encoder=text, audio_encoder=audio, decoder=decoder)
    made = transformers.MusicgenForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2)  # larger than a new model's, so that text and codes count
        for layer in made.audio_encoder.quantizer.layers:
            layer.codebook.embed.normal_()
    settings = made.generation_config
    settings.guidance_scale, settings.do_sample, settings.max_length = 3.0, True, 12
    settings.pad_token_id = settings.bos_token_id = settings.decoder_start_token_id = CODES
    made.save_pretrained(folder)
    features = transformers.EncodecFeatureExtractor(sampling_rate=RATE, feature_size=channels)
    transformers.MusicgenProcessor(features, words).save_pretrained(folder)
    return folder
