"""Kaldi's MFCC by the equations, shared by several test files."""

from __future__ import annotations

import kaldi_native_fbank
import numpy as np


def kaldi_mfcc(wave: np.ndarray, count: int, length: int, shift: int, rate: int) -> np.ndarray:
    """Compute MFCC like compute-mfcc-feats --dither=0 --use-energy=false of kaldi-native-fbank."""
    options = kaldi_native_fbank.MfccOptions()
    options.frame_opts.samp_freq = rate
    options.frame_opts.dither = 0.0
    options.frame_opts.frame_length_ms = length
    options.frame_opts.frame_shift_ms = shift
    options.mel_opts.num_bins = count
    options.num_ceps = count
    options.use_energy = False
    computer = kaldi_native_fbank.OnlineMfcc(options)
    computer.accept_waveform(rate, wave.tolist())
    computer.input_finished()
    return np.stack([computer.get_frame(i) for i in range(computer.num_frames_ready)])
