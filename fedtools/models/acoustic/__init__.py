"""Acoustic models: ESPnet's encoders and TDNNs, cut in two, exported, and their losses."""
