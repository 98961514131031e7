"""Pretrained models from Hugging Face folders: Whisper, wav2vec 2.0, HuBERT, WavLM."""
